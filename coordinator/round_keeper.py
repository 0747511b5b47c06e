"""Carrying averaging rounds out: who is asked, what is averaged, what is learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator import messages as m
from coordinator.averaging import usable_weights
from coordinator.checkpoint import Saving
from coordinator.commands import AbortCollective, Average
from coordinator.convergence import Verdict
from coordinator.ledger import Epoch
from coordinator.outcome import Phase
from coordinator.own_time import OwnTime
from coordinator.policy import AverageBackend
from coordinator.ranks import RankState
from coordinator.rounds import Round, RoundState
from coordinator.state import Core

_NONE = (None, None)

OWN_SHARE, RATED_PER_S = 0.012, 1000.0
"""Part of a core that the coordinator's thread may take for averaging rounds where all ranks
together train so many batches a second or more. It takes the interpreter from the ranks then,
which no clock of theirs sees. With fewer batches it may take more: what averaging seldom costs in
quality follows the batches between two rounds and not the time. Measured on LeNet with 2 workers
on 2 cores, half of the batches between two rounds bring the efficiency from 0.955 to 0.925."""


class RoundKeeper:
    """Runs one averaging round at a time.

    Attributes:
        round: The round in progress, or the last one.
        own_time: What rounds cost the coordinator's thread.
    """

    def __init__(self, core: Core, saving: Saving) -> None:
        self._core = core
        self._saving = saving
        self.own_time = OwnTime(core)
        self.round = Round()

    def start(
        self, now: float, epoch: Epoch | None = None, work: tuple[int | None, int | None] = _NONE
    ) -> None:
        """Ask every live rank for its part; if a checkpoint is due it is made of the round.

        Args:
            now: The time.
            epoch: The epoch that the average closes, or one whose lead died.
            work: Epoch to evaluate and version to hand over on the average.
        """
        evaluate, checkpoint = work
        ranks = tuple(r.rank for r in self._core.live)
        on_cpu = self._core.config.backend is AverageBackend.CPU
        deadline = now + self._patience_s() if on_cpu else None
        if capture := self._saving.due:
            self._saving.begin_round(ranks)
        self.round.begin(
            RoundState.COLLECTING if on_cpu else RoundState.SYNCING,
            ranks,
            epoch=epoch,
            generation=self._core.generation,
            evaluate=evaluate,
            checkpoint=checkpoint,
            deadline=deadline,
            capture=capture,
        )
        self._core.gate.new_round()
        for rank in ranks:
            if on_cpu:
                self._core.send(rank, m.RequestParams(round=self.round.id, capture=capture))
                continue
            allowance, lead = self._core.gate.allowance(rank), rank == ranks[0]
            self.round.limits[rank] = allowance.limit
            self._core.send(
                rank,
                m.SyncNow(
                    round=self.round.id,
                    allowance=allowance,
                    evaluate=evaluate if lead else None,
                    checkpoint=checkpoint if lead else None,
                    capture=capture,
                ),
            )

    @property
    def acks_may_wait(self) -> bool:
        """Whether nothing follows from the end of the round before a rank reports again.

        Every rank has work left then, and none waits for what only an event can bring. The end
        of a collective tells the ranks where the run stands, which their learning rates follow.
        """
        rnd, core = self.round, self._core
        if rnd.state is not RoundState.DELIVERING or rnd.capture or rnd.epoch is not None:
            return False
        if core.phase is not Phase.RUNNING or core.gate.limits:
            return False
        return all(r.num_queued > 0 for r in core.live)

    def _patience_s(self) -> float:
        """How long an answer may take before it counts as late."""
        if self._core.config.backend is not AverageBackend.CPU:
            return self._core.config.collective_timeout_s
        slowest = max(self._core.elche.seconds_per_batch or (0.0,)) * self._core.config.accumulate
        return max(self._core.config.snapshot_timeout_s, 3 * slowest)

    def late(self, now: float) -> tuple[int, ...]:
        """The deadline of a round has passed that cannot be given up before all have answered.

        Returns:
            The ranks that it waits for, but for a lead that evaluates.
        """
        rnd = self.round
        rnd.deadline = now + self._patience_s()
        busy = rnd.lead if (rnd.evaluate, rnd.checkpoint) != _NONE else -1
        missing = tuple(rank for rank in rnd.ranks if rank not in rnd.acks and rank != busy)
        if missing:
            rnd.num_failed += 1
            self._core.num_failed_rounds += 1
        return missing

    def on_snapshot(self, event: m.ParamSnapshot) -> None:
        """A rank's state has come; with the last of them the average is computed."""
        if not self.round.accepts(event, RoundState.COLLECTING):
            return
        self.round.snapshots[event.rank] = event
        self._core.ranks[event.rank].freeze()
        self._core.pool.freeze(event.rank)
        if self.round.capture:
            self._saving.note(event.rank, event.extra)
        if self.round.all_snapshots:
            self.round.move(RoundState.COMPUTING)
            self.round.deadline = None
            order = [self.round.snapshots[r] for r in self.round.ranks]
            self._core.out.append(
                Average(
                    round=self.round.id,
                    ranks=self.round.ranks,
                    payloads=tuple(s.payload for s in order),
                    weights=tuple(
                        usable_weights([s.round_weight if s.healthy else None for s in order])
                    ),
                    squares=tuple(s.squares for s in order),
                    keep=self.round.capture,
                )
            )

    def on_averaged(self, event: m.Averaged, now: float) -> bool:
        """The average is there, or could not be computed; returns whether the round goes on."""
        if event.round != self.round.id or self.round.state is not RoundState.COMPUTING:
            return True
        self.round.forget_tensors()
        if event.average is None:
            return False
        self.round.move(RoundState.DELIVERING)
        self.round.deadline = now + self._patience_s()
        self.round.divergences = dict(event.divergences)
        self.round.average_s = event.compute_s
        self._commit(self.round.ranks)
        if self.round.capture:
            self._saving.commit(event.kept)
        self._core.gate.new_round()
        for rank in self.round.ranks:
            info, lead = self._core.ranks[rank], rank == self.round.lead
            info.commit_freeze()
            allowance = self._core.gate.allowance(rank)
            info.set_limit(allowance.limit)
            self._core.send(
                rank,
                m.Update(
                    round=event.round,
                    average=event.average,
                    num_samples=event.num_samples,
                    allowance=allowance,
                    evaluate=self.round.evaluate if lead else None,
                    checkpoint=self.round.checkpoint if lead else None,
                ),
            )
            self._core.send(rank, m.SetGlobalStep(step=self._core.global_step))
        return True

    def on_ack(self, event: m.SyncAck, now: float) -> bool:
        """A rank has done its part; returns False if the round must be given up."""
        if self.round.accepts(event, RoundState.SYNCING):
            # The worker reported all it had trained before it joined.
            self._core.ranks[event.rank].enter_round()
            self._core.ranks[event.rank].set_limit(self.round.limits[event.rank])
            self._core.pool.freeze(event.rank)
            if self.round.capture and event.ok:
                self._saving.note(event.rank, event.extra, event.average)
            self.round.acks[event.rank] = replace(event, extra=None, average=None)
            if self.round.all_acks:
                return self._end_sync()
            if not event.ok and self.round.deadline is None:
                self.round.deadline = now + self._patience_s()
            return True
        if self.round.accepts(event, RoundState.DELIVERING):
            self.round.acks[event.rank] = event
            if self.round.all_acks:
                self._end_round()
        return True

    def _end_sync(self) -> bool:
        """Every rank has left the collective; returns whether all of them have the average."""
        if self.round.doomed or not all(ack.ok for ack in self.round.acks.values()):
            return False
        self._commit(self.round.ranks)
        if self.round.capture:
            self._saving.commit(None)
        for rank in self.round.ranks:
            if self._core.is_live(rank):
                self._core.send(rank, m.SetGlobalStep(step=self._core.global_step))
        self._end_round()
        return True

    def on_death(self, rank: int) -> bool:
        """A rank of the round may be dead; returns False if the round must be given up.

        What its snapshot holds is lost with it unless the average is out. In a collective
        its part counts if it said what that was: the others have it, or it is undone.
        """
        rnd = self.round
        if not rnd.in_flight or rank not in rnd.ranks:
            return True
        if rnd.state is RoundState.SYNCING:
            if not self._has_joined(rank):
                rnd.doomed = True
                rnd.drop(rank)
            return not rnd.all_acks or self._end_sync()
        if rnd.state is not RoundState.DELIVERING:
            return False
        rnd.drop(rank)
        if rnd.all_acks:
            self._end_round()
        return True

    def _has_joined(self, rank: int) -> bool:
        ack = self.round.acks.get(rank)
        return ack is not None and ack.ok

    def holds(self, rank: int) -> bool:
        """Whether the round in progress may still bring a dead rank's part into the result."""
        rnd = self.round
        return rnd.state is RoundState.SYNCING and not rnd.doomed and self._has_joined(rank)

    def _commit(self, ranks: Sequence[int]) -> None:
        """The average exists: what was in it is settled."""
        self._core.num_averagings += 1
        oldest = self._core.pool.oldest
        if oldest is not None:
            oldest.num_averagings += 1
        if self.round.epoch is not None:
            self.round.epoch.worked = True
            self.round.epoch.lead = self.round.lead
        for rank in ranks:
            self._core.pool.settle(rank)
            self._core.global_step += self._core.ranks[rank].round_batches

    def _end_round(self) -> None:
        """Every rank has acknowledged: learn from the round."""
        rnd = self.round
        rnd.move(RoundState.NONE)
        rnd.deadline = None
        rnd.num_failed = 0
        for rank, ack in rnd.acks.items():
            self._core.ranks[rank].sync_s += ack.sync_s
            if ack.divergence is not None:
                rnd.divergences[rank] = ack.divergence
        sync_s = max(ack.sync_s for ack in rnd.acks.values())
        # The background computation takes its time from the ranks' cores.
        sync_s += rnd.average_s / len(rnd.ranks)
        sync_s += self._own_cost()
        times = [(0.0, 0)] * len(self._core.ranks)
        for rank in rnd.ranks:
            info = self._core.ranks[rank]
            if self._core.is_live(rank):
                times[rank] = (info.round_compute_s, info.round_batches)
        verdict = self._core.guard.report(list(rnd.divergences.values()))
        self._core.elche.hold_growth(verdict is not Verdict.STABLE)
        self._core.elche.report_timing([t for t, _ in times], [n for _, n in times], sync_s)
        if verdict is Verdict.NUDGE_DOWN:
            self._core.elche.nudge_down()

    def _own_cost(self) -> float:
        """What the round cost in this thread, as if it had cost the ranks so many seconds.

        One target serves both: where this thread takes all that it may, it is reached.
        """
        seconds = self._core.elche.seconds_per_batch
        rate = sum(1 / s for s in seconds if s) if seconds else RATED_PER_S
        share = OWN_SHARE * max(1.0, RATED_PER_S / rate)
        weight = self._core.config.overhead_target / share
        # As with the computation, a core that it takes is one of theirs.
        return self.own_time.take() * max(weight, 1 / len(self.round.ranks))

    def give_up(self) -> tuple[int, ...]:
        """The round failed: every rank keeps its own weights and what it trained waits.

        Returns:
            The live ranks that must undo it.
        """
        rnd = self.round
        if rnd.capture:
            self._saving.cancel()
        undo: list[int] = []
        if rnd.state is RoundState.SYNCING:
            self._core.out.append(AbortCollective(generation=rnd.generation))
            for rank, ack in rnd.acks.items():
                info = self._core.ranks[rank]
                info.since_round += info.round_batches
                info.compute_since_round += info.round_compute_s
                if ack.ok and self._core.is_live(rank):
                    undo.append(rank)
        rnd.move(RoundState.NONE)
        rnd.deadline = None
        rnd.forget_tensors()
        self.own_time.take()  # what was noted so far is no cost of the next one
        rnd.num_failed += 1
        self._core.num_failed_rounds += 1
        self._core.pool.thaw()
        for info in self._core.ranks:
            if info.state is RankState.DEAD:
                self._core.pool.take_back(info.rank, self._core.elche.shares)
        return tuple(undo)
