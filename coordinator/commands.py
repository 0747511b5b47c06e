"""What the machine tells its service to do."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Wake every rank that waits in a collective; its buffers hold garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEpoch:
    """An epoch has closed."""

    metrics: EpochMetrics


Command = Send | Average | AbortCollective | PublishEpoch
FINAL_ROUND = -1
