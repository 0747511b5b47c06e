"""The waits for data that count in a rank's speed."""

from __future__ import annotations

import pytest

from coordinator.data_waits import DataWaits
from coordinator.metrics import ReportStats


def report(wait_s, num_samples=10):
    return ReportStats(num_batches=1, num_samples=num_samples, data_wait_s=wait_s)


def waits_of(*ranks):
    """Ranks whose reports of 10 samples have these waits, in seconds."""
    waits = DataWaits(len(ranks))
    for rank, seconds in enumerate(ranks):
        for wait_s in seconds:
            waits.add(rank, report(wait_s))
    return waits


def test_the_least_of_the_last_three_reports_counts():
    waits = waits_of((0.0, 0.0, 0.0), (0.1, 9.0, 3.0, 2.0, 5.0))
    assert waits.per_sample_s(1, (0, 1)) == pytest.approx(0.2)
    waits.add(1, report(0.5))
    assert waits.per_sample_s(1, (0, 1)) == pytest.approx(0.05)


def test_waits_count_by_samples():
    waits = waits_of((0.0, 0.0), ())
    for num_samples in (10, 20, 5):
        waits.add(1, report(0.03 * num_samples, num_samples))
    assert waits.per_sample_s(1, (0, 1)) == pytest.approx(0.03)


def test_the_least_wait_of_the_live_ranks_is_subtracted():
    waits = waits_of((1.0,) * 3, (3.0,) * 3, (6.0,) * 3)
    assert [waits.per_sample_s(rank, (0, 1, 2)) for rank in range(3)] == pytest.approx(
        [0, 0.2, 0.5]
    )
    assert [waits.per_sample_s(rank, (1, 2)) for rank in range(3)] == pytest.approx([0, 0, 0.3])


def test_no_wait_counts_before_every_live_rank_has_reported_twice():
    waits = waits_of((5.0, 5.0, 5.0), (0.0,))
    assert waits.per_sample_s(0, (0, 1)) == 0.0
    waits.add(1, report(0.0))
    assert waits.per_sample_s(0, (0, 1)) == 0.5


def test_reports_without_samples_or_measurement_have_no_effect():
    waits = waits_of((5.0, 5.0), (0.0, 0.0))
    waits.add(0, report(0.0, num_samples=0))
    waits.add(0, report(None))
    waits.add(0, ReportStats())
    assert waits.per_sample_s(0, (0, 1)) == 0.5


def test_waits_are_restored_at_the_same_world_size():
    saved = waits_of((5.0, 5.0), (0.0, 0.0)).last
    same, other = DataWaits(2), DataWaits(3)
    same.restore(saved)
    other.restore(saved)
    assert same.per_sample_s(0, (0, 1)) == 0.5
    assert other.last == ((), (), ())
