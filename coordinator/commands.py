"""What the machine tells its service to do."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.errors import RunStalled
from coordinator.messages import Payload, ToWorker
from coordinator.metrics import EpochMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Put a message into a worker's inbox."""

    rank: int
    message: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Compute a weighted average in the background and answer with ``Averaged``.

    Attributes:
        round: Id of the round; -1: the final average.
        ranks: Whose payloads these are.
        payloads: One for each of ``ranks``.
        weights: Samples behind each.
    """

    round: int
    ranks: tuple[int, ...]
    payloads: tuple[Payload, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCollective:
    """Wake every rank that waits in a collective; its buffers hold garbage.

    Attributes:
        generation: The group to break; ``None``: whatever there is, for good.
    """

    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEpoch:
    """An epoch has closed."""

    metrics: EpochMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStall:
    """Write into ``error`` what everybody is doing, and log it.

    Attributes:
        error: What the run is about to fail with.
        state: The machine's state before it fails.
    """

    error: RunStalled
    state: str


Command = Send | Average | AbortCollective | PublishEpoch | ReportStall
FINAL_ROUND = -1
