"""The collectives of a run: one group of ranks after the other, as ranks die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from coordinator.config import AverageBackend
from runtime.collective import Collective
from runtime.core.errors import CollectiveAborted, GpuWorkerError

MakeGroup = Callable[[Sequence[int], AverageBackend], Sequence[Collective]]


class CollectiveGroups:
    """Makes each group of ranks once, in one place, and hands every rank its end.

    Thread-safe. The first group is made when the run starts, every later one by the first
    of its ranks that asks, while the others wait.

    Args:
        make: Gives one connected end for each of the ranks it is given, over a backend.
    """

    def __init__(self, make: MakeGroup) -> None:
        self._make = make
        self._making = threading.Lock()
        # Guards what follows, and is never held while a group is made.
        self._lock = threading.Lock()
        self._ends: dict[int, dict[int, Collective]] = {}
        self._unconnected: dict[tuple[int, AverageBackend], GpuWorkerError] = {}
        self._broken: set[int] = set()
        self._all_broken = False
        self._closed = False

    def end(
        self, generation: int, ranks: Sequence[int], rank: int, backend: AverageBackend
    ) -> Collective:
        """A rank's end of a group. Blocks until the group is connected.

        Raises:
            CollectiveAborted: The run is over, or a rank could not connect.
            CollectiveTimeout: A rank did not connect in time.
            GpuWorkerError: An earlier group does not end, so that no other one can be made.
        """
        with self._making:
            with self._lock:
                if self._closed:
                    raise CollectiveAborted("the run is over")
                ends = self._ends.get(generation)
            earlier = self._unconnected.get((generation, backend))
            if earlier is not None:  # the others need not try it again
                raise type(earlier)(str(earlier))
            if ends is None:
                try:
                    ends = dict(zip(ranks, self._make(ranks, backend), strict=True))
                except Exception as error:
                    # An earlier group that does not end is no fault of the backend.
                    kind = GpuWorkerError if type(error) is GpuWorkerError else CollectiveAborted
                    self._unconnected[generation, backend] = kind(str(error))
                    raise
                self._keep(generation, ends)
        return ends[rank]

    def _keep(self, generation: int, ends: dict[int, Collective]) -> None:
        with self._lock:
            closed = self._closed
            broken = self._all_broken or generation in self._broken
            if not closed:
                self._ends[generation] = ends
        for end in ends.values():
            if closed:
                end.close()
            elif broken:
                end.abort()

    def abort(self, generation: int | None = None) -> None:
        """Break a group, made or to be made; ``None``: all of them, for good. Never waits."""
        with self._lock:
            if generation is None:
                self._all_broken = True
                chosen = list(self._ends.values())
            else:
                self._broken.add(generation)
                chosen = [e for g, e in self._ends.items() if g == generation]
            ends = [end for group in chosen for end in group.values()]
        for end in ends:
            end.abort()

    def close(self) -> None:
        """Close every end; the ranks use them no more."""
        with self._lock:
            self._closed = True
            groups, self._ends = list(self._ends.values()), {}
        for group in groups:
            for end in group.values():
                end.close()
