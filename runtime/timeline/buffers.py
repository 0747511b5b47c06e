"""Bounded buffers, written by one thread and read by any: Ring, TimeBins and Decimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

Row = tuple[float, ...]
T = TypeVar("T")
NUM_BINS = 1024
NUM_POINTS = 4096
FIRST_WIDTH_S = 0.02


class TimeBins:
    """Running totals at equally spaced times.

    When all bins are used, every second total is dropped and the bins become twice as wide, so
    that at least half of them are in use. Amounts in an interval are differences of totals, so
    that nothing is lost. Written by one thread, read by any.

    Args:
        start: Start of the first bin.
        num_bins: Maximum number of bins; even.

    Attributes:
        end: End of the current bin.
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
        """Close all bins that have ended.

        Args:
            now: The current time.
            totals: The current totals.
            running: Index of the total that has grown with the clock since before the bins
                ended; the others have not changed since.
        """
        while self.end <= now:
            row = list(totals)
            if running is not None:
                row[running] -= now - self.end
            self._rows.append(tuple(row))
            if len(self._rows) == self._num_bins:
                # A new list: concurrent readers of the old one use its own width.
                self._rows = self._rows[1::2]
                self._width_s *= 2
                self._view = (self._width_s, self._rows)
            # A product, not a sum: the ends stay exact for any number of bins.
            self.end = self._start + (len(self._rows) + 1) * self._width_s

    def read(self, end: float) -> tuple[float, list[Row]]:
        """Width of a bin in seconds, and the totals at the end of each; from any thread.

        Args:
            end: Time that the maximum number of bins must reach; widens them if needed.
        """
        width_s, rows = self._view
        rows = list(rows)
        while end - self._start > self._num_bins * width_s:
            rows, width_s = rows[1::2], width_s * 2
        return width_s, rows


class Decimated(Generic[T]):
    """A list of bounded length: when it is full, every second item is dropped.

    From then on only every second new item is added, and so on; the last item is always kept.
    Written by one thread, read by any.

    Args:
        max_items: Maximum length, without the last item; even.
    """

    __slots__ = ("_items", "_last", "_max_items", "_num_seen", "_stride")

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: list[T] = []
        self._last: T | None = None
        self._stride = 1
        self._num_seen = 0

    def add(self, item: T) -> None:
        """Append an item."""
        self._last = item
        if self._num_seen % self._stride == 0:
            self._items.append(item)
            if len(self._items) >= self._max_items:
                self._items = self._items[::2]
                self._stride *= 2
        self._num_seen += 1

    def read(self) -> list[T]:
        """The kept items, oldest first, and the last item."""
        items = list(self._items)  # before ``_last``, which is never older
        last = self._last
        if last is not None and (not items or items[-1] is not last):
            items.append(last)
        return items


class Ring:
    """Ring buffer, written by one thread and read by any.

    Each slot holds a tuple that starts with the item's number. Slots are replaced atomically, with
    and without the GIL: a reader sees whole items, and detects by the number that an item was
    overwritten.

    Args:
        capacity: Number of items kept; the oldest are dropped.
    """

    __slots__ = ("_capacity", "_slots", "num_added")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: list[tuple[Any, ...] | None] = [None] * capacity
        self.num_added = 0

    def add(self, item: tuple[Any, ...]) -> None:
        """Add an item; by the writing thread only."""
        number = self.num_added
        self._slots[number % self._capacity] = (number, *item)
        self.num_added = number + 1

    def read(self, since: int = 0) -> tuple[list[tuple[Any, ...]], int]:
        """The kept items, oldest first, each preceded by its number.

        Args:
            since: First number to return.

        Returns:
            The items, and the number of the next one.
        """
        end = self.num_added
        kept = []
        for number in range(max(since, end - self._capacity), end):
            item = self._slots[number % self._capacity]
            # An item overwritten meanwhile is returned by a later call.
            if item is not None and item[0] == number:
                kept.append(item)
        return kept, end

    @property
    def num_dropped(self) -> int:
        return max(0, self.num_added - self._capacity)
