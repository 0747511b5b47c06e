"""Sums that come out the same wherever they are cut.

A report is sent when its time has come, so the losses of an epoch are summed in pieces
that differ from run to run. Each piece carries what rounding left out of it, and the sum
of all pieces is the exact sum of the values, rounded once. The method is that of
Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric
Predicates" (1997), as in ``math.fsum``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class RoundedSum(float):
    """A sum, rounded, that knows the rest.

    Attributes:
        parts: Numbers whose exact sum is the exact sum; empty: the sum is this number.
    """

    __slots__ = ("parts",)
    parts: tuple[float, ...]

    def __new__(cls, value: float, parts: Iterable[float] = ()) -> RoundedSum:
        """A sum from its rounded value and its parts."""
        made = super().__new__(cls, value)
        made.parts = tuple(parts)
        return made

    def __reduce__(self) -> tuple[type[RoundedSum], tuple[float, tuple[float, ...]]]:
        return type(self), (float(self), self.parts)


class WeightSum:
    """Adds weights without losing anything: whole numbers stay whole numbers."""

    __slots__ = ("_rest", "_whole")

    def __init__(self) -> None:
        self._whole = 0
        self._rest: ExactSum | None = None

    def add(self, weight: float) -> None:
        """Add a weight, or what :meth:`value` or :attr:`parts` gave of others."""
        if isinstance(weight, int):
            self._whole += weight
        elif weight.is_integer() and not getattr(weight, "parts", ()):
            self._whole += int(weight)
        else:
            self._rest = self._rest or ExactSum()
            self._rest.add(weight)

    def add_all(self, weights: Sequence[float]) -> None:
        """Add many weights."""
        for weight in weights:
            self.add(weight)

    def value(self) -> float:
        """The sum: an ``int``, or a :class:`RoundedSum` where a weight was no whole number."""
        return self._whole if self._rest is None else self._sum(self._rest).value()

    @property
    def parts(self) -> int | list[float]:
        """What :meth:`add` makes the same sum of, piece by piece where it is a list."""
        return self._whole if self._rest is None else list(self._sum(self._rest).parts)

    def _sum(self, rest: ExactSum) -> ExactSum:
        rounded = float(self._whole)
        return ExactSum((*rest.parts, rounded, float(self._whole - int(rounded))))


class ExactSum:
    """Adds numbers without losing anything; NaN and infinities stay what they are."""

    __slots__ = ("_parts", "_special")

    def __init__(self, parts: Sequence[float] = ()) -> None:
        self._parts: list[float] = []  # they do not overlap, and rise in size
        self._special = 0.0
        for x in parts:
            self._add(x)

    def add(self, value: float) -> None:
        """Add a number, or a :class:`RoundedSum` with all that is in it."""
        if isinstance(value, RoundedSum) and value.parts:
            for x in value.parts:
                self._add(x)
        else:
            self._add(float(value))

    def add_all(self, values: Sequence[float]) -> None:
        """Add many numbers, faster than one by one; no :class:`RoundedSum` among them."""
        left = [*self._parts, *values]
        parts: list[float] = []
        try:
            # Each sum is rounded once, and what rounding left out is summed next.
            while (rounded := math.fsum(left)) and rounded - rounded == 0.0:
                parts.append(rounded)
                left.append(-rounded)
        except (OverflowError, ValueError):  # on the way to it, or opposite infinities
            rounded = math.nan
        if rounded == 0.0:
            self._parts = parts[::-1]
        else:
            for x in values:
                self._add(x)

    def _add(self, x: float) -> None:
        parts, kept = self._parts, 0
        for y in parts:
            high = x + y
            # Knuth's two-sum: no comparison, exact unless it overflows.
            z = high - x
            low = (x - (high - z)) + (y - z)
            if low:
                parts[kept] = low
                kept += 1
            x = high
        if x - x != 0.0:  # not finite
            self._special += x
            parts.clear()
        else:
            parts[kept:] = [x]

    @property
    def parts(self) -> tuple[float, ...]:
        """What :class:`ExactSum` can be made from again."""
        if self._special or math.isnan(self._special):
            return (self._special,)
        return tuple(self._parts)

    def value(self) -> RoundedSum:
        """The sum."""
        if self._special or math.isnan(self._special):
            return RoundedSum(self._special)
        return RoundedSum(math.fsum(self._parts), self._parts if len(self._parts) > 1 else ())
