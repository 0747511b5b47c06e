"""A stand-in for the engine under machines of a cluster: quorums, exchanges and their failures.

It keeps to what is known of torchft: a quorum forms at once when all that were in the last one
ask, or all that live; otherwise it waits some time for those that do not ask. Machines with
fewer commits are brought the state of one with the most, at step 0 all but the first. Each
machine decides by itself whether a round is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.cluster.member import GatherFailed, QuorumFailed, QuorumFormed, ReduceDone

if TYPE_CHECKING:
    from tests.simulation.cluster_harness import ClusterSimulation
    from tests.simulation.cluster_machine import SimMachine


@dataclass
class Group:
    """The machines of a quorum, for one round.

    Attributes:
        members: In order.
        calls: What each machine brought to an exchange, by the exchange's name.
        left: Machines that have given the round up or are gone.
        total: The sum over machines.
    """

    members: tuple[str, ...]
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    total: Any = None


class SimEngine:
    """The server and the network.

    Args:
        sim: The simulation.
    """

    def __init__(self, sim: ClusterSimulation) -> None:
        self._sim = sim
        self._asking: dict[str, float] = {}
        self._last: dict[int, tuple[str, ...]] = {}
        self.num_quorums = 0
        self.num_healed = 0

    # -- who is there ---------------------------------------------------------------------

    def _server_of(self, machine: SimMachine) -> int | None:
        """The server that a machine reaches now, if any."""
        s, now = self._sim.schedule, self._sim.now
        if now in s.away:
            return None
        if now in s.partition and machine.name in s.side:
            return 1 if s.split else None
        return 0

    def apart(self, one: str, other: str) -> bool:
        """Whether two machines do not reach each other now."""
        s = self._sim.schedule
        return self._sim.now in s.partition and (one in s.side) != (other in s.side)

    def _healthy(self, server: int) -> list[str]:
        """Machines that the server believes to be alive."""
        since = self._sim.now - self._sim.schedule.heartbeat_s
        return [
            m.name
            for m in self._sim.machines.values()
            if m.begun and m.heard_until(self._sim.now) > since and self._server_of(m) == server
        ]

    # -- quorums --------------------------------------------------------------------------

    def ask(self, machine: SimMachine) -> None:
        """A machine asks for a quorum."""
        call = machine.call
        self._asking[machine.name] = self._sim.now
        s = self._sim.schedule
        for wait_s in (0.0, s.join_s, s.heartbeat_s, s.join_s + s.heartbeat_s):
            self._sim.at(self._sim.now + wait_s + 1e-6, self.look)
        self._sim.at(self._sim.now + s.quorum_timeout_s, lambda: self._no_quorum(machine, call))

    def silent(self) -> None:
        """A machine is not heard of any more."""
        self._sim.at(self._sim.now + self._sim.schedule.heartbeat_s + 1e-6, self.look)

    def withdraw(self, name: str) -> None:
        """A machine does not ask any more."""
        self._asking.pop(name, None)

    def _no_quorum(self, machine: SimMachine, call: int) -> None:
        if machine.call == call and self._asking.pop(machine.name, None) is not None:
            machine.answer(call, QuorumFailed(error="no quorum in time"), 0.0)

    def look(self) -> None:
        """Form the quorums that can be formed."""
        if len(self._asking) >= self._sim.schedule.min_machines:
            for server in (0, 1):
                self._look(server)

    def _look(self, server: int) -> None:
        s, now = self._sim.schedule, self._sim.now
        healthy = self._healthy(server)
        asking = sorted(name for name in healthy if name in self._asking)
        if len(asking) < s.min_machines or not asking:
            return
        known = self._last.get(server)
        fast = known is not None and set(known) <= set(asking)
        waited = now - min(self._asking[name] for name in asking) >= s.join_s
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
            del self._asking[machine.name]
            machine.group = group
            if machine.name in offers:
                self._tell(machine, members, None, 0)
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
        """The state travels, if the donor lives as long."""
        call, sim = machine.call, self._sim

        def arrive() -> None:
            if machine.call != call:
                return
            if donor.gone or donor.stalled or self.apart(donor.name, machine.name):
                failed = QuorumFailed(error=f"machine {donor.name} sent no state")
                machine.answer(call, failed, sim.draw(sim.schedule.timeout_s))
            else:
                self._tell(machine, members, offer, step)

        sim.at(sim.now + 2 * sim.draw(sim.schedule.delay_s), arrive)

    def _tell(self, machine: SimMachine, members: tuple[str, ...], offer: Any, step: int) -> None:
        sim = self._sim
        formed = QuorumFormed(members=members, healed=None if offer is None else offer[0])

        def healed() -> None:
            if offer is not None:
                machine.received = offer[1]
                machine.engine_step = step

        machine.answer(machine.call, formed, sim.draw(sim.schedule.delay_s), before=healed)

    # -- exchanges ------------------------------------------------------------------------

    def exchange(
        self,
        machine: SimMachine,
        what: str,
        value: Any,
        chance: float,
        result: Callable[[list[Any]], Any],
    ) -> None:
        """All members bring a value; each gets the result, or an error."""
        sim, group, call = self._sim, machine.group, machine.call
        assert group is not None
        brought = group.calls.setdefault(what, {})
        brought[machine.name] = value
        if group.left:
            self.give_up(machine, what)
            return
        sim.at(sim.now + sim.schedule.timeout_s, lambda: self._too_long(machine, what, call))
        if len(brought) < len(group.members):
            return
        first = group.members[0]
        if any(self.apart(first, name) for name in group.members):
            return  # all wait in vain
        outcome = result([brought[name] for name in group.members])
        group.calls[what] = {}
        for name in group.members:
            peer = sim.machines[name]
            fails = sim.now < sim.schedule.quiet_s and sim.rng.random() < chance
            if fails:
                self.give_up(peer, what)
            else:
                peer.answer(peer.call, outcome, sim.draw(sim.schedule.delay_s))

    def _too_long(self, machine: SimMachine, what: str, call: int) -> None:
        if machine.call == call and not machine.answered:
            self.give_up(machine, what)

    def give_up(self, machine: SimMachine, what: str) -> None:
        """A machine's exchange fails, and with it those of all that wait for it."""
        self._fail(machine, what)
        self.leave(machine)

    def _fail(self, machine: SimMachine, what: str) -> None:
        failed = GatherFailed(error="a peer is gone")
        event = failed if what == "gather" else ReduceDone(ok=False)
        machine.answer(machine.call, event, self._sim.draw(self._sim.schedule.delay_s))

    def leave(self, machine: SimMachine) -> None:
        """A machine is in its round no more; the others notice."""
        self.withdraw(machine.name)
        group, machine.group = machine.group, None
        if group is None:
            return
        group.left.add(machine.name)
        for what, brought in group.calls.items():
            for name in list(brought):
                peer = self._sim.machines[name]
                if peer.group is group and not peer.answered:
                    self._fail(peer, what)
                    peer.group = None
                    group.left.add(name)
