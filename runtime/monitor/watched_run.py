"""WatchedRun: the read-only view of a run that monitors are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from coordinator.metrics import EpochMetrics
from coordinator.state import Statistics
from runtime.timeline.summary import RunFacts
from runtime.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A run, as far as a monitor may see it. Every function returns at once, in any thread.

    Attributes:
        facts: What was known when it began.
        devices: Of each rank.
        total_batches: Of the whole run, over all ranks.
        started: When it began, by ``time.monotonic``.
        timeline: What it is recorded in, if it is.
        statistics: The coordinator's counters.
        epochs: The closed epochs, without the first so many.
        end: How it ended; ``None`` while it goes on.
    """

    facts: RunFacts
    devices: tuple[torch.device, ...]
    total_batches: int
    started: float
    timeline: Timeline | None
    statistics: Callable[[], Statistics]
    epochs: Callable[[int], Sequence[EpochMetrics]]
    end: Callable[[], End | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended.

    Attributes:
        state: ``"finished"``, ``"stopped"`` or ``"failed"``.
        at: When, by ``time.monotonic``.
        error: What stopped it, if it failed.
    """

    state: str
    at: float
    error: BaseException | None = None
