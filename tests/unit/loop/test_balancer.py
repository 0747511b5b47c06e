"""Batch shares from measured throughput."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.splitting import split_by_ratio
from runtime.loop.balance import (
    MIN_SHARE,
    REBALANCE_EVERY,
    WARMUP_STEPS,
    Balancer,
    apportion,
    normalized_shares,
)

speeds = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=24)


def measured(rates, num_steps=WARMUP_STEPS):
    """A balancer after measurements of these speeds for ``steps`` steps."""
    balancer = Balancer(len(rates))
    for _ in range(num_steps):
        for rank, rate in enumerate(rates):
            balancer.observe(rank, 10, 10 / rate)
        balancer.step()
    return balancer


@given(speeds)
def test_shares_sum_to_one_and_none_is_zero(weights):
    shares = normalized_shares(weights)
    assert math.isclose(math.fsum(shares), 1.0, rel_tol=1e-12)
    assert min(shares) >= min(MIN_SHARE, 1 / len(weights)) * (1 - 1e-9)


@given(speeds)
def test_faster_devices_never_get_smaller_shares(weights):
    shares = normalized_shares(weights)
    for a, share_a in zip(weights, shares, strict=True):
        for b, share_b in zip(weights, shares, strict=True):
            if a > b:
                assert share_a >= share_b * (1 - 1e-9)


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=9))
def test_shares_above_the_least_keep_their_proportion(weights):
    shares = normalized_shares(weights)
    free = [(w, s) for w, s in zip(weights, shares, strict=True) if s > MIN_SHARE * 1.001]
    for w, s in free:
        assert s / free[0][1] == pytest.approx(w / free[0][0], rel=1e-6)


def test_raising_the_smallest_share_lowers_the_others_in_proportion():
    assert normalized_shares([1, 33, 66]) == pytest.approx([0.05, 0.95 / 3, 0.95 * 2 / 3])


def test_a_share_that_falls_below_the_minimum_after_raising_others_is_raised_too():
    # 0.0505 of the whole, but less than 0.05 of the rest without the first.
    shares = normalized_shares([0.0001, 0.0505, 0.9494])
    assert shares[:2] == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, math.nan], [math.inf, 1.0], [-1.0]])
def test_invalid_speeds_are_refused(weights):
    with pytest.raises(ValueError, match="finite and positive"):
        normalized_shares(weights)


@given(speeds, st.integers(0, 10_000))
def test_sizes_are_complete_and_none_is_zero(weights, num_samples):
    sizes = apportion(num_samples, normalized_shares(weights))
    assert sum(sizes) == num_samples
    assert all(size >= 0 for size in sizes)
    if num_samples >= len(weights):
        assert min(sizes) >= 1
    else:  # the first devices get one each
        assert list(sizes) == [1] * num_samples + [0] * (len(weights) - num_samples)


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=9), st.integers(200, 10_000))
def test_sizes_are_as_close_to_the_ratios_as_integers_can_be(weights, num_samples):
    shares = normalized_shares(weights)
    for size, share in zip(apportion(num_samples, shares), shares, strict=True):
        assert abs(size - num_samples * share) <= 1


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any), st.integers(0, 3000))
def test_batches_are_distributed_completely_by_batch_counts(counts, num_items):
    assert split_by_ratio(sum(counts), counts) == tuple(counts)
    sizes = split_by_ratio(num_items, counts)
    assert sum(sizes) == num_items
    for size, count in zip(sizes, counts, strict=True):
        assert abs(size - num_items * count / sum(counts)) < 1
        assert size == 0 or count > 0


def test_the_split_is_equal_during_calibration():
    balancer = measured([1.0, 3.0], WARMUP_STEPS - 1)
    assert balancer.chunk_ratios == (0.5, 0.5)
    assert balancer.sizes(8) == (4, 4)


def test_the_first_rebalance_comes_after_calibration_and_the_next_ones_at_an_interval():
    balancer = Balancer(2)
    changed = []
    for step in range(1, WARMUP_STEPS + 2 * REBALANCE_EVERY + 1):
        sizes = balancer.sizes(30)
        balancer.observe(0, sizes[0], 0.1 * sizes[0])
        balancer.observe(1, sizes[1], 0.05 * sizes[1])
        if balancer.step():
            changed.append(step)
    assert changed == [
        WARMUP_STEPS,
        WARMUP_STEPS + REBALANCE_EVERY,
        WARMUP_STEPS + 2 * REBALANCE_EVERY,
    ]
    assert balancer.chunk_ratios == pytest.approx((1 / 3, 2 / 3))
    assert balancer.sizes(9) == (3, 6)


def train(balancer, batch_size, num_steps, *, call_s, sample_s, noise=0.0, seed=0):
    """Steps of devices with a cost per call and a cost per sample.

    Returns the least part that a device had on the way.
    """
    generator, least = random.Random(seed), 1.0
    for _ in range(num_steps):
        for rank, size in enumerate(balancer.sizes(batch_size)):
            seconds = call_s[rank] + sample_s[rank] * size
            balancer.observe(rank, size, seconds * generator.uniform(1 - noise, 1 + noise))
        balancer.step()
        least = min(least, *balancer.chunk_ratios)
    return least


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("call_s", "sample_s"), [((2.2e-4, 2e-4), 2e-6), ((1.1e-3, 1e-3), 5e-6)])
def test_a_fixed_cost_per_call_does_not_move_the_shares_of_equal_devices(call_s, sample_s, seed):
    balancer = Balancer(2)
    costs = {"call_s": call_s, "sample_s": [sample_s] * 2}
    assert train(balancer, 12, 3000, **costs, noise=0.1, seed=seed) > 0.4


def test_ratios_without_a_gain_are_reverted_until_speeds_change():
    balancer = Balancer(2)
    # The larger share only seems faster.
    first = {"call_s": [1.2, 1.0], "sample_s": [0.001, 0.001]}
    train(balancer, 20, WARMUP_STEPS, **first)
    assert balancer.chunk_ratios[1] > 0.52
    train(balancer, 20, REBALANCE_EVERY, **first)
    assert balancer.chunk_ratios == (0.5, 0.5)
    for _ in range(4):
        train(balancer, 20, REBALANCE_EVERY, **first)
        assert balancer.chunk_ratios == (0.5, 0.5)
    train(balancer, 20, 2 * REBALANCE_EVERY, call_s=[0.0, 0.0], sample_s=[0.3, 0.1])
    assert balancer.chunk_ratios == pytest.approx((0.25, 0.75), abs=0.01)


def test_a_few_slow_steps_do_not_decide_a_trial():
    balancer = Balancer(2)
    slow = {"call_s": [60.0, 50.0], "sample_s": [0.001, 0.001]}  # e.g. autotuned kernels
    train(balancer, 20, 3, **slow)
    usual = {"call_s": [1.2, 1.0], "sample_s": [0.001, 0.001]}
    train(balancer, 20, WARMUP_STEPS - 3, **usual)
    assert balancer.chunk_ratios[1] > 0.52
    train(balancer, 20, REBALANCE_EVERY, **usual)
    assert balancer.chunk_ratios == (0.5, 0.5)


def test_a_new_measurement_has_weight_three_tenths():
    balancer = Balancer(1)
    balancer.observe(0, 10, 1.0)
    assert balancer.throughput == (10.0,)
    balancer.observe(0, 20, 1.0)
    assert balancer.throughput == pytest.approx((0.7 * 10 + 0.3 * 20,))


def test_a_speed_hint_is_corrected_after_the_first_step():
    balancer = Balancer(2, speed_hint=(1, 3.0))
    assert balancer.chunk_ratios == pytest.approx((0.75, 0.25))
    balancer.observe(0, 10, 1.0)
    balancer.observe(1, 10, 1.0)
    assert balancer.step()
    assert balancer.chunk_ratios == pytest.approx((0.5, 0.5))
    assert balancer.sizes(8) == (4, 4)  # not the cached sizes of the old ratios


def test_a_device_that_was_never_measured_keeps_its_share():
    balancer = Balancer(3)
    for _ in range(WARMUP_STEPS):
        balancer.observe(0, 10, 1.0)
        balancer.observe(1, 10, 0.5)
        balancer.step()
    assert balancer.chunk_ratios == pytest.approx((2 / 9, 4 / 9, 1 / 3))


def test_time_without_samples_counts_with_the_next_samples():
    """Backward is timed separately from forward."""
    balancer = Balancer(1)
    balancer.observe(0, 0, 3.0)
    balancer.observe(0, 8, 1.0)
    assert balancer.throughput == (2.0,)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_ignored(seconds):
    balancer = Balancer(1)
    balancer.observe(0, 10, seconds)
    assert balancer.throughput == (0.0,)


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 10.0), st.floats(1e-6, 10.0), st.integers(0, 9)), max_size=80
    )
)
def test_ratios_sum_to_one_for_any_measurements(steps):
    balancer = Balancer(2, speed_hint=(0, 2.0))
    for first, second, num_samples in steps:
        balancer.observe(0, num_samples, first)
        balancer.observe(1, 9 - num_samples, second)
        balancer.step()
        assert math.isclose(sum(balancer.chunk_ratios), 1.0)
        assert min(balancer.chunk_ratios) >= MIN_SHARE * (1 - 1e-9)
        assert sum(balancer.sizes(num_samples)) == num_samples


@pytest.mark.parametrize("hint", [None, (0, 3.0)])
def test_fixed_ratios_stay_whatever_is_measured(hint):
    balancer = Balancer(2, hint, fixed=True)
    before = balancer.chunk_ratios
    train(balancer, 20, 2 * REBALANCE_EVERY, call_s=[0.0, 0.0], sample_s=[0.1, 0.9])
    balancer.adopt([1.0, 5.0])
    assert balancer.chunk_ratios == before
    assert not any(balancer.step() for _ in range(REBALANCE_EVERY + 1)), "tells of a change"


@pytest.mark.parametrize(("faster", "moves"), [(1.06, False), (1.2, True)])
def test_equal_shares_change_only_for_a_gain_above_noise(faster, moves):
    balancer = Balancer(2)
    train(balancer, 1000, WARMUP_STEPS, call_s=[0.0, 0.0], sample_s=[1.0, 1.0 / faster])
    assert (balancer.chunk_ratios != (0.5, 0.5)) is moves
