"""What an averaging round teaches the cadence."""

from __future__ import annotations

import pytest

from coordinator.config import CoordinatorConfig
from tests.simulation.harness import Simulation
from tests.simulation.schedule import Pace, Schedule

ANCHOR = 10


def anchor_after(batch_s):
    """Two ranks whose batches take so long, and whom averaging costs nothing."""
    config = CoordinatorConfig(
        devices=("cpu",) * 2,
        num_samples=800,
        batch_size=1,
        num_epochs=1,
        anchor=ANCHOR,
        divergence_threshold=None,
    )
    schedule = Schedule(config=config, paces=((Pace(start_s=0.0, batch_s=batch_s),),) * 2)
    assert schedule.sync_s == schedule.average_s == 0.0
    statistics = Simulation(schedule).run().machine.statistics()
    assert statistics.num_averagings >= 5
    assert all(rank.sync_s == 0.0 for rank in statistics.ranks)
    return statistics.anchor


@pytest.mark.parametrize(("batch_s", "grows"), [(5e-4, True), (0.5, False)])
def test_a_round_costs_something_even_where_no_rank_notices(batch_s, grows):
    """It shows where batches are short, and nowhere else."""
    assert (anchor_after(batch_s) > ANCHOR) is grows
