"""The simulated engine of a cluster: quorums, exchanges and their failures.

Modelled on torchft: a quorum forms at once when all members of the last one, or all live machines,
request it; otherwise it waits for the others for some time. Machines with fewer commits receive
the state of one with the most; at step 0 all but the first do. Each machine decides by itself
about its commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.cluster.member import RoundFailed

if TYPE_CHECKING:
    from tests.simulation.cluster_harness import ClusterSimulation
    from tests.simulation.cluster_machine import SimMachine


@dataclass
class Group:
    """The machines of a quorum, for one round.

    Attributes:
        members: The machines, in order.
        contributions: The values of an exchange by machine, for each exchange by name.
        left: Machines that have left the round or are gone.
        total: The sum over machines.
    """

    members: tuple[str, ...]
    contributions: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    total: Any = None


class SimEngine:
    """The simulated server and network.

    Args:
        sim: The simulation.
    """

    def __init__(self, sim: ClusterSimulation) -> None:
        self._sim = sim
        self._requests: dict[str, float] = {}
        self._last: dict[int, tuple[str, ...]] = {}
        self.num_quorums = 0
        self.num_healed = 0

    # -- membership ---------------------------------------------------------------------

    def _server_of(self, machine: SimMachine) -> int | None:
        """The server that a machine reaches now; ``None``: no server."""
        s, now = self._sim.schedule, self._sim.now
        if now in s.away:
            return None
        if now in s.partition and machine.name in s.side:
            return 1 if s.split else None
        return 0

    def apart(self, one: str, other: str) -> bool:
        """True if two machines do not reach each other now."""
        s = self._sim.schedule
        return self._sim.now in s.partition and (one in s.side) != (other in s.side)

    def _healthy(self, server: int) -> list[str]:
        """Machines that count as alive on this server."""
        since = self._sim.now - self._sim.schedule.heartbeat_s
        return [
            m.name
            for m in self._sim.machines.values()
            if m.started
            and m.last_heartbeat(self._sim.now) > since
            and self._server_of(m) == server
        ]

    # -- quorums --------------------------------------------------------------------------

    def request_quorum(self, machine: SimMachine) -> None:
        """Request a quorum for a machine."""
        call = machine.call
        self._requests[machine.name] = self._sim.now
        s = self._sim.schedule
        for wait_s in (0.0, s.join_s, s.heartbeat_s, s.join_s + s.heartbeat_s):
            self._sim.at(self._sim.now + wait_s + 1e-6, self.form_quorums)
        self._sim.at(self._sim.now + s.quorum_timeout_s, lambda: self._no_quorum(machine, call))

    def on_silence(self) -> None:
        """Schedule the detection of a machine's missing heartbeats."""
        self._sim.at(self._sim.now + self._sim.schedule.heartbeat_s + 1e-6, self.form_quorums)

    def withdraw(self, name: str) -> None:
        """Withdraw a machine's request."""
        self._requests.pop(name, None)

    def _no_quorum(self, machine: SimMachine, call: int) -> None:
        if machine.call == call and self._requests.pop(machine.name, None) is not None:
            machine.answer(call, RoundFailed("no quorum in time"), 0.0)

    def form_quorums(self) -> None:
        """Form all quorums that are possible now."""
        if len(self._requests) >= self._sim.schedule.min_machines:
            for server in (0, 1):
                self._try_quorum(server)

    def _try_quorum(self, server: int) -> None:
        s, now = self._sim.schedule, self._sim.now
        healthy = self._healthy(server)
        asking = sorted(name for name in healthy if name in self._requests)
        if len(asking) < s.min_machines or not asking:
            return
        known = self._last.get(server)
        fast = known is not None and set(known) <= set(asking)
        waited = now - min(self._requests[name] for name in asking) >= s.join_s
        if s.guard and not fast and len(asking) <= len(healthy) // 2:
            return
        if not (fast or waited or len(asking) == len(healthy)):
            return
        self._form(server, tuple(asking))

    def _form(self, server: int, members: tuple[str, ...]) -> None:
        sim = self._sim
        self.num_quorums += 1
        self._last[server] = members
        group = Group(members)
        machines = [sim.machines[name] for name in members]
        most = max(machine.engine_step for machine in machines)
        leads = [m for m in machines if m.engine_step == most]
        if most == 0:
            leads = leads[:1]
        offers = {m.name: m.offer() for m in leads}
        for machine in machines:
            del self._requests[machine.name]
            machine.group = group
            if machine.name in offers:
                self._answer_formed(machine, members, None, 0)
            else:
                donor = leads[sim.rng.randrange(len(leads))]
                self.num_healed += 1
                self._heal(machine, donor, members, offers[donor.name], most)

    def _heal(
        self,
        machine: SimMachine,
        donor: SimMachine,
        members: tuple[str, ...],
        offer: Any,
        step: int,
    ) -> None:
        """Transfer the state, if the donor lives long enough."""
        call, sim = machine.call, self._sim

        def arrive() -> None:
            if machine.call != call:
                return
            if donor.gone or donor.stalled or self.apart(donor.name, machine.name):
                failed = RoundFailed(f"machine {donor.name} sent no state")
                machine.answer(call, failed, sim.draw(sim.schedule.timeout_s))
            else:
                self._answer_formed(machine, members, offer, step)

        sim.at(sim.now + 2 * sim.draw(sim.schedule.delay_s), arrive)

    def _answer_formed(
        self, machine: SimMachine, members: tuple[str, ...], offer: Any, step: int
    ) -> None:
        sim = self._sim
        formed = (members, None if offer is None else offer[0])

        def healed() -> None:
            if offer is not None:
                machine.received = offer[1]
                machine.engine_step = step

        machine.answer(machine.call, formed, sim.draw(sim.schedule.delay_s), before=healed)

    # -- exchanges ------------------------------------------------------------------------

    def exchange(
        self,
        machine: SimMachine,
        exchange_name: str,
        value: Any,
        chance: float,
        result: Callable[[list[Any]], Any],
    ) -> None:
        """Exchange a value of each member; each receives the result, or an error."""
        sim, group, call = self._sim, machine.group, machine.call
        assert group is not None
        contributed = group.contributions.setdefault(exchange_name, {})
        contributed[machine.name] = value
        if group.left:
            self.fail_exchange(machine)
            return
        sim.at(sim.now + sim.schedule.timeout_s, lambda: self._time_out(machine, call))
        if len(contributed) < len(group.members):
            return
        first = group.members[0]
        if any(self.apart(first, name) for name in group.members):
            return  # all time out
        outcome = result([contributed[name] for name in group.members])
        group.contributions[exchange_name] = {}
        for name in group.members:
            peer = sim.machines[name]
            fails = sim.now < sim.schedule.faultless_after_s and sim.rng.random() < chance
            if fails:
                self.fail_exchange(peer)
            else:
                peer.answer(peer.call, outcome, sim.draw(sim.schedule.delay_s))

    def _time_out(self, machine: SimMachine, call: int) -> None:
        if machine.call == call and not machine.answered:
            self.fail_exchange(machine)

    def fail_exchange(self, machine: SimMachine) -> None:
        """Fail a machine's exchange, and those of all machines waiting for it."""
        self._fail(machine)
        self.leave(machine)

    def _fail(self, machine: SimMachine) -> None:
        failed = RoundFailed("a peer is gone")
        machine.answer(machine.call, failed, self._sim.draw(self._sim.schedule.delay_s))

    def leave(self, machine: SimMachine) -> None:
        """Remove a machine from its round; the others' exchanges fail."""
        self.withdraw(machine.name)
        group, machine.group = machine.group, None
        if group is None:
            return
        group.left.add(machine.name)
        for contributed in group.contributions.values():
            for name in list(contributed):
                peer = self._sim.machines[name]
                if peer.group is group and not peer.answered:
                    self._fail(peer)
                    peer.group = None
                    group.left.add(name)
