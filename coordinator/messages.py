"""The protocol between the coordinator and the workers.

Every message is a frozen dataclass; there is one union for each direction. A request carries the id
of its averaging round and every reply repeats it, so that replies to an abandoned round are
recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from coordinator.config import AverageBackend
from coordinator.metrics import EpochMetrics, MachineStats, ReportStats, StepMetrics
from coordinator.run_errors import RunStalled
from coordinator.saved_run import SavedRun
from coordinator.steps import StepPlan

if TYPE_CHECKING:
    from torch import Tensor

# Tensors are sent in a :class:`Payload`: flat CPU tensors owned by the message, which alias nothing
# that training writes to.


class AfterPlan(Enum):
    """State of the epoch and the run after a plan. Under ``CADENCE`` and ``ASYNC``, which average
    buffers in rounds, it is always ``EPOCH_END``.
    """

    MORE = "more"
    """More of the epoch, unless a rank dies or the run ends."""
    PAUSE = "pause"
    """All ranks stop within the epoch for an evaluation."""
    RUN_END = "run_end"
    """``max_steps`` ends the run within the epoch."""
    EPOCH_END = "epoch_end"

    @property
    def is_end(self) -> bool:
        """True if no step over several batches may continue after the plan."""
        return self in (AfterPlan.RUN_END, AfterPlan.EPOCH_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Batches of one epoch to train: for one rank, or under ``SYNC`` for all ranks together.

    Attributes:
        epoch: Epoch, counted from 0.
        batches: Positions of the batches within the epoch's permutation, in the
            order of training. Batch ``b`` holds the samples
            ``permutation[b * batch_size : (b + 1) * batch_size]``. With ``pieces``, a number of
            each piece, which seeds the data set's random draws for it.
        pieces: For ranks with a batch size of their own, the samples of each batch, as positions
            ``[start, stop)`` in the epoch's permutation; empty: those of the batches.
        steps: Under ``SYNC``, the batches and their pieces; the same for all ranks.
        then: What follows it.
        metrics: Value of each closed epoch for a scheduler that steps by a metric; ``None``: the
            epoch has no such metric. Empty without such a scheduler.
    """

    epoch: int
    batches: tuple[range, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    steps: StepPlan | None = None
    then: AfterPlan = AfterPlan.EPOCH_END
    metrics: tuple[float | None, ...] = ()

    @property
    def num_batches(self) -> int:
        return sum(map(len, self.batches)) if self.steps is None else len(self.steps.span)

    def loads(self, rank: int) -> Iterator[tuple[int, tuple[int, int] | None]]:
        """The key of each micro-batch with samples for a rank, which seeds the data set's random
        draws for it, and its samples; ``None``: those of the batch of this number.
        """
        if self.steps is None:
            keys = chain.from_iterable(self.batches)
            yield from zip(keys, self.pieces or repeat(None), strict=bool(self.pieces))
        else:
            yield from (load for load in self.steps.pieces(rank) if load[1][0] < load[1][1])

    def num_loads(self, rank: int) -> int:
        """Number of micro-batches with samples for a rank."""
        return self.num_batches if self.steps is None else sum(1 for _ in self.loads(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The averaged state of one replica as flat CPU tensors.

    Attributes:
        params: One flat tensor for each dtype of the trainable parameters.
        buffers: One flat tensor for each dtype of the floating-point buffers.
        other_buffers: One flat tensor for each dtype of the other buffers, which are not
            averaged but copied from the rank with the most samples.
    """

    params: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()
    other_buffers: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.params, *self.buffers, *self.other_buffers)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def map(self, make: Callable[[Tensor], Tensor]) -> Payload:
        """A payload with ``make`` applied to each tensor."""
        return Payload(
            params=tuple(map(make, self.params)),
            buffers=tuple(map(make, self.buffers)),
            other_buffers=tuple(map(make, self.other_buffers)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBudget:
    """Limits of a worker after an averaging round, in batches since the round, and its factor.

    Attributes:
        limit: The worker parks after this many batches; ``None``: no limit.
        report_after: The worker reports after at most this many batches; ``None``: only at the end
            of a plan and after ``report_interval_s``.
        lr_factor: Factor of the learning rate of scale-invariant optimizers; ``None``: unchanged.
    """

    limit: int | None = None
    report_after: int | None = None
    lr_factor: float | None = None


class TaskKind(Enum):
    """Kinds of work on an average, in the order in which ranks do it."""

    EVALUATE = "eval_fn"
    HAND_OVER = "checkpoint_fn"
    VALIDATE = "val_dataset"
    REQUESTED = "worker.evaluate"

    @property
    def is_shared(self) -> bool:
        """True if all ranks take part, each with the next batch when it has completed one."""
        return self in (TaskKind.VALIDATE, TaskKind.REQUESTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work on an average.

    Attributes:
        id: Counts the tasks of a run, from 1.
        epoch: The epoch that the average closes, or within which it is made.
        at: Batches of all ranks before it; ``None``: it closes the epoch.
        rank: The rank that does it. Of a shared task, the one that ends it and has its results:
            the caller of a requested evaluation.
    """

    id: int
    kind: TaskKind
    epoch: int
    at: int | None
    rank: int


# From the coordinator to a worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEpoch:
    """Train the plan after those already queued."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageWork:
    """A rank's limits after an averaging round, and its tasks on the averaged weights.

    Attributes:
        budget: Limits after it.
    """

    round: int
    budget: BatchBudget = field(default_factory=BatchBudget)
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncNow(AverageWork):
    """Join the collective of an averaging round at the next step boundary.

    Attributes:
        capture: The acknowledgement must carry the rank's own state.
    """

    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Send a :class:`ParamSnapshot` for this round.

    Attributes:
        capture: The snapshot must carry the rank's own state.
    """

    round: int
    capture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCheckpoint:
    """Send a :class:`CapturedState`: between two steps, under ``SYNC`` the same on every rank.

    Attributes:
        id: Counts the captures of a run.
    """

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(AverageWork):
    """Apply the average of a round: add ``average - own snapshot`` to the live state.

    Attributes:
        average: The averaged state; read-only, shared by all ranks.
        num_samples: Sum of the weights; 0: the round changes nothing.
        mean_batches: Batches of a rank in the average since the last one, on average.
    """

    average: Payload
    num_samples: float = 1
    mean_batches: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyDelta:
    """Add the other machines' changes to the live state, between two steps; under ``SYNC`` at the
    same step on every rank.

    Sent while no averaging round is in flight, so that every rank has it before the next one.

    Attributes:
        delta: Differences of parameters and float buffers; of the other buffers the new values.
            Read-only, shared by all ranks.
    """

    delta: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGlobalStep:
    """Batches trained by all ranks up to the last round, for the schedule."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Park once ``limit`` batches are trained since the last round (0: immediately)."""

    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue within the budget (by default without limit).

    Attributes:
        alone: No other rank is left, and no round follows.
    """

    budget: BatchBudget = field(default_factory=BatchBudget)
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTasks:
    """Do tasks on the live weights, which hold the average (``SYNC``, one device).

    Attributes:
        state: In a cluster, the state to use in place of the live weights; read-only.
    """

    tasks: tuple[Task, ...]
    state: Payload | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Finish at the next step boundary, send the final snapshot, leave.

    Attributes:
        snapshot: Reply with a :class:`FinalSnapshot`; False if the state is not used.
        capture: The snapshot must carry the rank's own state.
        failed: The run has failed and its collectives are aborted: in lockstep, too, no other
            step is made.
    """

    snapshot: bool = True
    capture: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Undo the collective of a round that a peer did not complete.

    The worker reverts the changes of the round and keeps its training since then; its counters
    continue from their values before the round.
    """

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Under ``SYNC``, leave the plan between two steps and report the number of steps.

    Attributes:
        generation: The broken group. A worker that has already halted for it, or belongs to a
            later one, skips the message.
    """

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Leave the previous collective and join the one of these ranks.

    Attributes:
        generation: Counts the groups of a run; the first is 0.
        ranks: The surviving ranks, ascending; their positions are their new ranks.
        backend: Backend of the collective.
        step: Under ``SYNC``, the optimizer steps that count; a rank with fewer steps copies the
            state of ``donor``.
        donor: A rank that made all of them.
    """

    generation: int
    ranks: tuple[int, ...]
    backend: AverageBackend = AverageBackend.THREAD
    step: int | None = None
    donor: int | None = None


ToWorkerReplica = (
    SyncNow
    | RequestParams
    | Update
    | ApplyDelta
    | RunTasks
    | TakeCheckpoint
    | Rollback
    | Halt
    | Regroup
)
"""Messages that require work on the replica; the worker's protocol handles all others."""
ToWorker = ToWorkerReplica | StartEpoch | SetGlobalStep | Throttle | Resume | Shutdown


# From the coordinator to its service.


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Put a message into a worker's inbox."""

    rank: int
    message: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Compute a weighted average in the background and reply with ``Averaged``.

    Attributes:
        round: Id of the round; -1: the final average.
        payloads: One for each rank.
        weights: Weight of each: samples, or total weight of its losses.
        squares: Squared norms of the parameter tensors of each; ``None``: not measured.
        keep: Return a copy of the average as well.
    """

    round: int
    ranks: tuple[int, ...]
    payloads: tuple[Payload, ...]
    weights: tuple[float, ...]
    squares: tuple[tuple[float, ...] | None, ...] = ()
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCollective:
    """Wake every rank that waits in a collective; its buffers are then undefined.

    Attributes:
        generation: The group to abort; ``None``: all, permanently.
    """

    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEpoch:
    """An epoch has closed."""

    metrics: EpochMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSteps:
    """Metrics of at least ``metrics_every`` batches, or of an evaluation within an epoch."""

    metrics: StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChosen:
    """The backend of the following rounds; see :class:`~coordinator.backend_choice.BackendChoice`.

    Attributes:
        before: The backend before.
        failed: The backend before has failed.
    """

    backend: AverageBackend
    before: AverageBackend
    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStall:
    """Complete the report of ``error`` with messages and stacks, and log it.

    Attributes:
        error: The error that the run is about to fail with.
        state: The coordinator's state before the failure, as text.
    """

    error: RunStalled
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """The whole state of the run at one point; aliases nothing that is written to.

    Attributes:
        payload: The averaged weights and buffers.
        ranks: The own state of each rank, in order of rank.
        run: The coordinator's state.
        scheduled: True if it was due; otherwise it was made for the tickets only.
        within: True if it was made within an epoch.
        tickets: The calls of ``save()`` that it completes.
        final: True if the run ends with it.
        kept: In answer to :class:`ClusterCheckpointRequested`, the granted batches that are not
            in it and that the run continues to train, by epoch.
        reason: Of the final one, the reason for the end of the run; see ``Outcome.reason``.
    """

    payload: Payload
    ranks: tuple[Any, ...]
    run: SavedRun
    scheduled: bool
    tickets: tuple[int, ...] = ()
    within: bool = False
    final: bool = False
    kept: tuple[tuple[int, tuple[range, ...]], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint failed; training continues.

    Attributes:
        tickets: The calls of ``save()`` that it fails.
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

Extra = Any
"""A rank's own part of a checkpoint, not used by the coordinator; or the error."""
MAX_REPORT_INTERVAL_S = 0.5
"""Maximum time between two reports of a rank, for any number of ranks: the monitor shows what the
reports contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The replica is built and holds rank 0's weights.

    Attributes:
        scale_invariant: Names of the optimizers whose steps ignore the scale of the gradient.
        batch_statistics: True if a layer computes statistics of the rank's own samples, which are
            not defined for a single one.
    """

    rank: int
    scale_invariant: tuple[str, ...] = field(default=(), repr=False)
    batch_statistics: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Batches trained since the last report, within the plan in progress."""

    rank: int
    epoch: int
    stats: ReportStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """A plan is complete (or was left at a stop); ``stats`` holds what is not reported yet.

    If no round measures the norm of the parameters, the lowest rank sends it. With ``left`` the
    rank has left the epoch: its other batches, in this plan and in later ones, are assigned to
    other ranks. ``open_epoch`` is the last epoch that the rank has begun, in which a step over
    several batches is in progress. Its batches are not reported before its end: until then the rank
    handles no message but the next plan, or, if that has no batches, all.
    """

    rank: int
    epoch: int
    stats: ReportStats
    norm: float | None = None
    left: bool = False
    open_epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAck:
    """A round is complete on this rank. Never counted as a batch.

    Attributes:
        divergence: ``||pre - post|| / ||post||`` over the parameters.
        norm: ``||post||``, over a collective.
        sync_s: Time of the round on this rank, without its wait for the others.
        wait_s: Time of that wait.
        ok: False if the collective was aborted or timed out; the live state is then the one before
            the round.
        fault: The error, if the transport failed and no rank was late, left or died.
        report: Training before the round that is not reported yet.
        extra: The rank's own state after the round, if requested.
        average: With ``extra``, from the lead: the average; owned by the message.
        done_at: When the rank had done its part, by ``time.perf_counter()``, which on Linux is the
            clock of ``time.monotonic()``.
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
        payload: The state; owned by the message.
        num_samples: Samples trained since the last round.
        num_batches: Batches trained since the last round.
        healthy: True if the parameters are finite; otherwise the weight is 0.
        squares: Squared norms of the payload's parameter tensors; ``None``: not measured.
        report: Training that is not reported yet; it counts even if the round is abandoned.
        extra: The rank's own state at that boundary, if requested.
        weight: Weight of the state in the round; ``None``: the samples.
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
        return self.num_samples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSnapshot:
    """The last state of a rank, sent as it leaves.

    Attributes:
        payload: Its state; owned by the message.
        num_samples: Samples since the last averaging of the parameters, or, under ``SYNC``, of the
            buffers.
        step: Under ``SYNC``, the optimizer steps made: after a death ranks may differ.
        fault: Set if the parameters are not finite: the state must not be used, and the run fails
            with this if no rank has a finite one.
        extra: The rank's own state, if requested.
        weight: Weight in the final average; ``None``: the samples.
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
        id: Id of the :class:`TakeCheckpoint`.
        payload: Weights and buffers; owned by the message. Under ``SYNC`` the parameters
            come from the lowest rank only, since all are equal.
        num_samples: Samples since the last averaging of the buffers.
        step: Optimizer steps made since the start of the run.
        extra: The rank's own state.
        report: Training that is not reported yet.
    """

    rank: int
    id: int
    payload: Payload
    num_samples: int
    step: int
    extra: Extra
    report: BatchReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDone:
    """The rank has done its part of a task.

    Attributes:
        values: Its results, from the rank that ends it; ``None``: from others, or a request that
            the average does not answer.
    """

    rank: int
    task: Task
    values: tuple[tuple[str, float], ...] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequested:
    """The body of an own loop waits for an evaluation on the average of the next round.

    The data set and the function stay with the workers, which share them.
    """

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """A long evaluation makes progress."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exiting:
    """The rank leaves; its last message."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """A worker that failed.

    Attributes:
        rank: The worker's rank; -1 for an error of the coordinator, which fails the run.
        epoch: Epoch of the failure.
        step: Batches that the worker had trained.
        error: Its exception.
    """

    rank: int = -1
    epoch: int = 0
    step: int = 0
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(WorkerFailure):
    """The rank died of an exception.

    Attributes:
        fatal: The run fails even with ``continue_on_failure``.
        answers: The rank waits for :class:`Shutdown`, and can reply with the state before the
            step that failed.
        unsafe: No rank's state may be saved, since the replicas differ.
    """

    fatal: bool = False
    answers: bool = False
    unsafe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted:
    """The rank has left its plan because its collective group is broken (``SYNC``).

    Attributes:
        step: Optimizer steps made since the start of the run.
        num_syncs: Number of averagings of its buffers.
        fault: The error, if the transport itself failed.
        report: Training that is not reported yet.
        too_large: Samples of the piece that ran out of memory; 0: another cause.
        error: The out-of-memory error.
        left: The epoch that the rank has left, to be trained by the others; ``None``: none.
    """

    rank: int
    generation: int
    step: int
    num_syncs: int = 0
    fault: str | None = None
    report: BatchReport | None = None
    too_large: int = 0
    error: Exception | None = None
    left: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """All ranks of a new group are connected, at the same step (``SYNC``)."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectFailed:
    """A group of ranks could not be connected; another backend may serve them.

    Attributes:
        rank: The sender; every rank of the group may send it.
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
    | TaskDone
    | EvaluationRequested
    | Evaluating
    | Exiting
    | Failed
    | Halted
    | Regrouped
    | ConnectFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The background computation of an average has ended.

    Attributes:
        round: Id of the round; -1 for the final average.
        average: The result; ``None`` if the computation failed.
        num_samples: Sum of the weights.
        divergences: ``(rank, ||snapshot - average|| / ||average||)``.
        norm: ``||average||`` over the parameters; ``None``: not measured.
        error: The error, without a result.
        kept: A copy of the result that is not overwritten, if requested.
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
    """``stop()`` was called, or the metrics function returned ``False``.

    Attributes:
        reason: See :attr:`~gpuworker.TrainedState.reason`.
    """

    reason: str = "stopped"


CLUSTER_TICKET = 0
"""Ticket of checkpoints for :class:`ClusterCheckpointRequested`; users' tickets begin at 1."""
LOOP_TICKET = -1
"""Ticket of checkpoints that a user's loop requests, which are written to the run's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheckpointRequested:
    """Make a checkpoint as this machine's part of a round between machines.

    From then on only the assigned batches and a reserve are trained, which are
    ``SaveCheckpoint.kept``: the grant of the others is revoked until the round has ended.

    Attributes:
        reserve_s: Duration of the reserve, in seconds of training.
    """

    reserve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochGrant:
    """Batches of an epoch granted to a machine, and the progress of the other machines.

    Attributes:
        epoch: Epoch, counted from 0.
        batches: Batches that it may train, of which it may have some already.
        consumed: Batches settled by all machines.
        complete: Every batch is settled by some machine.
        num_samples: If complete, distinct samples trained by all machines.
        others: If complete, the sums of the other machines, by machine.
    """

    epoch: int
    batches: tuple[range, ...] = ()
    consumed: tuple[range, ...] = ()
    complete: bool = False
    num_samples: int = 0
    others: tuple[MachineStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRound:
    """A committed round between machines.

    Attributes:
        step: Number of the round.
        machines: Names of the participating machines.
        num_samples: Samples that each contributed.
        num_granted: Batches granted to each until the next round.
        round_s: Duration in seconds, measured on this machine.
    """

    step: int
    machines: tuple[str, ...]
    num_samples: tuple[int, ...]
    num_granted: tuple[int, ...]
    round_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoundDone:
    """A round between machines has ended.

    Attributes:
        epochs: The grants, by epoch.
        delta: Changes by the other machines; see :class:`ApplyDelta`. ``None``: none.
        over: The run ends once its open epochs are closed.
        state: The state of all machines, with which the complete epochs close; read-only.
        round: Figures of the round; ``None``: it failed, and the batches that were revoked for
            it are granted again.
    """

    epochs: tuple[EpochGrant, ...] = ()
    delta: Payload | None = None
    over: bool = False
    state: Payload | None = None
    round: MachineRound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """``save()`` was called.

    Attributes:
        ticket: Identifies the call.
        withdrawn: The call ended without a state, such as by its timeout: nobody waits for one.
    """

    ticket: int
    withdrawn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequested:
    """A second signal: end the run without waiting for a step boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadEnded:
    """A worker's thread has ended; without a message before, the rank is dead."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the coordinator may have passed."""


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
