"""Orders of epochs that are computed as they are read, of data sets of any length."""

from __future__ import annotations

import shutil
import threading
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from runtime import CheckpointError, predict
from runtime.data import epoch_index, epoch_order
from runtime.data.epoch_index import EpochIndex, SampledOrder
from runtime.data.epoch_order import Drawn, InOrder, SeedingSampler, Shuffled, computed_order
from runtime.device.base import Device
from runtime.evaluation.validation_data import ValidationData
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    at_once,
    builder,
    count_up,
    local_ways,
    over,
)

N, HUGE = 37, 10**12


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr(epoch_order, "BLOCK", 8)
    monkeypatch.setattr(epoch_order, "_KEPT_BLOCKS", 2)


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def with_replacement(num, seed=5, num_samples=N):
    sampler = RandomSampler(range(num_samples), replacement=True, num_samples=num)
    sampler.generator = None if seed is None else generator(seed)
    return sampler


ORDERS = {
    "in order": lambda: InOrder(range(N)),
    "a range": lambda: InOrder(range(100, 26, -2)),
    "shuffled": lambda: Shuffled(N, 1, 3),
    "drawn": lambda: Drawn(N, N, generator()),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_slices_in_any_order_are_those_of_the_whole(kind):
    whole = list(ORDERS[kind]())
    assert len(whole) == len(ORDERS[kind]()) == N
    order = ORDERS[kind]()
    slices = [(30, 37), (0, 5), (3, 30), (16, 24), (36, 50), (5, 5), (0, 0), (0, 37), (7, 9)]
    for start, stop in slices:
        part = order[start:stop]
        assert part.dtype is torch.int64
        assert part.tolist() == whole[start:stop]
    assert order[:].tolist() == whole


def test_threads_that_draw_at_once_get_the_samples_of_their_positions():
    whole = list(with_replacement(800))
    order = computed_order(with_replacement(800), N)
    parts = at_once(lambda i: order[i : i + 100].tolist(), range(0, 800, 100))
    assert [sample for part in parts for sample in part] == whole


@pytest.mark.parametrize("num_samples", [N, 2**28 + 3, 2**31 + 1, HUGE])
@pytest.mark.parametrize("num", [1, 8, 31, 32, 100])
def test_drawn_samples_and_the_generator_are_those_of_the_sampler(num, num_samples):
    sampler, other = (with_replacement(num, num_samples=num_samples) for _ in range(2))
    order = computed_order(sampler, num_samples)
    assert order[:].tolist() == list(other)
    assert torch.equal(sampler.generator.get_state(), other.generator.get_state())


def loader_with(sampler):
    return DataLoader(range(N), sampler=sampler, generator=sampler.generator)


@pytest.mark.parametrize("shares", [False, True], ids=["own generator", "that of the loader"])
def test_epochs_of_the_users_generator_are_those_of_a_plain_loop(shares):
    plain, sampler = with_replacement(20), with_replacement(20)
    if shares:
        loader = loader_with(plain)
        wanted = [[int(i) for i in loader] for _ in range(4)]
        sampler = SeedingSampler(sampler, sampler.generator)
    else:
        wanted = [list(plain) for _ in range(4)]
    order = SampledOrder(sampler, seed=0)
    first = order.draw(0, N)
    assert first[0:3].tolist() == wanted[0][:3]  # the rest is not read
    assert order.draw(1, N)[:].tolist() == wanted[1]
    second = order.draw(2, N)
    assert order.draw(0, N)[:].tolist() == wanted[0]  # again
    assert second[:].tolist() == wanted[2]
    assert order.draw(3, N)[:].tolist() == wanted[3]
    assert torch.equal(sampler.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("read", [0, 3, 20])
@pytest.mark.parametrize("since", [1, 2])
def test_a_restored_generator_draws_the_epochs_that_follow(since, read):
    plain = with_replacement(20)
    wanted = [list(plain) for _ in range(4)]
    order = SampledOrder(with_replacement(20), seed=0)
    for epoch in (0, 1):
        order.draw(epoch, N)[0:read]
    state = order.state(since)
    again = SampledOrder(with_replacement(20, seed=6), seed=0)
    again.restore(state)
    assert [again.draw(epoch, N)[:].tolist() for epoch in range(since, 4)] == wanted[since:]


@pytest.mark.parametrize("sampler", [range(N), SequentialSampler(range(N)), with_replacement(9)])
def test_orders_that_are_computed_are_not_kept_for_checkpoints(sampler):
    index = EpochIndex(N, 4, 0, sampler)
    index.order(0)[:]
    assert index.sampled_orders(0) == {}


@pytest.mark.parametrize("sampler", [range(-1, 5), range(N + 1), range(30, 40), range(5, -2, -1)])
def test_a_range_that_leaves_the_data_set_is_refused(sampler):
    with pytest.raises(ValueError, match="the sampler yielded index"):
        EpochIndex(N, 4, 0, sampler).order(0)


class OnDemand(Dataset):
    """Makes its samples: each is its index."""

    def __len__(self):
        return HUGE

    def __getitem__(self, index):
        return torch.tensor([index])


def over_huge(sampler=None):
    return DataLoader(OnDemand(), batch_size=4, sampler=sampler)


KINDS = {
    "shuffled": lambda: OnDemand(),
    "in order": lambda: over_huge(),
    "with replacement": lambda: over_huge(with_replacement(HUGE, None, HUGE)),
    "with a generator": lambda: over_huge(with_replacement(HUGE, 5, HUGE)),
}


class Seen:
    def __init__(self):
        self.lock, self.samples = threading.Lock(), []

    def train(self, model, batch):
        with self.lock:
            self.samples += batch[:, 0].tolist()
        return count_up(model, batch)


def run_huge(kind, seen, way, configure=lambda b: b, steps=20):
    b = builder(train=seen.train, dataset=KINDS[kind](), batch_size=4, epochs=2, way=way)
    configure(b.max_steps(steps)).run().join(WAIT_S)
    return Counter(seen.samples)


@over([(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_of_any_length_is_trained_saved_and_resumed(kind, way, tmp_path):
    whole = run_huge(kind, Seen(), way)
    assert sum(whole.values()) == 80
    if kind == "in order":
        assert max(whole) < 200
    else:
        assert max(whole) > HUGE // 2
    first = run_huge(kind, Seen(), way, lambda b: b.checkpoint_dir(tmp_path), steps=10)
    rest = run_huge(kind, Seen(), way, lambda b: b.resume(tmp_path))
    assert sum(first.values()) + sum(rest.values()) == 80
    if way[0] is SYNC:
        assert first + rest == whole


def test_a_long_data_set_is_read_by_loader_processes():
    seen = Seen()
    found = run_huge("shuffled", seen, (SYNC, THREAD), lambda b: b.loader_workers(1), steps=4)
    assert sum(found.values()) == 16


def test_a_long_validation_set_and_a_prediction_of_few_draws_are_not_listed():
    data = ValidationData(OnDemand(), [Device()], batch_size=4)
    assert data.num_batches == HUGE // 4
    loader = data.make_loader(0, None)
    loader.submit(HUGE // 4 - 1)
    assert loader.next()[:, 0].tolist() == [*range(HUGE - 4, HUGE)]
    assert loader.close()
    found = predict(torch.nn.Identity(), over_huge(with_replacement(30, 5, HUGE)), batch_size=4)
    assert found[:, 0].tolist() == list(with_replacement(30, 5, HUGE))


# The permutation by function, of shorter data sets.


@pytest.fixture
def by_function(monkeypatch):
    for module in ("runtime.data.epoch_index", "runtime.run"):
        monkeypatch.setattr(f"{module}.LONG", 1)


@local_ways
def test_each_sample_is_trained_once_in_each_epoch(way, by_function, tmp_path):
    seen = Seen()
    data = [torch.tensor([i]) for i in range(N)]

    def run(configure):
        b = builder(train=seen.train, dataset=data, ranks=3, epochs=2, way=way)
        configure(b).run().join(WAIT_S)

    run(lambda b: b.checkpoint_dir(tmp_path).max_steps(11))
    run(lambda b: b.resume(tmp_path))
    assert Counter(seen.samples) == dict.fromkeys(range(N), 2)


def test_a_shuffle_by_function_begins_at_the_documented_length():
    assert epoch_index.LONG == 2**24
    assert isinstance(EpochIndex(2**24, 4, 0).order(0), Shuffled)


def test_a_checkpoint_of_another_shuffle_is_refused(tmp_path, monkeypatch):
    builder(dataset=N).max_steps(4).checkpoint_dir(tmp_path / "a").run().join(WAIT_S)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr("runtime.run.LONG", 1)
    with pytest.raises(CheckpointError, match="a shuffle 'as a whole', this run has 'by function'"):
        builder(dataset=N).resume(tmp_path / "b").run()
