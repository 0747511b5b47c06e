"""A schedule of a cluster: everything that a seed decides about its run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.cluster.member import MAX_PAUSE_S


@dataclass(frozen=True, kw_only=True)
class Host:
    """One start of a process.

    Attributes:
        name: Its machine's id.
        start_s: When it is ready to join.
        batch_s: Seconds that a batch takes it.
        lanes: Devices: so many batches are under way at a time, from places far apart.
        clock_s: What its clock is off by.
        origin: Another machine whose last commit it begins with, as from a checkpoint.
        odd: Whether its settings are others than those of the cluster.
    """

    name: str
    start_s: float = 0.0
    batch_s: float
    lanes: int = 1
    clock_s: float = 0.0
    origin: str | None = None
    odd: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something happens to a machine.

    Attributes:
        kind: "die", "stall", "stop" or "stop everywhere".
        name: The machine.
        at_s: When.
        for_s: How long it stalls.
        at: If given, it happens at the first of these commands from ``at_s`` on, right
            after the machine has sent it.
    """

    kind: str
    name: str
    at_s: float
    for_s: float = 0.0
    at: str | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time in which something is so."""

    start_s: float
    stop_s: float

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.stop_s


@dataclass(frozen=True, kw_only=True)
class ClusterSchedule:
    """One simulated run of a cluster.

    Attributes:
        seed: Of the draws made while it runs.
        hosts: All machines that there will be.
        batches_per_epoch: As the ledger has it, like ``num_epochs`` and ``max_batches``.
        period_s: Between rounds.
        min_machines: In a quorum.
        delay_s: Longest time that anything travels.
        capture_s: Longest time of a capture.
        join_s: How long a quorum waits for machines that live and have not asked.
        guard: Whether a quorum must be more than half of those that live.
        heartbeat_s: How long a machine counts as alive that is not heard of.
        timeout_s: How long a machine waits for others in an exchange.
        quorum_timeout_s: How long it waits for a quorum.
        faults: What happens to machines.
        partition: When machines are split into two sides.
        side: Those of the other side.
        split: Whether both sides have a server, so that both may form quorums.
        away: When the server is away.
        capture_chance: Chance that a capture fails.
        gather_chance: Chance that a machine misses what the others gathered.
        reduce_chance: Likewise, sums.
        commit_chance: Chance that a machine's commit fails though its vote was yes.
        quiet_s: From here on nothing fails by chance.
    """

    seed: int
    hosts: tuple[Host, ...]
    batches_per_epoch: int
    num_epochs: int
    max_batches: int | None = None
    period_s: float
    min_machines: int = 1
    delay_s: float
    capture_s: float
    join_s: float
    guard: bool = False
    heartbeat_s: float
    timeout_s: float
    quorum_timeout_s: float
    faults: tuple[Fault, ...] = ()
    partition: Span = Span(start_s=0.0, stop_s=0.0)
    side: frozenset[str] = frozenset()
    split: bool = False
    away: Span = Span(start_s=0.0, stop_s=0.0)
    capture_chance: float = 0.0
    gather_chance: float = 0.0
    reduce_chance: float = 0.0
    commit_chance: float = 0.0
    quiet_s: float = 0.0


COMMANDS = ("FormQuorum", "TakeCapture", "Gather", "Reduce", "Vote", "Apply", "Adopt")


@dataclass(frozen=True)
class ClusterDraw:
    """Draws a schedule from a seed."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(f"cluster {self.seed}"))

    def maybe(self, chance: float) -> bool:
        """True with this chance."""
        return self.rng.random() < chance

    def schedule(self) -> ClusterSchedule:
        """The schedule of the seed."""
        rng = self.rng
        num = rng.choice((2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, 12, 16))
        period_s = 10 ** rng.uniform(-0.5, 0.5)
        per_period = rng.choice((0.5, 3.0, 10.0, 30.0))  # batches of one machine
        batch_s = period_s / per_period
        periods = rng.uniform(1.0, 8.0)
        total = max(2, int(periods * per_period * num))
        epochs = rng.randint(1, 3)
        per_epoch = max(1, min(400, total // epochs))
        lasts_s = per_epoch * epochs * batch_s / num
        hosts = tuple(self._hosts(num, batch_s, lasts_s))
        names = [host.name for host in hosts]
        faults = tuple(self._faults(hosts, lasts_s, period_s))
        parted = self.maybe(0.15)
        start_s = rng.uniform(0.0, lasts_s)
        away = Span(start_s=start_s, stop_s=start_s + rng.uniform(0.5, 5.0) * period_s)
        part_s = rng.uniform(0.0, lasts_s)
        chance = rng.choice((0.0, 0.0, 0.0, 0.2, 0.5)) / num
        return ClusterSchedule(
            seed=self.seed,
            hosts=hosts,
            batches_per_epoch=per_epoch,
            num_epochs=epochs,
            max_batches=rng.randint(1, per_epoch * epochs) if self.maybe(0.15) else None,
            period_s=period_s,
            min_machines=rng.choice((1, 1, 1, 2, num // 2 + 1)),
            delay_s=rng.choice((0.0, 0.001, 0.02, 0.1)) * period_s,
            capture_s=rng.choice((0.0, 0.01, 0.2)) * period_s,
            join_s=rng.choice((0.1, 2.0, 2.0, 10.0)) * period_s,
            guard=self.maybe(0.7),
            heartbeat_s=rng.choice((0.3, 1.0)) * period_s,
            timeout_s=rng.choice((0.5, 2.0)) * period_s,
            quorum_timeout_s=MAX_PAUSE_S + rng.choice((1.0, 20.0)) * period_s,
            faults=faults,
            partition=Span(start_s=part_s, stop_s=part_s + rng.uniform(0.5, 4) * period_s)
            if parted
            else Span(start_s=0.0, stop_s=0.0),
            side=frozenset(rng.sample(names, rng.randint(1, len(names)))),
            split=self.maybe(0.5),
            away=away if self.maybe(0.15) else Span(start_s=0.0, stop_s=0.0),
            capture_chance=chance if self.maybe(0.5) else 0.0,
            gather_chance=chance if self.maybe(0.5) else 0.0,
            reduce_chance=chance if self.maybe(0.5) else 0.0,
            commit_chance=chance if self.maybe(0.5) else 0.0,
            quiet_s=2 * lasts_s + 4 * period_s,
        )

    def _hosts(self, num: int, batch_s: float, lasts_s: float) -> Iterator[Host]:
        rng = self.rng
        alike = self.maybe(0.4)
        names = [f"m{i:02}" for i in range(num)]
        rng.shuffle(names)
        odd = self.maybe(0.05)
        for i, name in enumerate(names):
            late = i > 0 and self.maybe(0.25)
            yield Host(
                name=name,
                start_s=rng.uniform(0.0, lasts_s) if late else rng.uniform(0.0, 0.05) * lasts_s,
                batch_s=batch_s if alike else batch_s * 10 ** rng.uniform(-0.5, 0.5),
                lanes=rng.choice((1, 1, 2, 4)),
                clock_s=rng.uniform(0.0, 1000.0),
                origin=rng.choice(names[:i]) if late and self.maybe(0.3) and not odd else None,
                odd=late and odd,
            )

    def _faults(self, hosts: tuple[Host, ...], lasts_s: float, period_s: float) -> Iterator[Fault]:
        rng = self.rng
        if self.maybe(0.25):
            return
        survivor = None if self.maybe(0.05) else rng.choice(hosts).name
        most = rng.choice((1, 2, 3, len(hosts), 3 * len(hosts)))
        for _ in range(most):
            host = rng.choice(hosts)
            kind = rng.choice(("die", "die", "stall", "stall", "stall", "stop"))
            if kind != "stall" and host.name == survivor:
                continue
            yield Fault(
                kind=kind,
                name=host.name,
                at_s=host.start_s + rng.uniform(0.0, 1.2) * lasts_s,
                for_s=rng.choice((0.2, 1.0, 4.0)) * rng.random() * period_s,
                at=rng.choice(COMMANDS) if self.maybe(0.5) else None,
            )
        if self.maybe(0.1):
            yield Fault(
                kind="stop everywhere",
                name=rng.choice(hosts).name,
                at_s=rng.uniform(0.0, 1.2) * lasts_s,
            )


def draw_cluster(seed: int) -> ClusterSchedule:
    """The schedule of a seed."""
    return ClusterDraw(seed).schedule()
