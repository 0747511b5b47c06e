"""Ranks of unequal speed, on the virtual clock: shares, total time and the lead."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.data_waits import DataWaits
from runtime.settings import DEFAULT_ANCHOR, DEFAULT_MIN_ANCHOR
from tests.simulation.checks import Checks
from tests.simulation.harness import Hooks, Simulation, simulate
from tests.simulation.schedule import Pace, Schedule, draw_schedule
from tests.support.pairs import SCALE, pairwise

FAST_S = 0.004
"""Seconds of a batch on the fast rank."""

WAYS = [
    (policy, backend)
    for policy in (ApplyPolicy.CADENCE, ApplyPolicy.ASYNC)
    for backend in (AverageBackend.CPU, AverageBackend.THREAD)
]
every_way = pytest.mark.parametrize(
    ("policy", "backend"), WAYS, ids=[f"{p.value}-{b.value}" for p, b in WAYS]
)


def schedule_of(policy, backend, *, slowness=(1.0, 3.0), jitter=0.1, **settings):
    """Ranks whose batches take ``slowness * FAST_S``, with small other costs."""
    config = CoordinatorConfig(
        devices=("cpu",) * len(slowness),
        batch_size=10,
        policy=policy,
        backend=backend,
        divergence_threshold=None,
        **settings,
    )
    return Schedule(
        config=config,
        paces=tuple((Pace(start_s=0.0, batch_s=FAST_S * s),) for s in slowness),
        jitter=jitter,
        delay_s=FAST_S / 100,
        average_s=FAST_S / 4,
        sync_s=FAST_S / 20,
    )


def lockstep_of(slowness, num_steps, jitter=0.0):
    """Ranks under ``SYNC`` with measured shares, for an epoch of ``num_steps`` steps."""
    return schedule_of(
        ApplyPolicy.SYNC,
        AverageBackend.THREAD,
        slowness=slowness,
        jitter=jitter,
        num_samples=num_steps * len(slowness) * 10,
        num_epochs=1,
        balance=True,
    )


def shares_of(run):
    samples = run.checks.samples_by_rank
    return [n / sum(samples) for n in samples]


@pytest.mark.parametrize(("num_epochs", "num_batches"), [(1, 400), (4, 100), (10, 37), (3, 1000)])
@every_way
def test_a_rank_three_times_slower_trains_a_quarter_without_idle_time(
    policy, backend, num_epochs, num_batches
):
    schedule = schedule_of(policy, backend, num_samples=num_batches * 10 - 7, num_epochs=num_epochs)
    run = Simulation(schedule).run()
    assert 0.20 <= shares_of(run)[1] <= 0.30
    # Both together train 4 batches in the time in which the slow one trains one.
    mean_s = FAST_S * (1 + schedule.jitter / 2)
    possible_s = num_epochs * num_batches * mean_s * 3 / 4
    assert run.now <= 1.10 * possible_s


@pytest.mark.parametrize("slowness", [(1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("backend", [AverageBackend.CPU, AverageBackend.THREAD])
def test_cheap_rounds_reach_a_cadence_of_two_or_three_batches_without_lost_time(backend, slowness):
    schedule = schedule_of(
        ApplyPolicy.CADENCE,
        backend,
        slowness=slowness,
        num_samples=20_000,
        num_epochs=1,
        anchor=DEFAULT_ANCHOR,
        min_anchor=DEFAULT_MIN_ANCHOR,
    )
    run = Simulation(replace(schedule, sync_s=FAST_S / 100, average_s=FAST_S / 100)).run()
    waits = backend is AverageBackend.THREAD
    assert run.machine.run_state.elche.anchor <= (5 if waits else 3)
    rate = sum(1 / (FAST_S * s * (1 + schedule.jitter / 2)) for s in slowness)
    assert run.now <= (1.15 if waits else 1.05) * 2_000 / rate


@every_way
def test_a_slower_rank_loses_its_share(policy, backend):
    schedule = schedule_of(
        policy, backend, slowness=(1.0, 1.0), jitter=0.0, num_samples=4000, num_epochs=5
    )
    slower = Pace(start_s=2 * 400 / 2 * FAST_S, batch_s=3 * FAST_S)
    paces = (schedule.paces[0], (*schedule.paces[1], slower))
    run = Simulation(Schedule(config=schedule.config, paces=paces)).run()
    by_epoch = [e.per_rank_batch_share[1] for e in run.machine.outcome.metrics]
    assert by_epoch[0] == pytest.approx(0.5, abs=0.03)
    assert by_epoch[-1] == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("slowness", [(1.0, 2.0), (1.0, 3.0), (1.0, 5.0), (1.0, 2.0, 4.0)])
def test_lockstep_with_shares_approaches_the_sum_of_the_ranks_speeds(slowness):
    num_steps, world = 300, len(slowness)
    schedule = lockstep_of(slowness, num_steps, jitter=0.1)
    run = Simulation(schedule).run()
    possible_s = num_steps * world * FAST_S / sum(1 / s for s in slowness)
    assert run.now <= 1.25 * possible_s
    equal_s = num_steps * FAST_S * max(slowness)
    assert run.now <= 0.85 * equal_s


class Plans(Hooks):
    """The number of steps of each plan of rank 0."""

    def __init__(self):
        self.steps = []
        self._plan = None

    def before_step(self, worker):
        if worker.rank == 0 and worker.protocol.plan is not self._plan:
            self._plan = worker.protocol.plan
            self.steps.append(self._plan.steps.num_pieces(0))


@pytest.mark.parametrize(("slowness", "num_steps"), [(1.0, 125), (25.0, 5), (1000.0, 1)])
def test_plans_of_lockstep_last_half_a_second(slowness, num_steps):
    """Each is at most about twice as long as the one before."""
    schedule = schedule_of(
        ApplyPolicy.SYNC,
        AverageBackend.THREAD,
        slowness=(slowness, slowness),
        jitter=0.0,
        num_samples=40 * num_steps * 20,
        num_epochs=1,
    )
    plans = Plans()
    Simulation(schedule, plans).run()
    assert plans.steps[0] == 1
    assert all(after <= 2 * num + 1 for num, after in itertools.pairwise(plans.steps))
    assert all(abs(num - num_steps) <= max(1, 0.05 * num_steps) for num in plans.steps[12:-1])


def test_plans_hold_the_batches_that_loader_processes_read_ahead():
    schedule = schedule_of(
        ApplyPolicy.SYNC,
        AverageBackend.THREAD,
        slowness=(1000.0, 1000.0),
        num_samples=20 * 20,
        num_epochs=1,
        accumulate=2,
        read_ahead=8,
    )
    plans = Plans()
    Simulation(schedule, plans).run()
    assert plans.steps == [8, 8, 4]


class Sizes(Hooks):
    """The size of rank 1's piece, with the time, in each of its steps."""

    def __init__(self):
        self.steps = []

    def before_step(self, worker):
        if worker.rank == 1:
            _, (start, stop) = next(worker.protocol.plan.steps.pieces(1))
            self.steps.append((worker._sim.now, stop - start))


def test_lockstep_shares_match_the_speeds_after_a_dozen_steps():
    schedule = lockstep_of((1.0, 5.0), num_steps=40)
    sizes = Sizes()
    Simulation(schedule, hooks=sizes).run()
    assert [size for _, size in sizes.steps[:6]] == [10] * 6
    assert {size for _, size in sizes.steps[8:]} <= {3, 4}


def test_lockstep_shares_follow_a_slower_rank_within_20_steps():
    schedule = lockstep_of((1.0, 1.0), num_steps=100)
    slower = Pace(start_s=50 * FAST_S, batch_s=3 * FAST_S)
    paces = (schedule.paces[0], (*schedule.paces[1], slower))
    sizes = Sizes()
    Simulation(Schedule(config=schedule.config, paces=paces), hooks=sizes).run()
    after = [size for now, size in sizes.steps if now > slower.start_s]
    assert [size for now, size in sizes.steps if now < slower.start_s][-1] == 10
    assert set(after[20:]) == {5}


@pairwise(
    ratios=[(0.5, 0.5), (0.9, 0.1), (1.0, 0.0)],
    policy=[ApplyPolicy.CADENCE, ApplyPolicy.ASYNC],
    backend=[AverageBackend.CPU, AverageBackend.THREAD],
)
def test_fixed_ratios_hold_at_any_speeds(policy, backend, ratios):
    run = Simulation(
        schedule_of(
            policy,
            backend,
            num_samples=1000,
            num_epochs=3,
            partition_ratios=ratios,
        )
    ).run()
    for epoch in run.machine.outcome.metrics:
        assert epoch.per_rank_batch_share == pytest.approx(ratios)


class Lead(Hooks):
    """Measures how far a rank is ahead of the other in a round, while both have work.

    Attributes:
        largest: The largest lead seen, in batches.
    """

    def __init__(self):
        self.largest = 0

    def before_step(self, worker):
        other = worker._sim.workers[1 - worker.rank]
        if worker.base is other.base and other.protocol.plans:
            self.largest = max(self.largest, worker.protocol.batches - other.protocol.batches)


@pytest.mark.parametrize("max_batch_diff", [0, 1, 2, 5])
@every_way
def test_no_rank_leads_by_more_than_max_batch_diff(policy, backend, max_batch_diff):
    """S1: a limit below the anchor, or 0 on equal devices, does not hang and is not exceeded."""
    for slowness in ((1.0, 3.0), (1.0, 1.0)):
        lead = Lead()
        schedule = schedule_of(
            policy,
            backend,
            slowness=slowness,
            num_samples=2000,
            num_epochs=1,
            max_batch_diff=max_batch_diff,
        )
        run = Simulation(schedule, lead).run()
        assert lead.largest <= max_batch_diff
        if slowness == (1.0, 3.0):
            assert lead.largest == max_batch_diff
            assert run.machine.run_state.ranks[0].totals.num_throttles > 0


@pytest.mark.parametrize("max_overshoot", [0, 1, 3])
@pytest.mark.parametrize("backend", [AverageBackend.CPU, AverageBackend.THREAD])
def test_a_fast_rank_overshoots_its_count_by_max_overshoot_at_most(backend, max_overshoot):
    class Overshoot(Hooks):
        largest = 0

        def before_step(self, worker):
            count = worker._sim.machine.run_state.elche.batch_counts[worker.rank]
            self.largest = max(self.largest, worker.protocol.batches + 1 - count)

    hooks = Overshoot()
    schedule = schedule_of(
        ApplyPolicy.ASYNC,
        backend,
        slowness=(1.0, 1.0, 1.0),
        jitter=0.0,
        num_samples=2000,
        num_epochs=2,
        max_overshoot=max_overshoot,
    )
    Simulation(schedule, hooks).run()
    assert min(max_overshoot, 1) <= hooks.largest <= max_overshoot


@pytest.mark.parametrize("policy", list(ApplyPolicy))
def test_sync_assigns_equal_shares_at_any_speeds(policy):
    schedule = schedule_of(policy, AverageBackend.THREAD, num_samples=1000, num_epochs=2)
    shares = shares_of(Simulation(schedule).run())
    assert (shares == [0.5, 0.5]) == (policy is ApplyPolicy.SYNC)


@every_way
def test_a_stalled_loader_delays_no_acknowledgement(policy, backend):
    """D8: less than 100 ms pass between a request and its reply while a batch is loaded."""
    schedule = schedule_of(policy, backend, slowness=(1.0, 1.0), num_samples=600, num_epochs=2)
    stalled = Schedule(
        config=schedule.config, paces=schedule.paces, load_chance=0.1, load_s=60.0, seed=3
    )
    run = Simulation(stalled).run()
    assert run.now > 60.0
    assert run.checks.longest_answer_s < 0.1


class Alone(Hooks):
    """The most batches of a rank between two rounds, as a multiple of its count."""

    def __init__(self):
        self.largest = 0.0

    def before_step(self, worker):
        count = worker._sim.machine.run_state.elche.batch_counts[worker.rank]
        self.largest = max(self.largest, (worker.protocol.batches + 1) / count)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", [AverageBackend.CPU, AverageBackend.THREAD])
def test_a_rank_is_averaged_while_another_waits_long_for_its_data(backend, seed):
    """Under ``CADENCE`` the slowest rank makes rounds due, but not one that makes no progress."""
    alone = Alone()
    schedule = schedule_of(
        ApplyPolicy.CADENCE, backend, slowness=(1.0, 1.0), num_samples=20_000, num_epochs=1
    )
    Simulation(replace(schedule, load_chance=0.01, load_s=10.0, seed=seed), alone).run()
    assert 1 <= alone.largest <= 6


def evaluated_run(schedule, monkeypatch):
    """The simulated seconds of a run, and the rank that evaluates its last epoch."""
    ranks = []
    check = Checks.on_per_epoch

    def on_per_epoch(checks, rank, what, epoch, held):
        ranks.append(rank)
        check(checks, rank, what, epoch, held)

    monkeypatch.setattr(Checks, "on_per_epoch", on_per_epoch)
    run = Simulation(schedule).run()
    monkeypatch.undo()
    assert len(ranks) == schedule.config.num_epochs
    return run.now, ranks[-1]


def compared(monkeypatch, schedule):
    """The rank chosen by cost, and the time of the run relative to that with ``eval_rank(0)``."""
    schedule = replace(schedule, evaluate_batches=100)
    pinned = replace(schedule, config=replace(schedule.config, eval_rank=0))
    pinned_s, rank = evaluated_run(pinned, monkeypatch)
    assert rank == 0
    chosen_s, rank = evaluated_run(schedule, monkeypatch)
    return rank, chosen_s / pinned_s


@pytest.mark.parametrize(("policy", "most"), [(ApplyPolicy.CADENCE, 0.97), (ApplyPolicy.SYNC, 0.9)])
def test_evaluations_leave_a_rank_with_slow_compute(monkeypatch, policy, most):
    more = {"balance": True} if policy is ApplyPolicy.SYNC else {}
    schedule = schedule_of(
        *(policy, AverageBackend.THREAD),
        slowness=(3.0, 1.0),
        num_samples=6000,
        num_epochs=6,
        evaluate=True,
        **more,
    )
    rank, time = compared(monkeypatch, schedule)
    assert rank == 1
    assert time < most


def test_evaluations_run_on_a_rank_that_waits_for_its_data(monkeypatch):
    schedule = schedule_of(
        *(ApplyPolicy.CADENCE, AverageBackend.CPU),
        slowness=(1.0, 1.0),
        num_samples=6000,
        num_epochs=6,
        evaluate=True,
    )
    rank, time = compared(monkeypatch, replace(schedule, data_s=(0.0, 3 * FAST_S)))
    assert rank == 1
    assert time < 0.97


def with_slow_data(policy, data, *, slowness=(1.0, 1.0), reads_ahead=True, **schedule):
    """Ranks whose data take ``data * FAST_S`` for a batch, with shares by speed."""
    base = schedule_of(
        policy,
        AverageBackend.THREAD,
        slowness=slowness,
        jitter=0.0,
        num_samples=6000 if SCALE > 1 else 3000,
        num_epochs=2,
        balance=policy is ApplyPolicy.SYNC or None,
    )
    data_s = tuple(FAST_S * d for d in data)
    return replace(base, data_s=data_s, reads_ahead=reads_ahead, **schedule)


SLOW_DATA = [
    pytest.param((1.0, 1.0), (0.0, 3.0), False, 1 / 5, id="on request"),
    pytest.param((1.0, 1.0), (0.0, 3.0), True, 1 / 4, id="ahead"),
    pytest.param((3.0, 1.0), (0.0, 4.0), False, 3 / 8, id="on request, peer with slow compute"),
    pytest.param((3.0, 1.0), (0.0, 4.0), True, 3 / 7, id="ahead, peer with slow compute"),
    pytest.param((1.0, 3.0), (0.0, 2.0), False, 1 / 6, id="on request, slow compute"),
]
"""Slowness of compute and data of two ranks, reading ahead, and the share of the second."""

POLICIES = [(ApplyPolicy.SYNC, 0.85), (ApplyPolicy.ASYNC, 0.85), (ApplyPolicy.CADENCE, 0.995)]


@pytest.mark.parametrize(("slowness", "data", "reads_ahead", "share"), SLOW_DATA)
@pytest.mark.parametrize(("policy", "most"), POLICIES, ids=lambda value: str(value))
def test_shares_count_a_ranks_own_wait_for_data(
    monkeypatch, policy, most, slowness, data, reads_ahead, share
):
    schedule = with_slow_data(policy, data, slowness=slowness, reads_ahead=reads_ahead)
    run = Simulation(schedule).run()
    assert shares_of(run)[1] == pytest.approx(share, abs=0.03)
    monkeypatch.setattr(DataWaits, "per_sample_s", lambda *args: 0.0)
    assert run.now < most * Simulation(schedule).run().now


@pytest.mark.parametrize("seed", [0, 1, 2, 9])
@pytest.mark.parametrize(("slowness", "data", "reads_ahead", "share"), SLOW_DATA)
def test_lockstep_shares_with_slow_data_converge_and_stay(slowness, data, reads_ahead, share, seed):
    """A wait for data counts although waits for peers hide it once the rank's share is smaller.

    Shares may vary in the first 55 of 300 steps.
    """
    schedule = with_slow_data(ApplyPolicy.SYNC, data, slowness=slowness, reads_ahead=reads_ahead)
    sizes = Sizes()
    Simulation(replace(schedule, seed=seed), hooks=sizes).run()
    later = [size for _, size in sizes.steps[60:]]
    assert len(later) > 200
    assert max(later) - min(later) <= 1
    assert later[-1] == pytest.approx(20 * share, abs=1)


def test_lockstep_shares_recover_once_the_data_are_fast():
    class Recovery(Sizes):
        def before_step(self, worker):
            super().before_step(worker)
            if len(self.steps) == 100:
                worker._sim.schedule = replace(worker._sim.schedule, data_s=(0.0, 0.0))

    sizes = Recovery()
    Simulation(with_slow_data(ApplyPolicy.SYNC, (0.0, 3.0)), hooks=sizes).run()
    assert sizes.steps[99][1] == 5
    assert {size for _, size in sizes.steps[120:]} == {10}


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_lockstep_shares_ignore_single_stalls_of_the_data(reads_ahead):
    schedule = with_slow_data(
        *(ApplyPolicy.SYNC, (0.0, 0.0)),
        reads_ahead=reads_ahead,
        load_chance=0.03,
        load_s=20 * FAST_S,
    )
    sizes = Sizes()
    Simulation(schedule, hooks=sizes).run()
    assert {size for _, size in sizes.steps[10:]} == {10}


@pytest.mark.parametrize("policy", [ApplyPolicy.SYNC, ApplyPolicy.CADENCE])
def test_shares_ignore_waits_that_all_ranks_have(policy):
    schedule = with_slow_data(policy, (3.0, 3.0), slowness=(1.0, 3.0), reads_ahead=False)
    run = Simulation(schedule).run()
    if policy is ApplyPolicy.SYNC:
        assert shares_of(run)[1] == pytest.approx(0.25, abs=0.02)
    else:
        seconds = run.machine.run_state.elche.seconds_per_batch
        assert seconds == pytest.approx((FAST_S, 3 * FAST_S), rel=0.01)


def test_every_sample_counts_once_in_random_schedules_with_slow_data():
    def draw(seed):
        schedule, rng = draw_schedule(seed), random.Random(seed)
        step_s = schedule.paces[0][0].batch_s
        data_s = tuple(step_s * rng.choice((0.0, 0.5, 4.0)) for _ in schedule.paces)
        return replace(schedule, data_s=data_s, reads_ahead=rng.random() < 0.5)

    runs = [simulate(seed, draw=draw) for seed in range(50 if SCALE == 1 else 150)]
    waits = [sum(rank.data_wait_s for rank in run.machine.run_state.ranks) for run in runs]
    assert sum(wait_s > 0 for wait_s in waits) > len(waits) // 15


def test_a_rank_that_idled_has_its_share_again_after_one_probe_at_its_own_speed():
    schedule = lockstep_of((1.0, 1.0), num_steps=1200)
    slow = Pace(start_s=20 * FAST_S, batch_s=100 * FAST_S)
    again = Pace(start_s=1000 * FAST_S, batch_s=FAST_S)
    paces = (schedule.paces[0], (*schedule.paces[1], slow, again))
    sizes = Sizes()
    Simulation(replace(schedule, paces=paces), hooks=sizes).run()
    after = [size for now, size in sizes.steps if now > again.start_s]
    probed = next(i for i, size in enumerate(after) if size)
    assert set(after[:probed]) == {0}
    assert after[probed] == 1
    assert set(after[probed + 20 :]) == {10}


def test_a_rank_that_has_lost_the_memory_for_the_smallest_piece_is_not_probed():
    """A second such piece would end the run."""

    class Loss(Sizes):
        def before_step(self, worker):
            super().before_step(worker)
            if len(self.steps) == 30:
                worker._sim.schedule = replace(worker._sim.schedule, memory=(20, 1))

    schedule = replace(lockstep_of((1.0, 1.0), num_steps=600), memory=(20, 20))
    sizes = Loss()
    run = Simulation(replace(schedule, batch_statistics=True), hooks=sizes).run()
    assert run.machine.outcome.failure is None
    assert sizes.steps[20][1] == 10
    assert {size for _, size in sizes.steps[-500:]} == {0}
