"""Number of batches that each device accumulates between two reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from coordinator.cadence import ElChe
from runtime.loop.ddp_config import DdpConfig

DEFAULT_ANCHOR = 10
"""Batches of the slowest device between two reductions, at the start."""
DEFAULT_MAX_ANCHOR = 200
BatchT = TypeVar("BatchT")


class AccumulationSchedule:
    """Batch counts by ElChe, or one batch for each device.

    Args:
        world_size: Number of devices.
        el_che: ``None``: one batch for each.

    Attributes:
        spans_steps: Whether several calls of ``step()`` share a reduction, because the caller
            has set a ``max_anchor`` above 1.
    """

    def __init__(
        self, world_size: int, el_che: ElChe | None = None, *, spans_steps: bool = False
    ) -> None:
        self._world_size = world_size
        self._el_che = el_che
        self.spans_steps = spans_steps

    @classmethod
    def of(cls, world_size: int, config: DdpConfig, *, use_el_che: bool) -> AccumulationSchedule:
        """The cadence of a configuration.

        Args:
            world_size: Number of devices; one alone has nothing to reduce.
            config: Where ``max_anchor`` is 0 ElChe is off.
            use_el_che: Whether ElChe is on otherwise.
        """
        if world_size == 1 or not use_el_che or config.max_anchor == 0:
            return cls(world_size)
        most = DEFAULT_MAX_ANCHOR if config.max_anchor is None else config.max_anchor
        target = 0.10 if config.overhead_target is None else config.overhead_target
        el_che = ElChe(
            world_size,
            min(DEFAULT_ANCHOR, most),
            max_anchor=most,
            overhead_target=target,
            speed_hint=config.speed_hint,
        )
        return cls(world_size, el_che, spans_steps=(config.max_anchor or 0) > 1)

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Batches of each device until the next reduction."""
        return (1,) * self._world_size if self._el_che is None else self._el_che.batch_counts

    def report(self, times: Sequence[tuple[float, int]], sync_s: float) -> tuple[float, ...] | None:
        """Take in a round.

        Args:
            times: For each device seconds of computing, and the batches in them.
            sync_s: Seconds that the reduction took; not finite if that is not known yet.

        Returns:
            Each device's part of the throughput once all were measured; ``None`` before.
        """
        if self._el_che is None:
            return None
        seconds, counts = [t[0] for t in times], [t[1] for t in times]
        self._el_che.report_timing(seconds, counts, sync_s)
        return None if self._el_che.seconds_per_batch is None else self._el_che.shares


def rounds(
    batches: Iterable[BatchT], batch_counts: Callable[[], Sequence[int]]
) -> Iterator[list[BatchT]]:
    """Lists of as many batches as the devices run until their next reduction.

    Args:
        batches: Of one epoch, say. The last list may be short.
        batch_counts: Called again for each list.
    """
    source = iter(batches)
    while given := list(islice(source, sum(batch_counts()))):
        yield given


def reduction_seconds(measured: Sequence[tuple[float, int]]) -> float:
    """What a reduction cost: that of the rank which waited least; NaN if not known yet."""
    known = [seconds for seconds, number in measured if number]
    return min(known) if known else math.nan
