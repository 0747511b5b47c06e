"""The rank of the evaluation and checkpoint functions, by measured cost."""

from __future__ import annotations

import pytest

from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.run_state import RankState, RunState
from coordinator.saved_run import RankTotals

CADENCE, SYNC = ApplyPolicy.CADENCE, ApplyPolicy.SYNC
SLOW_FIRST = [(100, 30.0), (300, 30.0)]
"""Samples and compute seconds of two ranks, of which the first computes three times slower."""
SLOW_DATA_SECOND = [(300, 30.0), (100, 10.0)]
"""The second waits for its data."""


def run_of(totals, policy=CADENCE, **settings):
    """A run whose ranks have trained this many samples in these compute seconds."""
    config = CoordinatorConfig(
        devices=("cpu",) * len(totals),
        num_samples=1000,
        batch_size=1,
        num_epochs=1,
        policy=policy,
        **settings,
    )
    run = RunState(config)
    for rank, (samples, seconds) in zip(run.ranks, totals, strict=True):
        rank.move(RankState.LIVE)
        rank.totals = RankTotals(num_batches=samples, num_samples=samples, compute_s=seconds)
    return run


@pytest.mark.parametrize(
    ("totals", "rank"),
    [
        (SLOW_FIRST, 1),
        (SLOW_DATA_SECOND, 1),
        ([(100, 10.0), (300, 30.0)], 0),  # slow data on the first
        ([(300, 30.0), (330, 30.0)], 0),  # about equal
        ([(100, 30.0), (200, 30.0), (300, 30.0)], 2),
        ([(20, 6.0), (300, 30.0)], 0),  # too few batches
        ([(100, 0.0), (300, 30.0)], 0),  # not measured
    ],
)
def test_an_evaluation_runs_where_it_costs_the_run_least(totals, rank):
    assert run_of(totals).evaluation_rank() == rank


def test_lockstep_places_by_compute_time_only_where_batches_follow_speed():
    assert run_of(SLOW_FIRST, SYNC).evaluation_rank() == 0  # results repeat to the bit
    balanced = run_of(SLOW_FIRST, SYNC, balance=True)
    assert balanced.evaluation_rank() == 1
    assert balanced.evaluation_rank(within=True) == 0  # buffers differ
    assert run_of(SLOW_DATA_SECOND, SYNC, balance=True).evaluation_rank() == 0  # all wait


def test_a_pinned_rank_is_kept_while_it_lives():
    run = run_of(SLOW_FIRST, eval_rank=0)
    assert run.evaluation_rank() == 0
    assert run_of(SLOW_FIRST, SYNC, eval_rank=1).evaluation_rank(within=True) == 1
    run.ranks[0].move(RankState.DEAD)
    assert run.evaluation_rank() == 1
