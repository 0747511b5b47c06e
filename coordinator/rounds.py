"""Averaging rounds: start, replies, failures, and their cost, from which the cadence follows.

A round has one of two transports: snapshots through the coordinator, or a collective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Protocol

from coordinator import messages as m
from coordinator.average_tasks import AverageTasks
from coordinator.averaging import usable_weights
from coordinator.backend_choice import RoundCost
from coordinator.cadence import CadenceAction
from coordinator.config import AverageBackend
from coordinator.ledger import Epoch
from coordinator.messages import AbortCollective, Average, Event, ParamSnapshot, SyncAck
from coordinator.run_state import Phase, RankState, RunState
from coordinator.saved_run import RankTotals

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

    def __init__(self, run: RunState, tasks: AverageTasks, saving: Checkpoints) -> None:
        self._run = run
        self._tasks = tasks
        self._saving = saving
        self.cpu_time = RoundCpuTime(run)
        self.round = Round(backend=run.backend_choice.chosen)
        self._transports = {
            backend: TRANSPORTS.get(backend, CollectiveTransport)(run, saving, self)
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
        assert not self.round.in_flight, "there is one round at a time"
        ranks = tuple(r.rank for r in self._run.live)
        if capture := self._saving.due:
            self._saving.begin_round(ranks)
        by_rank = self._run.ledger.by_rank
        self.transport = self.next_transport
        self.round = Round(
            id=self.round.id + 1,
            state=self.transport.first_state,
            ranks=ranks,
            epoch=epoch,
            generation=self._run.generation,
            tasks=self._tasks.begin(None if epoch is None else epoch.epoch, requested=True),
            capture=capture,
            num_failed=self.round.num_failed,
            backend=self._run.backend_choice.next,
            started_at=now,
            idle=frozenset(rank for rank in ranks if not by_rank[rank].assigned),
        )
        self._run.round_schedule.new_round()
        self._run.lr_factor.update(self._run.elche.batch_counts)
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
            self._run.num_failed_rounds += 1
        return missing

    @property
    def too_many_failed(self) -> bool:
        """True if failed rounds in a row end the run."""
        failed = self.round.num_failed >= self._run.config.max_failed_rounds
        return failed and self._run.phase is Phase.RUNNING

    @property
    def remedy(self) -> str:
        """The end of an error's text: the fault of the round, or the setting of its time limit."""
        rnd, name = self.round, self.transport.timeout_setting
        if rnd.fault is not None:
            return f"over {rnd.backend.name}: {rnd.fault}"
        value = getattr(self._run.config, f"{name}_s")
        return f"raise {name} ({value:g} s) or max_failed_rounds if the steps are long"

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
        rnd.snapshots = {}
        self.cpu_time.take()  # no cost of the next round
        rnd.num_failed += 1
        self._run.num_failed_rounds += 1
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
        self._run.lr_factor.update(self._run.elche.batch_counts)
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


class Transport(ABC):
    """Carries out an averaging round: requests, replies and the effect of deaths.

    All state of a round is in its :class:`Round`. The coordinator depends on the properties of a
    transport, never on its type.

    Args:
        saving: Checkpoints that are captured by a round.
        rounds: Holds the round in progress.

    Attributes:
        waits: Ranks wait for each other inside a round, in a group that a failed round breaks,
            with limits sent at its start.
        timeout_setting: Name of the setting that bounds the time of a reply.
    """

    first_state: ClassVar[RoundState]
    waits: ClassVar[bool]
    timeout_setting: ClassVar[str]

    def __init__(self, run: RunState, saving: Checkpoints, rounds: RoundRunner) -> None:
        self._run = run
        self._saving = saving
        self._rounds = rounds

    @property
    def _round(self) -> Round:
        return self._rounds.round

    @property
    @abstractmethod
    def timeout_s(self) -> float:
        """Seconds after which a reply is late."""

    @abstractmethod
    def request(self, now: float) -> None:
        """Request the part of each rank, at the start of the round."""

    @abstractmethod
    def receive(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> Progress:
        """Handle a reply, or the average; one of another round is ignored."""

    @abstractmethod
    def on_death(self, rank: int) -> Progress:
        """Handle the death of a rank of the round."""

    def holds(self, rank: int) -> bool:
        """True if a dead rank's part may still enter the result of the round."""
        return False

    def undo(self) -> list[int]:
        """Abandon the round; returns the live ranks that must undo it."""
        return []

    def _commit(self) -> None:
        """Settle the batches of the round: its average exists."""
        run, rnd = self._run, self._round
        run.count_averagings(1, run.ledger.oldest)
        run.note_norms(rnd.divergences, rnd.norm)
        if rnd.epoch is not None:
            rnd.epoch.averaged = True
        for rank in rnd.ranks:
            run.settle(rank)


class Progress(Enum):
    """State of the round after a reply or a death."""

    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


# ``CPU``: ``COLLECTING`` snapshots, ``COMPUTING`` their average in the background,
# ``DELIVERING`` it until every rank has acknowledged. Over a collective: ``SYNCING`` until
# every rank has acknowledged. There is at most one round at a time, and the next starts
# only after the last acknowledgement, so that no report from before a round can trigger
# another, and the averaged buffers are no longer read when they are written again.


class RoundState(Enum):
    """State of a round."""

    NONE = "none"
    COLLECTING = "collecting"
    COMPUTING = "computing"
    DELIVERING = "delivering"
    SYNCING = "syncing"


_ROUND_TRANSITIONS = {
    RoundState.NONE: set(),
    RoundState.COLLECTING: {RoundState.COMPUTING, RoundState.NONE},
    RoundState.COMPUTING: {RoundState.DELIVERING, RoundState.NONE},
    RoundState.DELIVERING: {RoundState.NONE},
    RoundState.SYNCING: {RoundState.NONE},
}


@dataclass(slots=True)
class Round:
    """The round in progress, or the last one while ``state`` is ``NONE``.

    ``ranks`` contribute their state, and do ``tasks`` on the average, which closes ``epoch`` if it
    is set. ``must_fail``: a rank died in the collective before it reported its
    part, so that the round must be undone. ``capture``: the round makes a checkpoint. ``backend``
    is kept to the end of the round, whatever is chosen meanwhile; ``fault`` is its failure, if any.
    ``idle`` are ranks without work at the start; ``stale_s`` is the time until the average was
    sent.
    """

    id: int = 0
    state: RoundState = RoundState.NONE
    ranks: tuple[int, ...] = ()
    epoch: Epoch | None = None
    generation: int = 0
    must_fail: bool = False
    tasks: tuple[m.Task, ...] = ()
    capture: bool = False
    deadline: float | None = None
    num_failed: int = 0
    snapshots: dict[int, ParamSnapshot] = field(default_factory=dict)
    acks: dict[int, SyncAck] = field(default_factory=dict)
    divergences: dict[int, float] = field(default_factory=dict)
    norm: float | None = None
    limits: dict[int, int | None] = field(default_factory=dict)
    average_s: float = 0.0
    backend: AverageBackend = AverageBackend.CPU
    fault: str | None = None
    started_at: float = 0.0
    stale_s: float = 0.0
    idle: frozenset[int] = frozenset()

    @property
    def in_flight(self) -> bool:
        """True if a round is in progress."""
        return self.state is not RoundState.NONE

    def move(self, state: RoundState) -> None:
        """Change to ``state``; asserts a legal transition."""
        assert state in _ROUND_TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def accepts(self, message: ParamSnapshot | SyncAck, state: RoundState) -> bool:
        """True for the first reply of a rank to this round, in this state."""
        replies = self.snapshots if isinstance(message, ParamSnapshot) else self.acks
        return (
            message.round == self.id
            and self.state is state
            and message.rank in self.ranks
            and message.rank not in replies
        )

    def is_partial_reply(self, event: Event) -> bool:
        """True for an accepted reply while the round waits for others.

        It makes nothing due, unless the training that it reports lifts a limit.
        """
        reply: ParamSnapshot | SyncAck | None
        if isinstance(event, ParamSnapshot):
            reply, during = self.snapshots.get(event.rank), self.state is RoundState.COLLECTING
        elif isinstance(event, SyncAck):
            reply = self.acks.get(event.rank)
            during = self.state in (RoundState.DELIVERING, RoundState.SYNCING)
        else:
            return False
        return during and reply is not None and reply.round == event.round

    def work(self, rank: int, budget: m.BatchBudget) -> dict[str, Any]:
        """The fields of :class:`~coordinator.messages.AverageWork` for a rank."""
        tasks = tuple(t for t in self.tasks if t.kind.is_shared or t.rank == rank)
        return {"round": self.id, "budget": budget, "tasks": tasks}

    def drop(self, rank: int) -> None:
        self.ranks = tuple(r for r in self.ranks if r != rank)
        self.acks.pop(rank, None)

    @property
    def all_snapshots(self) -> bool:
        return len(self.snapshots) == len(self.ranks)

    @property
    def all_acks(self) -> bool:
        return len(self.acks) == len(self.ranks)


class SnapshotTransport(Transport):
    """Sends snapshots to the coordinator, which averages them in the background.

    No rank waits: each adds ``average - its own snapshot`` to its live parameters.
    """

    first_state = RoundState.COLLECTING
    waits = False
    timeout_setting = "snapshot_timeout"

    @property
    def timeout_s(self) -> float:
        """At least three steps of the slowest rank."""
        c = self._run.config
        slowest = max(self._run.elche.seconds_per_batch or (0.0,)) * c.accumulate
        return max(c.snapshot_timeout_s, 3 * slowest)

    def request(self, now: float) -> None:
        rnd = self._round
        rnd.deadline = now + self.timeout_s
        for rank in rnd.ranks:
            self._run.send(rank, m.RequestParams(round=rnd.id, capture=rnd.capture))

    def receive(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> Progress:
        """Collect snapshots, deliver their average, collect the acknowledgements."""
        if isinstance(event, m.ParamSnapshot):
            self._collect(event)
            return Progress.WAITING
        if isinstance(event, m.Averaged):
            return self._deliver(event, now)
        if self._round.accepts(event, RoundState.DELIVERING):
            self._round.acks[event.rank] = event
            if self._round.all_acks:
                return Progress.DONE
        return Progress.WAITING

    def _collect(self, event: m.ParamSnapshot) -> None:
        rnd = self._round
        if not rnd.accepts(event, RoundState.COLLECTING):
            return
        rnd.snapshots[event.rank] = event
        self._run.ranks[event.rank].freeze()
        self._run.ledger.freeze(event.rank)
        if rnd.capture:
            self._saving.add_rank(event.rank, event.extra)
        if rnd.all_snapshots:
            rnd.move(RoundState.COMPUTING)
            rnd.deadline = None
            order = [rnd.snapshots[r] for r in rnd.ranks]
            self._run.emit(
                Average(
                    round=rnd.id,
                    ranks=rnd.ranks,
                    payloads=tuple(s.payload for s in order),
                    weights=tuple(
                        usable_weights([s.round_weight if s.healthy else None for s in order])
                    ),
                    squares=tuple(s.squares for s in order),
                    keep=rnd.capture,
                )
            )

    def _deliver(self, event: m.Averaged, now: float) -> Progress:
        rnd = self._round
        if event.round != rnd.id or rnd.state is not RoundState.COMPUTING:
            return Progress.WAITING
        mean_batches = sum(s.num_batches for s in rnd.snapshots.values()) / len(rnd.ranks)
        rnd.snapshots = {}
        if event.average is None:
            rnd.fault = f"the average could not be computed: {event.error}"
            return Progress.FAILED
        rnd.move(RoundState.DELIVERING)
        rnd.stale_s = now - rnd.started_at
        rnd.deadline = now + self.timeout_s
        rnd.divergences = dict(event.divergences)
        rnd.norm = event.norm
        rnd.average_s = event.compute_s
        self._commit()
        if rnd.capture:
            self._saving.commit(event.kept)
        self._run.round_schedule.new_round()
        for rank in rnd.ranks:
            info = self._run.ranks[rank]
            info.commit_freeze()
            budget = self._run.initial_budget(rank)
            info.set_limit(budget.limit)
            self._run.send(
                rank,
                m.Update(
                    average=event.average,
                    num_samples=event.num_samples,
                    mean_batches=mean_batches,
                    **rnd.work(rank, budget),
                ),
            )
            self._run.send(rank, m.SetGlobalStep(step=self._run.position))
        return Progress.WAITING

    def on_death(self, rank: int) -> Progress:
        """Fail the round unless the average has been sent."""
        rnd = self._round
        if rnd.state is not RoundState.DELIVERING:
            return Progress.FAILED
        rnd.drop(rank)
        return Progress.DONE if rnd.all_acks else Progress.WAITING


class CollectiveTransport(Transport):
    """The ranks average in a collective, where each waits for all others."""

    first_state = RoundState.SYNCING
    waits = True
    timeout_setting = "collective_timeout"

    @property
    def timeout_s(self) -> float:
        return self._run.config.collective_timeout_s

    def request(self, now: float) -> None:
        """Send each rank into the collective, which has its own timeout."""
        rnd = self._round
        rnd.deadline = None
        for rank in rnd.ranks:
            budget = self._run.initial_budget(rank)
            rnd.limits[rank] = budget.limit
            self._run.send(rank, m.SyncNow(capture=rnd.capture, **rnd.work(rank, budget)))

    def receive(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> Progress:
        """Handle a rank that left the collective, with or without the average."""
        rnd = self._round
        if not isinstance(event, m.SyncAck) or not rnd.accepts(event, RoundState.SYNCING):
            return Progress.WAITING
        # The worker reported all its training before it joined.
        self._run.ranks[event.rank].enter_round()
        self._run.ranks[event.rank].set_limit(rnd.limits[event.rank])
        self._run.ledger.freeze(event.rank)
        rnd.fault = rnd.fault or event.fault
        if rnd.capture and event.ok:
            self._saving.add_rank(event.rank, event.extra, event.average)
        rnd.acks[event.rank] = replace(event, extra=None, average=None)
        if rnd.all_acks:
            return self._end()
        if not event.ok and rnd.deadline is None:
            rnd.deadline = now + self.timeout_s
        return Progress.WAITING

    def _end(self) -> Progress:
        rnd = self._round
        if rnd.must_fail or not all(ack.ok for ack in rnd.acks.values()):
            return Progress.FAILED
        for rank, ack in rnd.acks.items():
            rnd.norm = ack.norm if rnd.norm is None else rnd.norm
            if ack.divergence is not None:
                rnd.divergences[rank] = ack.divergence
        self._commit()
        if rnd.capture:
            self._saving.commit(None)
        for rank in rnd.ranks:
            if self._run.is_live(rank):
                self._run.send(rank, m.SetGlobalStep(step=self._run.position))
        return Progress.DONE

    def on_death(self, rank: int) -> Progress:
        """Keep the part of a rank that acknowledged the round; otherwise fail the round."""
        rnd = self._round
        if not self._has_joined(rank):
            rnd.must_fail = True
            rnd.drop(rank)
        return self._end() if rnd.all_acks else Progress.WAITING

    def holds(self, rank: int) -> bool:
        """True if the rank left the collective with the average."""
        return not self._round.must_fail and self._has_joined(rank)

    def _has_joined(self, rank: int) -> bool:
        ack = self._round.acks.get(rank)
        return ack is not None and ack.ok

    def undo(self) -> list[int]:
        """Abort the group: some ranks may wait in it while others have the average."""
        rnd = self._round
        self._run.emit(AbortCollective(generation=rnd.generation))
        undo: list[int] = []
        for rank, ack in rnd.acks.items():
            info = self._run.ranks[rank]
            info.since_round += info.round_batches
            info.compute_since_round += info.round_compute_s
            if ack.ok and self._run.is_live(rank):
                undo.append(rank)
        return undo


TRANSPORTS: dict[AverageBackend, type[Transport]] = {AverageBackend.CPU: SnapshotTransport}
"""Transports of the backends that are not collectives."""


class Checkpoints(Protocol):
    """Checkpoints of rounds and of the end; see :class:`~coordinator.saving.RunCheckpointer`."""

    @property
    def due(self) -> bool: ...

    @property
    def final_checkpoint_due(self) -> bool: ...

    def begin_round(self, ranks: Sequence[int]) -> None: ...

    def add_rank(
        self, rank: int, extra: m.Extra | None, payload: m.Payload | None = None
    ) -> None: ...

    def commit(self, payload: m.Payload | None) -> None: ...

    def cancel(self) -> None: ...

    def freeze_final(self, finals: Sequence[m.FinalSnapshot]) -> None: ...

    def emit_final(self, payload: m.Payload | None) -> None: ...
