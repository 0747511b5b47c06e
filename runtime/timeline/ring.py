"""Memory for what happens often: bounded, and written without a lock."""

from __future__ import annotations

from typing import Any


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
