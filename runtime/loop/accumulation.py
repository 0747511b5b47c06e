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
    """Number of batches of each device between two reductions: ElChe's, or one.

    Args:
        el_che: Chooses the counts; ``None``: one batch per device.
        spans_steps: See the attribute.

    Attributes:
        spans_steps: True if several calls of ``step()`` share a reduction, because the user set a
            ``max_anchor`` above 1.
    """

    def __init__(
        self, world_size: int, el_che: ElChe | None = None, *, spans_steps: bool = False
    ) -> None:
        self._world_size = world_size
        self._el_che = el_che
        self.spans_steps = spans_steps

    @classmethod
    def of(cls, world_size: int, config: DdpConfig, *, use_el_che: bool) -> AccumulationSchedule:
        """The schedule of a configuration.

        Args:
            world_size: Number of devices; with one device nothing is reduced.
            config: The settings; ``max_anchor`` 0 disables ElChe.
            use_el_che: True if ElChe is enabled otherwise.
        """
        if world_size == 1 or not use_el_che or config.max_anchor == 0:
            return cls(world_size)
        max_anchor = DEFAULT_MAX_ANCHOR if config.max_anchor is None else config.max_anchor
        target = 0.10 if config.overhead_target is None else config.overhead_target
        el_che = ElChe(
            world_size,
            min(DEFAULT_ANCHOR, max_anchor),
            max_anchor=max_anchor,
            overhead_target=target,
            speed_hint=config.speed_hint,
        )
        return cls(world_size, el_che, spans_steps=(config.max_anchor or 0) > 1)

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Batches of each device until the next reduction."""
        return (1,) * self._world_size if self._el_che is None else self._el_che.batch_counts

    def report(self, times: Sequence[tuple[float, int]], sync_s: float) -> tuple[float, ...] | None:
        """Record the measurements of one reduction.

        Args:
            times: Each device's compute seconds and number of batches.
            sync_s: Seconds of the reduction; not finite if not measured yet.

        Returns:
            Each device's share of the throughput; ``None`` until all were measured.
        """
        if self._el_che is None:
            return None
        seconds, counts = [t[0] for t in times], [t[1] for t in times]
        self._el_che.report_timing(seconds, counts, sync_s)
        return None if self._el_che.seconds_per_batch is None else self._el_che.shares


def rounds(
    batches: Iterable[BatchT], batch_counts: Callable[[], Sequence[int]]
) -> Iterator[list[BatchT]]:
    """Yield lists of as many batches as all devices run until their next reduction.

    Args:
        batches: The batches, of one epoch for example; the last list may be short.
        batch_counts: Returns each device's current count; called for each list.
    """
    source = iter(batches)
    while round_ := list(islice(source, sum(batch_counts()))):
        yield round_


def reduction_seconds(measured: Sequence[tuple[float, int]]) -> float:
    """The cost of a reduction: the time of the rank that waited least; NaN if not measured."""
    known = [seconds for seconds, count in measured if count]
    return min(known) if known else math.nan
