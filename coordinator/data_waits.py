"""Lasting waits of single ranks for their data, as a part of the time that a sample takes them."""

from __future__ import annotations

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

    Attributes:
        last: The last waits of each rank.
    """

    def __init__(self, world_size: int) -> None:
        self.last: tuple[tuple[float, ...], ...] = ((),) * world_size

    def add(self, rank: int, stats: ReportStats) -> None:
        """Record a report; one without samples or without a measured wait has no effect."""
        if stats.num_samples and stats.data_wait_s is not None:
            last = list(self.last)
            last[rank] = (*last[rank], stats.data_wait_s / stats.num_samples)[-_NUM_REPORTS:]
            self.last = tuple(last)

    def per_sample_s(self, rank: int, live: Sequence[int]) -> float:
        """The rank's own lasting wait for a sample, in seconds.

        Args:
            live: The live ranks. 0.0 until each of them is measured, and for a rank that is not
                one of them.
        """
        if rank not in live or any(len(self.last[r]) < _MIN_REPORTS for r in live):
            return 0.0
        return min(self.last[rank]) - common_wait_s([self.last[r] for r in live])

    def restore(self, last: tuple[tuple[float, ...], ...]) -> None:
        """Restore :attr:`last`; without effect at another world size."""
        if len(last) == len(self.last):
            self.last = last


def common_wait_s(waits: Sequence[Sequence[float]]) -> float:
    """The lasting wait for a sample that all ranks have, in seconds.

    Args:
        waits: The last waits of each rank.
    """
    if any(len(last) < _MIN_REPORTS for last in waits):
        return 0.0
    return min((min(last) for last in waits), default=0.0)
