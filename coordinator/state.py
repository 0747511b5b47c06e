"""The state that the parts of the machine share."""

from __future__ import annotations

from coordinator.cadence import ElChe
from coordinator.commands import Command, Send
from coordinator.config import CoordinatorConfig
from coordinator.convergence import ConvergenceGuard
from coordinator.gate import Gate
from coordinator.ledger import LockstepPlan
from coordinator.outcome import Outcome, Phase
from coordinator.policy import ApplyPolicy
from coordinator.pool import ChunkPool
from coordinator.ranks import Rank, RankState, RankStatistics, Statistics
from coordinator.requests import ToWorker


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
