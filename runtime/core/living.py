"""The objects of one kind that are alive, told without a lock."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """Remembers objects and keeps none of them alive. Thread-safe, and safe in finalizers.

    A ``WeakSet`` is not: its iteration fails if another thread adds an object meanwhile, or
    if one dies there between the look whether somebody iterates and the removal. Here each
    step is one operation of a set, which is whole with and without the interpreter's lock.
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        """Remember an object, which must be hashable, until it dies."""
        self._refs.add(weakref.ref(item, self._refs.discard))

    def all(self) -> list[T]:
        """Those that are alive now, in any order."""
        found = [ref() for ref in self._refs.copy()]
        return [item for item in found if item is not None]
