"""Carrying averaging rounds out: who is asked, what is averaged, what is learnt."""

from __future__ import annotations

import math

from coordinator import messages as m
from coordinator.backend_choice import RoundCost
from coordinator.cadence import CadenceAction
from coordinator.ledger import Epoch
from coordinator.state import Core, Phase, RankState
from coordinator.transports import (
    TRANSPORTS,
    CollectiveTransport,
    Progress,
    Round,
    RoundCheckpoints,
    RoundState,
    Transport,
)

_NO_WORK = (None, None)
COORDINATOR_SHARE, REFERENCE_RATE_PER_S = 0.012, 1000.0
"""Part of a core that the coordinator's thread may take for averaging rounds where all ranks
together train so many batches a second or more: the ranks miss that time, since they share the
interpreter with it, and none of their clocks shows it. With fewer batches it may take more: what
averaging seldom costs in quality follows the batches between two rounds and not the time. A tuning
for steps of about a millisecond, see docs/measurements.md."""


class RoundRunner:
    """Runs one averaging round at a time, each over the transport that is chosen when it begins.

    Attributes:
        round: The round in progress, or the last one.
        transport: How it travels.
        cpu_time: What rounds cost the coordinator's thread.
    """

    def __init__(self, core: Core, saving: RoundCheckpoints) -> None:
        self._core = core
        self._saving = saving
        self.cpu_time = RoundCpuTime(core)
        self.round = Round(backend=core.backend_choice.chosen)
        self._transports = {
            backend: TRANSPORTS.get(backend, CollectiveTransport)(core, saving, self.round)
            for backend in core.config.backends
        }
        self.transport = self._transports[core.backend_choice.chosen]

    @property
    def next_transport(self) -> Transport:
        """How the next round travels."""
        return self._transports[self._core.backend_choice.next]

    def start(
        self,
        now: float,
        epoch: Epoch | None = None,
        work: tuple[int | None, int | None] = _NO_WORK,
        eval_at: int | None = None,
    ) -> None:
        """Ask every live rank for its part; if a checkpoint is due it is made of the round.

        Args:
            now: The time.
            epoch: The epoch that the average closes, or one whose lead died.
            work: Epoch to evaluate and version to hand over on the average.
            eval_at: See :class:`~coordinator.messages.Evaluate`.
        """
        evaluate, checkpoint = work
        ranks = tuple(r.rank for r in self._core.live)
        if capture := self._saving.due:
            self._saving.begin_round(ranks)
        by_rank = self._core.ledger.by_rank
        self.transport = self.next_transport
        self.round.begin(
            self.transport.first,
            ranks,
            epoch=epoch,
            generation=self._core.generation,
            evaluate=evaluate,
            checkpoint=checkpoint,
            eval_at=eval_at,
            capture=capture,
            backend=self._core.backend_choice.next,
            now=now,
            idle=frozenset(rank for rank in ranks if not by_rank[rank].assigned),
        )
        self._core.limits.new_round()
        self.transport.ask(now)

    @property
    def limits_frozen(self) -> bool:
        """Whether the ranks' limits are left alone: one could be read against either round."""
        return self.round.in_flight and self.transport.waits

    def take(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> bool:
        """Take a reply to the round; returns False if the round must be given up."""
        return self._apply(self.transport.take(event, now))

    def on_death(self, rank: int) -> bool:
        """A rank of the round may be dead; returns False if the round must be given up."""
        if not self.round.in_flight or rank not in self.round.ranks:
            return True
        return self._apply(self.transport.on_death(rank))

    def _apply(self, progress: Progress) -> bool:
        if progress is Progress.DONE:
            self._end_round()
        return progress is not Progress.FAILED

    def holds(self, rank: int) -> bool:
        """Whether the round in progress may still bring a dead rank's part into the result."""
        return self.round.in_flight and self.transport.holds(rank)

    def late(self, now: float) -> tuple[int, ...]:
        """The deadline of a round has passed that cannot be given up before all have answered.

        Returns:
            The ranks that it waits for, but for a lead that evaluates.
        """
        rnd = self.round
        rnd.deadline = now + self.transport.patience_s
        busy = rnd.lead if (rnd.evaluate, rnd.checkpoint) != _NO_WORK else -1
        missing = tuple(rank for rank in rnd.ranks if rank not in rnd.acks and rank != busy)
        if missing:
            rnd.num_failed += 1
            self._core.num_failed_rounds += 1
        return missing

    def _end_round(self) -> None:
        """Every rank has acknowledged: learn from the round."""
        rnd = self.round
        rnd.move(RoundState.NONE)
        rnd.deadline = None
        rnd.num_failed = 0
        for rank, ack in rnd.acks.items():
            self._core.ranks[rank].sync_s += ack.sync_s
        own_s = self.cpu_time.take()
        sync_s = max(ack.sync_s for ack in rnd.acks.values())
        # The background computation takes its time from the ranks' cores.
        sync_s += rnd.average_s / len(rnd.ranks)
        sync_s += self._own_cost(own_s)
        if self._core.backend_choice.is_trial(rnd.backend):
            sync_s = math.nan  # the cadence follows what is in use
        times = [(0.0, 0)] * len(self._core.ranks)
        for rank in rnd.ranks:
            info = self._core.ranks[rank]
            if self._core.is_live(rank):
                times[rank] = (info.round_compute_s, info.round_batches)
        verdict = self._core.guard.report(list(rnd.divergences.values()))
        self._core.elche.hold_growth(verdict is not CadenceAction.STABLE)
        self._core.elche.report_timing([t for t, _ in times], [n for _, n in times], sync_s)
        if verdict is CadenceAction.NUDGE_DOWN:
            self._core.elche.nudge_down()
        trained_s = sum(seconds for seconds, _ in times)
        anchor = self._core.elche.anchor
        if self._core.backend_choice.note(rnd.backend, self._cost(own_s), trained_s, anchor):
            self._core.announce_backend()

    def _cost(self, own_s: float) -> RoundCost | None:
        """What the round took from the training; ``None`` if it did more than averaging.

        Ranks that go on while an average is made train on what the others have not seen: of
        that time the part counts that averaging may cost altogether.
        """
        rnd = self.round
        if rnd.capture or (rnd.evaluate, rnd.checkpoint) != _NO_WORK:
            return None
        busy = [rank for rank in rnd.acks if rank not in rnd.idle]
        lost_s = sum(ack.sync_s for ack in rnd.acks.values())
        return RoundCost(
            ranks_s=lost_s + sum(rnd.acks[rank].wait_s for rank in busy),
            own_s=own_s + rnd.average_s,
            stale_s=self._core.config.overhead_target * rnd.stale_s * len(busy),
        )

    def _own_cost(self, own_s: float) -> float:
        """What the round cost in this thread, as if it had cost the ranks so many seconds.

        One target serves both: where this thread takes all that it may, it is reached.
        """
        seconds = self._core.elche.seconds_per_batch
        rate = sum(1 / s for s in seconds if s) if seconds else REFERENCE_RATE_PER_S
        share = COORDINATOR_SHARE * max(1.0, REFERENCE_RATE_PER_S / rate)
        weight = self._core.config.overhead_target / share
        # As with the computation, a core that it takes is one of theirs.
        return own_s * max(weight, 1 / len(self.round.ranks))

    def record_fault(self, now: float) -> None:
        """The round fails because its transport did."""
        rnd = self.round
        lost_s = (now - rnd.began_at) * len(rnd.ranks)
        self._core.backend_choice.record_fault(rnd.backend, RoundCost(ranks_s=lost_s))

    def give_up(self) -> list[int]:
        """The round failed: every rank keeps its own weights and what it trained waits.

        Returns:
            The live ranks that must undo it.
        """
        rnd = self.round
        if rnd.capture:
            self._saving.cancel()
        undo = self.transport.undo()
        rnd.move(RoundState.NONE)
        rnd.deadline = None
        rnd.drop_snapshots()
        self.cpu_time.take()  # what was noted so far is no cost of the next one
        rnd.num_failed += 1
        self._core.num_failed_rounds += 1
        self._core.ledger.thaw()
        for info in self._core.ranks:
            if info.state is RankState.DEAD:
                self._core.ledger.take_back(info.rank, self._core.elche.shares)
        return undo


class Limits:
    """Sends each rank the limit that the :class:`~coordinator.cadence.BatchLimits` gives it."""

    def __init__(self, core: Core, rounds: RoundRunner) -> None:
        self._core = core
        self._rounds = rounds

    def begin(self) -> None:
        """The run begins: tell every rank its first allowance."""
        if self._core.alone or self._core.lockstep:
            return
        for rank in self._core.live:
            budget = self._core.initial_budget(rank.rank)
            rank.set_limit(budget.limit)
            self._core.send(rank.rank, m.Resume(budget=budget))

    def readjust(self) -> None:
        """Tell every rank anew how far it may go, and whose count makes a round due."""
        if self._core.alone or self._core.lockstep or self._core.phase is Phase.STARTING:
            return
        if self._rounds.limits_frozen:
            return  # done when the round ends
        live = self._core.live
        self._core.limits.new_round()
        for rank in live:
            limit = self._core.limits.limit(rank, live)
            rank.set_limit(limit)
            self._core.send(rank.rank, m.Resume(budget=self._core.budget(rank.rank, limit)))

    def adjust(self) -> None:
        """Tell those ranks whose limit has changed."""
        if not self._core.limits.any_limit or self._core.alone or self._rounds.limits_frozen:
            return
        live = self._core.live
        for rank in live:
            limit = self._core.limits.limit(rank, live)
            if self._core.limits.limit_is_current(rank.rank, rank.limit, limit):
                continue
            raised = limit is None or (rank.limit is not None and limit > rank.limit)
            rank.set_limit(limit)
            if raised:
                self._core.send(rank.rank, m.Resume(budget=self._core.budget(rank.rank, limit)))
            elif limit is not None:
                self._core.send(rank.rank, m.Throttle(limit=limit))


_ROUND_EVENTS = (m.ParamSnapshot, m.Averaged, m.SyncAck)


class RoundCpuTime:
    """Tells the coordinator's CPU time for rounds from that for dealing batches out.

    Fewer rounds make the one less, longer chunks the other. Of reports those between two chunks
    belong to a round if their rank has reached the count that makes one due; others only come
    with time, or with the end of a chunk.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._before_s = 0.0
        self._of_round = False
        self._reporter: int | None = None
        self._rounds_s = 0.0

    def note(self, event: m.Event) -> None:
        """An event is to be handled: what was spent since the last one was spent on that."""
        spent_s = self._core.spent_s
        if self._of_round or self._has_reached():
            self._rounds_s += spent_s - self._before_s
        self._before_s = spent_s
        self._of_round = isinstance(event, _ROUND_EVENTS)
        self._reporter = event.rank if isinstance(event, m.BatchReport) else None

    def _has_reached(self) -> bool:
        if self._reporter is None:
            return False
        count = self._core.elche.batch_counts[self._reporter]
        return self._core.ranks[self._reporter].since_round >= count > 0

    def take(self) -> float:
        """Seconds for rounds since this was last called; 0.0 where nobody measures them."""
        taken, self._rounds_s = self._rounds_s, 0.0
        return taken
