"""A schedule: all random choices of a simulated run, drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.splitting import split_by_ratio, split_like


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of a rank: seconds per full batch, from a time on."""

    start_s: float
    batch_s: float


@dataclass(frozen=True, kw_only=True)
class Death:
    """A worker raises, or its thread ends without a message, from a time on."""

    rank: int
    at_s: float
    vanishes: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One simulated run.

    Attributes:
        seed: Of the draws made while it runs: delays, jitter, faults.
        config: Settings of the coordinator.
        paces: For each rank its speeds, in order of time.
        jitter: Each step takes up to this part more.
        build_s: Longest time that a replica takes to build.
        delay_s: Longest time that a message travels, in either direction.
        late_chance: Chance that an answer to the coordinator takes ``late_s`` more.
        load_chance: Chance that a batch is loaded only ``load_s`` after it is requested.
        wake_s: Longest time until a thread that waits for a message continues.
        average_s: Longest time that an average takes to compute.
        sync_s: Longest time that a collective takes after the last rank joined.
        evaluate_s: Time of an evaluation.
        evaluate_batches: Further time of an evaluation, in batches of its rank.
        data_s: For each rank the time that its data take for a full batch; empty: none, and
            reads are not measured.
        reads_ahead: Data of the next batch are read from the start of a step on, not on request.
        call_chance: Chance that a body calls ``evaluate`` after a step, without lockstep.
        leave_chance: Chance that a body leaves the epoch after a step.
        window_chance: Chance that a body's step continues over the next batch.
        report_interval_s: See ``WorkerConfig``.
        stop_at_s: Time of the call of ``stop()``, if any.
        divergence: Largest divergence that a round shows.
        deaths: Workers that die.
        torn_chance: Chance that a rank loses the result of a collective which breaks
            after all have joined.
        linger_s: Longest time until a rank runs again after a collective.
        collective_timeout_s: Limit of a rank's wait for its peers; 0: none.
        saves_at_s: Times of calls of ``save()``.
        memory: Samples of the largest piece that each rank has memory for; empty: of any.
        batch_statistics: The model computes statistics of each rank's own samples.
        busy_s: Longest time until the coordinator's thread handles arrived messages.
        fault_chance: Chance that a collective over the first transport that has ranks meet
            fails when all have joined.
        unconnected_chance: Chance that a new group over it cannot be connected.
        late: True if it is one of :func:`draw_late_schedule`.
    """

    seed: int = 0
    config: CoordinatorConfig
    paces: tuple[tuple[Pace, ...], ...]
    jitter: float = 0.0
    build_s: float = 0.0
    delay_s: float = 0.0
    late_chance: float = 0.0
    late_s: float = 0.0
    load_chance: float = 0.0
    load_s: float = 0.0
    wake_s: float = 0.0
    average_s: float = 0.0
    sync_s: float = 0.0
    evaluate_s: float = 0.0
    evaluate_batches: int = 0
    data_s: tuple[float, ...] = ()
    reads_ahead: bool = False
    call_chance: float = 0.0
    leave_chance: float = 0.0
    window_chance: float = 0.0
    report_interval_s: float = 0.05
    stop_at_s: float | None = None
    divergence: float = 0.0
    deaths: tuple[Death, ...] = ()
    torn_chance: float = 0.0
    linger_s: float = 0.0
    collective_timeout_s: float = 0.0
    saves_at_s: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()
    batch_statistics: bool = False
    busy_s: float = 0.0
    fault_chance: float = 0.0
    unconnected_chance: float = 0.0
    late: bool = False

    def batch_s(self, rank: int, now: float) -> float:
        """Seconds of a full batch on a rank at a time."""
        return [p.batch_s for p in self.paces[rank] if p.start_s <= now][-1]


@dataclass(frozen=True)
class Draw:
    """Draws a schedule from a seed."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(self.seed))

    def maybe(self, chance: float) -> bool:
        """True with this probability."""
        return self.rng.random() < chance

    def schedule(self) -> Schedule:
        """The schedule of the seed."""
        rng = self.rng
        world = rng.choice((1, 2, 2, 2, 3, 3, 4, 5, 6, 7, 8))
        config = self._config(world)
        step_s = 10 ** rng.uniform(-3.5, -1.5)
        timeouts = config.snapshot_timeout_s < 1
        impatient = self.maybe(0.1) and config.max_failed_rounds < 10
        build_s = rng.choice((0.0, 10 * step_s))
        total_s = config.num_epochs * config.num_samples / config.batch_size * step_s
        return Schedule(
            seed=self.seed,
            config=config,
            paces=tuple(self._paces(step_s, total_s) for _ in range(world)),
            jitter=rng.choice((0.0, 0.1, 1.0)),
            build_s=build_s,
            delay_s=rng.choice((0.0, 0.01, 0.5, 3.0)) * step_s,
            late_chance=rng.choice((0.1, 0.3)) if timeouts else 0.0,
            late_s=5 * max(config.snapshot_timeout_s, 3 * step_s) if timeouts else 0.0,
            load_chance=0.2 if self.maybe(0.2) else 0.0,
            load_s=rng.uniform(0.5, 20.0) * step_s,
            wake_s=rng.choice((0.0, 0.1, 1.0)) * step_s,
            average_s=rng.choice((0.0, 0.5, 4.0)) * step_s,
            sync_s=rng.choice((0.0, 0.1, 2.0)) * step_s,
            evaluate_s=rng.choice((0.0, 3.0)) * step_s,
            report_interval_s=rng.choice((0.0, 0.01, 0.05, 0.05, 10.0)),
            stop_at_s=rng.uniform(0.0, 1.2) * total_s / world if self.maybe(0.2) else None,
            divergence=rng.choice((0.0, 0.2)),
            deaths=tuple(self._deaths(world, total_s / world, build_s, step_s)),
            torn_chance=rng.choice((0.0, 0.5)),
            linger_s=rng.choice((0.0, 0.0, 5.0)) * step_s,
            collective_timeout_s=rng.uniform(1, 20) * step_s if impatient else 0.0,
        )

    def _deaths(self, world: int, lasts_s: float, build_s: float, step_s: float) -> Iterator[Death]:
        """No death in most runs, otherwise of one or several ranks, sometimes at once."""
        rng = self.rng
        if not self.maybe(0.4 if world > 1 else 0.1):
            return

        def time_s() -> float:
            start_s = 0.0 if self.maybe(0.1) else build_s
            return start_s + rng.uniform(0.0, 1.0) * lasts_s

        at_s = time_s()
        for rank in rng.sample(range(world), min(world, rng.choice((1, 1, 1, 2, 2, world - 1, 8)))):
            yield Death(rank=rank, at_s=at_s, vanishes=self.maybe(0.3))
            if self.maybe(0.4):
                at_s = time_s()
            elif self.maybe(0.5):  # while the others regroup
                at_s += rng.uniform(0.0, 10.0) * step_s

    def _config(self, world: int) -> CoordinatorConfig:
        rng = self.rng
        batch_size = rng.randint(1, 8)
        num_samples = rng.choice(
            (rng.randint(1, world), rng.randint(1, 40), batch_size * rng.randint(1, 30))
        )
        whole = num_samples >= batch_size
        anchor = rng.choice((1, 2, 3, 5, 10))
        ratios = [rng.choice((0.0, 0.2, 1.0, 1.0, 3.0)) for _ in range(world)]
        return CoordinatorConfig(
            devices=("cpu",) * world,
            num_samples=num_samples,
            batch_size=batch_size,
            num_epochs=rng.randint(1, 3),
            policy=rng.choice(tuple(ApplyPolicy)),
            backend=rng.choice((AverageBackend.CPU, AverageBackend.THREAD)),
            drop_last=whole and self.maybe(0.2),
            accumulate=rng.choice((1, 1, 1, 2, 3)),
            anchor=anchor,
            max_anchor=rng.choice((anchor, 200)),
            overhead_target=rng.choice((0.01, 0.1, 0.5)),
            speed_hint=(rng.randrange(world), rng.uniform(1, 4)) if self.maybe(0.2) else None,
            max_batch_diff=rng.choice((None, None, 0, 1, 2, 5)),
            max_overshoot=rng.choice((None, None, 0, 1, 3)),
            divergence_threshold=rng.choice((None, 0.05)),
            auto_lr=True,
            partition_ratios=tuple(ratios) if any(ratios) and self.maybe(0.2) else None,
            max_steps=self._max_steps(),
            evaluate=self.maybe(0.4),
            checkpoint_every=rng.choice((None, None, 1, 2)),
            snapshot_timeout_s=rng.choice((5.0, 5.0, 0.001)),
            max_failed_rounds=rng.choice((5, 50)),
            continue_on_failure=self.maybe(0.75),
        )

    def _max_steps(self) -> int | None:
        self.rng.random()  # without this draw all seeds would have other schedules
        return self.rng.randint(1, 60) if self.maybe(0.15) else None

    def _paces(self, step_s: float, total_s: float) -> tuple[Pace, ...]:
        rng = self.rng
        first = Pace(start_s=0.0, batch_s=step_s * rng.uniform(1.0, 3.0))
        if self.maybe(0.7):
            return (first,)
        start_s = rng.uniform(0.0, total_s)
        return first, Pace(start_s=start_s, batch_s=first.batch_s * 10 ** rng.uniform(-1, 1))


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    drawn = with_sizes(with_shares(with_saves(with_ratios(Draw(seed).schedule()))))
    drawn = with_transports(with_global_batches(drawn))
    drawn = with_calls(with_validations(with_evaluations(drawn)))
    return with_windows(with_leaves(with_statistics(drawn)))


def with_ratios(schedule: Schedule) -> Schedule:
    """The schedule with ratios as batch sizes under ``SYNC``."""
    c = schedule.config
    if c.policy is not ApplyPolicy.SYNC or c.partition_ratios is None:
        return schedule
    sizes = split_by_ratio(c.batch_size * c.world_size, c.partition_ratios)
    unequal = sizes if len(set(sizes)) > 1 else None
    return replace(schedule, config=replace(c, partition_ratios=None, batch_sizes=unequal))


def with_windows(schedule: Schedule) -> Schedule:
    """The schedule with bodies whose steps are over several batches in a fifth of the runs."""
    c, rng = schedule.config, random.Random(f"windows of {schedule.seed}")
    if c.accumulate > 1 or c.num_micro_batches > 1 or rng.random() < 0.8:
        return schedule
    return replace(schedule, window_chance=rng.choice((0.1, 0.3, 0.6)))


def with_statistics(schedule: Schedule) -> Schedule:
    """The schedule with batch statistics in a third of the runs, from a separate generator."""
    rng = random.Random(f"statistics of {schedule.seed}")
    return replace(schedule, batch_statistics=rng.random() < 0.33)


def with_leaves(schedule: Schedule) -> Schedule:
    """The schedule with bodies that leave epochs in a fifth of the runs."""
    rng = random.Random(f"leaves of {schedule.seed}")
    if rng.random() < 0.8:
        return schedule
    return replace(schedule, leave_chance=rng.choice((0.02, 0.1, 0.5)))


def with_calls(schedule: Schedule) -> Schedule:
    """The schedule with calls of ``evaluate`` by bodies in a third of the runs that average."""
    c, rng = schedule.config, random.Random(f"calls of {schedule.seed}")
    averages = c.policy is not ApplyPolicy.SYNC and c.world_size > 1
    if not averages or rng.random() < 0.67:
        return schedule
    return replace(schedule, call_chance=rng.choice((0.05, 0.3, 1.0)))


def with_validations(schedule: Schedule) -> Schedule:
    """The schedule with a validation set in a third of the runs, from a separate generator."""
    c, rng = schedule.config, random.Random(f"validations of {schedule.seed}")
    if rng.random() < 0.67:
        return schedule
    within = rng.random() < 0.5
    return replace(
        schedule,
        config=replace(
            c,
            val_batches=rng.randint(1, 3 * c.world_size),
            val_every=rng.choice((1, 1, 2)),
            val_every_steps=rng.randint(1, 40) if within else None,
        ),
    )


def with_evaluations(schedule: Schedule) -> Schedule:
    """The schedule with evaluations within epochs in half of the runs with evaluation."""
    c, rng = schedule.config, random.Random(f"evaluations of {schedule.seed}")
    if not c.evaluate or rng.random() < 0.5:
        return schedule
    return replace(schedule, config=replace(c, eval_every=rng.randint(1, 40)))


def with_sizes(schedule: Schedule) -> Schedule:
    """The schedule with unequal batch sizes of the ranks in a third of the runs without
    ``SYNC``.
    """
    c = schedule.config
    rng = random.Random(f"sizes of {schedule.seed}")
    if c.policy is ApplyPolicy.SYNC or c.drop_last or rng.random() < 0.67:
        return schedule
    unit = max(1, c.batch_size // rng.choice((1, 2, 4)))
    sizes = tuple(unit * rng.randint(1, 6) for _ in range(c.world_size))
    return replace(schedule, config=replace(c, batch_size=unit, batch_sizes=sizes))


def with_global_batches(schedule: Schedule) -> Schedule:
    """The schedule with a global batch size in half of the runs without other sizes."""
    c = schedule.config
    rng = random.Random(f"global batches of {schedule.seed}")
    if c.batch_sizes is not None or c.partition_ratios is not None or schedule.memory:
        return schedule
    if rng.random() < 0.5:
        return schedule
    num, sync = c.accumulate, c.policy is ApplyPolicy.SYNC
    size = num * rng.randint(max(4, c.world_size), 4 * max(4, c.world_size))
    if sync:
        size += rng.randint(0, num - 1)
    if c.drop_last:
        size = min(size // num // c.world_size * c.world_size * num, c.num_samples)
    if size < num * c.world_size or (c.drop_last and not sync and size % (num * c.world_size)):
        return schedule
    if sync:
        config = replace(
            c, batch_size=size, global_batch_size=size, accumulate=1, num_micro_batches=num
        )
    else:
        parts = split_by_ratio(size // num, [1] * c.world_size)
        sizes = parts if len(set(parts)) > 1 else None
        config = replace(c, batch_size=math.gcd(*parts), batch_sizes=sizes, global_batch_size=size)
    return replace(schedule, config=config)


def with_transports(schedule: Schedule) -> Schedule:
    """The schedule with a choice of backends in half of the runs, from a separate generator."""
    rng = random.Random(f"transports of {schedule.seed}")
    c = schedule.config
    if c.world_size == 1 or rng.random() < 0.5:
        return schedule
    backends = [AverageBackend.CPU, AverageBackend.THREAD]
    if c.policy is ApplyPolicy.SYNC:
        backends = [AverageBackend.NCCL, AverageBackend.THREAD]
    elif rng.random() < 0.5:
        backends = [AverageBackend.NCCL, AverageBackend.CPU]
    return replace(
        schedule,
        config=replace(c, backend=backends[0], alternatives=(backends[1],)),
        fault_chance=rng.choice((0.0, 0.0, 0.3, 1.0)),
        unconnected_chance=rng.choice((0.0, 0.0, 0.5, 1.0)),
    )


def with_shares(schedule: Schedule) -> Schedule:
    """The schedule with shares by measured speed in half of the runs of ``SYNC``.

    Some of them have longer epochs, of many plans.
    """
    c = schedule.config
    if c.policy is not ApplyPolicy.SYNC or c.world_size == 1 or c.batch_sizes is not None:
        return schedule
    rng = random.Random(f"shares of {schedule.seed}")
    if rng.random() >= 0.5:
        return schedule
    factor = rng.choice((1, 1, 2, 4, 8))
    stop_s = schedule.stop_at_s
    # A limit is four fifths of the failed piece, and equal pieces must fit.
    least = c.batch_size * 5 // 4 + 1
    memory = tuple(rng.randint(least, least + 2) for _ in range(c.world_size))
    is_small = rng.random() < 0.4
    sizes, measures = None, True
    if rng.random() < 0.4:  # sizes set by the user, initial or fixed
        weights = [rng.randint(1, 5) for _ in range(c.world_size)]
        sizes = split_like(c.batch_size * c.world_size, weights)
        measures, is_small = rng.random() < 0.4, False
    return replace(
        schedule,
        config=replace(c, balance=measures, batch_sizes=sizes, num_samples=factor * c.num_samples),
        memory=memory if is_small else (),
        stop_at_s=None if stop_s is None else factor * stop_s,
        saves_at_s=tuple(factor * at_s for at_s in schedule.saves_at_s),
        deaths=tuple(replace(d, at_s=factor * d.at_s) for d in schedule.deaths),
    )


def stopped_late(schedule: Schedule) -> Schedule:
    """A longer run that is stopped, with ranks notified at different times."""
    rng = random.Random(f"stop of {schedule.seed}")
    c, batch_s = schedule.config, schedule.batch_s(0, 0.0)
    size = c.batch_size * c.world_size * c.accumulate
    c = replace(c, num_epochs=1, num_samples=20 * size + c.num_samples % 7)
    return replace(
        schedule,
        config=c,
        delay_s=rng.choice((1, 4, 8)) * batch_s,
        stop_at_s=schedule.build_s + rng.uniform(0.0, 20.0) * c.accumulate * batch_s,
        deaths=schedule.deaths if rng.random() < 0.3 else (),
    )


def with_saves(schedule: Schedule) -> Schedule:
    """The schedule with checkpoints in some runs, from a separate generator."""
    rng = random.Random(f"saves of {schedule.seed}")
    if rng.random() < 0.5:
        return schedule
    c = schedule.config
    step_s = schedule.batch_s(0, 0.0)
    total_s = c.num_epochs * c.num_samples / c.batch_size * step_s / c.world_size
    times = (schedule.build_s + rng.uniform(0.0, 1.1) * total_s for _ in range(rng.randint(0, 4)))
    return replace(
        schedule,
        config=replace(c, save_every=rng.choice((None, 1, 1, 2))),
        saves_at_s=tuple(sorted(times)),
    )


def draw_late_schedule(seed: int) -> Schedule:
    """A longer run with a late coordinator, whose acknowledgements may be delayed to reports.

    The faults of the seed are spread over it.
    """
    base = Draw(seed).schedule()
    while base.config.world_size == 1:
        seed += 10**6
        base = Draw(seed).schedule()
    rng = random.Random(f"late {seed}")
    c = base.config
    config = replace(
        c,
        num_samples=c.batch_size * rng.randint(20, 60) * c.world_size,
        num_epochs=rng.randint(1, 2),
        policy=rng.choice((ApplyPolicy.CADENCE, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC)),
        max_batch_diff=None,
        max_steps=None,
        partition_ratios=None,
        anchor=rng.choice((1, 2, 3, 5)),
        overhead_target=0.5,
    )
    longer = config.num_epochs * config.num_samples / (c.num_epochs * c.num_samples)
    stop_at_s = base.stop_at_s
    drawn = replace(
        base,
        config=config,
        late=True,
        busy_s=rng.choice((0.0, 0.1, 2.0)) * base.batch_s(0, 0.0),
        stop_at_s=None if stop_at_s is None else stop_at_s * longer,
        deaths=tuple(replace(d, at_s=d.at_s * longer) for d in base.deaths),
    )
    return with_windows(with_leaves(with_transports(with_saves(drawn))))
