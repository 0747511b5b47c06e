"""Saved and sent state: dataclasses as plain values, and plain values as dataclasses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")

Count = Annotated[int, 0]
"""An integer that is not negative."""
Seconds = Annotated[float, 0.0]
"""A finite number that is not negative."""
Finite = Annotated[float, -1e300]
"""A finite number."""

_MAX_INT = 2**62
_MAX_DEPTH = 64


def encode(value: Any) -> Any:
    """Return the plain form of a dataclass: a dictionary of its fields, in the same form.

    A tuple becomes a list, a range ``[start, stop]``, a fraction ``[numerator, denominator]``, an
    enumeration its value. Other values, and those of fields of type ``Any``, are returned as they
    are, not copied.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: getattr(value, name) if _is_opaque(kind) else encode(getattr(value, name))
            for name, kind in _kinds(type(value)).items()
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Fraction):
        return [value.numerator, value.denominator]
    if type(value) in (tuple, list):
        return [encode(item) for item in value]
    if type(value) is dict:
        return {encode(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: Any, where: str) -> T:
    """Return the value of which :func:`encode` gave the plain form.

    Args:
        kind: Its type: ``int``, ``float``, ``str``, ``bool``, ``range``, ``Fraction``, an
            enumeration, a dataclass, a union, a tuple or dictionary of these, or any other class,
            whose values are returned as they are. ``Annotated[int, n]`` is at least ``n``. A field
            that is missing has its default.
        where: Place of the value, for the error; empty: fields are named alone.

    Raises:
        ValueError: A value has another type, or a dataclass has not such a field; the message has
            the place.
    """
    found: T = _decode(kind, value, where)
    return found


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _bounded(args[0], args[1], value, where)
    if origin in (Union, UnionType):
        return _one_of(args, value, where)
    if origin is tuple:
        items = _items(value, where, None if args[-1] is ... else len(args))
        kinds = args[:1] * len(items) if args[-1] is ... else args
        pairs = enumerate(zip(kinds, items, strict=True))
        return tuple(_decode(each, item, f"{where}[{i}]") for i, (each, item) in pairs)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            fail(where, value, "a dictionary")
        keys = {key: _decode(args[0], key, f"a key of {where}") for key in value}
        if args[1] is Any:
            return value
        return {keys[k]: _decode(args[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if is_dataclass(kind):
        return _record(kind, value, where)
    return _single(kind, value, where)


def _single(kind: Any, value: Any, where: str) -> Any:
    if kind is range or kind is Fraction:
        first, second = items = _items(value, where, 2)
        fits = type(first) is type(second) is int
        if kind is Fraction and fits and second > 0:
            return Fraction(first, second)
        if kind is range and fits and 0 <= first < second <= _MAX_INT:
            return range(first, second)
        fail(where, items, "a fraction" if kind is Fraction else "a range of whole numbers")
    if issubclass(kind, Enum):
        if value not in [member.value for member in kind]:
            fail(where, value, f"one of {', '.join(str(member.value) for member in kind)}")
        return kind(value)
    if kind is float and type(value) is int and abs(value) <= _MAX_INT:
        return float(value)
    exact = kind in (int, float, str, bool, type(None))
    if not (type(value) is kind if exact else isinstance(value, kind)):
        fail(where, value, f"a value of type {kind.__name__}")
    if kind is int and abs(value) > _MAX_INT:
        fail(where, value, "a smaller number")
    return value


def _bounded(kind: Any, least: float, value: Any, where: str) -> Any:
    found = _single(kind, value, where)
    if not least <= found < math.inf:
        fail(where, value, f"a finite number from {least:g} up")
    return found


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """The value as the first of these types that it has."""
    if value is None and type(None) in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not type(None))
    for kind in others:
        try:
            return _decode(kind, value, where)
        except ValueError:
            continue
    return _decode(last, value, where)


def _record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        fail(where, value, "a dictionary")
    kinds = _kinds(kind)
    if unknown := set(value) - set(kinds):
        names = sorted(map(str, unknown))
        raise ValueError(f"{where or 'it'} has {names}, which {kind.__name__} has not")
    for field in fields(kind):
        if field.name not in value and field.default is field.default_factory is MISSING:
            raise ValueError(f"{where or 'it'} has no {field.name!r}")
    places = {name: f"{where}[{name!r}]" if where else name for name in value}
    return kind(**{k: _decode(kinds[k], v, places[k]) for k, v in value.items()})


@cache
def _kinds(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _is_opaque(kind: Any) -> bool:
    return kind is Any or any(map(_is_opaque, get_args(kind)))


def _items(value: Any, where: str, length: int | None) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        fail(where, value, "a list")
    items: list[Any] | tuple[Any, ...] = value
    if length is not None and len(items) != length:
        raise ValueError(f"{where} has {len(items)} entries, expected {length}")
    return items


def fail(where: str, value: object, expected: str) -> NoReturn:
    """Raise ``ValueError`` with the place, its value and the expected one."""
    raise ValueError(f"{where} is {value!r:.80}, expected {expected}")


def parse_json(content: str | bytes, **hooks: Any) -> Any:
    """Parse JSON of another process, machine or file, of which no part is nested deeply.

    Args:
        hooks: Arguments of ``json.loads``.

    Raises:
        ValueError: It is no JSON, or nested so deeply that recursive functions could not read it.
    """
    try:
        value = json.loads(content, **hooks)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        found = [part for part in level if isinstance(part, list | dict)]
        level = [v for part in found for v in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return value
    raise ValueError(f"JSON that is nested more than {_MAX_DEPTH} levels deep")
