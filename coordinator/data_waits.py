"""Lasting waits of single ranks for their data, as a part of the time that a sample takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from coordinator.metrics import ReportStats

_NUM_REPORTS = 3
"""A wait lasts if it is in this many consecutive reports."""
_MIN_REPORTS = 2
"""Reports of each live rank until waits count."""


class DataWaits:
    """Tracks the seconds for which each rank waits for the data of a sample.

    A wait is lasting and not a spike: the least of the last three reports counts. It is the rank's
    own: the least of all live ranks is subtracted, as data that every rank waits for arrive no
    sooner if another rank trains them.

    Deterministic and not thread-safe: no clock, no thread.
    """

    def __init__(self, world_size: int) -> None:
        self._last: list[deque[float]] = [deque(maxlen=_NUM_REPORTS) for _ in range(world_size)]

    def add(self, rank: int, stats: ReportStats) -> None:
        """Record a report; one without samples or without a measured wait has no effect."""
        if stats.num_samples and stats.data_wait_s is not None:
            self._last[rank].append(stats.data_wait_s / stats.num_samples)

    def per_sample_s(self, rank: int, live: Sequence[int]) -> float:
        """The rank's own lasting wait for a sample, in seconds.

        Args:
            live: The live ranks. 0.0 until each of them is measured, and for a rank that is not
                one of them.
        """
        if rank not in live or any(len(self._last[r]) < _MIN_REPORTS for r in live):
            return 0.0
        return min(self._last[rank]) - common_wait_s([self._last[r] for r in live])

    def state_dict(self) -> list[list[float]]:
        """The last waits of each rank."""
        return [list(last) for last in self._last]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restore :meth:`state_dict`; without effect at another world size."""
        if len(state) == len(self._last):
            self._last = [deque(map(float, last), maxlen=_NUM_REPORTS) for last in state]


def common_wait_s(state: Sequence[Sequence[float]]) -> float:
    """The lasting wait for a sample that all ranks have, in seconds.

    Args:
        state: The last waits of each rank, as in :meth:`DataWaits.state_dict`.
    """
    if any(len(last) < _MIN_REPORTS for last in state):
        return 0.0
    return min((min(last) for last in state), default=0.0)
