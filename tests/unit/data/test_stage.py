"""Stages and SizingSchedule: how many batches are loaded ahead, and when this is set."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime.data import loader as stage
from runtime.data.loader import HostStage, LoadedBatch, SizingSchedule, Stage, ThreadLoader
from tests.support.loading import ALL, Consumer, N, Noisy, assert_is_plan

MIB = 2**20


def test_sizing_is_due_after_the_first_steps():
    sizing = SizingSchedule(3)
    sizing.submitted(10)
    dues = []
    for _ in range(6):
        dues.append(sizing.due())
        sizing.taken()
    assert dues == [None, None, None, 10, None, None]


def test_later_sizing_is_due_only_when_a_plan_ends():
    sizing = SizingSchedule(1)
    sizing.submitted(2)
    sizing.submitted(3)
    dues = []
    for _ in range(5):
        sizing.taken()
        dues.append(sizing.due())
    assert dues == [2, 3, None, None, None]
    sizing.submitted(0)
    assert sizing.due() is None
    sizing.submitted(4)
    assert sizing.due() == 4
    assert sizing.due() is None


def test_a_plan_that_others_follow_does_not_limit_the_depth():
    sizing = SizingSchedule(1)
    sizing.submitted(2, more=True)
    sizing.submitted(2)
    dues = []
    for _ in range(3):
        sizing.taken()
        dues.append(sizing.due())
    assert dues[0] > 10**9
    assert dues[1:] == [2, None]


def test_no_sizing_is_due_when_a_plan_ends_within_the_first_steps():
    sizing = SizingSchedule(3)
    for _ in range(2):
        sizing.submitted(1)
        sizing.taken()
        assert sizing.due() is None
    sizing.submitted(5)
    assert sizing.due() is None
    sizing.taken()
    assert sizing.due() == 5


def test_sizings_are_at_least_spacing_batches_apart():
    sizing = SizingSchedule(2, spacing=5)
    dues = []
    for _ in range(12):
        sizing.submitted(1)
        dues.append(sizing.due() is not None)
        sizing.taken()
    assert [batch for batch, due in enumerate(dues) if due] == [2, 7]


def test_sizing_is_due_for_the_next_plan_after_a_cancel():
    sizing = SizingSchedule(1)
    sizing.submitted(9)
    sizing.taken()
    assert sizing.due() == 9
    sizing.cancelled()
    assert sizing.due() is None
    sizing.submitted(4)
    assert sizing.due() == 4


def loaded(num_bytes):
    return LoadedBatch((torch.zeros(num_bytes, dtype=torch.uint8),), 1, 0, 0)


@pytest.mark.parametrize(
    ("available", "depth"), [(1000 * MIB, 8), (80 * MIB, 5), (8 * MIB, 1), (0, 1)]
)
def test_the_depth_follows_the_hosts_available_memory(monkeypatch, available, depth):
    monkeypatch.setattr(stage, "available_host_bytes", lambda: available)
    host = HostStage(2, SizingSchedule(2))
    host.submitted(100)
    for number in range(2):
        host.advance()
        assert host.depth == 1
        host.put(loaded(MIB if number else 2 * MIB))
        host.taken()
    host.advance()
    assert host.depth == depth


def test_the_depth_is_at_most_the_plans_batches(monkeypatch):
    monkeypatch.setattr(stage, "available_host_bytes", lambda: 10**12)
    host = HostStage(1, SizingSchedule(1))
    for plan, depth in ((3, 3), (20, 8), (2, 2)):
        host.submitted(plan)
        host.put(loaded(8))
        host.taken()
        host.advance()
        assert host.depth == depth
        host.cancelled()


class Counted(Noisy):
    def __init__(self):
        self.num_batches = 0

    def __getitems__(self, indices):
        self.num_batches += 1
        return [self[index] for index in indices]


def test_depth_zero_loads_each_batch_on_request():
    dataset = Counted()
    with Consumer(ThreadLoader, dataset, depth=0) as consumer:
        assert not consumer.loader.reads_ahead
        consumer.loader.submit(ALL)
        assert not consumer.ready.acquire(timeout=0.05)
        assert dataset.num_batches == 0
        for batch in range(6):
            assert consumer.next().batch == batch
            assert dataset.num_batches == batch + 1
            # A wake-up may be late, but never belongs to another batch.
            while consumer.ready.acquire(timeout=0.02):
                pass
            assert dataset.num_batches == batch + 1


def test_a_cancelled_request_is_not_served():
    dataset = Counted()
    with Consumer(ThreadLoader, dataset, depth=0) as consumer:
        consumer.loader.submit(ALL)
        assert consumer.loader.try_next() is None
        consumer.loader.cancel()
        while consumer.ready.acquire(timeout=0.05):
            pass
        consumer.loader.submit(ALL)
        assert not consumer.ready.acquire(timeout=0.05)
        assert_is_plan([consumer.next() for _ in range(6)], ALL)


def test_the_thread_loads_further_ahead_once_the_depth_grows():
    class Grows(Stage):
        def taken(self):
            self.depth = 3

    dataset = Counted()
    with Consumer(ThreadLoader, dataset, stage=Grows(1)) as consumer:
        consumer.loader.submit(ALL)
        assert [consumer.next().batch for _ in range(2)] == [0, 1]
        while len(consumer.loader._ready) < 3:
            assert consumer.ready.acquire(timeout=30)
        while consumer.ready.acquire(timeout=0.05):
            pass
        assert dataset.num_batches == 5


def test_batches_do_not_depend_on_the_measured_depth(monkeypatch):
    monkeypatch.setattr(stage, "available_host_bytes", lambda: 10**12)
    plans = [ALL, EpochPlan(epoch=1, batches=(range(6),)), EpochPlan(epoch=2, batches=(range(2),))]
    with Consumer(ThreadLoader, Noisy(), stage=HostStage(1, SizingSchedule(2))) as consumer:
        for plan in plans:
            assert_is_plan(consumer.take(plan), plan)
            assert consumer.loader._stage.depth in (plan.num_batches, 2)


def test_an_error_counts_as_a_batch_of_its_plan():
    class Fails(Dataset):
        def __len__(self):
            return N

        def get_batch(self, indices):
            raise KeyError("planted")

    host = HostStage(1, SizingSchedule(2))
    with Consumer(ThreadLoader, Fails(), stage=host) as consumer:
        consumer.loader.submit(ALL)
        for _ in range(6):
            with pytest.raises(KeyError):
                consumer.next()
        assert not host._sizing._plans
