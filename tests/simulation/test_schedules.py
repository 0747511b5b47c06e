"""Thousands of runs of the real coordinator with real protocols under a virtual clock.

A failing seed prints its history and replays with
``python -m tests.simulation.replay --seed N``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from coordinator.config import ApplyPolicy
from tests.simulation.checks import Checks
from tests.simulation.effects import Violation
from tests.simulation.finding import NUM_SCHEDULES
from tests.simulation.harness import simulate
from tests.simulation.schedule import draw_schedule

SLICES = 4


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
            seen["regrouped"] += run.machine.core.generation > 0
            seen["alone"] += run.machine.core.alone and config.world_size > 1
        seen["failed"] += bool(run.dead) and outcome.failure is not None
        seen["rounds given up"] += run.machine.core.num_failed_rounds > 0
    assert seen["events"] > 20 * NUM_SCHEDULES // SLICES
    for policy in ApplyPolicy:
        assert seen["survived", policy] >= 10
    for what in ("retrained", "regrouped", "alone", "failed", "rounds given up"):
        assert seen[what] >= 5, what


def test_the_same_seed_gives_the_same_history():
    for seed in (7, 8, 9):
        first, again = (simulate(seed) for _ in range(2))
        assert first.num_events == again.num_events
        assert [str(line) for line in first.trace] == [str(line) for line in again.trace]


def test_the_schedules_reach_every_setting():
    drawn = [draw_schedule(seed) for seed in range(NUM_SCHEDULES // 5)]
    assert {s.config.world_size for s in drawn} == set(range(1, 9))
    assert len({(s.config.policy, s.config.backend) for s in drawn}) == 9
    assert any(s.config.num_samples < s.config.world_size for s in drawn)
    assert any(s.config.num_samples % s.config.batch_size for s in drawn)
    assert any(s.config.max_batch_diff == 0 for s in drawn)
    assert any(s.config.max_overshoot == 0 for s in drawn)
    assert any(s.config.partition_ratios for s in drawn)
    assert any(s.config.balance for s in drawn)
    assert any(s.config.alternatives and s.fault_chance for s in drawn)
    assert any(s.config.alternatives and s.unconnected_chance for s in drawn)
    assert any(s.stop_at_s is not None for s in drawn)
    assert any(s.config.max_steps for s in drawn)
    assert any(s.late_chance for s in drawn)
    assert any(s.load_chance for s in drawn)
    assert any(s.collective_timeout_s for s in drawn)
    assert {d.vanishes for s in drawn for d in s.deaths} == {True, False}
    assert {len(s.deaths) for s in drawn} >= {0, 1, 2, 8}


def test_a_violation_says_which_batch_is_missing():
    run = simulate(7)
    checks = Checks(run)
    with pytest.raises(Violation, match=r"epoch 0 is closed without the effect of \[\(0, 0\)"):
        checks._must_hold(0, frozenset(), "closed")
