"""State of the ranks and of the run, shared by the parts of the coordinator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from coordinator.backend_choice import BackendChoice
from coordinator.cadence import ConvergenceGuard, ElChe, RoundSchedule
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.data_waits import DataWaits
from coordinator.ledger import BatchLedger, Epoch
from coordinator.lr_factor import LrFactor
from coordinator.messages import (
    AbortCollective,
    BackendChosen,
    BatchBudget,
    Command,
    FinalSnapshot,
    MachineRound,
    Payload,
    PublishSteps,
    Send,
    ToWorker,
    WorkerFailure,
)
from coordinator.metrics import EpochMetrics, ReportStats, StepAccumulator, StepMetrics, rounded
from coordinator.run_errors import RunStalled
from coordinator.saved_run import RankTotals, SavedRun
from coordinator.shares import IMBALANCE_RATIO, MIN_PLACEMENT_BATCHES, Shares


class RunState:
    """State of a run.

    Attributes:
        alone: True with one live rank, so that nothing is averaged.
        lockstep: True if gradients are averaged in each step (``SYNC``).
        ledger: The batches of the epochs and of each rank.
        elche: Batch counts of the ranks between two rounds.
        round_schedule: Decides when a round is due, and each rank's limit.
        ranks: One record for each rank.
        commands: Commands of the event being handled, in order.
        global_step: Batches trained by all ranks together, up to the last round, in batches of
            the ledger.
        num_averagings: Completed rounds; under lockstep, global steps assigned.
        divergence: Largest divergence of a rank in the last round; ``None``: not measured.
        param_norm: Last measured norm of the parameters.
        generation: Number of the present collective group of ranks.
        per_global: Under lockstep, the batches in a global batch: the number of ranks at the
            start of training, whatever deaths or resumes follow.
        steps: Accumulates step metrics; ``None``: none are published.
        shares: Under lockstep, the sizes of the pieces of global batches.
        machine_round: The last round between machines; ``None``: none yet.
        loss_sum: Sum of the finite losses reported since the start, each times its weight.
        loss_weight: Sum of these weights.
        spent_s: CPU time of the coordinator's thread up to the event being handled; 0 if not
            measured.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        world = config.world_size
        self.alone = world == 1
        self.lockstep = config.policy is ApplyPolicy.SYNC
        self.ledger = BatchLedger(
            num_samples=config.num_samples,
            batch_size=config.batch_size,
            num_epochs=config.num_epochs,
            world_size=world,
            batches_per_epoch=config.batches_per_epoch,
            ratios=config.partition_ratios,
            granularity=config.accumulate,
            max_batches=(
                None if config.max_steps is None else config.count_batches(config.max_steps)
            ),
            sizes=(
                None
                if self.lockstep or config.batch_sizes is None
                else [size // config.batch_size for size in config.batch_sizes]
            ),
            granted=config.granted,
        )
        self.ledger.look_ahead = not (self.alone and config.has_epoch_work)
        self.elche = ElChe(
            world,
            config.anchor,
            min_anchor=config.min_anchor,
            max_anchor=max(config.max_anchor, config.anchor),
            overhead_target=config.overhead_target,
            speed_hint=config.speed_hint,
        )
        self.guard = ConvergenceGuard(
            config.divergence_threshold or 0.05, enabled=config.divergence_threshold is not None
        )
        self.lr_factor = LrFactor(config)
        self.round_schedule = RoundSchedule(config, self.elche, self._has_work)
        self.backend_choice = BackendChoice(
            config.backends, measures=not self.lockstep, reason=config.backend_reason
        )
        self.ranks = [Rank(rank=r) for r in range(world)]
        self.data_waits = DataWaits(world)
        self.commands: list[Command] = []
        self.outcome = Outcome()
        self.phase = Phase.STARTING
        self.global_step = 0
        self.num_averagings = 0
        self.num_failed_rounds = 0
        self.divergence: float | None = None
        self.param_norm: float | None = None
        self.generation = 0
        self.per_global = 1 if self.lockstep and config.global_batch_size is not None else world
        self.shares = Shares(world, config.batch_sizes, fixed=not config.balance)
        every = config.metrics_every
        self.steps = StepAccumulator(every, world, equal=self.lockstep) if every else None
        self.machine_round: MachineRound | None = None
        self.now = 0.0
        self.spent_s = 0.0
        self.loss_sum = self.loss_weight = 0.0

    @property
    def num_trained(self) -> int:
        """Batches trained so far, including repeats and those not averaged yet."""
        if self.lockstep:
            return self.global_step  # micro-batches may be parts of batches
        parts = self.config.batch_parts
        pairs = zip(self.ranks, parts, strict=True)
        total = sum(r.totals.num_batches * part for r, part in pairs)
        size = self.config.global_batch_size
        if size is None:
            return int(total)
        return self.config.count_steps(int(total * size) // self.config.batch_size)

    @property
    def position(self) -> int:
        """``global_step`` in steps: the position of schedules."""
        return self.config.count_steps(self.global_step)

    @property
    def live(self) -> list[Rank]:
        return [r for r in self.ranks if r.state is RankState.LIVE]

    def data_wait_s(self, rank: int) -> float:
        """Seconds that a rank waits for a sample, longer than every other live rank, lastingly."""
        return self.data_waits.per_sample_s(rank, [r.rank for r in self.live])

    def _has_work(self, rank: int) -> bool:
        return bool(self.ledger.by_rank[rank].assigned)

    def initial_budget(self, rank: int) -> BatchBudget:
        """The budget that a rank receives at the start and with each round."""
        budget = self.budget(rank, self.round_schedule.initial_limit(rank))
        return replace(budget, lr_factor=self.lr_factor.current)

    def budget(self, rank: int, limit: int | None) -> BatchBudget:
        return BatchBudget(limit=limit, report_after=self.round_schedule.report_after(rank))

    def num_slices(self, ranks: Sequence[int]) -> int:
        """Number of consecutive slices in which these ranks train a global batch in lockstep.

        No slice is larger than the ranks' own batches together: memory for its batch suffices a
        rank for its piece, however many others have died.
        """
        num = self.config.num_micro_batches
        if self.config.sync_batchnorm or self.config.all_gather or self.config.own_loop:
            return num  # statistics, losses or steps are over the ranks' whole micro-batch
        if self.config.global_batch_size is not None:
            return -(-num * len(self.ranks) // len(ranks))
        own = self.config.batch_sizes or ()
        total = sum(own[rank] for rank in ranks if own) or len(ranks) * self.config.batch_size
        return -(-self.per_global * self.config.batch_size // total)

    def slice_samples(self, ranks: Sequence[int]) -> int:
        return -(-self.per_global * self.config.batch_size // self.num_slices(ranks))

    def evaluation_rank(self, *, within: bool = False) -> int:
        """The rank of the evaluation and checkpoint functions: the one of ``eval_rank``, or where
        they cost the run least.

        That is the lowest live rank, unless another costs clearly less. Under lockstep results
        repeat to the bit with equal batches, and buffers differ between ranks within an epoch:
        there the lowest rank is kept.

        Args:
            within: Within an epoch, not at its end.
        """
        pinned, live = self.config.eval_rank, self.live
        if pinned is not None and self.is_live(pinned):
            return pinned
        keeps = self.lockstep and (within or not self.config.balance)
        measured = all(r.totals.num_samples and r.totals.compute_s > 0 for r in live)
        fewest = min(r.totals.num_batches for r in live)
        if keeps or fewest < MIN_PLACEMENT_BATCHES or not measured:
            return live[0].rank
        costs = {r.rank: self._evaluation_cost(r, live) for r in live}
        best = min(costs, key=lambda rank: costs[rank])
        first = live[0].rank
        return best if costs[first] > IMBALANCE_RATIO * costs[best] else first

    def _evaluation_cost(self, rank: Rank, live: Sequence[Rank]) -> float:
        """Samples that an evaluation of one sample costs: those that the rank would deliver, which
        its waits for data reduce, and those of a rank that waits for it, on average. Under
        lockstep all wait.
        """
        own = rank.totals
        duration_s = own.compute_s / own.num_samples
        waiting = sum(r.totals.num_samples for r in live) / len(live)
        return duration_s * (waiting if self.lockstep else own.num_samples + waiting)

    def is_live(self, rank: int) -> bool:
        """True if the rank is live; -1 is no rank."""
        return rank >= 0 and self.ranks[rank].state is RankState.LIVE

    def emit(self, command: Command) -> None:
        self.commands.append(command)

    def publish_steps(self, steps: Iterable[StepMetrics]) -> None:
        self.commands += [PublishSteps(metrics=metrics) for metrics in steps]

    def send(self, rank: int, message: ToWorker) -> None:
        """Append a command that sends a message to a worker."""
        self.commands.append(Send(rank=rank, message=message))

    def abort_collective(self) -> None:
        """Append a command that aborts the present collective group."""
        self.emit(AbortCollective(generation=self.generation))

    def enter(self, phase: Phase) -> None:
        """Change the phase; asserts a legal transition."""
        assert phase in _PHASE_TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def settle(self, rank: int) -> None:
        """Settle and count the frozen batches of a rank: their effect is in the result."""
        self.global_step += self.ledger.settle(rank)

    def count_averagings(self, num: int, epoch: Epoch | None) -> None:
        """Count completed averagings, of an epoch if it is open; negative ones are undone."""
        self.num_averagings += num
        if epoch is not None:
            epoch.num_averagings += num

    def require_batch_statistics(self) -> None:
        """Keep pieces and batches at two samples or none, unless a rank's own has a single one."""
        c, world = self.config, len(self.ranks)
        own = [size for size in c.batch_sizes or (c.batch_size,) if size]
        if self.lockstep and c.global_batch_size is not None and c.batch_sizes is None:
            own = [-(-self.slice_samples(range(world)) // world)]
        self.shares.min_piece = self.ledger.cuts.min_batch = min(2, *own)

    def load_counters(self, saved: SavedRun) -> None:
        """Restore the counters of an earlier run from its checkpoint."""
        self.global_step, self.per_global = saved.global_step, saved.per_global
        self.ledger.queue.num_steps = saved.num_windows
        self.num_averagings = saved.num_averagings
        self.num_failed_rounds = saved.num_failed_rounds

    @property
    def collective(self) -> AverageBackend | None:
        """Backend of the ranks' collective, for steps or rounds; ``None``: no collective."""
        return self.backend_choice.chosen if self.lockstep else self.backend_choice.collective

    def exclude_backend(self, backend: AverageBackend, why: str) -> bool:
        """Exclude a backend that failed; returns True if another one replaces it."""
        has_other = self.backend_choice.exclude(backend, why)
        if has_other:
            self.announce_backend(failed=True)
        return has_other

    def note_norms(self, divergences: Mapping[int, float], norm: float | None) -> None:
        """Record divergences and norm, measured by a round, or by a plan without rounds."""
        oldest = self.ledger.oldest
        if norm is not None:
            self.param_norm = norm
            if oldest is not None:
                oldest.norm = norm
        for rank, divergence in divergences.items():
            self.ranks[rank].divergence = divergence
        if divergences:
            self.divergence = _largest(divergences.values())
            if oldest is not None:
                before = self.divergence if oldest.divergence is None else oldest.divergence
                oldest.divergence = _largest((before, self.divergence))

    def note_losses(self, stats: ReportStats) -> None:
        """Add the losses of a report, unless one is not finite."""
        if math.isfinite(loss_sum := rounded(stats.loss_sum)):
            self.loss_sum += loss_sum
            self.loss_weight += rounded(stats.loss_samples)

    def announce_backend(self, *, failed: bool = False) -> None:
        """Announce the backend of the following rounds."""
        choice = self.backend_choice
        self.emit(
            BackendChosen(
                backend=choice.chosen, before=choice.before, reason=choice.reason, failed=failed
            )
        )

    def statistics(self) -> Statistics:
        """A snapshot of counters."""
        total = sum(r.totals.num_samples for r in self.ranks)
        oldest = self.ledger.oldest
        pieces = self.shares.current if self.config.balance and not self.alone else {}
        return Statistics(
            epoch=oldest.epoch if oldest else len(self.outcome.metrics),
            global_step=self.position,
            num_trained=self.num_trained,
            num_averagings=self.num_averagings,
            num_failed_rounds=self.num_failed_rounds,
            anchor=self.elche.anchor,
            batch_counts=self.elche.batch_counts,
            divergence=self.divergence,
            param_norm=self.param_norm,
            lr_factor=self.lr_factor.value,
            backend=self.backend_choice.chosen,
            backend_reason=self.backend_choice.reason,
            loss_sum=self.loss_sum,
            loss_weight=self.loss_weight,
            ranks=tuple(
                RankStatistics(
                    rank=r.rank,
                    device=self.config.devices[r.rank],
                    num_batches=r.totals.num_batches,
                    num_samples=r.totals.num_samples,
                    share=r.totals.num_samples / total if total else 0.0,
                    piece=pieces.get(r.rank, 0),
                    throughput=r.totals.throughput,
                    compute_s=r.totals.compute_s,
                    sync_s=r.totals.sync_s,
                    num_throttles=r.totals.num_throttles,
                    divergence=r.divergence,
                    alive=r.state is not RankState.DEAD,
                )
                for r in self.ranks
            ),
            machine_round=self.machine_round,
        )


def _largest(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return math.nan if any(map(math.isnan, found)) else max(found)


class Phase(Enum):
    """Phase of a run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LEAVING = "leaving"
    AVERAGING = "averaging"
    FAILING = "failing"
    DONE = "done"


_PHASE_TRANSITIONS = {
    Phase.STARTING: {Phase.RUNNING, Phase.STOPPING, Phase.FAILING},
    Phase.RUNNING: {Phase.STOPPING, Phase.FAILING},
    Phase.STOPPING: {Phase.LEAVING, Phase.FAILING},
    Phase.LEAVING: {Phase.AVERAGING, Phase.FAILING, Phase.DONE},
    Phase.AVERAGING: {Phase.FAILING, Phase.DONE},
    Phase.FAILING: {Phase.DONE},
    Phase.DONE: set(),
}


class RankState(Enum):
    """Life cycle of a rank, as recorded by the coordinator."""

    BUILDING = "building"
    LIVE = "live"
    LEAVING = "leaving"
    GONE = "gone"
    DEAD = "dead"


_RANK_TRANSITIONS = {
    RankState.BUILDING: {RankState.LIVE, RankState.LEAVING, RankState.GONE, RankState.DEAD},
    RankState.LIVE: {RankState.LEAVING, RankState.GONE, RankState.DEAD},
    RankState.LEAVING: {RankState.GONE, RankState.DEAD},
    RankState.GONE: {RankState.DEAD},
    RankState.DEAD: set(),
}


@dataclass(slots=True)
class Rank:
    """The coordinator's record of one rank.

    ``since_round`` and ``compute_since_round`` cover training since the last round,
    ``round_batches`` and ``round_compute_s`` training in the round in progress. These times
    include ``data_wait_s``, the rank's own lasting waits for data; ``compute_s`` does not.
    ``open_epoch`` is that of the last ``EpochReport``; with ``is_starved`` the rank was then sent a
    plan without batches.
    """

    rank: int
    state: RankState = RankState.BUILDING
    num_queued: int = 0
    open_epoch: int | None = None
    is_starved: bool = False
    since_round: int = 0
    compute_since_round: float = 0.0
    round_batches: int = 0
    round_compute_s: float = 0.0
    limit: int | None = None
    parked: bool = False
    totals: RankTotals = field(default_factory=RankTotals)
    data_wait_s: float = 0.0
    learning_rate: float | None = None
    divergence: float | None = None
    final: FinalSnapshot | None = None

    def move(self, state: RankState) -> None:
        """Change to ``state``; asserts a legal transition."""
        assert state in _RANK_TRANSITIONS[self.state], f"rank {self.rank}: {self.state} -> {state}"
        self.state = state

    @property
    def present(self) -> bool:
        """True if the rank can answer a message."""
        return self.state in (RankState.BUILDING, RankState.LIVE, RankState.LEAVING)

    @property
    def round_length(self) -> float:
        """Batches in the round times the learning rate, which counts as 1 if it is unknown."""
        return self.round_batches * (1.0 if self.learning_rate is None else self.learning_rate)

    def note(self, stats: ReportStats, data_wait_s: float = 0.0) -> None:
        """Add the counts of a report, and the waits for data that count in it."""
        if stats.learning_rate is not None:
            self.learning_rate = stats.learning_rate
        self.since_round += stats.num_batches
        self.compute_since_round += stats.compute_s + data_wait_s
        self.data_wait_s += data_wait_s
        parked = self.limit is not None and self.since_round >= self.limit
        self.totals += RankTotals(
            num_batches=stats.num_batches,
            num_samples=stats.num_samples,
            compute_s=stats.compute_s,
            num_throttles=int(parked and not self.parked),
        )
        self.parked = parked

    def set_limit(self, limit: int | None) -> None:
        self.limit = limit
        self.parked = limit is not None and self.since_round >= limit

    def enter_round(self) -> None:
        """Move the counters since the last round to the round in progress."""
        self.round_batches, self.since_round = self.since_round, 0
        self.round_compute_s, self.compute_since_round = self.compute_since_round, 0.0

    def freeze(self) -> None:
        """Record the training that a snapshot holds, while training continues."""
        self.round_batches = self.since_round
        self.round_compute_s = self.compute_since_round

    def commit_freeze(self) -> None:
        """Subtract the snapshot's training: its average has been sent."""
        self.since_round -= self.round_batches
        self.compute_since_round -= self.round_compute_s


@dataclass(slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        payload: The final average; after a failure, of the ranks that left a usable state.
        metrics: One entry for each closed epoch.
        stopped: True if the run was stopped early.
        reason: The reason for the end of the run; see ``TrainedState.reason``.
        missing: Ranks that did not leave in time after a failure.
    """

    payload: Payload | None = None
    metrics: list[EpochMetrics] = field(default_factory=list)
    failure: WorkerFailure | None = None
    failures: list[WorkerFailure] = field(default_factory=list)
    stopped: bool = False
    reason: str = "finished"
    missing: tuple[int, ...] = ()

    def fail(self, failure: WorkerFailure) -> None:
        """Set the cause of a failed run; the first one counts."""
        if self.failure is None:
            self.failure = failure
            self.reason = "stalled" if isinstance(failure.error, RunStalled) else "failed"

    def stop(self, reason: str) -> None:
        """Record an early stop; the first one counts."""
        if not self.stopped:
            self.stopped, self.reason = True, reason

    def release(self) -> None:
        """Free the average, and the failures with their frames."""
        self.payload = None
        self.failures.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a run.

    Attributes:
        epoch: The oldest epoch that is open.
        global_step: Batches trained by all ranks together.
        num_trained: The same, including repeats and batches not averaged yet.
        num_averagings: Completed averaging rounds; under ``SYNC`` global steps.
        num_failed_rounds: Failed rounds in all.
        anchor: Batches of the slowest rank between two rounds.
        batch_counts: Batches of each rank between two rounds.
        divergence: Largest divergence of a rank in the last round; ``None``: not measured.
        param_norm: Norm of the parameters after the last round; under ``SYNC`` and with one rank,
            after the last plan; ``None``: not measured yet.
        backend: The averaging backend in use.
        backend_reason: Reason for it, in a sentence.
        ranks: One record for each rank.
        machine_round: In a cluster, the last round between machines; ``None``: none yet.
        lr_factor: The automatic factor of the learning rate.
        loss_sum: Sum of the finite losses reported in this process, each times its weight.
        loss_weight: Sum of these weights.
    """

    epoch: int
    global_step: int
    num_trained: int
    num_averagings: int
    num_failed_rounds: int
    anchor: int
    batch_counts: tuple[int, ...]
    divergence: float | None
    param_norm: float | None
    backend: AverageBackend
    backend_reason: str
    ranks: tuple[RankStatistics, ...]
    machine_round: MachineRound | None = None
    lr_factor: float = 1.0
    loss_sum: float = 0.0
    loss_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """Totals of one rank.

    Attributes:
        rank: The rank.
        device: Its device, by name.
        num_batches: Batches trained.
        num_samples: Samples in them.
        share: Its share of all samples trained.
        piece: Under ``SYNC`` with shares by measured speed, the samples of its next
            micro-batches; else 0.
        throughput: Samples per second of its compute time.
        compute_s: Seconds spent in training steps.
        sync_s: Seconds that it spent in averaging.
        num_throttles: Number of times it was parked because it was too far ahead.
        divergence: ``||replica - mean|| / ||mean||`` in its last round; ``None``: not measured.
        alive: False if the rank died.
    """

    rank: int
    device: str
    num_batches: int
    num_samples: int
    share: float
    piece: int
    throughput: float
    compute_s: float
    sync_s: float
    num_throttles: int
    divergence: float | None
    alive: bool
