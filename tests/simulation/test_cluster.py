"""Hundreds of simulated clusters. A failing seed prints its history; replay it with
``python -m tests.simulation.replay --cluster --seed N``.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.simulation.cluster_harness import ClusterSimulation, simulate_cluster
from tests.simulation.cluster_schedule import ACTIONS, ClusterSchedule, Fault, Host
from tests.support.pairs import SCALE

NUM_CLUSTERS = 50 if SCALE == 1 else 150 * SCALE


def test_every_cluster_ends_with_every_batch_counted_once():
    seen = Counter()
    for seed in range(NUM_CLUSTERS):
        seen += simulate_cluster(seed).seen
    faults = [f"faults at {action}" for action in ACTIONS]
    for name in ("restarts", "left", "retrained", "two ends", "starved", "refused", *faults):
        assert seen[name] >= NUM_CLUSTERS // 50, (name, seen)
    assert seen["finished"] > NUM_CLUSTERS


def test_the_same_seed_gives_the_same_cluster():
    first, again = (simulate_cluster(7) for _ in range(2))
    assert first.num_events == again.num_events
    assert [str(line) for line in first.trace] == [str(line) for line in again.trace]


def large(seed, num=1000):
    """A large cluster of unequal machines, some of which die, stall or leave."""
    rng = random.Random(f"large {seed}")
    hosts = tuple(
        Host(name=f"m{i:04}", start_s=rng.random(), batch_s=rng.uniform(0.1, 0.8))
        for i in range(num)
    )
    faults = tuple(
        Fault(
            kind=rng.choice(("die", "stall", "stop")),
            name=rng.choice(hosts[1:]).name,
            at_s=rng.uniform(0.0, 40.0),
            for_s=rng.uniform(0.0, 10.0),
        )
        for _ in range(num // 50)
    )
    return ClusterSchedule(
        seed=8 * seed + 1,  # outcomes are shared
        hosts=hosts,
        batches_per_epoch=20 * num,
        num_epochs=2,
        period_s=5.0,
        delay_s=0.02,
        capture_s=0.2,
        join_s=20.0,
        heartbeat_s=5.0,
        timeout_s=10.0,
        quorum_timeout_s=30.0,
        faults=faults,
    )


@pytest.mark.parametrize("seed", range(20 if SCALE > 1 else 1))
def test_a_large_cluster_ends(seed):
    num = 1000 if SCALE > 1 else 30
    assert ClusterSimulation(large(seed, num)).run().seen["finished"] > num // 2
