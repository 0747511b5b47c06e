"""A machine of a simulated cluster: the real member, and what its driver does for it.

In place of a model there is a vector with a place for each batch of the run, which training
that batch adds 1 to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from coordinator.cluster.facts import EpochRanges, Facts
from coordinator.cluster.ledger import ClusterLedger, RoundOutcome
from coordinator.cluster.member import (
    MAX_FAILED_CAPTURES,
    AdoptState,
    ApplyRound,
    CaptureDone,
    CaptureFailed,
    Commit,
    Committed,
    Finish,
    FormQuorum,
    GatherFacts,
    Idle,
    Member,
    MemberCommand,
    MemberEvent,
    ReduceChanges,
    ReduceDone,
    Reject,
    RequestCapture,
    ResetEngine,
    ResumeGrant,
    RunReady,
    Stop,
)
from coordinator.messages import Tick
from coordinator.splitting import compress
from tests.simulation.cluster_schedule import Fault, Host
from tests.simulation.effects import Batch, Violation

if TYPE_CHECKING:
    from tests.simulation.cluster_engine import Group
    from tests.simulation.cluster_harness import ClusterSimulation


def in_ranges(batches: list[Batch]) -> EpochRanges:
    """Batches as they are told to a member."""
    epochs = sorted({epoch for epoch, _ in batches})
    return tuple((e, tuple(compress(sorted(b for x, b in batches if x == e)))) for e in epochs)


def listed(batches: EpochRanges) -> list[Batch]:
    """What :func:`in_ranges` was made of, in rising order."""
    return [(epoch, b) for epoch, spans in batches for span in spans for b in span]


class SharingMember(Member):
    """A member that takes verdicts from a member of the same history, if there are any."""

    def __init__(self, sim: ClusterSimulation, machine: str, ledger: ClusterLedger) -> None:
        period_s = sim.schedule.period_s
        super().__init__(machine, ledger, leave_s=5 * period_s, linger_s=5 * period_s)
        self._sim = sim

    def evaluate(self, facts: tuple[Facts, ...]) -> RoundOutcome:
        if not self._sim.shares:
            return super().evaluate(facts)
        verdicts = self._sim.verdicts
        key = (self.ledger.lineage, id(facts))
        if key not in verdicts:
            verdicts[key] = (facts, super().evaluate(facts))
        return verdicts[key][1]


class SimMachine:
    """One process.

    Attributes:
        whole: The global parameters.
        live: The inner run's.
        engine_step: Commits that the engine has counted.
        leaving: Whether it leaves after the round that it is in.
        call: Number of the request that is under way; each is answered once.
        group: The round it is in.
        received: The state that came with the last quorum.
    """

    def __init__(self, sim: ClusterSimulation, host: Host) -> None:
        self._sim = sim
        self.host = host
        self.name = host.name
        self.member = SharingMember(sim, host.name, sim.new_ledger(odd=host.odd))
        self.whole = np.zeros(sim.num_places, dtype=np.int32)
        self.live = self.whole.copy()
        self.engine_step = 0
        self.call = 0
        self.answered = True
        self.group: Group | None = None
        self.received: Any = None
        self.begun = False
        self.dead = False
        self.outcome: Finish | Reject | None = None
        self.ended_s = 0.0
        self.leaving = False
        self.closed: list[int] = []
        self.last_commit: tuple[dict[str, Any], Any] | None = None
        self._silent_since: float | None = None
        self._deferred: list[Callable[[], None]] = []
        self._faults: list[Fault] = []
        self._tick_at: float | None = None
        # the inner run
        self._todo: list[Batch] = []  # what is trained next last
        self._back: list[Batch] = []
        self._trained: list[Batch] = []
        self._captured: int | None = None  # how many of those trained are in the capture
        self._snapshot: Any = None
        self._tallies: Counter[int] = Counter()
        self._told_idle = True
        self._next_at = 0.0
        self._wake = 0
        self.num_trained = 0
        self._num_failed = 0  # captures in a row

    # -- life -----------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """Whether it is dead or out."""
        return self.dead or self.outcome is not None

    @property
    def stalled(self) -> bool:
        """Whether its process stands still."""
        return self._silent_since is not None and not self.gone

    def heard_until(self, now: float) -> float:
        """Until when it has sent heartbeats."""
        return now if self._silent_since is None else self._silent_since

    def begin(self) -> None:
        """The process is up and its model built."""
        sim, origin = self._sim, self.host.origin
        self.begun = True
        if origin is not None and sim.machines[origin].last_commit is not None:
            state, whole = sim.machines[origin].last_commit or ({}, None)
            self.member.ledger.load_state_dict(state)
            self.member = SharingMember(sim, self.name, self.member.ledger)
            self.whole = whole.copy()
            self.live = whole.copy()
        self.tell(RunReady())

    def suffer(self, fault: Fault) -> None:
        """Something happens to it, or will at a command."""
        if self.gone or not self.begun:
            return
        if fault.at is not None:
            self._faults.append(fault)
            return
        self._sim.trace.append((self._sim.now, self.name, fault))
        match fault.kind:
            case "die":
                self._end()
                self.dead = True
            case "stall":
                self._stall(fault.for_s)
            case "stop" | "stop everywhere":
                stop = Stop(everywhere=fault.kind != "stop")
                self.deliver(lambda: self.tell(stop))
            case _:
                raise AssertionError(fault.kind)

    def _end(self) -> None:
        self._advance()
        if self._silent_since is None:
            self._silent_since = self._sim.now
        self._sim.engine.leave(self)
        self._sim.engine.silent()
        self.call += 1

    def _stall(self, for_s: float) -> None:
        if self.stalled:
            return
        self._advance()
        self._silent_since = self._sim.now
        self._sim.engine.silent()
        self._sim.at(self._sim.now + for_s, self._go_on)

    def _go_on(self) -> None:
        if self.gone:
            return
        self._silent_since = None
        self._next_at = self._sim.now + self.host.batch_s
        self._sim.engine.look()
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.deliver(action)
        self._watch_idle()

    def deliver(self, action: Callable[[], None]) -> None:
        """Do something in the process, once it runs."""
        if self.stalled:
            self._deferred.append(action)
        elif not self.gone:
            action()

    def answer(
        self,
        call: int,
        event: Any,
        delay_s: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        """The request under way is answered."""
        if call != self.call or self.answered:
            return
        self.answered = True

        def arrive() -> None:
            if call == self.call:
                if before is not None:
                    before()
                self.tell(event)

        self._sim.at(self._sim.now + delay_s, lambda: self.deliver(arrive))

    # -- the driver -----------------------------------------------------------------------

    def _ask(self) -> None:
        self.call += 1
        self.answered = False

    def tell(self, event: MemberEvent) -> None:
        """An event reaches the member, and what it commands is done."""
        sim = self._sim
        self._advance()
        if not isinstance(event, Tick):
            sim.trace.append((sim.now, f"{self.name} <-", event))
        for command in self.member.handle(event, sim.now + self.host.clock_s):
            if self.gone:
                return
            sim.trace.append((sim.now, f"{self.name} ->", command))
            self._execute(command)
            self._suffer_at(type(command).__name__)
        self._set_tick()
        self._watch_idle()

    def _suffer_at(self, command: str) -> None:
        for fault in [f for f in self._faults if f.at == command]:
            self._faults.remove(fault)
            self.suffer(Fault(kind=fault.kind, name=fault.name, at_s=0.0, for_s=fault.for_s))

    def _set_tick(self) -> None:
        deadline = self.member.deadline
        if deadline is None or self.gone:
            return
        at_s = max(self._sim.now, deadline - self.host.clock_s + 1e-9)
        if self._tick_at is not None and self._sim.now < self._tick_at <= at_s:
            return  # the one that is on its way comes earlier, and sets the next
        self._tick_at = at_s
        self._sim.at(at_s, lambda: self.deliver(self._tick))

    def _tick(self) -> None:
        self._tick_at = None
        self.tell(Tick())

    def _execute(self, command: MemberCommand) -> None:
        sim = self._sim
        match command:
            case FormQuorum():
                self._ask()
                sim.engine.leave(self)
                call = self.call
                sim.at(
                    sim.now + sim.draw(sim.schedule.delay_s),
                    lambda: sim.engine.ask(self) if self.call == call and not self.gone else None,
                )
            case AdoptState():
                self.whole = self.received.copy()
                self._drop()
            case ResetEngine():
                self.engine_step = command.step
                self.received = None
            case RequestCapture():
                self._ask()
                self._begin_capture(command.reserve_s)
            case GatherFacts():
                self._ask()
                facts = sim.sent(command.facts)
                self.leaving = facts.leaving
                chance = sim.schedule.gather_chance
                sim.engine.exchange(self, "gather", facts, chance, sim.gathered)
            case ReduceChanges():
                self._ask()
                value = (self._difference(), command)
                chance = sim.schedule.reduce_chance
                sim.engine.exchange(self, "reduce", value, chance, self._summed)
            case Commit():
                self._ask()
                self._commit(command.ok)
            case ApplyRound():
                self._apply(command)
            case ResumeGrant():
                sim.engine.leave(self)
                self._resume()
            case Reject() | Finish():
                self.outcome, self.ended_s = command, sim.now
                self._end()
                sim.on_end(self)
            case _:
                assert_never(command)

    def offer(self) -> tuple[dict[str, Any], Any]:
        """What another machine is healed from."""
        return self._sim.state_of(self.member.ledger), self.whole

    def _difference(self) -> Any:
        return None if self._snapshot is None else self._snapshot - self.whole

    def _summed(self, brought: list[Any]) -> ReduceDone:
        differences, commands = zip(*brought, strict=True)
        if any(command != commands[0] for command in commands):
            raise Violation("machines weigh each other differently")
        total = np.zeros_like(self.whole)
        for difference, weight in zip(differences, commands[0].weights, strict=True):
            if weight:
                total += difference
        assert self.group is not None
        self.group.total = total
        return ReduceDone(ok=True)

    def _commit(self, ok: bool) -> None:
        sim, s = self._sim, self._sim.schedule
        fails = sim.now < s.quiet_s and sim.rng.random() < s.commit_chance
        decided = ok and not fails

        def count() -> None:
            self.engine_step += decided

        delay_s = sim.draw(s.delay_s)
        self.answer(self.call, Committed(ok=decided), delay_s, before=count)

    def _apply(self, command: ApplyRound) -> None:
        sim = self._sim
        if command.reduced:
            if self.group is None or self.group.total is None:
                raise Violation(f"machine {self.name} applies sums that it never got")
            self.whole = self.whole + self.group.total
        num = len(self._trained) if self._captured is None else self._captured
        since = self._trained[num:]
        self._tallies.update(epoch for epoch, _ in self._trained[:num])
        if command.restart:
            if self._trained or self._todo or self._back:
                raise Violation(f"machine {self.name} kept on training after it was healed")
            self.live = self.whole.copy()
            self._tallies.clear()
        elif self._snapshot is not None:
            self.live = self.live + (self.whole - self._snapshot)
        else:
            if self._trained:
                raise Violation(f"machine {self.name} has trained and was not captured")
            self.live = self.whole.copy()
        granted = listed(command.grant.batches)
        if self.member.ledger.ended:
            since = []  # it is lost: all of it is in nobody's grant
            self.live = self.whole.copy()
        done = set(since)
        if done - set(granted):
            raise Violation(f"machine {self.name} keeps {done - set(granted)} and lost them")
        self._trained = since
        self._back, self._captured, self._snapshot = [], None, None
        self._take([batch for batch in granted if batch not in done])
        self.closed += [closed.epoch for closed in command.closed]
        self.last_commit = (sim.state_of(self.member.ledger), self.whole)
        sim.on_commit(self, command)

    # -- the inner run --------------------------------------------------------------------

    def _take(self, batches: list[Batch]) -> None:
        """Train these from here on, several at a time, from as many places."""
        lanes = self.host.lanes
        rows = [
            batches[i * len(batches) // lanes :][: len(batches) // lanes + 1] for i in range(lanes)
        ]
        order = dict.fromkeys(
            row[i] for i in range(len(batches) // lanes + 1) for row in rows if i < len(row)
        )
        busy = bool(self._todo)
        self._todo = list(order)[::-1]
        if not busy:
            self._next_at = self._sim.now + self.host.batch_s
        self._told_idle = False

    def _drop(self) -> None:
        self._todo, self._back, self._trained = [], [], []
        self._captured, self._snapshot = None, None
        self._told_idle = True

    def _advance(self) -> None:
        """Train what has been trained until now."""
        now = self._sim.now
        if self._silent_since is not None:
            return
        while self._todo and self._next_at <= now:
            batch = self._todo.pop()
            self.live[self._sim.place(batch)] += 1
            self._trained.append(batch)
            self.num_trained += 1
            self._next_at += self.host.batch_s

    def _watch_idle(self) -> None:
        """Tell the member once, when nothing is left."""
        if self.gone or self.stalled or self._told_idle or self._back:
            return
        self._wake += 1
        wake = self._wake
        wait_s = 0.0
        if self._todo:
            wait_s = self._next_at - self._sim.now + (len(self._todo) - 1) * self.host.batch_s
        self._sim.at(self._sim.now + wait_s + 1e-9, lambda: self.deliver(lambda: self._idle(wake)))

    def _idle(self, wake: int) -> None:
        self._advance()
        if wake == self._wake and not self._todo and not self._back and not self._told_idle:
            self._told_idle = True
            self.tell(Idle())

    def _begin_capture(self, reserve_s: float) -> None:
        num = min(len(self._todo), self.host.lanes + int(reserve_s / self.host.batch_s))
        self._back = self._todo[: len(self._todo) - num]
        self._todo = self._todo[len(self._todo) - num :]
        sim, call = self._sim, self.call
        delay_s = sim.draw(sim.schedule.capture_s)

        def done() -> None:
            if self.call == call:
                self._capture(keeps=reserve_s > 0)

        sim.at(sim.now + delay_s, lambda: self.deliver(done))

    def _capture(self, *, keeps: bool) -> None:
        sim, s = self._sim, self._sim.schedule
        self._advance()
        fails = sim.now < s.quiet_s and sim.rng.random() < s.capture_chance
        self._num_failed = self._num_failed + 1 if fails else 0
        if 0 < self._num_failed < MAX_FAILED_CAPTURES:
            self.answer(self.call, CaptureFailed(error="a worker died"), 0.0)
            return
        if not keeps:
            self._back, self._todo = self._back + self._todo, []
        self._snapshot = self.live.copy()
        self._captured = len(self._trained)
        tallies = Counter(self._tallies)
        tallies.update(epoch for epoch, _ in self._trained)
        done = CaptureDone(
            done=in_ranges(self._trained),
            kept=in_ranges(self._todo),
            weight=float(len(self._trained)),
            num_samples=len(self._trained),
            seconds_per_batch=self.host.batch_s if self.num_trained else None,
            tallies=tuple(
                (epoch, {"batches": tallies[epoch]})
                for epoch in self.member.ledger.open_epochs
                if tallies[epoch]
            ),
        )
        self.answer(self.call, done, 0.0)

    def _resume(self) -> None:
        """The old grant goes on."""
        busy = bool(self._todo)
        self._todo = self._back + self._todo
        self._back, self._captured, self._snapshot = [], None, None
        if not busy:
            self._next_at = self._sim.now + self.host.batch_s
        if not self.member.healing:
            self._told_idle = False
