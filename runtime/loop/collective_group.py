"""The process group of a loop's replicas, created on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.collective import Collective, close_collectives


class CollectiveGroup:
    """All ranks' collectives of one process group, created on first use and after an abort.

    Args:
        make: Creates one collective per rank.
    """

    def __init__(self, make: Callable[[], Sequence[Collective]]) -> None:
        self._make = make
        self._collectives: Sequence[Collective] = ()
        self._aborted = False

    def get(self) -> Sequence[Collective]:
        """The collectives in order of rank. Blocks until the group is connected."""
        if self._aborted:
            self.close()
        if not self._collectives:
            self._collectives = self._make()
        return self._collectives

    def abort(self) -> None:
        """Abort all collectives, so that waiting ranks raise. Thread-safe."""
        self._aborted = True
        for collective in self._collectives:
            collective.abort()

    def close(self) -> None:
        """Close the group. No rank may be inside a collective."""
        collectives, self._collectives, self._aborted = self._collectives, (), False
        close_collectives(collectives)
