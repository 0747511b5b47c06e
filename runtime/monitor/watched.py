"""What a monitor may read of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coordinator.metrics import EpochMetrics
from coordinator.ranks import Statistics
from runtime.timeline.summary import RunFacts
from runtime.timeline.timeline import Timeline

if TYPE_CHECKING:
    from runtime.run import Run


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


def watched_run(run: Run, started: float, end: Callable[[], End | None]) -> WatchedRun:
    """A run to be watched.

    Args:
        run: The run.
        started: When it began, by ``time.monotonic``.
        end: How it ended; ``None`` while it goes on.
    """
    machine = run.machine
    facts = RunFacts(
        devices=tuple(str(device) for device in run.devices),
        policy=run.config.policy.name,
        backend=run.backend.name,
        backend_reason=run.backend_reason,
        num_epochs=run.num_epochs,
        batch_size=run.batch_size,
        num_samples=machine.core.config.num_samples,
    )
    return WatchedRun(
        facts=facts,
        devices=run.devices,
        total_batches=run.config.total_batches(machine.core.config.num_samples),
        started=started,
        timeline=run.config.timeline,
        statistics=run.statistics,
        # The coordinator only ever adds to this list, until it replaces it at a resumption,
        # which is over before any thread starts.
        epochs=lambda since: machine.outcome.metrics[since:],
        end=end,
    )
