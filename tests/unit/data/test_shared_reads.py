"""Data sets whose own state changes when they are read, which all workers' threads share."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from runtime.data.dataset import adapt_dataset
from runtime.data.shared_reads import SharedReads
from tests.support.pairs import pairwise
from tests.support.running import (
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    at_once,
    builder,
    count_up,
)

N, SIZE = 24, 4
X = torch.arange(float(N))
BATCHES = list(torch.arange(N).split(SIZE))


class OneBuffer:
    """Fills the next of ``num`` buffers for each batch."""

    def __init__(self, num=1):
        self.buffers = [torch.empty(SIZE) for _ in range(num)]
        self.next = 0

    def __len__(self):
        return N

    def fill(self, values):
        buffer = self.buffers[self.next][: len(values)]
        self.next = (self.next + 1) % len(self.buffers)
        return buffer.copy_(values)

    def get_batch(self, indices):
        return (self.fill(X[indices]),)


class NumpyBuffer(OneBuffer):
    def __init__(self):
        self.buffer = np.empty(SIZE, np.float32)

    def get_batch(self, indices):
        part = self.buffer[: len(indices)]
        part[:] = X.numpy()[indices.numpy()]
        return (torch.from_numpy(part),)


class Foreign(OneBuffer):
    """Its buffer is not among its attributes."""

    def __init__(self):
        memory = torch.empty(SIZE)
        self.fill = lambda values: memory[: len(values)].copy_(values)


def collated(source):
    def collate(items):
        return (source.fill(torch.stack(items)),)

    return adapt_dataset(list(X), collate_fn=collate)


class Stream(IterableDataset):
    def __len__(self):
        return N

    def __iter__(self):
        return iter(X)


SOURCES = {
    "get_batch": lambda: adapt_dataset(OneBuffer()),
    "two buffers": lambda: adapt_dataset(OneBuffer(2)),
    "NumPy": lambda: adapt_dataset(NumpyBuffer()),
    "foreign memory": lambda: adapt_dataset(Foreign()),
    "collate_fn": lambda: collated(OneBuffer()),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_batches_keep_their_samples_while_later_ones_are_read(make):
    adapter = make()
    batches = [adapter.load(indices)[0] for indices in BATCHES]
    assert torch.equal(torch.cat(batches), X)


@pairwise(
    way=[(SYNC, THREAD), (CADENCE, OVER_CPU)],
    kind=[OneBuffer, NumpyBuffer, Foreign, Stream],
    ranks=[1, 2],
)
def test_a_run_trains_every_sample_of_a_data_set_with_one_buffer(kind, ranks, way):
    seen, source, collates = [], OneBuffer(), kind is Stream

    def train_fn(model, batch):
        seen.extend(batch[0].tolist())
        return count_up(model, batch)

    run = builder(train=train_fn, dataset=kind(), batch_size=SIZE, ranks=ranks, way=way)
    if collates:
        run.collate_fn(lambda items: (source.fill(torch.stack(items)),))
    run.run().join(WAIT_S)
    assert sorted(seen) == X.tolist()


class Scratch(Dataset):
    """Writes to an attribute whenever a sample is read."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.during = lambda: None

    def __len__(self):
        return N

    def write(self, index):
        self.scratch[0] = index

    def __getitem__(self, index):
        self.write(index)
        self.during()
        return X[index].clone()


class Nested(Scratch):
    def __init__(self, inner):
        self.inner = inner
        self.during = lambda: None

    def write(self, index):
        self.inner.write(index)


class File(Scratch):
    def write(self, index):
        self.scratch.seek(index)
        self.scratch.read(1)


class Reader(Scratch):
    """Writes nothing."""

    def write(self, index):
        pass


def reads_together(dataset):
    """True if a thread reads a batch while another one does."""
    adapter = adapt_dataset(dataset)
    for indices in BATCHES[:3]:
        adapter.load(indices)
    done = threading.Event()
    others = []

    def read():
        dataset.during = lambda: None
        adapter.load(BATCHES[0])
        done.set()

    def during():
        others.append(threading.Thread(target=read))
        others[-1].start()
        found.append(done.wait(0.1 if expects_lock else WAIT_S))

    found: list[bool] = []
    expects_lock = type(dataset) is not Reader
    dataset.during = during
    adapter.load(BATCHES[3])
    others[0].join(WAIT_S)
    assert done.is_set()
    return found[0]


@pytest.mark.parametrize("form", ["tensor", "array", "nested", "file"])
def test_a_data_set_that_writes_to_its_attributes_is_read_by_one_thread_at_a_time(form, tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(bytes(N + 1))
    with path.open("rb") as file:
        dataset = {
            "tensor": lambda: Scratch(torch.zeros(2)),
            "array": lambda: Scratch(np.zeros(2)),
            "nested": lambda: Nested(Scratch(torch.zeros(2))),
            "file": lambda: File(file),
        }[form]()
        assert not reads_together(dataset)


def test_a_data_set_that_only_reads_is_read_by_several_threads():
    assert reads_together(Reader(torch.zeros(2)))


class Study:
    """Has a method ``tell`` that is not that of a file, and an attribute that grows."""

    def __init__(self):
        self.results = {}

    def tell(self, trial, value):
        self.results[trial] = value


def test_a_method_tell_of_another_meaning_is_no_position():
    assert reads_together(Reader(Study()))


def test_an_observed_read_that_waits_for_another_one_is_not_a_deadlock():
    barrier = threading.Barrier(2)
    dataset = Reader(None)
    dataset.during = lambda: barrier.wait(WAIT_S)
    adapter = adapt_dataset(dataset)
    at_once(lambda i: adapter.load(torch.tensor([i])), (0, 1))


def test_reads_can_be_sent_to_a_loader_process():
    assert type(pickle.loads(pickle.dumps(SharedReads()))) is SharedReads
