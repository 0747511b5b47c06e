"""Saved and sent state as plain values, and JSON of others."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest

from coordinator.codec import Count, Finite, Seconds, decode, encode, parse_json


class Kind(Enum):
    ONE = "one"
    TWO = "two"


@dataclass(frozen=True, kw_only=True)
class Inner:
    num: Count
    seconds: Seconds = 0.0
    part: Fraction | float = Fraction(1, 3)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    flag: bool
    inner: Inner
    kind: Kind = Kind.ONE
    spans: tuple[range, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_kind: dict[Kind, Inner] = field(default_factory=dict)
    rate: Finite | None = None
    numbers: dict[str, int | float] = field(default_factory=dict)
    own: Any = None


WHOLE = Outer(
    name="a",
    flag=True,
    inner=Inner(num=3, seconds=0.5, part=Fraction(1, 1024)),
    kind=Kind.TWO,
    spans=(range(2, 5), range(7, 8)),
    pair=(-4, "b"),
    by_kind={Kind.TWO: Inner(num=0, part=math.inf)},
    rate=-1.5,
    numbers={"int": 2, "float": 2.0},
)


def test_a_dataclass_is_restored_from_its_json():
    again = decode(Outer, json.loads(json.dumps(encode(WHOLE))), "it")
    assert again == WHOLE
    assert [type(n) for n in again.numbers.values()] == [int, float]


def test_values_of_any_type_are_kept_as_they_are():
    own = {"counted": Counter(a=1), "row": (1, (2, [3])), "object": Inner(num=1)}
    plain = encode(Outer(name="", flag=False, inner=Inner(num=0), own=own))
    assert plain["own"] is own
    assert decode(Outer, plain, "it").own is own


def test_missing_fields_have_their_default():
    found = decode(Outer, {"name": "a", "flag": False, "inner": {"num": 1}}, "it")
    assert found == Outer(name="a", flag=False, inner=Inner(num=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, r"it\['name'\] is None, expected a value of type str"),
        ({"flag": 1}, r"it\['flag'\] is 1, expected a value of type bool"),
        ({"inner": {}}, r"it\['inner'\] has no 'num'"),
        ({"inner": {"num": 1, "more": 2}}, r"it\['inner'\] has \['more'\], which Inner has not"),
        ({"inner": []}, r"it\['inner'\] is \[\], expected a dictionary"),
        ({"inner": {"num": True}}, r"it\['inner'\]\['num'\] is True, expected a value of type int"),
        ({"inner": {"num": -1}}, r"\['num'\] is -1, expected a finite number from 0 up"),
        ({"inner": {"num": 2**70}}, r"\['num'\] is \d+, expected a smaller number"),
        ({"inner": {"num": 1, "seconds": math.nan}}, r"\['seconds'\] is nan"),
        ({"inner": {"num": 1, "seconds": math.inf}}, r"\['seconds'\] is inf"),
        ({"inner": {"num": 1, "part": [1, 0]}}, r"\['part'\] is \[1, 0\]"),
        ({"kind": "three"}, r"it\['kind'\] is 'three', expected one of one, two"),
        ({"kind": []}, r"it\['kind'\] is \[\], expected one of one, two"),
        ({"spans": [[2, 5], [7, 7]]}, r"it\['spans'\]\[1\] is \[7, 7\]"),
        ({"spans": [[-1, 5]]}, r"it\['spans'\]\[0\] is \[-1, 5\]"),
        ({"spans": 3}, r"it\['spans'\] is 3, expected a list"),
        ({"pair": [1]}, r"it\['pair'\] has 1 entries, expected 2"),
        ({"by_kind": {"none": {"num": 1}}}, r"a key of it\['by_kind'\] is 'none'"),
        ({"by_kind": {"one": {"num": "x"}}}, r"it\['by_kind'\]\['one'\]\['num'\] is 'x'"),
        ({"rate": -math.inf}, r"it\['rate'\] is -inf"),
        ({"numbers": {"a": True}}, r"it\['numbers'\]\['a'\] is True"),
    ],
)
def test_the_error_for_a_wrong_value_has_its_place(changes, message):
    with pytest.raises(ValueError, match=message):
        decode(Outer, {**encode(WHOLE), **changes}, "it")


def test_without_a_place_fields_are_named_alone():
    with pytest.raises(ValueError, match=r"^inner\['num'\] is None"):
        decode(Outer, {**encode(WHOLE), "inner": {"num": None}}, "")
    with pytest.raises(ValueError, match=r"^it has no 'name'"):
        decode(Outer, {}, "")


def nested(num_levels):
    return "[" * num_levels + "]" * num_levels


def test_json_of_the_usual_depth_is_parsed():
    assert parse_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_json(nested(64)) == eval(nested(64))


@pytest.mark.parametrize("content", [nested(65), '{"a": ' * 65 + "1" + "}" * 65])
def test_json_that_recursive_functions_may_not_read_is_a_value_error(content):
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_json(content)


@pytest.mark.parametrize("content", ["[" * 60_000, '{"a":' * 60_000, nested(100_000)])
def test_json_that_the_parser_cannot_read_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting value"):
        parse_json(content)
