"""Late, failing or abandoned data does not block ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import Dataset

from coordinator import messages as m
from runtime import WorkerFailed
from runtime.data.loader import ThreadLoader
from tests.deadlock.faults import BOUND_S, Planted
from tests.deadlock.tap import within
from tests.support.loading import ALL, PLANS, Consumer, Noisy, assert_is_plan
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    averaged_ways,
    builder,
    every_way,
    local_ways,
    over,
)


@averaged_ways
def test_a_stalled_loader_delays_no_acknowledgement(way, faults, tap):
    """D8: rank 1 has trained its count and waits for data when the round begins."""
    loading, ready = threading.Event(), threading.Event()
    planted = faults().slow(rank=1, seconds=0.01).stall_in_data(rank=1, read=2, until=loading)
    planted.stall_in_epoch(rank=0, epoch=0, until=ready)
    b = planted.builder(dataset=planted.dataset(60), batch_size=1, way=way)
    handle = b.anchor(2).partition_ratios([1, 1]).run()
    tap.await_came(m.EpochReport, 1, 2)  # of its two plans of one batch
    ready.set()
    tap.await_came(m.SyncAck, 1)
    assert planted.steps[1] == 2
    assert not loading.is_set()
    loading.set()
    assert [e.num_samples for e in handle.join(BOUND_S).metrics] == [60]


@every_way
def test_a_stop_reaches_a_worker_that_waits_for_data(way, faults, tap):
    """D8, D14: the loader is stuck until after the worker has left, under ``SYNC`` until the stop:
    the two plans that each rank has are trained.
    """
    loading = threading.Event()
    planted = faults()
    for rank in (0, 1):
        planted.stall_in_data(rank=rank, read=0, until=loading)
    handle = planted.builder(dataset=planted.dataset(60), way=way).run()
    planted.await_all()
    handle.stop()
    for rank in (0, 1) if way[0] is not SYNC else ():
        tap.await_sent(m.Shutdown, rank)
        tap.await_came(m.Exiting, rank)
    loading.set()
    with within(5):
        assert handle.join(BOUND_S).stopped
    assert sum(planted.steps.values()) == (4 if way[0] is SYNC else 0)


@every_way
def test_a_data_set_that_fails_ends_the_run(way, faults):
    """S2: read by the loader's thread, ahead of the worker that raises it."""
    planted = faults().fail_in_data(batch=5, epoch=1)
    handle = planted.builder(dataset=planted.dataset(60), batch_size=4, epochs=3, way=way).run()
    with within(5), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert isinstance(failed.value.__cause__, Planted)
    assert failed.value.epoch == 1


@averaged_ways
def test_a_failing_read_while_the_peer_waits_for_data_ends_the_run(way, faults):
    """D8: the peer is woken from its wait for a batch that never comes."""
    held, loading = threading.Event(), threading.Event()
    planted = faults().stall_in_data(rank=0, read=0, until=held)
    planted.stall_in_data(rank=1, read=0, until=loading).fail_in_read(rank=1, read=0)
    handle = planted.builder(dataset=planted.dataset(60), way=way).run()
    planted.wait_for(lambda: planted.num_shots == 2)
    loading.set()
    planted.await_all()
    held.set()
    with within(5), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert (failed.value.rank, type(failed.value.__cause__)) == (1, Planted)


# -- abandoned epochs -------------------------------------------------------------------


@local_ways
def test_an_abandoned_epoch_leaves_no_loader_blocked_on_a_full_queue(way, faults, tap):
    """D31: rank 1 is in a step, its loader has filled the queue and waits for room."""
    held = threading.Event()
    planted = faults().stall_at(rank=1, step=1, until=held)
    handle = planted.builder(dataset=planted.dataset(4000), way=way).run()
    planted.await_all()
    loaders = [t for t in threading.enumerate() if t.name.startswith("prefetch-")]
    assert {t.name for t in loaders} >= {"prefetch-1"}
    handle.stop()
    held.set()
    with within(5):
        assert handle.join(BOUND_S).stopped
    assert not [t.name for t in loaders if t.is_alive()]


def test_the_epoch_after_an_abandoned_one_starts_clean():
    """D31: the queue is full when the plan is cancelled; none of its batches is used later."""
    with Consumer(ThreadLoader, Noisy()) as consumer:
        for taken in (0, 1, 3):
            consumer.loader.submit(ALL)
            for _ in range(taken):
                consumer.next()
            assert consumer.ready.acquire(timeout=BOUND_S)  # one more is ready: it is full
            consumer.loader.cancel()
            assert consumer.loader.try_next() is None
            for plan in PLANS[1:]:
                assert_is_plan(consumer.take(plan), plan)


class Meeting(Dataset):
    """Every rank reads its fourth batch of two at the same time as the others."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks, timeout=BOUND_S)
        self._met = threading.local()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self._met.num = getattr(self._met, "num", 0) + 1
        if self._met.num == 7:  # after the reads that are observed, one at a time
            self._barrier.wait()
        return torch.tensor(index)


@local_ways
def test_a_data_set_is_read_by_all_ranks_at_once(way):
    """D8: no lock around the data set, which a stalled rank could hold."""
    b = builder(dataset=Meeting(3), batch_size=2, ranks=3, way=way)
    with within(5):
        state = b.partition_ratios([1, 1, 1]).run().join(BOUND_S)
    assert state.metrics[0].num_samples == 24


@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)])
def test_a_run_that_fails_before_its_first_plan_leaves_no_loader(way, faults):
    """D31: the data set was never read."""
    planted = faults().fail_in_build(rank=1)
    handle = planted.builder(dataset=planted.dataset(60), way=way).run()
    with pytest.raises(WorkerFailed, match=r"worker 1 .*planted"):
        handle.join(BOUND_S)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("prefetch-")]
