"""Runs resumed from every checkpoint of a simulated run, at any world size."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from coordinator.config import ApplyPolicy
from coordinator.splitting import split_like
from tests.simulation.finding import NUM_SCHEDULES
from tests.simulation.harness import Simulation, simulate
from tests.simulation.saves import Origin
from tests.simulation.schedule import Schedule, draw_schedule
from tests.support.pairs import SCALE

SLICES = 1 if SCALE == 1 else 2


def at_world_size(schedule: Schedule, world: int) -> Schedule:
    """The schedule on another number of ranks."""
    c = schedule.config
    if world == c.world_size:
        return schedule
    sizes = c.batch_sizes
    if sizes is not None:
        sizes = tuple(sizes[r % len(sizes)] for r in range(world))
        if c.policy is ApplyPolicy.SYNC:
            sizes = split_like(c.batch_size * world, sizes)
    return replace(
        schedule,
        config=replace(
            c,
            devices=("cpu",) * world,
            partition_ratios=None,
            batch_sizes=sizes,
            speed_hint=None,
        ),
        paces=tuple(schedule.paces[rank % len(schedule.paces)] for rank in range(world)),
        deaths=tuple(death for death in schedule.deaths if death.rank < world),
    )


@pytest.mark.parametrize("part", range(SLICES))
def test_remaining_batches_of_any_checkpoint_are_trained_once(part):
    seen: Counter[object] = Counter()
    for seed in range(part, NUM_SCHEDULES, SLICES):
        schedule = draw_schedule(seed)
        if not (schedule.saves_at_s or schedule.config.save_every):
            continue
        first = simulate(seed)
        if first.machine.outcome.failure is None:
            if schedule.config.save_every is not None:
                assert first.saved or first.machine.outcome.payload is None
            if first.saved and first.saved[-1].final:
                seen["final"] += 1
        if not first.saved:
            continue
        rng = random.Random(f"{seed} resumed")
        command = rng.choice(first.saved)
        world = schedule.config.world_size
        if rng.random() < 0.4:
            world = rng.randint(1, 4)
        again = replace(at_world_size(schedule, world), seed=seed + 1, stop_at_s=None)
        second = Simulation(again, origin=Origin(command)).run()
        policy = schedule.config.policy
        seen["saved", policy] += len(first.saved)
        seen["resumed", policy] += second.machine.outcome.failure is None
        seen["elsewhere", policy] += world != schedule.config.world_size
        seen["part of an epoch"] += any(e.consumed for e in command.run.epochs)
        seen["after a death"] += bool(first.dead)
    for policy in ApplyPolicy:
        for what in ("saved", "resumed", "elsewhere"):
            assert seen[what, policy] >= 10, (what, policy)
    for what in ("final", "part of an epoch", "after a death"):
        assert seen[what] >= 10, what
