"""Accumulation of reports into metrics of epochs and steps."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.codec import decode, encode
from coordinator.metrics import EpochAccumulator, ReportStats, StepAccumulator, Sums
from tests.support.pairs import few_examples


def close(stats, **changes):
    given = {
        "epoch": 0,
        "epoch_s": 1.0,
        "num_samples": 0,
        "devices": ("cpu",) * 2,
    }
    return stats.close(**(given | changes))


def report(num_samples, loss, compute_s=1.0, num_batches=1, **scalars):
    return ReportStats(
        num_batches=num_batches,
        num_samples=num_samples,
        compute_s=compute_s,
        loss_sum=loss * num_samples,
        loss_samples=num_samples,
        scalars={name: (mean * n, n) for name, (mean, n) in scalars.items()},
    )


reports = st.builds(
    ReportStats,
    num_batches=st.integers(0, 5),
    num_samples=st.integers(0, 50),
    num_skipped=st.integers(0, 50),
    compute_s=st.floats(0, 10),
    loss_sum=st.floats(-1e3, 1e3),
    loss_samples=st.integers(0, 50),
    scalars=st.dictionaries(
        st.sampled_from("abc"), st.tuples(st.floats(-1e3, 1e3), st.integers(1, 50)), max_size=3
    ),
)
reports_by_rank = st.lists(st.lists(reports, max_size=6), min_size=1, max_size=4)


def test_the_loss_is_weighted_by_samples():
    stats = EpochAccumulator(2)
    stats.add(0, report(30, 1.0))
    stats.add(1, report(10, 5.0))
    metrics = close(stats)
    assert metrics.avg_loss == 2.0
    assert [rank.avg_loss for rank in metrics.per_rank] == [1.0, 5.0]


def test_late_losses_are_weighted_by_their_own_samples():
    stats = EpochAccumulator(2)
    stats.add(0, ReportStats(num_batches=2, num_samples=20, loss_sum=10.0, loss_samples=10))
    assert close(stats).avg_loss == 1.0
    stats.add(0, ReportStats(loss_sum=30.0, loss_samples=10))
    assert close(stats).avg_loss == 2.0


def test_scalars_are_weighted_by_the_samples_that_recorded_them():
    stats = EpochAccumulator(2)
    stats.add(0, report(30, 1.0, accuracy=(0.5, 30)))
    stats.add(1, report(10, 1.0, accuracy=(0.9, 10), extra=(7.0, 2)))
    assert close(stats).scalars == pytest.approx({"accuracy": 0.6, "extra": 7.0})


def test_throughput_divides_by_the_sum_of_compute_time():
    stats = EpochAccumulator(2)
    for compute_s in (1.0, 3.0):
        stats.add(0, report(100, 1.0, compute_s=compute_s))
    metrics = close(stats)
    assert metrics.per_rank_throughput == (50.0, 0.0)
    assert metrics.per_rank[0].compute_s == 4.0


def test_batch_shares_sum_to_one():
    stats = EpochAccumulator(2)
    stats.add(0, report(30, 1.0, num_batches=3))
    stats.add(1, report(10, 1.0, num_batches=1))
    assert close(stats).per_rank_batch_share == (0.75, 0.25)


def test_an_epoch_without_a_batch_has_no_loss():
    metrics = close(EpochAccumulator(2))
    assert math.isnan(metrics.avg_loss)
    assert math.isnan(metrics.per_rank[1].avg_loss)
    assert metrics.scalars == {}
    assert metrics.per_rank_throughput == (0.0, 0.0)
    assert metrics.per_rank_batch_share == (0.0, 0.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_stays_in_the_metrics(loss):
    stats = EpochAccumulator(2)
    stats.add(0, report(10, 1.0))
    stats.add(1, report(10, loss, bad=(loss, 10)))
    stats.add(1, report(10, 1.0, bad=(1.0, 10)))
    metrics = close(stats)
    assert metrics.avg_loss == pytest.approx(loss, nan_ok=True)
    assert metrics.per_rank[1].avg_loss == pytest.approx(loss, nan_ok=True)
    assert metrics.scalars["bad"] == pytest.approx(loss, nan_ok=True)
    assert metrics.per_rank[0].avg_loss == 1.0


def test_values_of_the_caller_are_part_of_the_metrics():
    stats = EpochAccumulator(2)
    stats.add(0, report(110, 1.0))
    stats.add(0, ReportStats(num_skipped=3))
    stats.add(1, ReportStats(num_skipped=1))
    metrics = close(
        stats,
        epoch=3,
        epoch_s=2.5,
        num_samples=100,
        num_averagings=7,
        num_retrained=10,
        devices=["cpu", "cuda:0"],
        extra_scalars={"eval/accuracy": 0.5},
    )
    assert (metrics.epoch, metrics.epoch_s) == (3, 2.5)
    assert (metrics.num_samples, metrics.num_retrained, metrics.num_skipped) == (100, 10, 4)
    assert metrics.num_averagings == 7
    assert metrics.devices == ("cpu", "cuda:0")
    assert metrics.scalars == {"eval/accuracy": 0.5}
    assert metrics.per_rank[0].num_samples == 110


@few_examples
@given(reports_by_rank, st.randoms(use_true_random=False))
def test_metrics_have_the_same_bits_however_the_ranks_interleave(by_rank, random):
    in_rank_order, mixed = EpochAccumulator(len(by_rank)), EpochAccumulator(len(by_rank))
    for rank, tallies in enumerate(by_rank):
        for stats in tallies:
            in_rank_order.add(rank, stats)
    queues = [list(tallies) for tallies in by_rank]
    while any(queues):
        rank = random.choice([r for r, queue in enumerate(queues) if queue])
        mixed.add(rank, queues[rank].pop(0))
    assert repr(close(mixed)) == repr(close(in_rank_order))


def stored(stats):
    """The sums of the ranks after a round trip through a file."""
    return decode(tuple[Sums, ...], json.loads(json.dumps(encode(stats.ranks))), "sums")


@few_examples
@given(reports_by_rank, reports_by_rank)
def test_an_accumulator_continues_from_its_saved_state(before, after):
    size = max(len(before), len(after))
    whole, first = (EpochAccumulator(size) for _ in range(2))
    for rank, tallies in enumerate(before):
        for stats in tallies:
            whole.add(rank, stats)
            first.add(rank, stats)
    second = EpochAccumulator(size, stored(first))
    for rank, tallies in enumerate(after):
        for stats in tallies:
            whole.add(rank, stats)
            second.add(rank, stats)
    assert repr(close(second)) == repr(close(whole))


@pytest.mark.parametrize(("size", "samples"), [(1, [100]), (2, [40, 60]), (5, [10, 20, 30, 40, 0])])
def test_another_world_size_keeps_the_totals(size, samples):
    saved = EpochAccumulator(4)
    for rank in range(4):
        saved.add(rank, report(10 * (rank + 1), float(rank), accuracy=(rank / 2, 10)))
    loaded = EpochAccumulator(size, stored(saved))
    before, after = close(saved), close(loaded)
    assert after.avg_loss == pytest.approx(before.avg_loss)
    assert after.scalars == pytest.approx(before.scalars)
    assert [rank.num_samples for rank in after.per_rank] == samples


def test_closing_twice_returns_equal_metrics():
    stats = EpochAccumulator(2)
    stats.add(0, report(10, 1.0, accuracy=(0.5, 10)))
    assert repr(close(stats)) == repr(close(stats))


# -- metrics of steps ------------------------------------------------------------------------


def report_of(*losses, rate=0.1, samples=2, **scalars):
    """A report of batches with these losses, of weight 2 each."""
    return ReportStats(
        num_batches=len(losses),
        num_samples=samples * len(losses),
        losses=tuple((loss, 2.0, rate) for loss in losses),
        learning_rate=rate,
        scalars={name: (mean * 3, 3) for name, mean in scalars.items()},
    )


def steps(*args, **kwargs):
    stats = StepAccumulator(*args, **kwargs)
    stats.begin(1.0)
    return stats


def test_step_metrics_are_returned_once_every_rank_has_enough_batches():
    stats = steps(4, 2, equal=True)
    assert stats.add(0, 0, report_of(1, 2, 3, 4, 5), 1.0) == []
    (first,) = stats.add(1, 0, report_of(10, 20, 30, rate=0.2, norm=7.0), 2.0)
    assert (first.step, first.epoch, first.num_batches) == (4, 0, 4)
    assert first.avg_loss == (1 + 2 + 10 + 20) / 4
    assert first.scalars == {"norm": 7.0}
    assert first.learning_rate == 0.1  # of rank 0
    assert first.throughput == (5 + 3) * 2 / 1.0
    assert stats.add(0, 0, report_of(6), 3.0) == []
    (second,) = stats.flush()
    assert (second.step, second.num_batches) == (9, 5)
    assert second.avg_loss == (3 + 4 + 5 + 6 + 30) / 5
    assert stats.flush() == []


def test_a_dropped_rank_is_not_waited_for():
    stats = steps(2, 2, equal=True)
    assert stats.add(1, 0, report_of(5), 1.1) == []
    assert stats.add(0, 0, report_of(1), 1.2)[0].avg_loss == 3
    assert stats.add(0, 0, report_of(1, 2), 1.3) == []
    stats.drop(1)
    assert [m.avg_loss for m in stats.add(0, 0, report_of(3), 1.4)] == [1.5]


def test_without_lockstep_metrics_cover_all_that_was_reported():
    stats = steps(4, 2, equal=False)
    assert stats.add(0, 0, report_of(1, 2, 3), 1.5) == []
    (found,) = stats.add(1, 0, report_of(5, 5, 5), 2.0)
    assert (found.step, found.num_batches, found.avg_loss) == (6, 6, 21 / 6)
    (found,) = stats.add(0, 0, report_of(*[7] * 9), 3.0)
    assert (found.step, found.num_batches, found.avg_loss) == (15, 9, 7.0)
    assert stats.flush() == []


def test_parts_of_batches_are_counted_once_they_are_whole():
    stats = steps(2, 1, equal=False)
    found = [m for _ in range(10) for m in stats.add(0, 0, report_of(1), 1.0, Fraction(3, 4))]
    assert [(m.step, m.num_batches) for m in found] == [(2, 2), (4, 2), (6, 2)]


def test_batches_without_a_loss_are_counted_with_weight_zero():
    stats = steps(3, 1, equal=True)
    losses = ((math.nan, 0.0, None), (4.0, 1.0, None), (0.0, 0.0, None))
    (found,) = stats.add(0, 2, ReportStats(num_batches=3, losses=losses), 1.0)
    assert (found.avg_loss, found.epoch) == (4.0, 2)
    assert math.isnan(found.learning_rate)
    (found,) = stats.add(0, 2, ReportStats(num_batches=3, losses=((0.0, 0.0, None),) * 3), 1.0)
    assert math.isnan(found.avg_loss)


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ((math.inf, 1.0), math.inf),
        ((math.inf, -math.inf), math.nan),
        ((8e307, 8e307), math.inf),
    ],
)
def test_step_metrics_have_a_mean_of_losses_that_are_not_finite(losses, mean):
    (found,) = steps(2, 1, equal=True).add(0, 0, report_of(*losses), 1.0)
    assert found.avg_loss == pytest.approx(mean, nan_ok=True)


def test_the_learning_rate_is_that_of_the_lowest_rank_and_is_restored():
    stats = EpochAccumulator(3)
    assert math.isnan(close(stats, devices=("cpu",) * 3).learning_rate)
    stats.add(1, report_of(1, rate=0.3))
    stats.add(2, report_of(1, rate=0.4))
    stats.add(0, ReportStats(learning_rate=0.9))  # nothing was trained with it
    assert close(stats, devices=("cpu",) * 3).learning_rate == 0.3
    restored = EpochAccumulator(2, stored(stats))
    assert close(restored).learning_rate in (0.3, 0.4)


def test_a_death_does_not_change_the_number_of_steps_per_metrics():
    """Two ranks train the batches of three, in two slices: 3 batches for each step, as before."""
    stats = StepAccumulator(6, 3, equal=True)
    stats.begin(0.0)
    stats.drop(2)
    found = []
    for step in range(8):
        for rank in (0, 1):
            losses = ((float(step), 1.0, None),) * 2
            report = ReportStats(num_batches=2, num_samples=2, losses=losses)
            found += stats.add(rank, 0, report, float(step), Fraction(3, 4))
    assert [(f.step, f.num_batches) for f in found] == [(6, 6), (12, 6), (18, 6), (24, 6)]
    assert [f.avg_loss for f in found] == [0.5, 2.5, 4.5, 6.5]


def test_a_piece_of_several_batches_is_reported_once():
    stats = StepAccumulator(1, 1, equal=True)
    stats.begin(0.0)
    report = ReportStats(num_batches=1, num_samples=8, losses=((2.0, 8.0, None),))
    (found,) = stats.add(0, 0, report, 1.0, 4)
    assert (found.step, found.num_batches, found.avg_loss) == (4, 4, 2.0)


def test_an_excluded_pause_does_not_count_for_throughput():
    plain, paused = steps(2, 1, equal=True), steps(2, 1, equal=True)
    paused.exclude(3.0)
    (found,) = plain.add(0, 0, report_of(1, 2), 3.0)
    (excluded,) = paused.add(0, 0, report_of(1, 2), 6.0)
    assert found.throughput == excluded.throughput == 4 / 2.0
