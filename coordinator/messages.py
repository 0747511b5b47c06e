"""The protocol between the coordinator and the workers.

Every message is a frozen dataclass; there is one union for each direction. A
request carries the id of its averaging round and every reply repeats it, so a
reply to a round that was given up can be told from a reply to the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.config import AverageBackend
from coordinator.errors import RunStalled
from coordinator.metrics import EpochMetrics, MachineStats, ReportStats, StepMetrics

if TYPE_CHECKING:
    from torch import Tensor

# Tensors travel inside :class:`Payload`: flat CPU tensors that belong to the message and
# alias nothing that training writes to.


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Batches of one epoch that one rank shall train.

    Attributes:
        epoch: Epoch, counted from 0.
        batches: Positions of the batches within the epoch's permutation, in the
            order of training. Batch ``b`` holds the samples
            ``permutation[b * batch_size : (b + 1) * batch_size]``. With ``pieces``, a number of
            each piece, which keys what a data set draws for it.
        shares: Under ``SYNC``, how many micro-batches each rank of the world trains in
            this plan: from it every rank knows when the others run out and how far
            the learning-rate schedule has moved. Empty under the other policies.
        first_step: Under ``SYNC``, the position of the schedule (batches trained by
            all ranks) before the plan.
        pieces: Under ``SYNC`` where global batches are cut, the samples of each micro-batch, as
            positions ``[start, stop)`` in the epoch's permutation; empty: the batch's own. A
            piece without samples is loaded by nobody: the others train the whole global batch.
        per_global: With pieces, the batches in a global batch.
        num_slices: With pieces, the micro-batches of each rank in a global batch.
        more: Whether more of the epoch follows for the same ranks, short of a death or an
            end, so that nothing is closed behind this plan.
        metrics: Of each epoch that has closed, what a scheduler is stepped by; ``None``: the
            epoch has no such metric. Empty where none is.
    """

    epoch: int
    batches: tuple[range, ...] = ()
    shares: tuple[int, ...] = ()
    first_step: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    per_global: int = 0
    num_slices: int = 1
    more: bool = False
    metrics: tuple[float | None, ...] = ()

    @property
    def num_batches(self) -> int:
        """Number of batches in the plan."""
        return sum(len(span) for span in self.batches)

    @property
    def num_loads(self) -> int:
        """Batches of it that have samples for this rank."""
        if not self.pieces:
            return self.num_batches
        return sum(stop > start for start, stop in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The averaged state of one replica as flat CPU tensors.

    Attributes:
        params: One flat tensor for each dtype of the trainable parameters.
        buffers: One flat tensor for each dtype of the floating-point buffers.
        other_buffers: One flat tensor for each dtype of the other buffers, which are not
            averaged but taken from the rank with the most samples.
    """

    params: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()
    other_buffers: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (*self.params, *self.buffers, *self.other_buffers)

    @property
    def num_bytes(self) -> int:
        """Memory held by all tensors of the payload."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def map(self, make: Callable[[Tensor], Tensor]) -> Payload:
        """What ``make`` gives for each tensor."""
        return Payload(
            params=tuple(map(make, self.params)),
            buffers=tuple(map(make, self.buffers)),
            other_buffers=tuple(map(make, self.other_buffers)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBudget:
    """How far a worker may go after an averaging round, counted in batches since it.

    Attributes:
        limit: The worker parks once it has trained this many; ``None``: no limit.
        report_after: The worker reports at the latest after this many; ``None``: only
            at the end of a plan and after ``report_interval_s``.
    """

    limit: int | None = None
    report_after: int | None = None


# From the coordinator to a worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEpoch:
    """Train the plan after those already queued."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncNow:
    """Join the collective of an averaging round at the next step boundary.

    Attributes:
        round: Id of the round.
        allowance: How far to go after it.
        evaluate: Epoch to evaluate on the averaged weights, if any.
        eval_at: See :class:`Evaluate`.
        checkpoint: Version to hand to the checkpoint function, if any.
        capture: Whether the acknowledgement shall carry the rank's own state.
    """

    round: int
    budget: BatchBudget = field(default_factory=BatchBudget)
    evaluate: int | None = None
    eval_at: int | None = None
    checkpoint: int | None = None
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Send a :class:`ParamSnapshot` for this round.

    Attributes:
        round: Id of the round.
        capture: Whether the snapshot shall carry the rank's own state.
    """

    round: int
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCheckpoint:
    """Send a :class:`CapturedState`: between two steps, under ``SYNC`` the same on every rank.

    Attributes:
        id: Counts the captures of a run. A worker that has answered this one, because a
            peer heard of it first, skips the message.
    """

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Take the average of a round: add ``average - own snapshot`` to the live state.

    Attributes:
        round: Id of the round whose snapshot the average was made from.
        average: The averaged state; read-only, shared by all ranks.
        num_samples: Sum of the weights; 0: the round changes nothing.
        allowance: How far to go after it.
        evaluate: Epoch to evaluate on the average, if any.
        eval_at: See :class:`Evaluate`.
        checkpoint: Version to hand to the checkpoint function, if any.
    """

    round: int
    average: Payload
    num_samples: float = 1
    budget: BatchBudget = field(default_factory=BatchBudget)
    evaluate: int | None = None
    eval_at: int | None = None
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyDelta:
    """Add what the other machines' training has changed to the live state, between two steps;
    under ``SYNC`` the same step on every rank.

    Sent while no averaging round is in flight, so that every rank has it before the next one.

    Attributes:
        id: Counts the shifts of a run, from 1. A lockstep rank that has taken this one, because
            a peer heard of it first, skips the message.
        delta: Differences of parameters and float buffers; of the other buffers the new values.
            Read-only, shared by all ranks.
    """

    id: int
    delta: Payload


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

    budget: BatchBudget = field(default_factory=BatchBudget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Evaluate on the live weights, which hold the average (``SYNC``, one device).

    Attributes:
        epoch: The epoch.
        eval_at: Batches of all ranks after which it is evaluated; ``None``: at its end.
        state: In a cluster, what to evaluate in place of the live weights; read-only.
    """

    epoch: int
    eval_at: int | None = None
    state: Payload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCheckpointFn:
    """Hand the live weights, which hold the average, to the checkpoint function.

    Attributes:
        version: Of the checkpoint.
        state: In a cluster, what to hand over in place of the live weights; read-only.
    """

    version: int
    state: Payload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Finish at the next step boundary, send the final snapshot, leave.

    Attributes:
        snapshot: Whether a :class:`FinalSnapshot` is wanted; not after a failure.
        capture: Whether that shall carry the rank's own state.
    """

    snapshot: bool = True
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Undo the collective of a round, which a peer could not complete.

    The worker takes back what the round changed and keeps what it trained since; its
    counters are those of before the round plus what came after.
    """

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Under ``SYNC``, between two steps: leave the plan and say where you stand.

    Attributes:
        generation: The group of ranks that is broken. A worker that has halted for it
            already, or belongs to a later one, skips the message.
    """

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Leave the collective of before and join the one of these ranks.

    Attributes:
        generation: Counts the groups of a run; the first is 0.
        ranks: The ranks that are left, ascending; their places are their new ranks.
        backend: Over what they meet.
        step: Under ``SYNC``, the optimizer steps that count; a rank that made fewer takes
            everything from ``donor``.
        donor: A rank that has made all of them.
    """

    generation: int
    ranks: tuple[int, ...]
    backend: AverageBackend = AverageBackend.THREAD
    step: int | None = None
    donor: int | None = None


ToWorker = (
    StartEpoch
    | SyncNow
    | RequestParams
    | Update
    | SetGlobalStep
    | ApplyDelta
    | Throttle
    | Resume
    | Evaluate
    | CallCheckpointFn
    | TakeCheckpoint
    | Rollback
    | Halt
    | Regroup
    | Shutdown
)


# From the machine to its service.


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
class PublishSteps:
    """Some more batches are trained, with ``metrics_every``, or were evaluated."""

    metrics: StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChosen:
    """What carries the averagings from the next round on, to be told; see ``BackendChoice``.

    Attributes:
        backend: The transport.
        before: What was used.
        reason: Why, in a sentence.
        failed: Whether one has failed.
    """

    backend: AverageBackend
    before: AverageBackend
    reason: str
    failed: bool = False


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
        within: Whether it was made in the middle of an epoch.
        tickets: The calls of ``save()`` that it answers.
        final: Whether the run ends with it.
        returned: In answer to :class:`ClusterCheckpointRequested`, the batches given back, by
            epoch.
    """

    payload: Payload
    ranks: tuple[dict[str, Any], ...]
    run: dict[str, Any]
    epoch: int
    global_step: int
    scheduled: bool
    tickets: tuple[int, ...] = ()
    within: bool = False
    final: bool = False
    returned: tuple[tuple[int, tuple[range, ...]], ...] = ()


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
    Send
    | Average
    | AbortCollective
    | PublishEpoch
    | PublishSteps
    | BackendChosen
    | ReportStall
    | SaveCheckpoint
    | SaveFailed
)
FINAL_ROUND = -1
SAVE_ROUND = -2


# From a worker to the coordinator.

Extra = dict[str, Any] | Exception
"""A rank's own part of a checkpoint: tensors of the CPU and plain values; or why there is none."""
MAX_REPORT_INTERVAL_S = 0.5
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
    stats: ReportStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """A plan is done (or was left at a stop); ``stats`` is what no report has told yet.

    Where no round measures it, the lowest rank tells the norm of its parameters.
    """

    rank: int
    epoch: int
    stats: ReportStats
    norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAck:
    """A round is done on this rank. Never counted as a batch.

    Attributes:
        rank: Who reports.
        round: Id of the round.
        divergence: ``||pre - post|| / ||post||`` over the parameters.
        norm: ``||post||``, over a collective.
        sync_s: Time the round cost this rank, its wait for the others excluded.
        wait_s: That wait.
        ok: False where the collective was aborted or timed out; the live state is then
            the one before the round.
        fault: Why, where the transport itself failed and no rank was late, left or died.
        report: What was trained before the round and not yet told.
        extra: The rank's own state after the round, if it was asked for.
        average: With it, from the lead, what the round has averaged; owned by the message.
        done_at: ``time.monotonic()`` when the rank had done its part.
    """

    rank: int
    round: int
    divergence: float | None = None
    norm: float | None = None
    sync_s: float = 0.0
    wait_s: float = 0.0
    ok: bool = True
    fault: str | None = None
    report: BatchReport | None = None
    extra: Extra | None = None
    average: Payload | None = None
    done_at: float | None = None


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
class CapturedState:
    """The rank's whole state between two steps, all of which is in the result.

    Attributes:
        rank: Who reports.
        id: Of the :class:`TakeCheckpoint` that asked for it.
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
    """What the evaluation function returned for an epoch, or within it; see :class:`Evaluate`."""

    rank: int
    epoch: int
    eval_at: int | None = None
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
        fault: Why the group broke, where the transport itself failed.
        report: What was trained and not yet told.
        too_large: Samples of the piece for which the rank had no memory; 0: that is not why.
        error: What was raised then.
    """

    rank: int
    generation: int
    step: int
    num_syncs: int = 0
    fault: str | None = None
    report: BatchReport | None = None
    too_large: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """All ranks of a new group have met, and stand at the same step (``SYNC``)."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectFailed:
    """A group of ranks could not be connected, and another transport may serve them.

    Attributes:
        rank: Who reports; every rank of the group may.
        generation: The group.
        backend: Over what.
        error: Why, as text.
    """

    rank: int
    generation: int
    backend: AverageBackend
    error: str


FromWorker = (
    Ready
    | BatchReport
    | EpochReport
    | SyncAck
    | ParamSnapshot
    | FinalSnapshot
    | CapturedState
    | EvalReport
    | CheckpointDone
    | Exiting
    | Failed
    | Halted
    | Regrouped
    | ConnectFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The background computation of a round has ended.

    Attributes:
        round: Id of the round; -1 for the final average.
        average: The result; ``None`` if the computation failed.
        num_samples: Sum of the weights.
        divergences: ``(rank, ||snapshot - average|| / ||average||)``.
        norm: ``||average||`` over the parameters; ``None``: not measured.
        compute_s: Time the computation took.
        error: Why there is no result.
        kept: A copy of the result that nobody overwrites, if it was asked for.
    """

    round: int
    average: Payload | None
    num_samples: float = 0
    divergences: tuple[tuple[int, float], ...] = ()
    norm: float | None = None
    compute_s: float = 0.0
    error: BaseException | None = None
    kept: Payload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """``stop()`` was called, or the metrics function returned ``False``."""


CLUSTER_TICKET = 0
"""Ticket of checkpoints for :class:`ClusterCheckpointRequested`; users' tickets begin at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheckpointRequested:
    """Make a checkpoint as this machine's part of a round between machines; from outside.

    From that checkpoint on only what the ranks have, and a reserve, is trained: the rest of
    what was granted is given back in ``SaveCheckpoint.returned``.

    Attributes:
        reserve_s: How long the reserve shall last, in seconds of training.
    """

    reserve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochGrant:
    """What a machine is granted of an epoch, and what is known of the others' part.

    Attributes:
        epoch: Epoch, counted from 0.
        batches: Batches that it may train beside those that it has.
        num_elsewhere: Batches whose effect other machines have brought into the result;
            ``None``: as before.
        complete: Whether the effect of every batch is in the result of all machines.
        num_samples: Then, distinct samples trained by all machines.
        others: Then, the sums of the other machines, by machine.
    """

    epoch: int
    batches: tuple[range, ...] = ()
    num_elsewhere: int | None = None
    complete: bool = False
    num_samples: int = 0
    others: tuple[MachineStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRound:
    """A committed round between machines.

    Attributes:
        step: Counts them.
        machines: Who took part, by name.
        num_samples: What each has brought into it.
        num_granted: Batches that each may train until the next one.
        round_s: Seconds that it took, as this machine saw it.
    """

    step: int
    machines: tuple[str, ...]
    num_samples: tuple[int, ...]
    num_granted: tuple[int, ...]
    round_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoundDone:
    """A round between machines is over; from outside.

    Attributes:
        epochs: What is granted; nothing of other epochs.
        delta: What it has changed; see :class:`ApplyDelta`. ``None``: nothing.
        num_batches: Batches that other machines have trained since the last round, which move
            the schedule.
        over: Whether the run ends once its open epochs are closed.
        state: What all machines have come to with it, which closes the complete epochs; it is
            only read from here on.
        round: What is told of the round; ``None``: it failed.
    """

    epochs: tuple[EpochGrant, ...] = ()
    delta: Payload | None = None
    num_batches: int = 0
    over: bool = False
    state: Payload | None = None
    round: MachineRound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """``save()`` was called.

    Attributes:
        ticket: Tells the calls apart.
    """

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequested:
    """A second signal: the run ends without waiting for a step boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadEnded:
    """A worker's thread has ended; if nothing was heard of it before, it is dead."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the machine may have passed."""


FromService = (
    Averaged
    | StopRequested
    | SaveRequested
    | ClusterCheckpointRequested
    | ClusterRoundDone
    | AbortRequested
    | ThreadEnded
    | Tick
)
Event = FromWorker | FromService
