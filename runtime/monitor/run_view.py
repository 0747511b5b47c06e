"""RunView: a read-only view of a run for monitors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from coordinator.metrics import EpochMetrics
from coordinator.run_state import Statistics
from runtime.timeline.run_summary import RunSummary
from runtime.timeline.summary import RunFacts
from runtime.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A read-only view of a run for monitors. Every function returns at once, from any thread.

    Attributes:
        facts: Facts known at the start.
        devices: The device of each rank.
        total_batches: Batches of the whole run, over all ranks.
        started: Start of the run, by ``time.monotonic``.
        timeline: The run's timeline, if it has one.
        statistics: Returns the coordinator's counters.
        summary: Returns the throughput of the run and its lost time.
        seconds: Returns the seconds of each rank by cause; empty before the start.
        epochs: Returns the closed epochs from this number on.
        end: Returns the end of the run; ``None`` while it is running.
    """

    facts: RunFacts
    devices: tuple[torch.device, ...]
    total_batches: int
    started: float
    timeline: Timeline | None
    statistics: Callable[[], Statistics]
    summary: Callable[[], RunSummary]
    seconds: Callable[[], Sequence[Sequence[float]]]
    epochs: Callable[[int], Sequence[EpochMetrics]]
    end: Callable[[], RunEnd | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run.

    Attributes:
        state: ``"finished"``, ``"stopped"`` or ``"failed"``.
        at: Time of the end, by ``time.monotonic``.
        error: The error, if it failed.
    """

    state: str
    at: float
    error: BaseException | None = None
