"""The schedule of a simulated cluster, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.cluster import member
from coordinator.cluster.member import MAX_PAUSE_S


@dataclass(frozen=True, kw_only=True)
class Host:
    """One start of a machine's process.

    Attributes:
        name: The machine's id.
        start_s: Time at which it is ready to join.
        batch_s: Seconds per batch.
        num_devices: Number of batches in progress at a time, at positions far apart.
        clock_s: Offset of its clock.
        origin: Machine from whose last commit it starts, as from a checkpoint.
        other_settings: True if its settings differ from the cluster's.
    """

    name: str
    start_s: float = 0.0
    batch_s: float
    num_devices: int = 1
    clock_s: float = 0.0
    origin: str | None = None
    other_settings: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a machine.

    Attributes:
        kind: "die", "stall", "stop" or "stop everywhere".
        name: The machine.
        at_s: Time of the fault.
        for_s: Duration of a stall.
        at: Name of an action: the fault occurs right after the machine has executed the first
            one from ``at_s`` on; ``None``: at ``at_s``.
    """

    kind: str
    name: str
    at_s: float
    for_s: float = 0.0
    at: str | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval of time."""

    start_s: float
    stop_s: float

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.stop_s


@dataclass(frozen=True, kw_only=True)
class ClusterSchedule:
    """One simulated run of a cluster.

    Attributes:
        seed: Seed of the draws made during the run.
        hosts: All machines of the run.
        batches_per_epoch: As in the ledger, like ``num_epochs`` and ``max_batches``.
        period_s: Seconds between rounds.
        min_machines: Fewest machines in a quorum.
        delay_s: Longest delay of a message.
        capture_s: Longest time of a capture.
        join_s: Longest time for which a quorum waits for live machines that have not requested it.
        guard: True if a quorum needs more than half of the live machines.
        heartbeat_s: Time after the last heartbeat at which a machine counts as dead.
        timeout_s: Timeout of an exchange.
        quorum_timeout_s: Timeout of a quorum request.
        faults: Faults of machines.
        partition: Interval in which the machines are split into two sides.
        side: The machines of the second side.
        split: True if both sides have a server, so that both may form quorums.
        away: Interval in which the server is unreachable.
        capture_chance: Chance that a capture fails.
        gather_chance: Chance that a machine's gather fails.
        reduce_chance: Chance that a machine's all-reduce fails.
        commit_chance: Chance that a machine's commit fails despite its positive vote.
        faultless_after_s: Time after which nothing fails by chance.
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
    faultless_after_s: float = 0.0


ACTIONS = tuple(
    action.__name__
    for action in (
        member.FormQuorum,
        member.Capture,
        member.Gather,
        member.Reduce,
        member.Commit,
        member.ApplyRound,
        member.AdoptState,
    )
)
"""Actions after which faults are injected."""


@dataclass(frozen=True)
class ClusterDraw:
    """Draws a schedule from a seed."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(f"cluster {self.seed}"))

    def happens(self, chance: float) -> bool:
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
        parted = self.happens(0.15)
        start_s = rng.uniform(0.0, lasts_s)
        away = Span(start_s=start_s, stop_s=start_s + rng.uniform(0.5, 5.0) * period_s)
        part_s = rng.uniform(0.0, lasts_s)
        chance = rng.choice((0.0, 0.0, 0.0, 0.2, 0.5)) / num
        return ClusterSchedule(
            seed=self.seed,
            hosts=hosts,
            batches_per_epoch=per_epoch,
            num_epochs=epochs,
            max_batches=rng.randint(1, per_epoch * epochs) if self.happens(0.15) else None,
            period_s=period_s,
            min_machines=rng.choice((1, 1, 1, 2, num // 2 + 1)),
            delay_s=rng.choice((0.0, 0.001, 0.02, 0.1)) * period_s,
            capture_s=rng.choice((0.0, 0.01, 0.2)) * period_s,
            join_s=rng.choice((0.1, 2.0, 2.0, 10.0)) * period_s,
            guard=self.happens(0.7),
            heartbeat_s=rng.choice((0.3, 1.0)) * period_s,
            timeout_s=rng.choice((0.5, 2.0)) * period_s,
            quorum_timeout_s=MAX_PAUSE_S + rng.choice((1.0, 20.0)) * period_s,
            faults=faults,
            partition=Span(start_s=part_s, stop_s=part_s + rng.uniform(0.5, 4) * period_s)
            if parted
            else Span(start_s=0.0, stop_s=0.0),
            side=frozenset(rng.sample(names, rng.randint(1, len(names)))),
            split=self.happens(0.5),
            away=away if self.happens(0.15) else Span(start_s=0.0, stop_s=0.0),
            capture_chance=chance if self.happens(0.5) else 0.0,
            gather_chance=chance if self.happens(0.5) else 0.0,
            reduce_chance=chance if self.happens(0.5) else 0.0,
            commit_chance=chance if self.happens(0.5) else 0.0,
            faultless_after_s=2 * lasts_s + 4 * period_s,
        )

    def _hosts(self, num: int, batch_s: float, lasts_s: float) -> Iterator[Host]:
        rng = self.rng
        alike = self.happens(0.4)
        names = [f"m{i:02}" for i in range(num)]
        rng.shuffle(names)
        other_settings = self.happens(0.05)
        for i, name in enumerate(names):
            late = i > 0 and self.happens(0.25)
            yield Host(
                name=name,
                start_s=rng.uniform(0.0, lasts_s) if late else rng.uniform(0.0, 0.05) * lasts_s,
                batch_s=batch_s if alike else batch_s * 10 ** rng.uniform(-0.5, 0.5),
                num_devices=rng.choice((1, 1, 2, 4)),
                clock_s=rng.uniform(0.0, 1000.0),
                origin=rng.choice(names[:i])
                if late and self.happens(0.3) and not other_settings
                else None,
                other_settings=late and other_settings,
            )

    def _faults(self, hosts: tuple[Host, ...], lasts_s: float, period_s: float) -> Iterator[Fault]:
        rng = self.rng
        if self.happens(0.25):
            return
        survivor = None if self.happens(0.05) else rng.choice(hosts).name
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
                at=rng.choice(ACTIONS) if self.happens(0.5) else None,
            )
        if self.happens(0.1):
            yield Fault(
                kind="stop everywhere",
                name=rng.choice(hosts).name,
                at_s=rng.uniform(0.0, 1.2) * lasts_s,
            )


def draw_cluster(seed: int) -> ClusterSchedule:
    """The schedule of a seed."""
    return ClusterDraw(seed).schedule()
