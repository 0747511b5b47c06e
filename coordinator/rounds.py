"""Averaging rounds: start, replies, failures, and their cost, from which the cadence follows."""

from __future__ import annotations

import math

from coordinator import messages as m
from coordinator.average_tasks import AverageTasks
from coordinator.backend_choice import RoundCost
from coordinator.cadence import CadenceAction
from coordinator.ledger import Epoch
from coordinator.run_state import Phase, RankState, RunState
from coordinator.saved_run import RankTotals
from coordinator.transports import (
    TRANSPORTS,
    CollectiveTransport,
    Progress,
    Round,
    RoundCheckpoints,
    RoundState,
    Transport,
)

COORDINATOR_SHARE, REFERENCE_RATE_PER_S = 0.012, 1000.0
"""Share of a core that the coordinator's thread may spend on averaging rounds, at this rate of
batches of all ranks or above: the ranks lose that time to the GIL, and their clocks do not show it.
At lower rates it may spend more, since rare averaging costs quality per batch and not per second.
Tuned for steps of about a millisecond, see docs/measurements.md."""


class RoundRunner:
    """Runs one averaging round at a time, each over the transport chosen at its start.

    Attributes:
        round: The round in progress, or the last one.
        cpu_time: CPU time of the coordinator's thread for rounds.
    """

    def __init__(self, run: RunState, tasks: AverageTasks, saving: RoundCheckpoints) -> None:
        self._run = run
        self._tasks = tasks
        self._saving = saving
        self.cpu_time = RoundCpuTime(run)
        self.round = Round(backend=run.backend_choice.chosen)
        self._transports = {
            backend: TRANSPORTS.get(backend, CollectiveTransport)(run, saving, self.round)
            for backend in run.config.backends
        }
        self.transport = self._transports[run.backend_choice.chosen]

    @property
    def next_transport(self) -> Transport:
        return self._transports[self._run.backend_choice.next]

    def start(
        self,
        now: float,
        epoch: Epoch | None = None,
    ) -> None:
        """Start a round of all live ranks, with the tasks and the checkpoint that are due.

        Args:
            now: The present time.
            epoch: The epoch that the average closes, or one whose tasks were lost.
        """
        ranks = tuple(r.rank for r in self._run.live)
        if capture := self._saving.due:
            self._saving.begin_round(ranks)
        by_rank = self._run.ledger.by_rank
        self.transport = self.next_transport
        self.round.begin(
            self.transport.first_state,
            ranks,
            epoch=epoch,
            generation=self._run.generation,
            tasks=self._tasks.begin(None if epoch is None else epoch.epoch, requested=True),
            capture=capture,
            backend=self._run.backend_choice.next,
            started_at=now,
            idle=frozenset(rank for rank in ranks if not by_rank[rank].assigned),
        )
        self._run.round_schedule.new_round()
        self._run.update_lr_factor()
        self.transport.request(now)

    @property
    def limits_frozen(self) -> bool:
        """True while limits must not change: one could be applied to either of two rounds."""
        return self.round.in_flight and self.transport.waits

    def receive(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> bool:
        """Handle a reply to the round; returns False if the round must be abandoned."""
        return self._apply(self.transport.receive(event, now))

    def on_death(self, rank: int) -> bool:
        """Handle a death; returns False if the round must be abandoned."""
        if not self.round.in_flight or rank not in self.round.ranks:
            return True
        return self._apply(self.transport.on_death(rank))

    def _apply(self, progress: Progress) -> bool:
        if progress is Progress.DONE:
            self._end_round()
        return progress is not Progress.FAILED

    def holds(self, rank: int) -> bool:
        """True if a dead rank's part may still enter the result of the round."""
        return self.round.in_flight and self.transport.holds(rank)

    def extend_deadline(self, now: float) -> tuple[int, ...]:
        """Extend the deadline of a round that cannot be abandoned before all replies.

        Returns:
            The late ranks, without those that evaluate.
        """
        rnd = self.round
        rnd.deadline = now + self.transport.timeout_s
        if any(task.kind.is_shared for task in rnd.tasks):
            return ()
        done = rnd.acks.keys() | {task.rank for task in rnd.tasks}
        missing = tuple(rank for rank in rnd.ranks if rank not in done)
        if missing:
            rnd.num_failed += 1
            self._run.count_failed_round()
        return missing

    def _end_round(self) -> None:
        rnd = self.round
        rnd.move(RoundState.NONE)
        rnd.deadline = None
        rnd.num_failed = 0
        for rank, ack in rnd.acks.items():
            self._run.ranks[rank].totals += RankTotals(sync_s=ack.sync_s)
        own_s = self.cpu_time.take()
        sync_s = max(ack.sync_s for ack in rnd.acks.values())
        # The background average competes with the ranks for cores.
        sync_s += rnd.average_s / len(rnd.ranks)
        sync_s += self._cpu_cost(own_s)
        if self._run.backend_choice.is_trial(rnd.backend):
            sync_s = math.nan  # the cadence follows the backend in use
        times = [(0.0, 0)] * len(self._run.ranks)
        for rank in rnd.ranks:
            info = self._run.ranks[rank]
            if self._run.is_live(rank):
                times[rank] = (info.round_compute_s, info.round_batches)
        length = max(self._run.ranks[rank].round_length for rank in rnd.ranks)
        verdict = self._run.guard.report(list(rnd.divergences.values()), length)
        self._run.elche.hold_growth(verdict is not CadenceAction.STABLE)
        wait_s = sum(ack.wait_s for ack in rnd.acks.values()) / len(rnd.acks)
        self._run.elche.report_timing(
            [t for t, _ in times], [n for _, n in times], sync_s, wait_s=wait_s
        )
        if verdict is CadenceAction.NUDGE_DOWN:
            self._run.elche.nudge_down()
        choice, anchor = self._run.backend_choice, self._run.elche.anchor
        if choice.record_round(rnd.backend, self._cost(own_s), anchor):
            self._run.announce_backend()

    def _cost(self, own_s: float) -> RoundCost | None:
        """The cost of the round to training; ``None`` if it did more than averaging.

        While an average is computed, ranks train from stale parameters: that time counts at the
        rate of ``overhead_target``.
        """
        rnd = self.round
        if rnd.capture or rnd.tasks:
            return None
        busy = [rank for rank in rnd.acks if rank not in rnd.idle]
        lost_s = sum(ack.sync_s for ack in rnd.acks.values())
        return RoundCost(
            ranks_s=lost_s + sum(rnd.acks[rank].wait_s for rank in busy),
            own_s=own_s + rnd.average_s,
            stale_s=self._run.config.overhead_target * rnd.stale_s * len(busy),
        )

    def _cpu_cost(self, own_s: float) -> float:
        """CPU time of this thread in the round, converted to seconds of the ranks.

        Scaled so that ``overhead_target`` is reached when this thread uses its whole share.
        """
        seconds = self._run.elche.seconds_per_batch
        rate = sum(1 / s for s in seconds if s) if seconds else REFERENCE_RATE_PER_S
        share = COORDINATOR_SHARE * max(1.0, REFERENCE_RATE_PER_S / rate)
        weight = self._run.config.overhead_target / share
        # Like the average, it takes a core of the ranks.
        return own_s * max(weight, 1 / len(self.round.ranks))

    def record_fault(self, now: float) -> None:
        """Record that the round fails because of its backend."""
        rnd = self.round
        lost_s = (now - rnd.started_at) * len(rnd.ranks)
        self._run.backend_choice.record_fault(rnd.backend, RoundCost(ranks_s=lost_s))

    def give_up(self) -> list[int]:
        """Abandon the round: every rank keeps its weights, and its batches stay unsettled.

        Returns:
            The live ranks that must undo it.
        """
        rnd = self.round
        if rnd.capture:
            self._saving.cancel()
        undo = self.transport.undo()
        self._tasks.cancel(rnd.tasks, undo)
        rnd.move(RoundState.NONE)
        rnd.deadline = None
        rnd.drop_snapshots()
        self.cpu_time.take()  # no cost of the next round
        rnd.num_failed += 1
        self._run.count_failed_round()
        self._run.ledger.unfreeze()
        for info in self._run.ranks:
            if info.state is RankState.DEAD:
                self._run.ledger.reopen_rank(info.rank, self._run.elche.shares)
        return undo


class LimitSender:
    """Sends each rank its limit; see :class:`~coordinator.cadence.RoundSchedule`."""

    def __init__(self, run: RunState, rounds: RoundRunner) -> None:
        self._run = run
        self._rounds = rounds

    def begin(self) -> None:
        """Send every rank its first budget."""
        if self._run.alone or self._run.lockstep:
            return
        self._run.update_lr_factor()
        for rank in self._run.live:
            budget = self._run.initial_budget(rank.rank)
            rank.set_limit(budget.limit)
            self._run.send(rank.rank, m.Resume(budget=budget))

    def readjust(self) -> None:
        """Send every rank a new budget, after a change of ranks."""
        if self._run.alone or self._run.lockstep or self._run.phase is Phase.STARTING:
            return
        if self._rounds.limits_frozen:
            return  # sent when the round ends
        live = self._run.live
        self._run.round_schedule.new_round()
        for rank in live:
            limit = self._run.round_schedule.limit(rank, live)
            rank.set_limit(limit)
            self._run.send(rank.rank, m.Resume(budget=self._run.budget(rank.rank, limit)))

    def adjust(self) -> None:
        """Send a message to each rank whose limit has changed."""
        if not self._run.round_schedule.any_limit or self._run.alone or self._rounds.limits_frozen:
            return
        live = self._run.live
        for rank in live:
            limit = self._run.round_schedule.limit(rank, live)
            if self._run.round_schedule.limit_is_current(rank.rank, rank.limit, limit):
                continue
            raised = limit is None or (rank.limit is not None and limit > rank.limit)
            rank.set_limit(limit)
            if raised:
                self._run.send(rank.rank, m.Resume(budget=self._run.budget(rank.rank, limit)))
            elif limit is not None:
                self._run.send(rank.rank, m.Throttle(limit=limit))


_ROUND_EVENTS = (m.ParamSnapshot, m.Averaged, m.SyncAck)


class RoundCpuTime:
    """CPU time of the coordinator's thread for rounds, apart from that for assigning batches.

    A report belongs to rounds if its rank has reached the count that makes one due; other reports
    come by time or at the end of a chunk.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._before_s = 0.0
        self._of_round = False
        self._reporter: int | None = None
        self._rounds_s = 0.0

    def record(self, event: m.Event) -> None:
        """Attribute the CPU time since the last event to that event."""
        spent_s = self._run.spent_s
        if self._of_round or self._has_reached():
            self._rounds_s += spent_s - self._before_s
        self._before_s = spent_s
        self._of_round = isinstance(event, _ROUND_EVENTS)
        self._reporter = event.rank if isinstance(event, m.BatchReport) else None

    def _has_reached(self) -> bool:
        if self._reporter is None:
            return False
        count = self._run.elche.batch_counts[self._reporter]
        return self._run.ranks[self._reporter].since_round >= count > 0

    def take(self) -> float:
        """Seconds for rounds since the last call; 0.0 if not measured."""
        taken, self._rounds_s = self._rounds_s, 0.0
        return taken
