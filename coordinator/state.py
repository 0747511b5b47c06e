"""The state that the parts of the machine share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coordinator.cadence import ConvergenceGuard, ElChe
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.messages import Command, Payload, Send, ToWorker
from coordinator.metrics import EpochMetrics
from coordinator.pool import ChunkPool, LockstepPlan
from coordinator.ranks import Gate, Rank, RankState, RankStatistics, Statistics

# -- How a run ends --


class Phase(Enum):
    """Where the run stands."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    LEAVING = "leaving"
    AVERAGING = "averaging"
    FAILING = "failing"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run failed: a worker's exception, or an error of the machine's own.

    ``rank`` is -1 where no single rank is to blame.
    """

    error: BaseException
    rank: int = -1
    epoch: int = 0
    step: int = 0


@dataclass(slots=True)
class Outcome:
    """The end of a run.

    Attributes:
        payload: The final average.
        metrics: One entry for each closed epoch.
        failure: Why there is no result.
        failures: Ranks that died while the others went on.
        stopped: Whether the run was ended before its time.
        missing: Ranks that did not leave in time after a failure.
    """

    payload: Payload | None = None
    metrics: list[EpochMetrics] = field(default_factory=list)
    failure: Failure | None = None
    failures: list[Failure] = field(default_factory=list)
    stopped: bool = False
    missing: tuple[int, ...] = ()


class Core:
    """What a run knows: who is there, who has which batches, how fast everyone is.

    Attributes:
        config: Settings.
        alone: Whether there is one rank, or one is left, so that nothing is averaged.
        lockstep: Whether gradients are averaged in the step (``SYNC``).
        pool: Who has which batches.
        elche: How many batches each rank runs between two rounds.
        guard: What divergence says about the cadence.
        gate: When a round is due, and how far each rank may run.
        ranks: One record for each rank.
        out: Commands of the event being handled, in order.
        outcome: The end of the run, as far as it is known.
        phase: Where the run stands.
        global_step: Batches trained by all ranks together, up to the last round.
        num_averagings: Rounds done; under lockstep, global steps dealt.
        num_failed_rounds: Rounds given up.
        generation: Counts the groups of ranks that meet in collectives.
        plan: Under lockstep, what the ranks were dealt last.
        num_windows: Under lockstep, the optimizer steps dealt so far.
        now: Time of the event being handled.
        spent_s: CPU time of the coordinator's thread up to the event being handled; stays 0
            where nobody measures it.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        world = config.world_size
        self.alone = world == 1
        self.lockstep = config.policy is ApplyPolicy.SYNC
        per_epoch_work = config.evaluate or config.checkpoint_every is not None
        self.pool = ChunkPool(
            num_samples=config.num_samples,
            batch_size=config.batch_size,
            num_epochs=config.num_epochs,
            world_size=world,
            drop_last=config.drop_last,
            ratios=config.partition_ratios,
            progressive=config.progressive and not self.alone,
            granularity=config.accumulate,
            max_batches=config.max_steps,
            look_ahead=not (self.alone and per_epoch_work),
        )
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
        self.gate = Gate(config, self.elche, self.pool)
        self.ranks = [Rank(rank=r) for r in range(world)]
        self.out: list[Command] = []
        self.outcome = Outcome()
        self.phase = Phase.STARTING
        self.global_step = 0
        self.num_averagings = 0
        self.num_failed_rounds = 0
        self.generation = 0
        self.plan: LockstepPlan | None = None
        self.num_windows = 0
        self.now = 0.0
        self.spent_s = 0.0

    @property
    def live(self) -> list[Rank]:
        """Ranks that take part."""
        return [r for r in self.ranks if r.state is RankState.LIVE]

    def is_live(self, rank: int) -> bool:
        """Whether this rank takes part; -1 is nobody."""
        return rank >= 0 and self.ranks[rank].state is RankState.LIVE

    def send(self, rank: int, message: ToWorker) -> None:
        """Put a message to a worker among the commands."""
        self.out.append(Send(rank=rank, message=message))

    def statistics(self) -> Statistics:
        """A snapshot of counters."""
        total = sum(r.num_samples for r in self.ranks)
        oldest = self.pool.oldest
        return Statistics(
            epoch=oldest.epoch if oldest else len(self.outcome.metrics),
            global_step=self.global_step,
            num_averagings=self.num_averagings,
            num_failed_rounds=self.num_failed_rounds,
            anchor=self.elche.anchor,
            batch_counts=self.elche.batch_counts,
            ranks=tuple(
                RankStatistics(
                    rank=r.rank,
                    device=self.config.devices[r.rank],
                    num_batches=r.num_batches,
                    num_samples=r.num_samples,
                    share=r.num_samples / total if total else 0.0,
                    throughput=r.num_samples / r.compute_s if r.compute_s > 0 else 0.0,
                    compute_s=r.compute_s,
                    sync_s=r.sync_s,
                    num_throttles=r.num_throttles,
                    alive=r.state is not RankState.DEAD,
                )
                for r in self.ranks
            ),
        )
