"""LiveRegistry: a set of weak references for several threads."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveRegistry(Generic[T]):
    """A set of weak references. Thread-safe, and safe in finalizers.

    ``WeakSet`` is not: iterating fails if another thread adds an object, or if an object dies at
    the wrong moment. Here each step is a single set operation, which is atomic with and without
    the GIL.
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        self._refs.add(weakref.ref(item, self._refs.discard))

    def all(self) -> list[T]:
        """The objects alive now, in any order."""
        found = [ref() for ref in self._refs.copy()]
        return [item for item in found if item is not None]
