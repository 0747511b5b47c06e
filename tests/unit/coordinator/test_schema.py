"""JSON of others: bounded in depth."""

from __future__ import annotations

import pytest

from coordinator.schema import parse_json


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
