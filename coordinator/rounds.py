"""Carrying averaging rounds out: who is asked, what is averaged, what is learnt."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import ClassVar, Protocol

from coordinator import messages as m
from coordinator.averaging import usable_weights
from coordinator.cadence import Verdict
from coordinator.config import AverageBackend
from coordinator.messages import AbortCollective, Average, Event, ParamSnapshot, SyncAck
from coordinator.pool import Epoch
from coordinator.state import Core, Phase, RankState
from coordinator.transport import RoundCost

_OF_ROUNDS = (m.ParamSnapshot, m.Averaged, m.SyncAck)


class OwnTime:
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
        self._of_round = isinstance(event, _OF_ROUNDS)
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


# ``CPU``: ``COLLECTING`` snapshots, ``COMPUTING`` their average in the background,
# ``DELIVERING`` it until every rank has acknowledged. Over a collective: ``SYNCING`` until
# every rank has acknowledged. There is at most one round at a time, and the next starts
# only after the last acknowledgement, so that no report from before a round can trigger
# another, and the averaged buffers are no longer read when they are written again.


class RoundState(Enum):
    """Where a round stands."""

    NONE = "none"
    COLLECTING = "collecting"
    COMPUTING = "computing"
    DELIVERING = "delivering"
    SYNCING = "syncing"


_NEXT = {
    RoundState.NONE: {RoundState.COLLECTING, RoundState.SYNCING},
    RoundState.COLLECTING: {RoundState.COMPUTING, RoundState.NONE},
    RoundState.COMPUTING: {RoundState.DELIVERING, RoundState.NONE},
    RoundState.DELIVERING: {RoundState.NONE},
    RoundState.SYNCING: {RoundState.NONE},
}


@dataclass(slots=True)
class Round:
    """The round in progress, or the last one while ``state`` is ``NONE``.

    ``ranks`` are those whose state goes in, ``lead`` the one that evaluates and hands
    over the average if it closes ``epoch``. ``doomed``: a rank died in the collective
    before it could say what it put in, so that the round must be undone. ``capture``: a
    checkpoint is made of it. ``backend`` carries it to its end, whatever is chosen meanwhile;
    ``fault``: why that has failed in it, if it has. ``idle`` are ranks that had nothing to
    train when it began; ``stale_s`` is how long they trained on until the average came.
    """

    id: int = 0
    state: RoundState = RoundState.NONE
    ranks: tuple[int, ...] = ()
    lead: int = 0
    epoch: Epoch | None = None
    generation: int = 0
    doomed: bool = False
    evaluate: int | None = None
    at: int | None = None
    checkpoint: int | None = None
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
    began_at: float = 0.0
    stale_s: float = 0.0
    idle: frozenset[int] = frozenset()

    @property
    def in_flight(self) -> bool:
        """Whether a round is in progress."""
        return self.state is not RoundState.NONE

    def move(self, state: RoundState) -> None:
        """Go to ``state``; an illegal move is a bug."""
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    def begin(
        self,
        state: RoundState,
        ranks: tuple[int, ...],
        *,
        epoch: Epoch | None,
        generation: int,
        evaluate: int | None,
        checkpoint: int | None,
        at: int | None = None,
        capture: bool = False,
        backend: AverageBackend = AverageBackend.CPU,
        now: float = 0.0,
        idle: frozenset[int] = frozenset(),
    ) -> None:
        """Start the next round; what is not told here is as in a new one."""
        self.move(state)
        fresh = Round(
            id=self.id + 1,
            state=state,
            ranks=ranks,
            lead=ranks[0],
            epoch=epoch,
            generation=generation,
            evaluate=evaluate,
            at=at,
            checkpoint=checkpoint,
            capture=capture,
            num_failed=self.num_failed,
            backend=backend,
            began_at=now,
            idle=idle,
        )
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))

    def accepts(self, message: ParamSnapshot | SyncAck, state: RoundState) -> bool:
        """Whether a reply belongs to this round, in this state, and is the first."""
        seen = self.snapshots if isinstance(message, ParamSnapshot) else self.acks
        return (
            message.round == self.id
            and self.state is state
            and message.rank in self.ranks
            and message.rank not in seen
        )

    def is_part(self, event: Event) -> bool:
        """Whether this answer was taken and the round still waits for others.

        It makes nothing due then, unless what it tells of training lifts a limit.
        """
        taken: ParamSnapshot | SyncAck | None
        if isinstance(event, ParamSnapshot):
            taken, during = self.snapshots.get(event.rank), self.state is RoundState.COLLECTING
        elif isinstance(event, SyncAck):
            taken = self.acks.get(event.rank)
            during = self.state in (RoundState.DELIVERING, RoundState.SYNCING)
        else:
            return False
        return during and taken is not None and taken.round == event.round

    def forget_tensors(self) -> None:
        """Drop the references to the snapshots."""
        self.snapshots = {}

    def drop(self, rank: int) -> None:
        """The rank is dead: nothing of it is waited for."""
        self.ranks = tuple(r for r in self.ranks if r != rank)
        self.acks.pop(rank, None)

    @property
    def all_snapshots(self) -> bool:
        return len(self.snapshots) == len(self.ranks)

    @property
    def all_acks(self) -> bool:
        return len(self.acks) == len(self.ranks)


_NONE = (None, None)


class SavesOfRounds(Protocol):
    """How a round becomes a checkpoint; see :class:`~coordinator.checkpoint.CheckpointRounds`."""

    @property
    def due(self) -> bool:
        """Whether the next round is to be kept."""

    def begin_round(self, ranks: Sequence[int]) -> None:
        """A round begins whose answers carry the ranks' own states."""

    def note(self, rank: int, extra: m.Extra | None, payload: m.Payload | None = None) -> None:
        """A rank's part has come."""

    def commit(self, payload: m.Payload | None) -> None:
        """The round has settled what is in it."""

    def cancel(self) -> None:
        """The round failed."""


class Progress(Enum):
    """What a reply, or a death, has made of the round in progress."""

    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


class Transport(ABC):
    """How an averaging round travels between the ranks.

    It asks each rank for its part, takes the replies, and says what becomes of the round when a
    rank dies. Whatever it knows of a round stands in the :class:`Round`. The machine asks what a
    transport can do, never which one it is.

    Args:
        core: The machine's state.
        saving: The checkpoints, some of which are made of a round.
        round: The round in progress, reused from one to the next.

    Attributes:
        first: The state in which a round begins.
        waits: Whether ranks wait for each other inside a round, in a group that a failed
            round breaks, with limits that were told when it began.
        timeout: The setting that bounds how long an answer may take.
    """

    first: ClassVar[RoundState]
    waits: ClassVar[bool]
    timeout: ClassVar[str]

    def __init__(self, core: Core, saving: SavesOfRounds, round: Round) -> None:
        self._core = core
        self._saving = saving
        self._round = round

    @property
    @abstractmethod
    def patience_s(self) -> float:
        """How long an answer may take before it counts as late, in seconds."""

    @abstractmethod
    def ask(self, now: float) -> None:
        """The round has begun: ask each of its ranks for its part."""

    @abstractmethod
    def take(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> Progress:
        """Take a reply, or the average; one that belongs to another round changes nothing."""

    @abstractmethod
    def on_death(self, rank: int) -> Progress:
        """A rank of the round in progress is dead."""

    def holds(self, rank: int) -> bool:
        """Whether the round in progress may still bring a dead rank's part into the result."""
        return False

    def undo(self) -> list[int]:
        """The round is given up; returns the live ranks that must undo it."""
        return []

    def _commit(self) -> None:
        """The average exists: what was in it is settled."""
        core, rnd = self._core, self._round
        core.num_averagings += 1
        oldest = core.pool.oldest
        if oldest is not None:
            oldest.num_averagings += 1
        core.note_norms(rnd.divergences, rnd.norm)
        if rnd.epoch is not None:
            rnd.epoch.worked = True
            rnd.epoch.lead = rnd.lead
        for rank in rnd.ranks:
            core.global_step += core.pool.settle(rank)


class SnapshotTransport(Transport):
    """Snapshots go to the coordinator, which averages them in the background.

    No rank waits: each adds ``average - its own snapshot`` to its live parameters.
    """

    first = RoundState.COLLECTING
    waits = False
    timeout = "snapshot_timeout"

    @property
    def patience_s(self) -> float:
        """At least three of the slowest rank's steps."""
        c = self._core.config
        slowest = max(self._core.elche.seconds_per_batch or (0.0,)) * c.accumulate
        return max(c.snapshot_timeout_s, 3 * slowest)

    def ask(self, now: float) -> None:
        """Ask each rank for a snapshot."""
        rnd = self._round
        rnd.deadline = now + self.patience_s
        for rank in rnd.ranks:
            self._core.send(rank, m.RequestParams(round=rnd.id, capture=rnd.capture))

    def take(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> Progress:
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
        """A rank's state has come; with the last of them the average is computed."""
        rnd = self._round
        if not rnd.accepts(event, RoundState.COLLECTING):
            return
        rnd.snapshots[event.rank] = event
        self._core.ranks[event.rank].freeze()
        self._core.pool.freeze(event.rank)
        if rnd.capture:
            self._saving.note(event.rank, event.extra)
        if rnd.all_snapshots:
            rnd.move(RoundState.COMPUTING)
            rnd.deadline = None
            order = [rnd.snapshots[r] for r in rnd.ranks]
            self._core.out.append(
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
        """The average is there, or could not be computed."""
        rnd = self._round
        if event.round != rnd.id or rnd.state is not RoundState.COMPUTING:
            return Progress.WAITING
        rnd.forget_tensors()
        if event.average is None:
            rnd.fault = f"the average could not be computed: {event.error}"
            return Progress.FAILED
        rnd.move(RoundState.DELIVERING)
        rnd.stale_s = now - rnd.began_at
        rnd.deadline = now + self.patience_s
        rnd.divergences = dict(event.divergences)
        rnd.norm = event.norm
        rnd.average_s = event.compute_s
        self._commit()
        if rnd.capture:
            self._saving.commit(event.kept)
        self._core.gate.new_round()
        for rank in rnd.ranks:
            info, lead = self._core.ranks[rank], rank == rnd.lead
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
                    evaluate=rnd.evaluate if lead else None,
                    at=rnd.at if lead else None,
                    checkpoint=rnd.checkpoint if lead else None,
                ),
            )
            self._core.send(rank, m.SetGlobalStep(step=self._core.position))
        return Progress.WAITING

    def on_death(self, rank: int) -> Progress:
        """What its snapshot holds is lost with the rank, unless the average is out."""
        rnd = self._round
        if rnd.state is not RoundState.DELIVERING:
            return Progress.FAILED
        rnd.drop(rank)
        return Progress.DONE if rnd.all_acks else Progress.WAITING


class CollectiveTransport(Transport):
    """The ranks average among themselves, in a collective where each waits for all others."""

    first = RoundState.SYNCING
    waits = True
    timeout = "collective_timeout"

    @property
    def patience_s(self) -> float:
        """What a rank waits for its peers in the collective."""
        return self._core.config.collective_timeout_s

    def ask(self, now: float) -> None:
        """Send each rank into the collective. The collective has a timeout of its own."""
        rnd = self._round
        rnd.deadline = None
        for rank in rnd.ranks:
            allowance, lead = self._core.gate.allowance(rank), rank == rnd.lead
            rnd.limits[rank] = allowance.limit
            self._core.send(
                rank,
                m.SyncNow(
                    round=rnd.id,
                    allowance=allowance,
                    evaluate=rnd.evaluate if lead else None,
                    at=rnd.at if lead else None,
                    checkpoint=rnd.checkpoint if lead else None,
                    capture=rnd.capture,
                ),
            )

    def take(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> Progress:
        """A rank has left the collective, with the average or without."""
        rnd = self._round
        if not isinstance(event, m.SyncAck) or not rnd.accepts(event, RoundState.SYNCING):
            return Progress.WAITING
        # The worker reported all it had trained before it joined.
        self._core.ranks[event.rank].enter_round()
        self._core.ranks[event.rank].set_limit(rnd.limits[event.rank])
        self._core.pool.freeze(event.rank)
        rnd.fault = rnd.fault or event.fault
        if rnd.capture and event.ok:
            self._saving.note(event.rank, event.extra, event.average)
        rnd.acks[event.rank] = replace(event, extra=None, average=None)
        if rnd.all_acks:
            return self._end()
        if not event.ok and rnd.deadline is None:
            rnd.deadline = now + self.patience_s
        return Progress.WAITING

    def _end(self) -> Progress:
        """Every rank has left the collective."""
        rnd = self._round
        if rnd.doomed or not all(ack.ok for ack in rnd.acks.values()):
            return Progress.FAILED
        for rank, ack in rnd.acks.items():
            rnd.norm = ack.norm if rnd.norm is None else rnd.norm
            if ack.divergence is not None:
                rnd.divergences[rank] = ack.divergence
        self._commit()
        if rnd.capture:
            self._saving.commit(None)
        for rank in rnd.ranks:
            if self._core.is_live(rank):
                self._core.send(rank, m.SetGlobalStep(step=self._core.position))
        return Progress.DONE

    def on_death(self, rank: int) -> Progress:
        """A rank's part counts if it said what that was: the others have it, or it is undone."""
        rnd = self._round
        if not self._has_joined(rank):
            rnd.doomed = True
            rnd.drop(rank)
        return self._end() if rnd.all_acks else Progress.WAITING

    def holds(self, rank: int) -> bool:
        """Whether it has left the collective with the average."""
        return not self._round.doomed and self._has_joined(rank)

    def _has_joined(self, rank: int) -> bool:
        ack = self._round.acks.get(rank)
        return ack is not None and ack.ok

    def undo(self) -> list[int]:
        """Break the group: some ranks may still wait in it, others have the average."""
        rnd = self._round
        self._core.out.append(AbortCollective(generation=rnd.generation))
        undo: list[int] = []
        for rank, ack in rnd.acks.items():
            info = self._core.ranks[rank]
            info.since_round += info.round_batches
            info.compute_since_round += info.round_compute_s
            if ack.ok and self._core.is_live(rank):
                undo.append(rank)
        return undo


TRANSPORTS: dict[AverageBackend, type[Transport]] = {AverageBackend.CPU: SnapshotTransport}
"""What carries a round out where it is no collective."""

OWN_SHARE, RATED_PER_S = 0.012, 1000.0
"""Part of a core that the coordinator's thread may take for averaging rounds where all ranks
together train so many batches a second or more: the ranks miss that time, since they share the
interpreter with it, and none of their clocks shows it. With fewer batches it may take more: what
averaging seldom costs in quality follows the batches between two rounds and not the time. A tuning
for steps of about a millisecond, see docs/measurements.md."""


class RoundKeeper:
    """Runs one averaging round at a time, each over the transport that is chosen when it begins.

    Attributes:
        round: The round in progress, or the last one.
        transport: How it travels.
        own_time: What rounds cost the coordinator's thread.
    """

    def __init__(self, core: Core, saving: SavesOfRounds) -> None:
        self._core = core
        self._saving = saving
        self.own_time = OwnTime(core)
        self.round = Round(backend=core.choice.chosen)
        self._transports = {
            backend: TRANSPORTS.get(backend, CollectiveTransport)(core, saving, self.round)
            for backend in core.config.backends
        }
        self.transport = self._transports[core.choice.chosen]

    @property
    def next_transport(self) -> Transport:
        """How the next round travels."""
        return self._transports[self._core.choice.next]

    def start(
        self,
        now: float,
        epoch: Epoch | None = None,
        work: tuple[int | None, int | None] = _NONE,
        at: int | None = None,
    ) -> None:
        """Ask every live rank for its part; if a checkpoint is due it is made of the round.

        Args:
            now: The time.
            epoch: The epoch that the average closes, or one whose lead died.
            work: Epoch to evaluate and version to hand over on the average.
            at: See :class:`~coordinator.messages.Evaluate`.
        """
        evaluate, checkpoint = work
        ranks = tuple(r.rank for r in self._core.live)
        if capture := self._saving.due:
            self._saving.begin_round(ranks)
        ledgers = self._core.pool.ledgers
        self.transport = self.next_transport
        self.round.begin(
            self.transport.first,
            ranks,
            epoch=epoch,
            generation=self._core.generation,
            evaluate=evaluate,
            checkpoint=checkpoint,
            at=at,
            capture=capture,
            backend=self._core.choice.next,
            now=now,
            idle=frozenset(rank for rank in ranks if not ledgers[rank].assigned),
        )
        self._core.gate.new_round()
        self.transport.ask(now)

    @property
    def limits_stand(self) -> bool:
        """Whether the ranks' limits are left alone: one could be read against either round."""
        return self.round.in_flight and self.transport.waits

    def take(self, event: m.ParamSnapshot | m.Averaged | m.SyncAck, now: float) -> bool:
        """Take a reply to the round; returns False if the round must be given up."""
        return self._went_on(self.transport.take(event, now))

    def on_death(self, rank: int) -> bool:
        """A rank of the round may be dead; returns False if the round must be given up."""
        if not self.round.in_flight or rank not in self.round.ranks:
            return True
        return self._went_on(self.transport.on_death(rank))

    def _went_on(self, progress: Progress) -> bool:
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
        busy = rnd.lead if (rnd.evaluate, rnd.checkpoint) != _NONE else -1
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
        own_s = self.own_time.take()
        sync_s = max(ack.sync_s for ack in rnd.acks.values())
        # The background computation takes its time from the ranks' cores.
        sync_s += rnd.average_s / len(rnd.ranks)
        sync_s += self._own_cost(own_s)
        if self._core.choice.is_tried(rnd.backend):
            sync_s = math.nan  # the cadence follows what is in use
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
        trained_s = sum(seconds for seconds, _ in times)
        anchor = self._core.elche.anchor
        if self._core.choice.note(rnd.backend, self._cost(own_s), trained_s, anchor):
            self._core.tell_choice()

    def _cost(self, own_s: float) -> RoundCost | None:
        """What the round took from the training; ``None`` if it did more than averaging.

        Ranks that go on while an average is made train on what the others have not seen: of
        that time the part counts that averaging may cost altogether.
        """
        rnd = self.round
        if rnd.capture or (rnd.evaluate, rnd.checkpoint) != _NONE:
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
        rate = sum(1 / s for s in seconds if s) if seconds else RATED_PER_S
        share = OWN_SHARE * max(1.0, RATED_PER_S / rate)
        weight = self._core.config.overhead_target / share
        # As with the computation, a core that it takes is one of theirs.
        return own_s * max(weight, 1 / len(self.round.ranks))

    def note_fault(self, now: float) -> None:
        """The round fails because its transport did."""
        rnd = self.round
        lost_s = (now - rnd.began_at) * len(rnd.ranks)
        self._core.choice.note_fault(rnd.backend, RoundCost(ranks_s=lost_s))

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
        rnd.forget_tensors()
        self.own_time.take()  # what was noted so far is no cost of the next one
        rnd.num_failed += 1
        self._core.num_failed_rounds += 1
        self._core.pool.thaw()
        for info in self._core.ranks:
            if info.state is RankState.DEAD:
                self._core.pool.take_back(info.rank, self._core.elche.shares)
        return undo


class Limits:
    """Sends each rank the limit that the :class:`~coordinator.state.BatchLimits` gives it."""

    def __init__(self, core: Core, rounds: RoundKeeper) -> None:
        self._core = core
        self._rounds = rounds

    def begin(self) -> None:
        """The run begins: tell every rank its first allowance."""
        if self._core.alone or self._core.lockstep:
            return
        for rank in self._core.live:
            allowance = self._core.gate.allowance(rank.rank)
            rank.set_limit(allowance.limit)
            self._core.send(rank.rank, m.Resume(allowance=allowance))

    def readjust(self) -> None:
        """Tell every rank anew how far it may go, and whose count makes a round due."""
        if self._core.alone or self._core.lockstep or self._core.phase is Phase.STARTING:
            return
        if self._rounds.limits_stand:
            return  # done when the round ends
        live = self._core.live
        self._core.gate.new_round()
        for rank in live:
            limit = self._core.gate.limit(rank, live)
            rank.set_limit(limit)
            self._core.send(
                rank.rank, m.Resume(allowance=self._core.gate.allowance_for(rank, limit))
            )

    def adjust(self) -> None:
        """Tell those ranks whose limit has changed."""
        if not self._core.gate.limits or self._core.alone or self._rounds.limits_stand:
            return
        live = self._core.live
        for rank in live:
            limit = self._core.gate.limit(rank, live)
            if self._core.gate.limit_is_current(rank.rank, rank.limit, limit):
                continue
            raised = limit is None or (rank.limit is not None and limit > rank.limit)
            rank.set_limit(limit)
            if raised:
                self._core.send(
                    rank.rank, m.Resume(allowance=self._core.gate.allowance_for(rank, limit))
                )
            elif limit is not None:
                self._core.send(rank.rank, m.Throttle(limit=limit))
