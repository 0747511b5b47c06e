"""Collectives of a run: a new group of ranks after each death of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from coordinator.config import AverageBackend
from runtime.collective import Collective, close_collectives
from runtime.core.errors import CollectiveAborted, GpuWorkerError

MakeGroup = Callable[[Sequence[int], AverageBackend], Sequence[Collective]]


class CollectiveGroups:
    """Creates each group of ranks once, and returns each rank its collective.

    Thread-safe. The first group is created when the run starts, every later one by the first of
    its ranks that calls :meth:`connect`, while the others wait.

    Args:
        make: Returns connected collectives, one for each of the given ranks, over a backend.
    """

    def __init__(self, make: MakeGroup) -> None:
        self._make = make
        self._creating = threading.Lock()
        # Guards the following attributes; never held while a group is created.
        self._lock = threading.Lock()
        self._groups: dict[int, dict[int, Collective]] = {}
        self._unconnected: dict[tuple[int, AverageBackend], GpuWorkerError] = {}
        self._aborted: set[int] = set()
        self._all_aborted = False
        self._closed = False

    def connect(
        self, generation: int, ranks: Sequence[int], rank: int, backend: AverageBackend
    ) -> Collective:
        """Return a rank's collective of a group. Blocks until the group is connected.

        Raises:
            CollectiveAborted: The run has ended, or a rank could not connect.
            CollectiveTimeout: A rank did not connect in time.
            GpuWorkerError: An earlier group has not ended, so no other can be created.
        """
        with self._creating:
            with self._lock:
                if self._closed:
                    raise CollectiveAborted("the run has ended")
                collectives = self._groups.get(generation)
            earlier = self._unconnected.get((generation, backend))
            if earlier is not None:  # the other ranks need not retry
                raise type(earlier)(str(earlier))
            if collectives is None:
                try:
                    collectives = dict(zip(ranks, self._make(ranks, backend), strict=True))
                except Exception as error:
                    # An earlier group that has not ended is no fault of the backend.
                    kind = GpuWorkerError if type(error) is GpuWorkerError else CollectiveAborted
                    self._unconnected[generation, backend] = kind(str(error))
                    raise
                self._add(generation, collectives)
        return collectives[rank]

    def _add(self, generation: int, collectives: dict[int, Collective]) -> None:
        with self._lock:
            closed = self._closed
            aborted = self._all_aborted or generation in self._aborted
            if not closed:
                self._groups[generation] = collectives
        for collective in collectives.values():
            if closed:
                collective.close()
            elif aborted:
                collective.abort()

    def abort(self, generation: int | None = None) -> None:
        """Abort a group, created or not; ``None``: all, permanently. Does not block."""
        with self._lock:
            if generation is None:
                self._all_aborted = True
                chosen = list(self._groups.values())
            else:
                self._aborted.add(generation)
                chosen = [e for g, e in self._groups.items() if g == generation]
            collectives = [collective for group in chosen for collective in group.values()]
        for collective in collectives:
            collective.abort()

    def close(self) -> None:
        """Close all collectives, after their last use."""
        with self._lock:
            self._closed = True
            groups, self._groups = list(self._groups.values()), {}
        close_collectives(collective for group in groups for collective in group.values())
