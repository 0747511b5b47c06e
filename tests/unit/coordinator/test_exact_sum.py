"""Sums that do not depend on order or partition."""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.codec import decode, encode
from coordinator.metrics import EpochAccumulator, ReportStats, Sums, exact_sum, rounded
from tests.support.pairs import few_examples

numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30)


def stored(total):
    """Sums after a round trip through a file."""
    sums = Sums() + Sums(loss_sum=total, scalars={"x": (0, total)})
    return decode(Sums, json.loads(json.dumps(encode(sums))), "sums")


@few_examples
@given(numbers, st.integers(1, 7), st.randoms())
def test_a_sum_is_independent_of_order_and_partition(values, size, rng):
    exact = sum(map(Fraction, values), Fraction(0))
    pieces = [exact_sum(values[i : i + size]) for i in range(0, len(values), size)]
    rng.shuffle(pieces)
    assert exact_sum(values) == exact_sum(pieces) == exact
    assert sum((Sums(loss_sum=piece) for piece in pieces), Sums()).loss_sum == exact


@few_examples
@given(numbers)
def test_a_stored_sum_is_restored_without_rounding(values):
    again = stored(exact_sum(values))
    assert again.loss_sum == again.scalars["x"][1] == sum(map(Fraction, values), Fraction(0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf, 2.0], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1.0, math.nan], math.nan),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
    ],
)
def test_non_finite_values_are_preserved(values, expected):
    total = exact_sum(values)
    one_by_one = sum((Sums(loss_sum=value) for value in values), Sums())
    again = stored(total)
    sums = (one_by_one.loss_sum, again.loss_sum, again.scalars["x"][1])
    for found in (total, exact_sum([0.5, total]), *sums):
        assert repr(rounded(found)) == repr(expected)
        assert repr(Sums(loss_sum=found, loss_samples=1).avg_loss) == repr(expected)


def test_a_sum_within_the_range_of_floats_passes_beyond_it():
    for order in itertools.permutations([1e308, 1e308, -1e308]):
        assert exact_sum(order) == 1e308
        assert sum((Sums(loss_sum=value) for value in order), Sums()).loss_sum == 1e308


def test_a_sum_keeps_what_a_float_rounds_off():
    total = exact_sum([1e16, 1.0, 1.0, 1e-9])
    assert rounded(total) == 1e16 + 2
    assert rounded(exact_sum([total, -1e16])) == 2.000000001


def test_the_losses_of_an_epoch_do_not_depend_on_when_reports_were_sent():
    rng = random.Random(0)
    losses = [rng.uniform(0.0, 3.0) * 32 for _ in range(200)]
    means = set()
    for size in (1, 3, 7, 200):
        stats = EpochAccumulator(2)
        for i in range(0, len(losses), size):
            piece = losses[i : i + size]
            total = exact_sum(piece)
            scalars = {"a": (total, len(piece))}
            stats.add(0, ReportStats(loss_sum=total, loss_samples=len(piece), scalars=scalars))
        metrics = stats.close(epoch=0, epoch_s=1.0, num_samples=0, devices=())
        means.add((metrics.avg_loss, metrics.scalars["a"], metrics.per_rank[0].avg_loss))
        again = EpochAccumulator(2, stats.ranks)
        assert repr(again.close(epoch=0, epoch_s=1.0, num_samples=0, devices=())) == repr(metrics)
    mean = math.fsum(losses) / 200
    assert means == {(mean, mean, mean)}
