"""Thousands of runs of the real coordinator with real protocols under a virtual clock.

A failing seed prints its history and replays with
``python -m tests.simulation.replay --seed N``.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from tests.simulation.checks import Checks
from tests.simulation.effects import Violation
from tests.simulation.finding import NUM_SCHEDULES
from tests.simulation.harness import simulate
from tests.simulation.schedule import Pace, Schedule, draw_schedule
from tests.support.pairs import SCALE

SLICES = 1 if SCALE == 1 else 2


@pytest.mark.parametrize("part", range(SLICES))
def test_every_schedule_ends_with_every_sample_in_the_result_once(part):
    seen = Counter()
    for seed in range(part, NUM_SCHEDULES, SLICES):
        run = simulate(seed)
        outcome, config = run.machine.outcome, run.schedule.config
        seen["events"] += run.num_events
        if outcome.failures and outcome.failure is None:
            seen["survived", config.policy] += 1
            seen["retrained"] += any(e.num_retrained for e in outcome.metrics)
            seen["regrouped"] += run.machine.run_state.generation > 0
            seen["alone"] += run.machine.run_state.alone and config.world_size > 1
        seen["failed"] += bool(run.dead) and outcome.failure is not None
        seen["rounds given up"] += run.machine.run_state.num_failed_rounds > 0
    assert seen["events"] > 20 * NUM_SCHEDULES // SLICES
    for policy in ApplyPolicy:
        assert seen["survived", policy] >= 10
    for what in ("retrained", "regrouped", "alone", "failed", "rounds given up"):
        assert seen[what] >= 5, what


def draw_late_ranks_at_a_stop(seed):
    """Lockstep ranks that time out waiting for each other, and a stop at about that time."""
    draw = random.Random(seed)
    config = CoordinatorConfig(
        devices=("cpu", "cpu"),
        num_samples=80,
        batch_size=4,
        num_epochs=2,
        policy=ApplyPolicy.SYNC,
        backend=AverageBackend.THREAD,
        accumulate=draw.choice([1, 3]),
        balance=draw.random() < 0.5,
        save_every=2,
        continue_on_failure=True,
    )
    return Schedule(
        seed=seed,
        config=config,
        paces=tuple((Pace(start_s=0.0, batch_s=s),) for s in (0.0013, 0.001)),
        build_s=0.007,
        delay_s=0.002,
        sync_s=0.0015,
        linger_s=0.004,
        report_interval_s=10.0,
        stop_at_s=draw.uniform(0.008, 0.03),
        collective_timeout_s=0.0011,
    )


def test_ranks_that_time_out_at_a_stop_report_their_training():
    """Their last steps are in the checkpoint and must not be dealt again."""
    seen = Counter()
    for seed in range(300):
        run = simulate(seed, draw=draw_late_ranks_at_a_stop)
        seen["saved in mid-epoch"] += any(save.run.epochs for save in run.saved)
    assert seen["saved in mid-epoch"] >= 100


def test_the_same_seed_gives_the_same_history():
    for seed in (7, 8, 9):
        first, again = (simulate(seed) for _ in range(2))
        assert first.num_events == again.num_events
        assert [str(line) for line in first.trace] == [str(line) for line in again.trace]


def test_the_schedules_reach_every_setting():
    drawn = [draw_schedule(seed) for seed in range(200)]
    assert {s.config.world_size for s in drawn} == set(range(1, 9))
    assert len({(s.config.policy, s.config.backend) for s in drawn}) == 9
    assert any(s.config.num_samples < s.config.world_size for s in drawn)
    assert any(s.config.num_samples % s.config.batch_size for s in drawn)
    assert any(s.config.max_batch_diff == 0 for s in drawn)
    assert any(s.config.max_overshoot == 0 for s in drawn)
    assert any(s.config.partition_ratios for s in drawn)
    assert {(s.config.balance, s.config.batch_sizes is None) for s in drawn} == set(
        product((False, True), repeat=2)
    )
    wholes = [s.config for s in drawn if s.config.global_batch_size is not None]
    assert {(c.policy, c.num_micro_batches * c.accumulate) for c in wholes} == set(
        product(ApplyPolicy, (1, 2, 3))
    )
    assert any(s.config.alternatives and s.fault_chance for s in drawn)
    assert any(s.config.alternatives and s.unconnected_chance for s in drawn)
    assert any(s.stop_at_s is not None for s in drawn)
    assert any(s.config.max_steps for s in drawn)
    assert any(s.late_chance for s in drawn)
    assert any(s.load_chance for s in drawn)
    assert any(s.collective_timeout_s for s in drawn)
    assert {d.vanishes for s in drawn for d in s.deaths} == {True, False}
    assert {len(s.deaths) for s in drawn} >= {0, 1, 2, 8}


def test_a_violation_names_the_missing_batch():
    run = simulate(7)
    checks = Checks(run)
    with pytest.raises(Violation, match=r"epoch 0 is closed without the effect of \[\(0, 0\)"):
        checks._must_hold(0, frozenset(), "closed")
