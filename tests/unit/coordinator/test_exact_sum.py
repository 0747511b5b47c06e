"""Sums that do not depend on order or partition."""

from __future__ import annotations

import math
import pickle
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.metrics import EpochAccumulator, ExactSum, ReportStats, RoundedSum
from tests.support.pairs import few_examples

numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30)


def summed_at_once(values):
    total = ExactSum()
    total.add_all(values[:3])
    total.add_all(values[3:])
    return total


def summed(values):
    total = ExactSum()
    for value in values:
        total.add(value)
    return total


@few_examples
@given(numbers)
def test_many_numbers_at_once_are_added_as_exactly_as_one_by_one(values):
    exact = sum(map(Fraction, values), Fraction(0))
    assert summed(values).value() == float(exact)
    total = summed_at_once(values)
    assert sum(map(Fraction, total.parts), Fraction(0)) == exact
    assert total.value() == float(exact)
    assert list(total.parts) == sorted(total.parts, key=abs)


@few_examples
@given(numbers, st.integers(1, 7), st.randoms())
def test_a_sum_is_independent_of_order_and_partition(values, size, rng):
    cut = [summed(values[i : i + size]).value() for i in range(0, len(values), size)]
    rng.shuffle(cut)
    assert summed(cut).value() == summed(values).value()


@few_examples
@given(numbers)
def test_the_parts_restore_the_sum(values):
    total = summed(values)
    again = ExactSum(total.parts)
    assert again.value() == total.value()
    again.add(0.1)
    total.add(0.1)
    assert again.value() == total.value()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf, 2.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1.0, math.nan], math.nan),
        ([1e308, 1e308], math.inf),
    ],
)
def test_non_finite_values_are_preserved(values, expected):
    again = (summed([summed(values).value()]), ExactSum(summed(values).parts))
    for total in (summed(values), summed_at_once(values), *again):
        assert repr(float(total.value())) == repr(expected)


def test_a_rounded_sum_keeps_its_rounding_error():
    total = summed([1e16, 1.0, 1.0, 1e-9]).value()
    assert isinstance(total, float)
    assert total == 1e16 + 2
    copied = pickle.loads(pickle.dumps(total))
    assert (copied, copied.parts) == (total, total.parts)
    assert summed([copied, -1e16]).value() == 2.000000001
    assert RoundedSum(2.5).parts == ()


def test_the_losses_of_an_epoch_do_not_depend_on_when_reports_were_sent():
    rng = random.Random(0)
    losses = [rng.uniform(0.0, 3.0) * 32 for _ in range(200)]
    means = set()
    for size in (1, 3, 7, 200):
        stats = EpochAccumulator(2)
        for i in range(0, len(losses), size):
            piece = losses[i : i + size]
            total = summed(piece).value()
            scalars = (("a", total, len(piece)),)
            stats.add(0, ReportStats(loss_sum=total, loss_samples=len(piece), scalars=scalars))
        metrics = stats.close(epoch=0, epoch_s=1.0, num_samples=0, devices=())
        means.add((metrics.avg_loss, metrics.scalars["a"], metrics.per_rank[0].avg_loss))
        again = EpochAccumulator(2)
        again.load_state_dict(stats.state_dict())
        assert repr(again.close(epoch=0, epoch_s=1.0, num_samples=0, devices=())) == repr(metrics)
    mean = math.fsum(losses) / 200
    assert means == {(mean, mean, mean)}
