"""The protocol between the coordinator and the workers.

Every message is a frozen dataclass; there is one union for each direction. A
request carries the id of its averaging round and every reply repeats it, so a
reply to a round that was given up can be told from a reply to the current one.

Tensors travel inside :class:`Payload`: flat CPU tensors that belong to the
message and alias nothing that training writes to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Batches of one epoch that one rank shall train.

    Attributes:
        epoch: Epoch, counted from 0.
        batches: Positions of the batches within the epoch's permutation, in the
            order of training. Batch ``b`` holds the samples
            ``permutation[b * batch_size : (b + 1) * batch_size]``.
        shares: Under ``SYNC``, how many batches each rank of the world trains in
            this plan: from it every rank knows when the others run out and how far
            the learning-rate schedule has moved. Empty under the other policies.
        first_step: Under ``SYNC``, the position of the schedule (batches trained by
            all ranks) before the plan.
    """

    epoch: int
    batches: tuple[range, ...] = ()
    shares: tuple[int, ...] = ()
    first_step: int = 0

    @property
    def num_batches(self) -> int:
        """Number of batches in the plan."""
        return sum(len(span) for span in self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The averaged state of one replica as flat CPU tensors.

    Attributes:
        params: One flat tensor for each dtype of the trainable parameters.
        buffers: One flat tensor for each dtype of the floating-point buffers.
        taken: One flat tensor for each dtype of the other buffers, which are not
            averaged but taken from the rank with the most samples.
    """

    params: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()
    taken: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Memory held by all tensors of the payload."""
        return sum(t.numel() * t.element_size() for t in (*self.params, *self.buffers, *self.taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a rank trained since its last report.

    Attributes:
        num_batches: Micro-batches trained.
        num_samples: Samples in them.
        compute_s: Time spent in training steps, waits for data and peers excluded.
        loss_sum: Sum over batches of mean loss times samples, in step order.
        loss_samples: Samples behind ``loss_sum``. Less than ``num_samples`` where
            losses are still in flight on the device; they come with a later report.
        scalars: ``(name, weighted sum, samples)`` for each recorded scalar.
    """

    num_batches: int = 0
    num_samples: int = 0
    compute_s: float = 0.0
    loss_sum: float = 0.0
    loss_samples: int = 0
    scalars: tuple[tuple[str, float, int], ...] = ()


# --------------------------------------------------------------------------
# Coordinator -> worker
# --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEpoch:
    """Train the plan after those already queued."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How far a worker may go after an averaging round, counted in batches since it.

    Attributes:
        limit: The worker parks once it has trained this many; ``None``: no limit.
        report_after: The worker reports at the latest after this many; ``None``: only
            at the end of a plan and after ``report_interval_s``.
    """

    limit: int | None = None
    report_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncNow:
    """Join the collective of an averaging round at the next step boundary.

    Attributes:
        round: Id of the round.
        allowance: How far to go after it.
        evaluate: Epoch to evaluate on the averaged weights, if any.
        checkpoint: Version to hand to the checkpoint function, if any.
    """

    round: int
    allowance: Allowance = field(default_factory=Allowance)
    evaluate: int | None = None
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Send a :class:`ParamSnapshot` for this round."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Take the average of a round: add ``average - own snapshot`` to the live state.

    Attributes:
        round: Id of the round whose snapshot the average was made from.
        average: The averaged state; read-only, shared by all ranks.
        num_samples: Samples behind the average; 0: the round changes nothing.
        allowance: How far to go after it.
        evaluate: Epoch to evaluate on the average, if any.
        checkpoint: Version to hand to the checkpoint function, if any.
    """

    round: int
    average: Payload
    num_samples: int = 1
    allowance: Allowance = field(default_factory=Allowance)
    evaluate: int | None = None
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGlobalStep:
    """Batches trained by all ranks up to the last round, for the schedule."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Park once ``limit`` batches have been trained since the last round (0: at once)."""

    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Go on, as far as the allowance says (by default: no limit)."""

    allowance: Allowance = field(default_factory=Allowance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate on the live weights, which hold the average (``SYNC``, one device)."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Hand the live weights, which hold the average, to the checkpoint function."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Finish at the next step boundary, send the final snapshot, leave.

    Attributes:
        snapshot: Whether a :class:`FinalSnapshot` is wanted; not after a failure.
    """

    snapshot: bool = True


ToWorker = (
    StartEpoch
    | SyncNow
    | RequestParams
    | Update
    | SetGlobalStep
    | Throttle
    | Resume
    | Evaluate
    | Checkpoint
    | Shutdown
)


# --------------------------------------------------------------------------
# Worker -> coordinator
# --------------------------------------------------------------------------


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
        ok: False where the collective was aborted; the live state is then the one
            before the round.
        report: What was trained before the round and not yet told.
    """

    rank: int
    round: int
    divergence: float | None = None
    sync_s: float = 0.0
    ok: bool = True
    report: BatchReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSnapshot:
    """The rank's state at a step boundary, for averaging on the CPU.

    Attributes:
        rank: Who reports.
        round: Id of the round that asked for it.
        payload: The state; owned by the message.
        num_samples: Samples trained since the last round: the weight.
        num_batches: Batches trained since the last round.
        report: What of it was not yet told; it counts even if the round was given up.
    """

    rank: int
    round: int
    payload: Payload
    num_samples: int
    num_batches: int
    report: BatchReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSnapshot:
    """The last state of a rank and the samples it trained since the last round."""

    rank: int
    payload: Payload
    num_samples: int


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
    """The rank died of an exception."""

    rank: int
    epoch: int
    step: int
    error: BaseException


FromWorker = (
    Ready
    | BatchReport
    | EpochReport
    | SyncAck
    | ParamSnapshot
    | FinalSnapshot
    | EvalReport
    | CheckpointDone
    | Exiting
    | Failed
)


# --------------------------------------------------------------------------
# Service -> machine
# --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The background computation of a round has ended.

    Attributes:
        round: Id of the round; -1 for the final average.
        average: The result; ``None`` if the computation failed.
        num_samples: Sum of the weights.
        divergences: ``(rank, ||snapshot - average|| / ||average||)``.
        compute_s: Time the computation took.
        error: Why there is no result.
    """

    round: int
    average: Payload | None
    num_samples: int = 0
    divergences: tuple[tuple[int, float], ...] = ()
    compute_s: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """``stop()`` was called, or the metrics function returned ``False``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadEnded:
    """A worker's thread has ended; if nothing was heard of it before, it is dead."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the machine may have passed."""


FromService = Averaged | StopRequested | ThreadEnded | Tick
Event = FromWorker | FromService
