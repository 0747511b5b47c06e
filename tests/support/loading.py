"""Loader tests: data sets that record their readers, and a consumer."""

from __future__ import annotations

import os
import threading

import torch
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime.core.context import current_worker
from runtime.data.batches import batch_generator
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import InlineLoader, LoaderSpec, Stage
from runtime.data.process_loader import ProcessLoader

N, SIZE, SEED = 23, 4, 5
CPU = torch.device("cpu")
BAD, DEADLY = (1, 1), (2, 2)  # epoch and batch
ALL = EpochPlan(epoch=0, batches=(range(6),))


class Noisy(Dataset):
    """Sample i is (i, a number drawn from the batch's generator, the rank)."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        worker = current_worker()
        return index, torch.rand((), generator=worker.generator), worker.rank


def key_of(epoch, batch):
    return batch_generator(SEED, epoch, batch).initial_seed()


class FrozenClock:
    """A clock of reads that each take ``READ_S``, in place of the module ``time``."""

    READ_S = 0.25

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def advance(self):
        self.now += self.READ_S


class Timed(Noisy):
    """Advances a clock with each batch that is read."""

    def __init__(self, clock):
        self._clock = clock

    def get_batch(self, indices):
        self._clock.advance()
        return (indices,)


class Troubled(Noisy):
    """Raises in one batch and kills its process in another."""

    def __getitem__(self, index):
        key = current_worker().generator.initial_seed()
        if key == key_of(*BAD):
            raise KeyError("no such sample")
        if key == key_of(*DEADLY):
            os._exit(7)
        return super().__getitem__(index)


INDEX = EpochIndex(N, SIZE, SEED)


class Consumer:
    """A loader and its wake-ups; closed at the end."""

    def __init__(self, kind, dataset, *, rank=0, worker=None, depth=1, **kwargs):
        self.ready = threading.Semaphore(0)
        if kind is not InlineLoader:
            kwargs = {"stage": Stage(depth), "on_ready": self.ready.release, **kwargs}
        index = EpochIndex(N, SIZE, SEED)
        adapter = adapt_dataset(dataset)
        spec = LoaderSpec(
            adapter=adapter, index=index, device=CPU, seed=SEED, rank=rank, worker=worker
        )
        self.loader = kind(spec, **kwargs)

    def __enter__(self):
        if isinstance(self.loader, ProcessLoader):
            self.loader.start()
        return self

    def __exit__(self, *exception):
        assert self.loader.close(20)

    def next(self):
        """The next batch; waits for wake-ups without polling."""
        while (loaded := self.loader.try_next()) is None:
            assert self.ready.acquire(timeout=30), "no batch became ready"
        return loaded

    def take(self, plan):
        self.loader.submit(plan)
        return [self.next() for _ in range(plan.num_batches)]


def assert_is_plan(taken, plan):
    wanted = [(plan.epoch, batch) for span in plan.batches for batch in span]
    assert [(x.epoch, x.batch) for x in taken] == wanted
    for loaded in taken:
        indices = INDEX.indices(loaded.epoch, loaded.batch)
        assert loaded.data[0].tolist() == indices.tolist()
        assert loaded.num_samples == len(indices)


PLANS = [
    ALL,
    EpochPlan(epoch=1, batches=(range(1, 6, 2), range(2))),
    EpochPlan(epoch=1, batches=()),
    EpochPlan(epoch=2, batches=(range(5, 6),)),
]


def draws(taken):
    return [loaded.data[1].tolist() for loaded in taken]
