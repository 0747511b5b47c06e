"""DeviceBudget and prefetch depths: batches never use memory that the model needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.budget import (
    MAX_DEPTH,
    DeviceBudget,
    host_prefetch_depth,
    padded_bytes,
    prefetch_slots,
)
from runtime.device.memory import MemoryReading, capacity_bytes, margin_bytes

GIB, MIB = 2**30, 2**20


def reading(*, total=80 * GIB, free=None, reserved=10 * GIB, active=8 * GIB, peak=9 * GIB):
    free = total - reserved if free is None else free
    return MemoryReading(
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=reserved,
        active_bytes=active,
        peak_bytes=peak,
    )


def test_capacity_is_a_fraction_of_total_memory_including_the_model():
    assert capacity_bytes(reading(), 0.5) == 40 * GIB


def test_capacity_is_limited_by_other_processes():
    assert capacity_bytes(reading(free=5 * GIB), 0.9) == 15 * GIB


def test_the_budget_is_zero_before_a_peak_is_measured():
    budget = DeviceBudget(0.9)
    assert budget.share_bytes(0, reading()) == 0


def test_the_budget_is_the_capacity_minus_peak_and_margin():
    budget = DeviceBudget(0.5, margin=GIB)
    budget.observe(0, reading())
    assert budget.share_bytes(0, reading()) == 30 * GIB
    budget.reserve(2 * GIB)
    assert budget.share_bytes(0, reading()) == 28 * GIB


def test_the_margin_is_a_fraction_of_the_capacity_with_a_minimum():
    assert margin_bytes(100 * GIB) == 5 * GIB
    assert margin_bytes(GIB) == 64 * MIB
    budget = DeviceBudget(0.5)
    budget.observe(0, reading())
    assert budget.share_bytes(0, reading()) == 31 * GIB - 2 * GIB


def test_the_reserve_never_falls_below_the_highest_peak():
    budget = DeviceBudget(0.5, margin=0)
    budget.observe(0, reading(peak=20 * GIB))
    budget.observe(0, reading(peak=12 * GIB))
    assert budget.share_bytes(0, reading()) == (40 - 20) * GIB
    budget.observe(0, reading(peak=25 * GIB))
    assert budget.share_bytes(0, reading()) == (40 - 25) * GIB


def test_memory_held_for_batches_is_not_in_the_reserve():
    budget = DeviceBudget(0.5, margin=0)
    budget.observe(0, reading(peak=10 * GIB))
    budget.hold(0, 6 * GIB, reading(active=14 * GIB, peak=14 * GIB))
    assert budget.share_bytes(0, reading()) == (40 - 10) * GIB
    budget.observe(0, reading(active=14 * GIB, peak=16 * GIB))
    assert budget.share_bytes(0, reading()) == (40 - 10) * GIB
    budget.observe(0, reading(active=14 * GIB, peak=17 * GIB))
    assert budget.share_bytes(0, reading()) == (40 - 11) * GIB


def test_a_peak_measured_before_the_slots_is_not_reduced_by_them():
    budget = DeviceBudget(0.5, margin=0)
    budget.observe(0, reading(peak=20 * GIB))
    budget.hold(0, 6 * GIB, reading(active=14 * GIB, peak=20 * GIB))
    for peak in (20, 22):
        budget.observe(0, reading(active=14 * GIB, peak=peak * GIB))
        assert budget.share_bytes(0, reading()) == (40 - 20) * GIB


def test_workers_on_a_device_share_the_budget():
    budget = DeviceBudget(0.5, 2, margin=0)
    for rank in range(2):
        budget.observe(rank, reading(active=10 * GIB, peak=10 * GIB))
    assert budget.share_bytes(0, reading()) == 15 * GIB
    budget.hold(0, 15 * GIB, reading())
    assert budget.share_bytes(1, reading()) == 15 * GIB
    budget.hold(0, 20 * GIB, reading())
    assert budget.share_bytes(1, reading()) == 10 * GIB
    assert budget.share_bytes(0, reading()) == 15 * GIB


def test_a_worker_without_a_measured_step_is_assumed_to_need_as_much():
    budget = DeviceBudget(0.5, 3, margin=0)
    budget.observe(0, reading(active=8 * GIB, peak=10 * GIB))
    assert budget.share_bytes(0, reading()) == (30 - 2 * 2) * GIB // 3
    budget.observe(1, reading(active=8 * GIB, peak=10 * GIB))
    assert budget.share_bytes(0, reading()) == (30 - 2) * GIB // 3
    budget.observe(2, reading(active=8 * GIB, peak=10 * GIB))
    assert budget.share_bytes(0, reading()) == 10 * GIB


def test_begin_is_true_once():
    budget = DeviceBudget(0.5, 2)
    assert [budget.begin() for _ in range(3)] == [True, False, False]


@given(
    total=st.integers(1, 200 * GIB),
    fraction=st.floats(0.01, 1.0),
    reserved=st.floats(0.0, 1.0),
    active=st.floats(0.0, 1.0),
    peak=st.floats(1.0, 2.0),
    workers=st.integers(1, 4),
    slot=st.integers(1, 4 * GIB),
    depth=st.none() | st.integers(1, 100),
)
def test_slots_and_the_highest_peak_fit_into_the_budget_together(
    total, fraction, reserved, active, peak, workers, slot, depth
):
    budget = DeviceBudget(fraction, workers)
    taken = int(total * reserved)
    now = reading(
        total=total,
        reserved=taken,
        active=int(taken * active),
        peak=int(taken * active * peak),
    )
    held = 0
    for rank in range(workers):
        budget.observe(rank, now)
    for rank in range(workers):
        slots = prefetch_slots(budget.share_bytes(rank, now), slot, depth, 1000)
        held += slots * slot
        budget.hold(rank, slots * slot, now)
    assert held == 0 or held + now.peak_bytes <= total * fraction


@pytest.mark.parametrize(
    ("share", "depth", "plan", "slots"),
    [
        (100, None, 100, MAX_DEPTH + 1),
        (100, 20, 100, 10),
        (100, 3, 100, 4),
        (100, None, 2, 3),
        (29, None, 100, 2),
        (19, None, 100, 0),
        (0, 4, 100, 0),
        (100, 0, 100, 0),
    ],
)
def test_slots_are_bounded_by_memory_depth_and_plan(share, depth, plan, slots):
    assert prefetch_slots(share, 10, depth, plan) == slots


def test_the_hosts_share_is_divided_among_workers_and_is_at_least_one_batch():
    assert host_prefetch_depth(64 * GIB, 2, GIB) == 8
    assert host_prefetch_depth(32 * GIB, 2, GIB) == 4
    assert host_prefetch_depth(32 * GIB, 2, GIB, plan_batches=3) == 3
    assert host_prefetch_depth(GIB, 2, GIB) == 1
    assert host_prefetch_depth(10**15, 1, 1) == MAX_DEPTH
    assert host_prefetch_depth(0, 1, 0) == 1


def test_sizes_are_rounded_up_as_by_the_allocator():
    assert [padded_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
