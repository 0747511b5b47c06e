"""InlineLoader and ThreadLoader, with a data set that stalls."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import defaultdict, namedtuple

import pytest
import torch
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime.core.context import current_worker
from runtime.data import loader as loading
from runtime.data.batches import PlanQueue, batch_generator, move_batch
from runtime.data.dataset import adapt_dataset
from runtime.data.loader import InlineLoader, ThreadLoader
from tests.support.loading import (
    ALL,
    INDEX,
    PLANS,
    SIZE,
    Consumer,
    FrozenClock,
    N,
    Noisy,
    Timed,
    Troubled,
    assert_is_plan,
    draws,
)
from tests.support.step_plans import step_plan

LOCAL = pytest.mark.parametrize("kind", [InlineLoader, ThreadLoader])


class Gate(Dataset):
    """Blocks each read until it is released; counts its reads."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.num_reads = 0

    def __len__(self):
        return N

    def get_batch(self, indices):
        self.num_reads += 1
        self.entered.release()
        assert self.let.acquire(timeout=30)
        return (indices,)


def test_a_plan_queue_returns_positions_in_order():
    queue = PlanQueue(0)
    for plan in PLANS:
        queue.put(plan)
    assert len(queue) == 12
    taken = [position and position[:2] for position in (queue.pop() for _ in range(13))]
    assert taken[6:] == [(1, 1), (1, 3), (1, 5), (1, 0), (1, 1), (2, 5), None]
    assert len(queue) == 0
    queue.put(ALL)
    queue.clear()
    assert queue.pop() is None


def test_a_plan_queue_has_the_pieces_of_its_rank_with_samples():
    queue = PlanQueue(1)
    steps = step_plan(((4, 2),), 3, last=((1, 0),), epoch=1, start=6)
    queue.put(EpochPlan(epoch=1, steps=steps))
    assert len(queue) == 2
    assert [queue.pop() for _ in range(3)] == [(1, 1, (10, 12)), (1, 3, (16, 18)), None]


@LOCAL
def test_a_plan_with_pieces_is_loaded_in_those_pieces(kind):
    order = INDEX.order(1).tolist()
    pieces = ((0, 3), (3, 4), (7, 9))
    with Consumer(kind, (torch.arange(N),)) as consumer:
        consumer.loader.submit(EpochPlan(epoch=1, batches=(range(3),), pieces=pieces))
        loaded = [consumer.next() for _ in pieces]
        for batch, (start, stop) in zip(loaded, pieces, strict=True):
            assert batch.num_samples == stop - start
            assert batch.data[0].tolist() == order[start:stop]


@LOCAL
@pytest.mark.parametrize("dataset", [Noisy(), (torch.arange(N),)], ids=["map", "tensors"])
def test_plans_are_loaded_exactly_and_in_order(kind, dataset):
    with Consumer(kind, dataset) as consumer:
        for plan in PLANS:
            consumer.loader.submit(plan)
        for plan in PLANS:
            assert_is_plan([consumer.next() for _ in range(plan.num_batches)], plan)
        assert consumer.loader.try_next() is None
        assert_is_plan(consumer.take(ALL), ALL)


@LOCAL
def test_batches_carry_the_time_in_which_they_were_read(kind, monkeypatch):
    monkeypatch.setattr(loading, "time", clock := FrozenClock())
    with Consumer(kind, Timed(clock)) as consumer:
        assert {loaded.load_s for loaded in consumer.take(ALL)} == {clock.READ_S}
        assert consumer.loader.reads_ahead == (kind is ThreadLoader)


def test_random_draws_depend_only_on_the_batch():
    with Consumer(InlineLoader, Noisy()) as consumer:
        wanted = draws(consumer.take(ALL))
        backwards = EpochPlan(epoch=0, batches=(range(5, -1, -1),))
        assert draws(consumer.take(backwards)) == wanted[::-1]
        assert draws(consumer.take(EpochPlan(epoch=1, batches=(range(6),)))) != wanted
    assert len({value for batch in wanted for value in batch}) == N
    for depth, rank in ((1, 0), (3, 2)):
        with Consumer(ThreadLoader, Noisy(), rank=rank, depth=depth) as consumer:
            taken = consumer.take(ALL)
        assert draws(taken) == wanted
        assert taken[0].data[2].tolist() == [rank] * SIZE


def test_generators_differ_by_seed_epoch_and_batch():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0)]
    firsts = {batch_generator(*key).initial_seed() for key in keys}
    assert len(firsts) == len(keys)
    assert all(0 <= first < 2**63 for first in firsts)


@LOCAL
def test_the_data_set_sees_its_worker(kind):
    class Worker:
        rank = 0
        current_epoch = 41

    class Asks(Noisy):
        def __getitem__(self, index):
            return current_worker().current_epoch

    with Consumer(kind, Asks(), worker=Worker()) as consumer:
        assert consumer.take(ALL)[0].data.tolist() == [41] * SIZE
    with pytest.raises(RuntimeError):
        current_worker()


@LOCAL
def test_an_exception_is_raised_in_order_with_its_traceback(kind):
    with Consumer(kind, Troubled()) as consumer:
        plan = EpochPlan(epoch=1, batches=(range(3),))
        consumer.loader.submit(plan)
        assert consumer.next().batch == 0
        with pytest.raises(KeyError, match="no such sample") as caught:
            consumer.next()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "__getitem__"
        assert consumer.next().batch == 2
        consumer.loader.submit(plan)
        consumer.loader.cancel()
        assert_is_plan(consumer.take(ALL), ALL)


def test_a_system_exit_in_the_data_set_is_raised_for_its_batch():
    class Exits(Noisy):
        def __getitem__(self, index):
            raise SystemExit(3)

    with Consumer(ThreadLoader, Exits()) as consumer:
        consumer.loader.submit(ALL)
        with pytest.raises(RuntimeError, match=r"the data set raised SystemExit\(3\)"):
            consumer.next()


@pytest.mark.parametrize("depth", [1, 2])
def test_at_most_depth_batches_wait(depth):
    gate = Gate()
    with Consumer(ThreadLoader, gate, depth=depth) as consumer:
        consumer.loader.submit(ALL)
        for _ in range(depth):
            gate.let.release()
            assert gate.entered.acquire(timeout=30)
            assert consumer.ready.acquire(timeout=30)
        assert not gate.entered.acquire(timeout=0.1)
        assert consumer.loader.try_next().batch == 0
        assert gate.entered.acquire(timeout=30)
        assert gate.num_reads == depth + 1
        gate.let.release()


def test_the_thread_starts_with_the_first_plan_and_has_a_name():
    def names():
        return [thread.name for thread in threading.enumerate()]

    with Consumer(ThreadLoader, Noisy(), rank=3) as consumer:
        assert "prefetch-3" not in names()
        consumer.take(ALL)
        assert names().count("prefetch-3") == 1
    assert "prefetch-3" not in names()


def test_nothing_blocks_while_the_data_set_stalls():
    gate = Gate()
    with Consumer(ThreadLoader, gate) as consumer:
        consumer.loader.submit(ALL)
        assert gate.entered.acquire(timeout=30)
        start = time.monotonic()
        assert consumer.loader.try_next() is None
        consumer.loader.submit(PLANS[1])
        consumer.loader.cancel()
        assert not consumer.loader.close(0.05)
        assert time.monotonic() - start < 5
        gate.let.release()


def test_cancel_discards_a_batch_being_loaded():
    gate = Gate()
    with Consumer(ThreadLoader, gate) as consumer:
        consumer.loader.submit(ALL)
        assert gate.entered.acquire(timeout=30)
        consumer.loader.cancel()
        gate.let.release(10)
        assert_is_plan(consumer.take(PLANS[1]), PLANS[1])
        assert gate.num_reads == 1 + PLANS[1].num_batches
        assert not consumer.ready.acquire(timeout=0.05)
        assert consumer.loader.try_next() is None


def test_a_plan_after_a_cancel_is_loaded_in_full():
    awake, go_on = threading.Event(), threading.Event()

    class Raced(ThreadLoader):
        """Blocks between the thread's wake-up and its first step."""

        def _load_next(self, generation):
            awake.set()
            assert go_on.wait(30)
            return super()._load_next(generation)

    with Consumer(Raced, Noisy()) as consumer:
        consumer.loader.submit(ALL)
        assert awake.wait(30)
        consumer.loader.cancel()
        consumer.loader.submit(PLANS[1])
        go_on.set()
        taken = [consumer.next() for _ in range(PLANS[1].num_batches)]
        assert_is_plan(taken, PLANS[1])


def test_a_cancelled_epoch_leaves_no_batch_behind():
    with Consumer(ThreadLoader, Noisy(), depth=2) as consumer:
        for plan in PLANS[:2]:
            consumer.loader.submit(ALL)
            consumer.next()
            consumer.next()
            consumer.loader.cancel()
            assert consumer.loader.try_next() is None
            assert_is_plan(consumer.take(plan), plan)


def test_a_read_that_returns_after_close_has_no_effect():
    gate = Gate()
    consumer = Consumer(ThreadLoader, gate)
    consumer.loader.submit(ALL)
    assert gate.entered.acquire(timeout=30)
    assert consumer.loader.close(0.05) is False
    with pytest.raises(RuntimeError, match="closed"):
        consumer.loader.submit(ALL)
    gate.let.release(10)
    assert consumer.loader.close(20) is True
    assert not consumer.ready.acquire(blocking=False)
    assert consumer.loader.try_next() is None
    assert gate.num_reads == 1


@LOCAL
def test_close_is_idempotent_and_final(kind):
    consumer = Consumer(kind, Noisy())
    assert consumer.loader.close()
    assert consumer.loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        consumer.loader.submit(ALL)
    consumer.loader.cancel()
    assert consumer.loader.try_next() is None


def test_the_loader_does_not_keep_a_taken_batch_alive():
    alive = []

    class Counted(Noisy):
        def __getitem__(self, index):
            return torch.zeros(())

    def collate(samples):
        alive.append(torch.stack(samples))
        return (alive[-1],)

    consumer = Consumer(ThreadLoader, Counted())
    consumer.loader._adapter = adapt_dataset(Counted(), collate_fn=collate)
    with consumer:
        for epoch in range(3):  # the first batches are compared with each other
            consumer.take(EpochPlan(epoch=epoch, batches=(range(1),)))
        (loaded,) = consumer.take(EpochPlan(epoch=3, batches=(range(1),)))
        reference = weakref.ref(alive.pop())
        alive.clear()
        del loaded
        # Without the GIL the thread that created the batch frees it when it runs again.
        consumer.take(EpochPlan(epoch=4, batches=(range(1),)))
        assert reference() is None


# -- devices -----------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@LOCAL
def test_batches_are_moved_to_the_device(kind):
    consumer = Consumer(kind, (torch.arange(N),))
    consumer.loader._device, consumer.loader._moves = torch.device("meta"), True
    if kind is InlineLoader:
        consumer.loader._context.device = torch.device("meta")
    with consumer:
        assert consumer.take(ALL)[0].data[0].device.type == "meta"


def test_every_tensor_of_a_nested_batch_is_moved():
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3)])
    batch = {"pair": Pair(torch.zeros(2), [torch.zeros(1), "name"]), "packed": packed, "n": 3}
    moved = move_batch(defaultdict(list, batch), torch.device("meta"))
    assert type(moved) is defaultdict
    assert moved["missing"] == []
    assert type(moved["pair"]) is Pair
    assert moved["pair"].x.is_meta
    assert moved["pair"].y[0].is_meta
    assert moved["pair"].y[1] == "name"
    assert moved["packed"].data.is_meta
    assert moved["n"] == 3
    assert not batch["pair"].x.is_meta
