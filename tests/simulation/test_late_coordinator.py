"""Longer runs whose coordinator thread is late and finds several messages at once."""

from __future__ import annotations

from collections import Counter

from coordinator.config import ApplyPolicy
from tests.simulation.harness import simulate
from tests.simulation.schedule import draw_late_schedule
from tests.support.pairs import SCALE

NUM_SCHEDULES = 100 if SCALE == 1 else 300 * SCALE


def test_every_schedule_ends_with_a_late_coordinator():
    seen = Counter()
    for seed in range(NUM_SCHEDULES):
        run = simulate(seed, draw=draw_late_schedule)
        seen["late"] += run.schedule.busy_s > 0
        seen["died"] += bool(run.dead)
        seen["saved"] += bool(run.saved)
        seen[run.schedule.config.policy] += 1
    assert seen["late"] >= 50
    for what in ("died", "saved", ApplyPolicy.CADENCE, ApplyPolicy.ASYNC):
        assert seen[what] >= 20, what
