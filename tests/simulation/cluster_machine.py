"""A machine of a simulated cluster: the real member, and a simulated inner run.

The model is a vector with an element for each batch of the run; training a batch adds 1 to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from coordinator.cluster.cluster_ledger import ClusterLedger, LedgerState, RoundOutcome
from coordinator.cluster.machine_report import EpochRanges, MachineReport
from coordinator.cluster.member import (
    MAX_FAILED_CAPTURES,
    AdoptState,
    ApplyRound,
    Capture,
    Captured,
    Commit,
    FormQuorum,
    Gather,
    Member,
    MemberAction,
    Reduce,
    ResetEngine,
    ResumeGrant,
    RoundFailed,
    Wait,
)
from coordinator.codec import decode
from coordinator.metrics import MachineStats, Sums
from coordinator.run_errors import ClusterError
from coordinator.splitting import union
from tests.simulation.cluster_schedule import Fault, Host
from tests.simulation.effects import Batch, Violation

if TYPE_CHECKING:
    from tests.simulation.cluster_engine import Group
    from tests.simulation.cluster_harness import ClusterSimulation


def to_ranges(batches: list[Batch]) -> EpochRanges:
    """Batches as ranges by epoch."""
    epochs = sorted({epoch for epoch, _ in batches})
    return tuple((e, tuple(union(range(b, b + 1) for x, b in batches if x == e))) for e in epochs)


def to_list(batches: EpochRanges) -> list[Batch]:
    """The inverse of :func:`to_ranges`, in ascending order."""
    return [(epoch, b) for epoch, spans in batches for span in spans for b in span]


class SharingMember(Member):
    """A member that shares outcomes with members of the same history."""

    def __init__(self, sim: ClusterSimulation, host: Host, ledger: ClusterLedger) -> None:
        patience_s = 5 * sim.schedule.period_s
        super().__init__(
            host.name,
            ledger,
            lambda: sim.now + host.clock_s,
            leave_s=patience_s,
            linger_s=patience_s,
        )
        self._sim = sim

    def evaluate(self, reports: tuple[MachineReport, ...]) -> RoundOutcome:
        if not self._sim.shares_outcomes:
            return super().evaluate(reports)
        outcomes = self._sim.outcomes
        key = (self.ledger.lineage, id(reports))
        if key not in outcomes:
            outcomes[key] = (reports, super().evaluate(reports))
        return outcomes[key][1]


class SimMachine:
    """One process.

    Attributes:
        global_vector: The global parameters.
        local_vector: The inner run's parameters.
        engine_step: Commits that the engine has counted.
        action: The action in progress, for whose result the member waits; ``None``: none.
        outcome: Once it is out, the reason why it cannot take part, else an empty text.
        call: Number of the request in progress; each is answered once.
        group: The round in progress.
        received: The state received with the last quorum.
    """

    def __init__(self, sim: ClusterSimulation, host: Host) -> None:
        self._sim = sim
        self.host = host
        self.name = host.name
        self.member = SharingMember(sim, host, sim.new_ledger(other_settings=host.other_settings))
        self._actions = self.member.run()
        self.action: MemberAction | None = None
        self.global_vector = np.zeros(sim.num_batches, dtype=np.int32)
        self.local_vector = self.global_vector.copy()
        self.engine_step = 0
        self.call = 0
        self.answered = True
        self.group: Group | None = None
        self.received: Any = None
        self.started = False
        self.dead = False
        self.outcome: str | None = None
        self.ended_s = 0.0
        self.closed: list[int] = []
        self.last_commit: tuple[dict[str, Any], Any] | None = None
        self._silent_since: float | None = None
        self._deferred: list[Callable[[], None]] = []
        self._faults: list[Fault] = []
        # the inner run
        self._queue: list[Batch] = []  # in reverse order of training
        self._returned: list[Batch] = []
        self._trained: list[Batch] = []
        self._captured: int | None = None  # number of trained batches in the capture
        self._snapshot: Any = None
        self._tallies: Counter[int] = Counter()
        self._idle_reported = True
        self._next_at = 0.0
        self._idle_id = 0
        self.num_trained = 0
        self._num_failed = 0  # captures in a row

    # -- life -----------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """True if it is dead or out."""
        return self.dead or self.outcome is not None

    @property
    def stalled(self) -> bool:
        """True if its process is suspended."""
        return self._silent_since is not None and not self.gone

    def last_heartbeat(self, now: float) -> float:
        """Time of its last heartbeat."""
        return now if self._silent_since is None else self._silent_since

    def begin(self) -> None:
        """Start the process with its built model."""
        sim, origin = self._sim, self.host.origin
        self.started = True
        if origin is not None and sim.machines[origin].last_commit is not None:
            state, global_vector = sim.machines[origin].last_commit or ({}, None)
            self.member.ledger.restore(decode(LedgerState, state, "ledger"))
            self.member = SharingMember(sim, self.host, self.member.ledger)
            self._actions = self.member.run()
            self.global_vector = global_vector.copy()
            self.local_vector = global_vector.copy()
        self.resume(None)

    def inject(self, fault: Fault) -> None:
        """Inject a fault now, or at a later action."""
        if self.gone or not self.started:
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
                everywhere = fault.kind != "stop"
                self.deliver(lambda: self._stop(everywhere=everywhere))
            case _:
                raise AssertionError(fault.kind)

    def _end(self) -> None:
        self._advance()
        if self._silent_since is None:
            self._silent_since = self._sim.now
        self._sim.engine.leave(self)
        self._sim.engine.on_silence()
        self.call += 1

    def _stall(self, for_s: float) -> None:
        if self.stalled:
            return
        self._advance()
        self._silent_since = self._sim.now
        self._sim.engine.on_silence()
        self._sim.at(self._sim.now + for_s, self._continue)

    def _continue(self) -> None:
        if self.gone:
            return
        self._silent_since = None
        self._next_at = self._sim.now + self.host.batch_s
        self._sim.engine.form_quorums()
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.deliver(action)
        self._schedule_idle()

    def deliver(self, action: Callable[[], None]) -> None:
        """Run an action in the process, once it is not suspended."""
        if self.stalled:
            self._deferred.append(action)
        elif not self.gone:
            action()

    def answer(
        self,
        call: int,
        result: Any,
        delay_s: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Answer the request in progress."""
        if call != self.call or self.answered:
            return
        self.answered = True

        def arrive() -> None:
            if call == self.call:
                if before is not None:
                    before()
                self.resume(result)

        self._sim.at(self._sim.now + delay_s, lambda: self.deliver(arrive))

    # -- the driver -----------------------------------------------------------------------

    def _begin_request(self) -> None:
        self.call += 1
        self.answered = False

    def resume(self, result: Any) -> None:
        """Resume the member with a result or a failure, and execute its actions up to one that
        takes time.
        """
        sim = self._sim
        self._advance()
        self.action = None
        while self.action is None and not self.gone:
            sim.trace.append((sim.now, f"{self.name} <-", result))
            action = self._next(result)
            if action is None:
                break
            sim.trace.append((sim.now, f"{self.name} ->", action))
            result = None
            if self._execute(action):
                self.action = action
            self._inject_at(type(action).__name__)
        self._set_alarm()
        self._schedule_idle()

    def _next(self, result: Any) -> MemberAction | None:
        """The member's next action; ``None``: it is out."""
        try:
            if isinstance(result, RoundFailed):
                return self._actions.throw(result)
            return self._actions.send(result)
        except StopIteration:
            self.outcome = ""
        except ClusterError as error:
            self.outcome = str(error)
        self.ended_s = self._sim.now
        self._end()
        self._sim.on_end(self)
        return None

    def _stop(self, *, everywhere: bool) -> None:
        self._sim.trace.append((self._sim.now, f"{self.name} <-", f"stop {everywhere=}"))
        self.member.stop(everywhere=everywhere)
        if isinstance(self.action, Wait):
            self.resume(False)
        else:
            self._set_alarm()

    def _inject_at(self, action: str) -> None:
        for fault in [f for f in self._faults if f.at == action]:
            self._faults.remove(fault)
            self._sim.seen[f"faults at {action}"] += 1
            self.inject(Fault(kind=fault.kind, name=fault.name, at_s=0.0, for_s=fault.for_s))

    @property
    def _until_s(self) -> float | None:
        """Time at which the action in progress ends at the latest; ``None``: no limit."""
        until = self.member.finish_by if isinstance(self.action, FormQuorum) else None
        if isinstance(self.action, Wait):
            until = self.action.until
        return None if until is None else until - self.host.clock_s + 1e-9

    def _set_alarm(self) -> None:
        if self._until_s is not None and not self.gone:
            action, at_s = self.action, max(self._sim.now, self._until_s)
            self._sim.at(at_s, lambda: self.deliver(lambda: self._end_action(action)))

    def _end_action(self, action: MemberAction | None) -> None:
        if self.action is not action or self._until_s is None or self._sim.now < self._until_s:
            return
        if isinstance(action, Wait):
            self.resume(False)
        else:  # as an engine that is cancelled
            self.call += 1
            self._sim.engine.leave(self)
            self.resume(RoundFailed("out of time"))

    def _execute(self, action: MemberAction) -> bool:
        """Execute an action; returns True if its result comes later."""
        sim = self._sim
        match action:
            case FormQuorum():
                self._begin_request()
                sim.engine.leave(self)
                call = self.call
                sim.at(
                    sim.now + sim.draw(sim.schedule.delay_s),
                    lambda: (
                        sim.engine.request_quorum(self)
                        if self.call == call and not self.gone
                        else None
                    ),
                )
            case AdoptState():
                self.global_vector = self.received.copy()
                self._discard_work()
                return False
            case ResetEngine():
                self.engine_step = action.step
                self.received = None
                return False
            case Capture():
                self._begin_request()
                self._begin_capture(action.reserve_s)
            case Gather():
                self._begin_request()
                report = sim.transmit(action.report)
                chance = sim.schedule.gather_chance
                sim.engine.exchange(self, "gather", report, chance, tuple)
            case Reduce():
                self._begin_request()
                value = (self._difference(), action)
                chance = sim.schedule.reduce_chance
                sim.engine.exchange(self, "reduce", value, chance, self._sum)
            case Commit():
                self._begin_request()
                self._commit(action.ok)
            case ApplyRound():
                self._apply(action)
                return False
            case ResumeGrant():
                sim.engine.leave(self)
                self._resume()
                return False
            case Wait():
                pass
            case _:
                assert_never(action)
        return True

    def offer(self) -> tuple[dict[str, Any], Any]:
        """The state that heals another machine."""
        return self._sim.state_of(self.member.ledger), self.global_vector

    def _difference(self) -> Any:
        return None if self._snapshot is None else self._snapshot - self.global_vector

    def _sum(self, contributed: list[Any]) -> None:
        differences, actions = zip(*contributed, strict=True)
        if any(action != actions[0] for action in actions):
            raise Violation("machines have different weights of each other")
        total = np.zeros_like(self.global_vector)
        for difference, weight in zip(differences, actions[0].weights, strict=True):
            if weight:
                total += difference
        assert self.group is not None
        self.group.total = total

    def _commit(self, ok: bool) -> None:
        sim, s = self._sim, self._sim.schedule
        fails = sim.now < s.faultless_after_s and sim.rng.random() < s.commit_chance
        decided = ok and not fails

        def count() -> None:
            self.engine_step += decided

        delay_s = sim.draw(s.delay_s)
        self.answer(self.call, decided, delay_s, before=count)

    def _apply(self, action: ApplyRound) -> None:
        sim = self._sim
        if action.reduced:
            if self.group is None or self.group.total is None:
                raise Violation(f"machine {self.name} applies sums that it never received")
            self.global_vector = self.global_vector + self.group.total
        num = len(self._trained) if self._captured is None else self._captured
        since = self._trained[num:]
        self._tallies.update(epoch for epoch, _ in self._trained[:num])
        if action.restart:
            if self._trained or self._queue or self._returned:
                raise Violation(f"machine {self.name} continued training after it was healed")
            self.local_vector = self.global_vector.copy()
            self._tallies.clear()
        elif self._snapshot is not None:
            self.local_vector = self.local_vector + (self.global_vector - self._snapshot)
        else:
            if self._trained:
                raise Violation(f"machine {self.name} has trained and was not captured")
            self.local_vector = self.global_vector.copy()
        granted = to_list(action.grant.batches)
        if self.member.ledger.ended:
            since = []  # lost: in no machine's grant
            self.local_vector = self.global_vector.copy()
        done = set(since)
        if done - set(granted):
            raise Violation(f"machine {self.name} trained {done - set(granted)} without a grant")
        self._trained = since
        self._returned, self._captured, self._snapshot = [], None, None
        self._add_batches([batch for batch in granted if batch not in done])
        self.closed += [closed.epoch for closed in action.closed]
        self.last_commit = (sim.state_of(self.member.ledger), self.global_vector)
        sim.on_commit(self, action)

    # -- the inner run --------------------------------------------------------------------

    def _add_batches(self, batches: list[Batch]) -> None:
        """Train these batches from now on, one per device at a time, from distant positions."""
        num_devices = self.host.num_devices
        rows = [
            batches[i * len(batches) // num_devices :][: len(batches) // num_devices + 1]
            for i in range(num_devices)
        ]
        order = dict.fromkeys(
            row[i] for i in range(len(batches) // num_devices + 1) for row in rows if i < len(row)
        )
        busy = bool(self._queue)
        self._queue = list(order)[::-1]
        if not busy:
            self._next_at = self._sim.now + self.host.batch_s
        self._idle_reported = False

    def _discard_work(self) -> None:
        self._queue, self._returned, self._trained = [], [], []
        self._captured, self._snapshot = None, None
        self._idle_reported = True

    def _advance(self) -> None:
        """Train the batches that are due by now."""
        now = self._sim.now
        if self._silent_since is not None:
            return
        while self._queue and self._next_at <= now:
            batch = self._queue.pop()
            self.local_vector[self._sim.index_of(batch)] += 1
            self._trained.append(batch)
            self.num_trained += 1
            self._next_at += self.host.batch_s

    def _schedule_idle(self) -> None:
        """Schedule one ``Idle`` event for the time when no batch is left."""
        if self.gone or self.stalled or self._idle_reported or self._returned:
            return
        self._idle_id += 1
        wake = self._idle_id
        wait_s = 0.0
        if self._queue:
            wait_s = self._next_at - self._sim.now + (len(self._queue) - 1) * self.host.batch_s
        self._sim.at(self._sim.now + wait_s + 1e-9, lambda: self.deliver(lambda: self._idle(wake)))

    def _idle(self, wake: int) -> None:
        self._advance()
        if (
            wake == self._idle_id
            and not self._queue
            and not self._returned
            and not self._idle_reported
        ):
            self._idle_reported = True
            if isinstance(self.action, Wait):
                self.resume(True)

    def _begin_capture(self, reserve_s: float) -> None:
        num = min(len(self._queue), self.host.num_devices + int(reserve_s / self.host.batch_s))
        self._returned = self._queue[: len(self._queue) - num]
        self._queue = self._queue[len(self._queue) - num :]
        sim, call = self._sim, self.call
        delay_s = sim.draw(sim.schedule.capture_s)

        def done() -> None:
            if self.call == call:
                self._capture(keeps=reserve_s > 0)

        sim.at(sim.now + delay_s, lambda: self.deliver(done))

    def _capture(self, *, keeps: bool) -> None:
        sim, s = self._sim, self._sim.schedule
        self._advance()
        fails = sim.now < s.faultless_after_s and sim.rng.random() < s.capture_chance
        self._num_failed = self._num_failed + 1 if fails else 0
        if 0 < self._num_failed < MAX_FAILED_CAPTURES:
            self.answer(self.call, RoundFailed("a worker died"), 0.0)
            return
        if not keeps:
            self._returned, self._queue = self._returned + self._queue, []
        self._snapshot = self.local_vector.copy()
        self._captured = len(self._trained)
        tallies = Counter(self._tallies)
        tallies.update(epoch for epoch, _ in self._trained)
        captured = Captured(
            done=to_ranges(self._trained),
            kept=to_ranges(self._queue),
            weight=float(len(self._trained)),
            num_samples=len(self._trained),
            seconds_per_batch=self.host.batch_s if self.num_trained else None,
            tallies=tuple(
                (epoch, self._stats_of(tallies[epoch]))
                for epoch in self.member.ledger.open_epochs
                if tallies[epoch]
            ),
        )
        self.answer(self.call, captured, 0.0)

    def _stats_of(self, num_batches: int) -> MachineStats:
        return MachineStats(machine=self.name, ranks=(Sums(num_batches=num_batches),))

    def _resume(self) -> None:
        """Continue the previous grant."""
        busy = bool(self._queue)
        self._queue = self._returned + self._queue
        self._returned, self._captured, self._snapshot = [], None, None
        if not busy:
            self._next_at = self._sim.now + self.host.batch_s
        if not self.member.healing:
            self._idle_reported = False
