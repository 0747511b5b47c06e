"""Batch shares of own loops by measured speed."""

from __future__ import annotations

import math
import random
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.splitting import split_by_ratio
from runtime.loop.balance import REBALANCE_EVERY, TRIAL_STEPS, WARMUP_STEPS, Balancer
from tests.support.pairs import pairwise


def train(balancer, batch_size, num_steps, *, call_s=(0.0, 0.0), sample_s, noise=0.0, seed=0):
    """Train steps of devices with a cost per call and a cost per sample; return their sizes."""
    generator, found = random.Random(seed), []
    for _ in range(num_steps):
        found.append(balancer.sizes(batch_size))
        for rank, size in enumerate(found[-1]):
            compute_s = call_s[rank] + sample_s[rank] * size
            balancer.observe(rank, size, compute_s * generator.uniform(1 - noise, 1 + noise))
        balancer.step()
    return found


shares = st.lists(st.floats(0.05, 10.0), min_size=1, max_size=24)


@given(shares, st.integers(0, 10_000), st.sampled_from([1, 2]))
def test_sizes_are_complete_and_at_least_the_minimum_or_zero(weights, num_samples, least):
    balancer = Balancer(len(weights))
    balancer.adopt(weights)
    sizes = balancer.sizes(num_samples, least)
    assert sum(sizes) == num_samples
    busy = [size for size in sizes if size]
    assert list(sizes) == [*busy, *[0] * (len(sizes) - len(busy))]  # the first devices
    if num_samples >= least:
        assert min(busy) >= least
        assert len(busy) == min(len(weights), num_samples // least)


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=9), st.integers(200, 10_000))
def test_sizes_are_as_close_to_the_ratios_as_integers_can_be(weights, num_samples):
    balancer = Balancer(len(weights))
    balancer.adopt(weights)
    for size, share in zip(balancer.sizes(num_samples), balancer.chunk_ratios, strict=True):
        assert abs(size - num_samples * share) <= 1


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any), st.integers(0, 3000))
def test_batches_are_distributed_completely_by_batch_counts(counts, num_items):
    assert split_by_ratio(sum(counts), counts) == tuple(counts)
    sizes = split_by_ratio(num_items, counts)
    assert sum(sizes) == num_items
    for size, count in zip(sizes, counts, strict=True):
        assert abs(size - num_items * count / sum(counts)) < 1
        assert size == 0 or count > 0


def test_sizes_change_after_the_warm_up_and_soon_again_until_the_costs_are_fitted():
    sizes = train(Balancer(2), 120, 200, call_s=(20.0, 20.0), sample_s=(2.0, 1.0))
    changes = [(found, len(list(group))) for found, group in groupby(sizes)]
    assert [found for found, _ in changes] == [(60, 60), (43, 77), (40, 80)]
    assert [num for _, num in changes[:2]] == [WARMUP_STEPS, TRIAL_STEPS]


def test_times_of_the_first_steps_are_discarded():
    balancer = Balancer(2)
    train(balancer, 20, 2, sample_s=(60.0, 1.0))  # kernels are compiled
    train(balancer, 20, REBALANCE_EVERY, sample_s=(1.0, 1.0))
    assert balancer.chunk_ratios == (0.5, 0.5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("call_s", "sample_s"), [((2.2e-4, 2e-4), 2e-6), ((1.1e-3, 1e-3), 5e-6)])
def test_a_fixed_cost_per_call_does_not_change_the_shares_of_equal_devices(call_s, sample_s, seed):
    sizes = train(
        Balancer(2), 12, 3000, call_s=call_s, sample_s=[sample_s] * 2, noise=0.1, seed=seed
    )
    assert set(sizes) == {(6, 6)}


@pairwise(
    call_s=[(0.0, 0.0), (30.0, 30.0), (10.0, 30.0)],
    ratio=[1.5, 3.0, 8.0],
    noise=[0.0, 0.1],
    hint=[None, (0, 3.0), (1, 12.0)],
)
def test_steps_of_unequal_devices_come_within_6_percent_of_the_shortest(call_s, ratio, noise, hint):
    sample_s = (1.0, ratio)
    sizes = train(Balancer(2, hint), 64, 500, call_s=call_s, sample_s=sample_s, noise=noise)
    best = min(
        max(c + s * n for c, s, n in zip(call_s, sample_s, (n, 64 - n), strict=True))
        for n in range(1, 64)
    )
    for found in sizes[100:]:
        step_s = max(c + s * n for c, s, n in zip(call_s, sample_s, found, strict=True))
        assert step_s <= 1.06 * best
    assert len(set(sizes[100:])) <= 3


def test_a_device_that_becomes_slow_gets_fewer_samples():
    balancer = Balancer(2)
    train(balancer, 64, 200, sample_s=(1.0, 1.0), call_s=(1.0, 1.0), noise=0.1)
    assert balancer.chunk_ratios == (0.5, 0.5)
    train(balancer, 64, 4 * REBALANCE_EVERY, sample_s=(1.0, 3.0), call_s=(1.0, 1.0), noise=0.1)
    assert balancer.chunk_ratios[0] == pytest.approx(0.75, abs=0.03)


def test_a_device_that_delays_the_others_with_one_sample_keeps_it():
    balancer = Balancer(2)
    train(balancer, 16, 2 * REBALANCE_EVERY, call_s=(0.0, 50.0), sample_s=(1.0, 1.0))
    assert balancer.chunk_ratios == (15 / 16, 1 / 16)


def test_late_times_of_the_former_sizes_are_not_those_of_the_new_ones():
    """As of a GPU that is behind the host."""
    balancer, late, found = Balancer(2), [], []
    for _ in range(2 * REBALANCE_EVERY):
        found.append(balancer.sizes(64))
        late.append([(n, 20.0 + (1, 3)[rank] * n) for rank, n in enumerate(found[-1])])
        if len(late) > 2:
            for rank, measured in enumerate(late.pop(0)):
                balancer.observe(rank, *measured)
        balancer.step()
    assert [sizes for sizes, _ in groupby(found)] == [(32, 32), (44, 20), (48, 16)]


def test_shares_that_are_set_between_two_fits_begin_a_new_measurement():
    """As the cadence of accumulated batches does."""
    balancer = Balancer(2)
    train(balancer, 64, WARMUP_STEPS - 4, sample_s=(1.0, 2.0))
    balancer.adopt([1.0, 1.0])
    train(balancer, 64, 4, sample_s=(1.0, 2.0))
    assert balancer.chunk_ratios == (43 / 64, 21 / 64)


def test_a_few_slow_steps_do_not_change_the_shares():
    balancer = Balancer(2)
    for _ in range(4):
        train(balancer, 20, 3, sample_s=(9.0, 1.0))
        train(balancer, 20, WARMUP_STEPS, sample_s=(1.0, 1.0))
    assert balancer.chunk_ratios == (0.5, 0.5)


def test_shares_are_kept_until_each_device_is_measured():
    balancer = Balancer(3)
    for _ in range(WARMUP_STEPS):
        balancer.observe(0, 10, 1.0)
        balancer.observe(1, 10, 0.5)
        balancer.step()
    assert balancer.chunk_ratios == (1 / 3, 1 / 3, 1 / 3)


def test_time_without_samples_counts_with_the_next_samples():
    """Backward is timed separately from forward."""
    balancer = Balancer(2)
    for _ in range(WARMUP_STEPS):
        balancer.observe(0, 0, 3.0)
        balancer.observe(0, 8, 1.0)
        balancer.observe(1, 8, 1.0)
        balancer.step()
    assert balancer.sizes(20) == (4, 16)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, -1.0, math.nan, math.inf]) | st.floats(1e-6, 10.0),
            st.floats(1e-6, 10.0),
            st.integers(0, 9),
        ),
        max_size=80,
    )
)
def test_ratios_sum_to_one_for_any_measurements(steps):
    balancer = Balancer(2, speed_hint=(0, 2.0))
    for first, second, num_samples in steps:
        balancer.observe(0, num_samples, first)
        balancer.observe(1, 9 - num_samples, second)
        balancer.step()
        assert math.isclose(sum(balancer.chunk_ratios), 1.0)
        assert min(balancer.chunk_ratios) > 0
        assert sum(balancer.sizes(num_samples)) == num_samples


@pytest.mark.parametrize("hint", [None, (0, 3.0)])
def test_fixed_ratios_stay_whatever_is_measured(hint):
    balancer = Balancer(2, hint, fixed=True)
    before = balancer.chunk_ratios
    train(balancer, 20, 2 * REBALANCE_EVERY, sample_s=[0.1, 0.9])
    balancer.adopt([1.0, 5.0])
    assert balancer.chunk_ratios == before
