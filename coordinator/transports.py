"""Transports of an averaging round: snapshots through the coordinator, or a collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol

from coordinator import messages as m
from coordinator.averaging import usable_weights
from coordinator.config import AverageBackend
from coordinator.ledger import Epoch
from coordinator.messages import AbortCollective, Average, Event, ParamSnapshot, SyncAck
from coordinator.run_state import RunState


class Transport(ABC):
    """Carries out an averaging round: requests, replies and the effect of deaths.

    All state of a round is in its :class:`Round`. The coordinator depends on the properties of a
    transport, never on its type.

    Args:
        saving: Checkpoints that are captured by a round.
        round: The round in progress, reused for the next.

    Attributes:
        waits: Ranks wait for each other inside a round, in a group that a failed round breaks,
            with limits sent at its start.
        timeout_setting: Name of the setting that bounds the time of a reply.
    """

    first_state: ClassVar[RoundState]
    waits: ClassVar[bool]
    timeout_setting: ClassVar[str]

    def __init__(self, run: RunState, saving: RoundCheckpoints, round: Round) -> None:
        self._run = run
        self._saving = saving
        self._round = round

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
    RoundState.NONE: {RoundState.COLLECTING, RoundState.SYNCING},
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

    def begin(self, state: RoundState, ranks: tuple[int, ...], **settings: Any) -> None:
        """Start the next round with these fields; all others are reset."""
        self.move(state)
        settings |= {"id": self.id + 1, "num_failed": self.num_failed}
        fresh = Round(state=state, ranks=ranks, **settings)
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))

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

    def drop_snapshots(self) -> None:
        self.snapshots = {}

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
        rnd.drop_snapshots()
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


class RoundCheckpoints(Protocol):
    """Checkpoints captured by a round; see :class:`~coordinator.saving.RunCheckpointer`."""

    @property
    def due(self) -> bool:
        """True if the next round is to make a checkpoint."""

    def begin_round(self, ranks: Sequence[int]) -> None:
        """Start a checkpoint with a round whose replies carry the ranks' states."""

    def add_rank(self, rank: int, extra: m.Extra | None, payload: m.Payload | None = None) -> None:
        """Add a rank's part."""

    def commit(self, payload: m.Payload | None) -> None:
        """Complete the checkpoint with the round."""

    def cancel(self) -> None:
        """Discard the checkpoint: the round failed."""
