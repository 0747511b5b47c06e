"""Messages from a worker to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.contents import Payload, Tally

Extra = dict[str, Any] | Exception
"""A rank's own part of a checkpoint: tensors of the CPU and plain values; or why there is none."""


LONGEST_REPORT_S = 0.5
"""A run's ranks tell at the latest after this long what they have trained, however many there
are: what is shown of a run comes from the reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The replica is built and holds rank 0's weights."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Batches trained since the last report, within the plan in progress."""

    rank: int
    epoch: int
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """A plan is done (or was left at a stop); ``tally`` is what no report has told yet."""

    rank: int
    epoch: int
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAck:
    """A round is done on this rank. Never counted as a batch.

    Attributes:
        rank: Who reports.
        round: Id of the round.
        divergence: ``||pre - post|| / ||post||`` over the parameters.
        sync_s: Time the round cost this rank, its wait for the others excluded.
        ok: False where the collective was aborted or timed out; the live state is then
            the one before the round.
        report: What was trained before the round and not yet told.
        extra: The rank's own state after the round, if it was asked for.
        average: With it, from the lead, what the round has averaged; owned by the message.
        at: When the rank had done its part, by ``time.monotonic()``; it may be told later.
    """

    rank: int
    round: int
    divergence: float | None = None
    sync_s: float = 0.0
    ok: bool = True
    report: BatchReport | None = None
    extra: Extra | None = None
    average: Payload | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSnapshot:
    """The rank's state at a step boundary, for averaging on the CPU.

    Attributes:
        rank: Who reports.
        round: Id of the round that asked for it.
        payload: The state; owned by the message.
        num_samples: Samples trained since the last round.
        num_batches: Batches trained since the last round.
        healthy: Whether the parameters are finite; if not, the weight is 0.
        squares: Squared norms of the payload's parameter tensors, if the rank has measured them.
        report: What of it was not yet told; it counts even if the round was given up.
        extra: The rank's own state at that boundary, if it was asked for.
        weight: Of what was trained, in the round; ``None``: the samples.
    """

    rank: int
    round: int
    payload: Payload
    num_samples: int
    num_batches: int
    healthy: bool = True
    squares: tuple[float, ...] | None = None
    report: BatchReport | None = None
    extra: Extra | None = None
    weight: float | None = None

    @property
    def round_weight(self) -> float:
        """The weight in the round."""
        return self.num_samples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSnapshot:
    """The last state of a rank, sent as it leaves.

    Attributes:
        rank: Who leaves.
        payload: Its state; owned by the message.
        num_samples: Samples behind what is not yet averaged: the parameters since the last
            round, or, under ``SYNC``, the buffers.
        step: Under ``SYNC``, the optimizer steps made: after a death ranks may differ.
        fault: Set where the parameters are not finite: the state must not be used, and
            this is how the run ends if no rank has a better one.
        extra: The rank's own state, if it was asked for.
        weight: Of what is not yet averaged; ``None``: the samples.
    """

    rank: int
    payload: Payload
    num_samples: int
    step: int = 0
    fault: Failed | None = None
    extra: Extra | None = None
    weight: float | None = None

    @property
    def round_weight(self) -> float:
        """The weight in the average of the last states."""
        return self.num_samples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The rank's whole state between two steps, all of which is in the result.

    Attributes:
        rank: Who reports.
        id: Of the :class:`Capture` that asked for it.
        payload: Weights and buffers; owned by the message. Under ``SYNC`` the parameters
            come from the lowest rank alone, since all have the same.
        num_samples: Samples that the buffers have seen since they were averaged.
        step: Optimizer steps made since the start of the run.
        extra: The rank's own state.
        report: What was trained and not yet told.
    """

    rank: int
    id: int
    payload: Payload
    num_samples: int
    step: int
    extra: Extra
    report: BatchReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """What the evaluation function returned for an epoch."""

    rank: int
    epoch: int
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDone:
    """The checkpoint function has returned, or failed, which the rank has logged."""

    rank: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exiting:
    """The rank leaves on purpose; nothing more comes from it."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The rank died of an exception.

    Attributes:
        rank: Who died.
        epoch: Epoch it was in.
        step: Batches it had trained.
        error: The exception.
        fatal: Whether no run can go on after it, whatever the settings say.
    """

    rank: int
    epoch: int
    step: int
    error: BaseException
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted:
    """The rank has left its plan, because its group of ranks is broken (``SYNC``).

    Attributes:
        rank: Who reports.
        generation: The broken group.
        step: Optimizer steps made since the start of the run.
        num_syncs: Times it has averaged its buffers.
        report: What was trained and not yet told.
    """

    rank: int
    generation: int
    step: int
    num_syncs: int = 0
    report: BatchReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """All ranks of a new group have met, and stand at the same step (``SYNC``)."""

    rank: int
    generation: int


FromWorker = (
    Ready
    | BatchReport
    | EpochReport
    | SyncAck
    | ParamSnapshot
    | FinalSnapshot
    | Captured
    | EvalReport
    | CheckpointDone
    | Exiting
    | Failed
    | Halted
    | Regrouped
)
