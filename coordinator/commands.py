"""What the machine tells its service to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.contents import Payload
from coordinator.errors import RunStalled
from coordinator.metrics import EpochMetrics
from coordinator.requests import ToWorker


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
        weights: Of each; samples, or what the losses of its batches were means over.
        squares: Squared norms of the parameter tensors of each, as far as they are known.
        keep: Whether a copy of the average is wanted, too.
    """

    round: int
    ranks: tuple[int, ...]
    payloads: tuple[Payload, ...]
    weights: tuple[float, ...]
    squares: tuple[tuple[float, ...] | None, ...] = ()
    keep: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """The whole state of the run at one moment; it aliases nothing that is written to.

    Attributes:
        payload: The averaged weights and buffers.
        ranks: The own state of each rank, in order of rank.
        run: The machine's state, as plain numbers, lists and dictionaries.
        epoch: Closed epochs.
        global_step: Batches trained by all ranks together.
        scheduled: Whether it was due; if not, it was made for the tickets alone.
        tickets: The calls of ``save()`` that it answers.
        final: Whether the run ends with it.
    """

    payload: Payload
    ranks: tuple[dict[str, Any], ...]
    run: dict[str, Any]
    epoch: int
    global_step: int
    scheduled: bool
    tickets: tuple[int, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint could not be made; training goes on.

    Attributes:
        error: Why.
        tickets: The calls of ``save()`` that it was made for.
    """

    error: Exception
    tickets: tuple[int, ...] = ()


Command = (
    Send | Average | AbortCollective | PublishEpoch | ReportStall | SaveCheckpoint | SaveFailed
)
FINAL_ROUND = -1
SAVE_ROUND = -2
