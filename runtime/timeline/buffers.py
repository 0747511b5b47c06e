"""Bounded buffers, written by one thread and read by any: Ring, Bins and Thinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

Row = tuple[float, ...]


T = TypeVar("T")


NUM_BINS = 1024


NUM_POINTS = 4096


FIRST_WIDTH_S = 0.02


class Bins:
    """Running totals at equally spaced times.

    When all bins are used, each second total is dropped and the bins become twice as wide:
    between half of them and all of them are always in use. What happened in a span of
    time is the difference of two totals, so that nothing is lost. Written by one thread,
    read by any.

    Args:
        start: Time at which the first bin begins.
        num_bins: At most so many; even.
        width_s: Width of the first bins.

    Attributes:
        end: When the bin in progress is over.
    """

    __slots__ = ("_num_bins", "_rows", "_start", "_view", "_width_s", "end")

    def __init__(
        self, start: float, num_bins: int = NUM_BINS, width_s: float = FIRST_WIDTH_S
    ) -> None:
        self._start = start
        self._num_bins = num_bins
        self._width_s = width_s
        self._rows: list[Row] = []
        self._view = (width_s, self._rows)
        self.end = start + width_s

    def close(self, now: float, totals: Sequence[float], running: int | None = None) -> None:
        """Close all bins that ended up to now.

        Args:
            now: The time.
            totals: What the totals have come to.
            running: The one that has grown with the clock since before the bins ended; the
                others have not changed since then.
        """
        while self.end <= now:
            row = list(totals)
            if running is not None:
                row[running] -= now - self.end
            self._rows.append(tuple(row))
            if len(self._rows) == self._num_bins:
                # A new list: whoever reads the old one reads it with its own width.
                self._rows = self._rows[1::2]
                self._width_s *= 2
                self._view = (self._width_s, self._rows)
            # Multiplied, not added up: the ends stay exact however many there are.
            self.end = self._start + (len(self._rows) + 1) * self._width_s

    def read(self, end: float) -> tuple[float, list[Row]]:
        """Width of a bin in seconds, and the totals at the end of each, from any thread.

        Args:
            end: The bins come so wide that those allowed would reach at least up to here.
        """
        width_s, rows = self._view
        rows = list(rows)
        while end - self._start > self._num_bins * width_s:
            rows, width_s = rows[1::2], width_s * 2
        return width_s, rows


class Thinned(Generic[T]):
    """Items in order; once there are too many, only each second one stays.

    From then on each second one that comes is left out too, and so on; the last one is
    always there. Written by one thread, read by any.

    Args:
        max_items: At most so many, and the last; even.
    """

    __slots__ = ("_items", "_last", "_max_items", "_num_seen", "_stride")

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: list[T] = []
        self._last: T | None = None
        self._stride = 1
        self._num_seen = 0

    def add(self, item: T) -> None:
        """Add an item at the end."""
        self._last = item
        if self._num_seen % self._stride == 0:
            self._items.append(item)
            if len(self._items) >= self._max_items:
                self._items = self._items[::2]
                self._stride *= 2
        self._num_seen += 1

    def read(self) -> list[T]:
        """What is kept, oldest first, and the last item."""
        items = list(self._items)  # before the last one, which is never older
        last = self._last
        if last is not None and (not items or items[-1] is not last):
            items.append(last)
        return items


class Ring:
    """The last items that one thread added; any thread may read them.

    Each slot holds a tuple that starts with the item's number. A slot is replaced as a
    whole, with and without the interpreter's lock: a reader sees each item entire or not at
    all, and its number tells whether it is the one that was looked for.

    Args:
        capacity: How many items are kept; the oldest give way.
    """

    __slots__ = ("_capacity", "_slots", "num_added")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: list[tuple[Any, ...] | None] = [None] * capacity
        self.num_added = 0

    def add(self, item: tuple[Any, ...]) -> None:
        """Add an item. In the writing thread alone."""
        number = self.num_added
        self._slots[number % self._capacity] = (number, *item)
        self.num_added = number + 1

    def read(self, since: int = 0) -> tuple[list[tuple[Any, ...]], int]:
        """The items that are kept, oldest first, each behind its number.

        Args:
            since: Leave out those with lower numbers.

        Returns:
            The items, and the number of the next one.
        """
        end = self.num_added
        kept = []
        for number in range(max(since, end - self._capacity), end):
            item = self._slots[number % self._capacity]
            # One that was replaced meanwhile is told by a later call.
            if item is not None and item[0] == number:
                kept.append(item)
        return kept, end

    @property
    def num_dropped(self) -> int:
        """Items that have given way."""
        return max(0, self.num_added - self._capacity)
