"""The simulator of clusters: real members under a virtual clock.

As in :mod:`tests.simulation.harness`, everything runs in one thread, in an order determined by the
schedule's seed. A run ends with all invariants held, or raises :class:`SimulationFailed` with its
history.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from coordinator.cluster.cluster_ledger import ClusterLedger, RoundOutcome
from coordinator.cluster.machine_report import MachineReport
from coordinator.cluster.member import MAX_PAUSE_S, ApplyRound
from coordinator.codec import encode
from tests.simulation.cluster_engine import SimEngine
from tests.simulation.cluster_machine import SimMachine, to_list
from tests.simulation.cluster_schedule import ClusterSchedule, draw_cluster
from tests.simulation.effects import Batch, Violation
from tests.simulation.harness import STUCK, TRACE_LINES, SimulationFailed

MAX_EVENTS_OF_HOST = 4000
TOO_LONG = "the run does not end"


class ClusterSimulation:
    """One run.

    Attributes:
        now: The virtual time.
        machines: By name.
        engine: Quorums and exchanges.
        seen: Counts of occurrences.
        shares_outcomes: True if outcomes are computed once for all machines.
        outcomes: The computed outcomes, with their reports.
    """

    def __init__(self, schedule: ClusterSchedule) -> None:
        self.schedule = schedule
        self.num_batches = schedule.batches_per_epoch * schedule.num_epochs
        self.now = 0.0
        self.rng = random.Random(schedule.seed)
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=TRACE_LINES)
        self.seen: Counter[str] = Counter()
        self.num_events = 0
        self._few_since = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        # Equal outcomes are computed once, except in some runs, which check that they are equal.
        self.shares_outcomes = schedule.seed % 8 != 0
        self.outcomes: dict[tuple[str, int], tuple[tuple[MachineReport, ...], RoundOutcome]] = {}
        self._states: dict[ClusterLedger, dict[str, Any]] = {}
        self._histories: dict[str, tuple[Any, ClusterLedger]] = {}
        self._grants: dict[str, dict[str, set[Batch]]] = {}
        self.engine = SimEngine(self)
        self.machines = {host.name: SimMachine(self, host) for host in schedule.hosts}

    # -- for machines and the engine ------------------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        heapq.heappush(self._heap, (time, next(self._order), action))

    def draw(self, longest: float) -> float:
        """A random number in [0, ``longest``)."""
        return self.rng.random() * longest

    def index_of(self, batch: Batch) -> int:
        """Index of a batch in the vector."""
        return batch[0] * self.schedule.batches_per_epoch + batch[1]

    def new_ledger(self, *, other_settings: bool = False) -> ClusterLedger:
        """The ledger of a new machine."""
        s = self.schedule
        return ClusterLedger(
            settings={"model": "other_settings" if other_settings else "even", "seed": 0},
            num_epochs=s.num_epochs,
            batches_per_epoch=s.batches_per_epoch,
            period_s=s.period_s,
            max_batches=s.max_batches,
        )

    def state_of(self, ledger: ClusterLedger) -> dict[str, Any]:
        """The ledger's state as sent to another machine."""
        if ledger not in self._states:
            self._states[ledger] = json.loads(json.dumps(encode(ledger.state)))
        return self._states[ledger]

    def transmit(self, report: MachineReport) -> MachineReport:
        """The report as received by the others."""
        arrived = MachineReport.from_json(report.to_json())
        if arrived != report:
            raise Violation(f"{report} arrives as {arrived}")
        return arrived

    # -- invariants -------------------------------------------------------------------------

    def on_commit(self, machine: SimMachine, action: ApplyRound) -> None:
        """Check the invariants after a machine has applied a round."""
        ledger = machine.member.ledger
        if action.grant and machine.member.leaving:
            raise Violation(f"machine {machine.name} leaves with {action.grant}")
        self.seen["commits"] += 1
        self.seen["restarts"] += action.restart
        for closed in action.closed:
            total = sum(s.ranks[0].num_batches for s in closed.tallies.values())
            if total != self.schedule.batches_per_epoch:
                raise Violation(f"epoch {closed.epoch} is closed with tallies of {total} batches")
        if machine.closed != sorted(set(machine.closed)):
            raise Violation(f"machine {machine.name} reports the closed epochs {machine.closed}")
        known = self._histories.setdefault(ledger.lineage, (machine.global_vector, ledger))
        if known[0] is machine.global_vector:
            self._check_vector(machine.global_vector, ledger)
            self._check_grants(ledger)
            return
        if not np.array_equal(known[0], machine.global_vector):
            raise Violation(f"machines of one lineage hold {known[0]} and {machine.global_vector}")
        if known[1] is not ledger and self.state_of(known[1]) != self.state_of(ledger):
            raise Violation("machines of one lineage have different ledgers")

    def _check_vector(self, global_vector: Any, ledger: ClusterLedger) -> None:
        expected = np.zeros_like(global_vector)
        expected[: ledger.first_open * self.schedule.batches_per_epoch] = 1
        for epoch in ledger.open_epochs:
            for span in ledger.consumed_of(epoch):
                start = self.index_of((epoch, span.start))
                expected[start : start + len(span)] += 1
        if not np.array_equal(expected, global_vector):
            wrong = np.flatnonzero(expected != global_vector)
            batches = [(int(i), int(global_vector[i]), int(expected[i])) for i in wrong]
            raise Violation(f"(batch, effect, times consumed): {batches}")

    def _check_grants(self, ledger: ClusterLedger) -> None:
        if ledger.max_batches is not None and ledger.consumed > ledger.max_batches:
            raise Violation(f"{ledger.consumed} batches are consumed, more than the limit")
        granted: Counter[Batch] = Counter()
        for grant in ledger.grants.values():
            granted.update(to_list(grant.batches))
        if granted and max(granted.values()) > 1:
            raise Violation(f"granted twice: {[b for b, n in granted.items() if n > 1]}")
        for epoch in ledger.open_epochs:
            for span in ledger.consumed_of(epoch):
                again = [b for b in span if (epoch, b) in granted]
                if again:
                    raise Violation(f"granted though consumed: {again} of epoch {epoch}")
        if not ledger.ended and not granted and any(ledger.grants):
            self.seen["empty grants"] += 1

    def on_end(self, machine: SimMachine) -> None:
        """Check the invariants at the end of a machine."""
        ledger = machine.member.ledger
        if machine.outcome:
            self.seen["refused"] += 1
            if not any(host.other_settings for host in self.schedule.hosts):
                raise Violation(f"machine {machine.name} is refused: {machine.outcome}")
            return
        self._check_vector(machine.global_vector, ledger)
        self.seen["finished" if ledger.complete else "left"] += 1

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> ClusterSimulation:
        """Run to the end.

        Raises:
            SimulationFailed: An invariant broke, or the run does not end.
        """
        try:
            self._run()
        except Exception as error:
            raise SimulationFailed(self._report(error)) from error
        return self

    def _run(self) -> None:
        s = self.schedule
        for machine in self.machines.values():
            self.at(machine.host.start_s, machine.begin)
        for fault in s.faults:
            machine = self.machines[fault.name]
            self.at(fault.at_s, lambda m=machine, f=fault: m.inject(f))
        for span in (s.partition, s.away):
            self.at(span.stop_s + 1e-6, self.engine.form_quorums)
        while self.num_events % 16 or not self._over:
            if not self._heap:
                if self._over:
                    break
                raise Violation(STUCK)
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self.num_events += 1
            if self.num_events > MAX_EVENTS_OF_HOST * (1 + len(s.hosts)):
                raise Violation(f"{self.num_events} events: {TOO_LONG}")
        self._at_end()

    @property
    def _over(self) -> bool:
        """True if all are out, or too few are left and no more will join."""
        running = [m for m in self.machines.values() if not m.gone]
        if not running:
            return True
        if len(running) >= self.schedule.min_machines or not all(m.started for m in running):
            self._few_since = self.now
            return False
        # They may still finish by themselves.
        if self.now - self._few_since < 10 * self.schedule.period_s:
            return False
        self.seen["starved"] += 1
        return True

    @property
    def _is_smooth(self) -> bool:
        """True if no round fails."""
        s = self.schedule
        chances = (s.capture_chance, s.gather_chance, s.reduce_chance, s.commit_chance)
        return not s.faults and not any(chances)

    @property
    def _is_calm(self) -> bool:
        """True if no live machine can be considered dead."""
        s = self.schedule
        # A machine pauses after a failed round.
        pause_s = 0.0 if self._is_smooth else MAX_PAUSE_S + s.timeout_s
        return (
            not any(fault.kind == "stall" for fault in s.faults)
            and s.partition.stop_s == s.away.stop_s == 0
            and s.join_s >= 2 * s.period_s + pause_s
            and not any(host.origin or host.other_settings for host in s.hosts)
        )

    def _at_end(self) -> None:
        finished = [
            m for m in self.machines.values() if m.outcome == "" and m.member.ledger.complete
        ]
        first_s = min((m.ended_s for m in finished), default=0.0)
        lineages = {m.member.ledger.lineage for m in finished if m.host.start_s < first_s}
        self.seen["two ends"] += len(lineages) > 1
        if len(lineages) > 1 and self._is_calm:
            raise Violation(f"machines end with different histories: {lineages}")
        needed = (
            self.num_batches if self.schedule.max_batches is None else self.schedule.max_batches
        )
        trained = sum(m.num_trained for m in self.machines.values())
        self.seen["retrained"] += trained > needed
        came_late = any(host.start_s >= first_s for host in self.schedule.hosts)
        if finished and trained != needed and not came_late and self._is_calm and self._is_smooth:
            raise Violation(f"{trained} batches are trained, and {needed} are needed")
        self.seen["quorums"] += self.engine.num_quorums
        self.seen["healed"] += self.engine.num_healed

    def _report(self, error: BaseException) -> str:
        history = "\n".join(f"{t:10.6f}  {who:<8} {what}" for t, who, what in self.trace)
        states = "\n".join(
            f"{m.name}: {m.action}, step {m.member.ledger.step}, engine {m.engine_step}, "
            f"{'gone' if m.gone else 'stalled' if m.stalled else 'runs'}, {m.outcome}"
            for m in self.machines.values()
        )
        return (
            f"seed {self.schedule.seed}: {type(error).__name__}: {error}\n\n{history}\n\n"
            f"{self.schedule}\n\n{states}\n"
            f"replay: python -m tests.simulation.replay --seed {self.schedule.seed} --cluster"
        )


def simulate_cluster(
    seed: int, draw: Callable[[int], ClusterSchedule] = draw_cluster
) -> ClusterSimulation:
    """Simulate the schedule of a seed to its end."""
    return ClusterSimulation(draw(seed)).run()
