"""Permutations, splits and sets of batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.splitting import (
    BatchSet,
    batch_bounds,
    count_batches,
    permutation,
    permuted,
    split_by_ratio,
    union,
)
from coordinator.steps import cut
from tests.support.pairs import few_examples

seeds = st.integers(0, 2**63)
epochs = st.integers(0, 10_000)
ratios = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@few_examples
@given(st.integers(0, 500), epochs, seeds)
def test_a_permutation_visits_every_sample_once(num_samples, epoch, seed):
    order = permutation(num_samples, epoch, seed)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(num_samples))


@few_examples
@given(st.integers(0, 500), epochs, seeds)
def test_a_permutation_depends_on_seed_and_epoch_alone(num_samples, epoch, seed):
    first = permutation(num_samples, epoch, seed)
    np.random.seed(seed % 2**32)
    permutation(num_samples, epoch + 1, seed)
    assert np.array_equal(first, permutation(num_samples, epoch, seed))


def test_permutations_of_other_epochs_and_seeds_differ():
    orders = [tuple(permutation(100, epoch, seed)) for epoch in range(10) for seed in range(10)]
    assert len(set(orders)) == 100


@given(st.integers(1, 300), epochs, seeds, st.integers(0, 300))
def test_a_permutation_by_function_visits_every_sample_once(num_samples, epoch, seed, start):
    order = permuted(np.arange(num_samples), num_samples, epoch, seed)
    assert sorted(order) == list(range(num_samples))
    rest = np.arange(num_samples)[start:]
    assert np.array_equal(order[start:], permuted(rest, num_samples, epoch, seed))


def test_permutations_by_function_of_other_epochs_and_seeds_differ():
    at = np.arange(100)
    orders = [tuple(permuted(at, 100, epoch, seed)) for epoch in range(10) for seed in range(10)]
    assert len(set(orders)) == 100


@pytest.mark.parametrize("num_samples", [2**24, 2**24 + 1, 20_000_000, 10**12])
def test_a_permutation_by_function_spreads_neighbours_over_the_data_set(num_samples):
    order = permuted(np.arange(2**16), num_samples, 0, 0) / num_samples
    counts, _ = np.histogram(order, 64, (0, 1))
    assert ((counts - 2**10) ** 2 / 2**10).sum() < 120  # 63 expected, 120 in one of 10^5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert len(set(order)) == 2**16


def test_the_permutations_are_the_same_in_every_release():
    found = permuted(np.arange(4), 10**9, 3, 7).tolist()
    assert found == [997312462, 254156828, 42193066, 525825864]
    assert permutation(8, 3, 7).tolist() == [3, 5, 0, 4, 2, 7, 1, 6]


@few_examples
@given(st.integers(1, 300), st.integers(1, 50))
def test_batches_cover_the_samples_without_a_gap(num_samples, batch_size):
    num_batches = count_batches(num_samples, batch_size, drop_last=False)
    bounds = [batch_bounds(b, num_samples, batch_size) for b in range(num_batches)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_samples
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert sum(stop - start < batch_size for start, stop in bounds) <= 1
    assert all(stop > start for start, stop in bounds)


@few_examples
@given(st.integers(0, 300), st.integers(1, 50))
def test_drop_last_drops_only_the_short_batch(num_samples, batch_size):
    whole = count_batches(num_samples, batch_size, drop_last=True)
    assert whole * batch_size <= num_samples < (whole + 1) * batch_size


@few_examples
@given(st.integers(0, 10_000), ratios)
def test_parts_sum_to_the_total_and_are_proportional(total, ratios):
    parts = split_by_ratio(total, ratios)
    assert sum(parts) == total
    assert len(parts) == len(ratios)
    for part, ratio in zip(parts, ratios, strict=True):
        assert part >= 0
        assert part == pytest.approx(total * ratio / sum(ratios), abs=1 + 1e-6)


@few_examples
@given(st.integers(0, 1000), ratios, st.data())
def test_a_part_of_ratio_zero_is_empty(total, ratios, data):
    where = data.draw(st.integers(0, len(ratios)))
    parts = split_by_ratio(total, [*ratios[:where], 0.0, *ratios[where:]])
    assert parts[where] == 0
    assert sum(parts) == total


def test_equal_ratios_give_the_remainder_to_the_lower_ranks():
    assert split_by_ratio(11, [1, 1, 1]) == (4, 4, 3)


@few_examples
@given(st.sets(st.integers(0, 200)))
def test_the_union_of_positions_is_maximal_ranges(positions):
    spans = union(range(b, b + 1) for b in positions)
    assert [b for span in spans for b in span] == sorted(positions)
    assert all(left.stop < right.start for left, right in itertools.pairwise(spans))


def flatten(spans):
    return [b for span in spans for b in span]


@few_examples
@given(
    st.integers(0, 120),
    st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=30),
)
def test_a_batch_set_neither_loses_nor_duplicates_a_batch(num_batches, moves):
    batches = BatchSet([range(num_batches)])
    held: list[tuple[range, ...]] = []
    for take, number in moves:
        if take:
            front = flatten(batches.spans)[:number]
            held.append(batches.take(number))
            assert flatten(held[-1]) == front
        elif held:
            batches.put_back(held.pop(number % len(held)))
        everywhere = flatten(batches.spans) + [b for spans in held for b in flatten(spans)]
        assert sorted(everywhere) == list(range(num_batches))
        assert len(batches) == len(flatten(batches.spans))
        assert bool(batches) == bool(len(batches))
        assert flatten(batches.spans) == sorted(flatten(batches.spans))


ranges = st.lists(st.builds(range, st.integers(0, 30), st.integers(0, 60)))


@few_examples
@given(ranges)
def test_the_union_of_ranges_has_each_of_their_batches_once(spans):
    found = union(spans)
    assert flatten(found) == sorted(set(flatten(spans)))


@few_examples
@given(ranges, st.integers(0, 40), st.none() | st.integers(0, 40))
def test_a_cut_of_ranges_is_that_of_their_batches(spans, start, stop):
    assert flatten(cut(spans, start, stop)) == flatten(spans)[start:stop]


def test_a_batch_that_is_put_back_twice_is_in_the_set_once():
    batches = BatchSet([range(10)])
    batches.put_back([range(9, 12), range(3, 9)])
    assert batches.spans == (range(12),)


@few_examples
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_putting_back_ranges_equals_putting_back_batches(cuts, held, rng):
    """Adjacent or separate ranges, in any order, some already in the set."""
    spans, start = [], 0
    for gap, length in cuts:
        spans.append(range(start + gap, start + gap + length))
        start = spans[-1].stop
    rng.shuffle(spans)
    by_ends, one_by_one = BatchSet(spans[:held]), BatchSet()
    by_ends.put_back(spans[held:])
    one_by_one.put_back(range(b, b + 1) for b in flatten(spans))
    assert by_ends.spans == one_by_one.spans
    assert flatten(by_ends.spans) == sorted(flatten(spans))


def test_an_empty_batch_set_yields_no_batch():
    batches = BatchSet()
    assert not batches
    assert batches.take(3) == ()
    batches.put_back([range(0)])
    assert not batches
    assert batches.spans == ()


def test_a_range_is_not_cut_below_a_whole_multiple_if_others_were_taken():
    batches = BatchSet([range(3), range(10, 20)])
    assert batches.take(4, whole=2) == (range(3),)
    assert batches.take(1, whole=2) == (range(10, 11),)
