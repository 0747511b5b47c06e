"""Checks of deserialized data; each error names the place of the wrong value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]
"""Raises ``ValueError`` for an invalid value; the second argument is its place, for the message."""


_MAX_DEPTH = 64


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


def fail(where: str, value: object, expected: str) -> None:
    """Raise ``ValueError`` with the place, its value and the expected one."""
    raise ValueError(f"{where} is {value!r:.80}, expected {expected}")


_MOST = 2**62


def integer(low: int = 0, high: int | None = None) -> Check:
    """An integer from ``low`` to ``high``."""

    def check(value: Any, where: str) -> None:
        most = _MOST if high is None else high
        fits = type(value) is int and low <= value <= most
        if not fits:
            end = "up" if high is None else f"to {high}"
            fail(where, value, f"a whole number from {low} {end}")

    return check


def number(low: float | None = None, high: float = math.inf) -> Check:
    """A number; with ``low``, finite, at least that and at most ``high``."""

    def check(value: Any, where: str) -> None:
        if type(value) not in (int, float):
            fail(where, value, "a number")
        if low is not None and not (math.isfinite(value) and low <= value <= high):
            end = "up" if high == math.inf else f"to {high:g}"
            fail(where, value, f"a finite number from {low:g} {end}")

    return check


def text(low: int, high: int, characters: str = "") -> Check:
    """A string of ``low`` to ``high`` characters, with ``characters`` only of these."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not low <= len(value) <= high:
            fail(where, value, f"a text of {low} to {high} characters")
        if characters and set(value) - set(characters):
            fail(where, value, f"a text of the characters {characters}")

    return check


def of_type(kind: type) -> Check:
    """A value of exactly this type."""

    def check(value: Any, where: str) -> None:
        if type(value) is not kind:
            fail(where, value, f"a value of type {kind.__name__}")

    return check


def one_of(*allowed: str) -> Check:
    """One of these strings."""

    def check(value: Any, where: str) -> None:
        if value not in allowed:
            fail(where, value, f"one of {', '.join(allowed)}")

    return check


def optional(check: Check) -> Check:
    """``None``, or a value that another check accepts."""
    return lambda value, where: None if value is None else check(value, where)


def items(check: Check, length: int | None = None, most: int | None = None) -> Check:
    """A list or tuple, with ``length`` of exactly that length, with ``most`` of at most that."""

    def check_all(values: Any, where: str) -> None:
        if not isinstance(values, (list, tuple)):
            fail(where, values, "a list")
        if length is not None and len(values) != length:
            raise ValueError(f"{where} has {len(values)} entries, expected {length}")
        if most is not None and len(values) > most:
            raise ValueError(f"{where} has {len(values)} entries, expected at most {most}")
        for i, value in enumerate(values):
            check(value, f"{where}[{i}]")

    return check_all


def entries(*checks: Check) -> Check:
    """A list or tuple with one value for each check."""
    of_length = items(lambda value, where: None, len(checks))

    def check_all(values: Any, where: str) -> None:
        of_length(values, where)
        for i, (check, value) in enumerate(zip(checks, values, strict=True)):
            check(value, f"{where}[{i}]")

    return check_all


def mapping(key: Check, value: Check) -> Check:
    """A dictionary with valid keys and values."""

    def check_all(values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            fail(where, values, "a dictionary")
        for name, found in values.items():
            key(name, f"a key of {where}")
            value(found, f"{where}[{name!r}]")

    return check_all


def record(fields: Mapping[str, Check], *, may: Mapping[str, Check] | None = None) -> Check:
    """A dictionary with these fields.

    Args:
        may: Optional fields. Other fields are not checked.
    """

    def check_all(values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            fail(where, values, "a dictionary")
        for name, check in fields.items():
            if name not in values:
                raise ValueError(f"{where} has no {name!r}")
            check(values[name], f"{where}[{name!r}]")
        for name, check in (may or {}).items():
            if name in values:
                check(values[name], f"{where}[{name!r}]")

    return check_all
