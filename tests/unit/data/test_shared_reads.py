"""Reads of data sets that share what a read changes: training, validation, predictions."""

from __future__ import annotations

import logging
import pickle
import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import runtime.data.shared_reads as module
from runtime import Trainer, predict
from runtime.data.dataset import adapt_dataset
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
    counter,
    train,
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


class Overlaps:
    """Counts reads, and those that are made at once: each waits a moment for another one."""

    def __init__(self):
        self.changed = threading.Condition()
        self.active = self.most = self.num = 0

    def __enter__(self):
        with self.changed:
            self.active += 1
            self.num += 1
            self.most = max(self.most, self.active)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.active > 1, 0.01)

    def __exit__(self, *error):
        with self.changed:
            self.active -= 1


class Records(Dataset):
    """Sample ``i`` of a file; a read of another sample between seek and read falsifies it."""

    def __init__(self, file, overlaps=None):
        self.file = file
        self.overlaps = overlaps or Overlaps()

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.file.seek(index)
        with self.overlaps:
            read = self.file.read(1) or b"\xff"  # at the end
        return torch.tensor([index, *read])


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(bytes(range(N)))
    with path.open("rb", buffering=0) as file:
        yield Records(file)


class Seen:
    """Samples that functions of the user have seen, by name, and those that are false."""

    def __init__(self):
        self.lock, self.num, self.false = threading.Lock(), Counter(), 0

    def add(self, name, batch):
        with self.lock:
            self.num[name] += len(batch)
            self.false += int((batch[:, 0] != batch[:, 1]).sum())

    def train(self, model, batch):
        self.add("trained", batch)
        return count_up(model, batch)

    def validate(self, model, batch):
        self.add("validated", batch)
        return {"mean": batch[:, 0].double().mean()}

    def predict(self, data, **settings):
        module = torch.nn.Identity()
        batches = predict(module, data, lambda m, x: x, ["cpu"] * 2, batch_size=2, **settings)
        self.add("predicted", batches)


class Wrapper(Dataset):
    """Some samples of a data set that a container holds."""

    def __init__(self, held, indices):
        self.held, self.indices = held, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, position):
        (data,) = self.held.values() if isinstance(self.held, dict) else self.held
        return data[self.indices[position]]


FIRST, REST = range(16), range(16, N)
PARTS = {
    "random_split": lambda data: (Subset(data, FIRST), Subset(data, REST)),
    "wrappers": lambda data: (
        Wrapper([data], FIRST),
        ConcatDataset([Wrapper({"inner": data}, REST)]),
    ),
    "one file": lambda data: (
        Subset(data, FIRST),
        Subset(Records(data.file, data.overlaps), REST),
    ),
    "loader": lambda data: (
        DataLoader(Subset(data, FIRST), batch_size=SIZE),
        DataLoader(Subset(data, REST), batch_size=SIZE),
    ),
}


@pairwise(
    parts=list(PARTS),
    lock=[None, True],
    way=[(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD)],
    ranks=[1, 2],
)
def test_training_and_validation_on_one_file_take_turns(records, parts, lock, way, ranks):
    seen = Seen()
    train_set, val_set = PARTS[parts](records)
    run = builder(
        train=seen.train, dataset=train_set, batch_size=SIZE, ranks=ranks, way=way, epochs=3
    ).val_dataset(val_set, fn=seen.validate)
    if lock is not None:
        run.dataset_lock(lock)
    run.run().join(WAIT_S)
    assert seen.num == {"trained": 48, "validated": 24}
    assert (records.overlaps.most, seen.false) == (1, 0)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_an_evaluation_function_reads_the_file_of_the_training_data_alone(records, way):
    seen = Seen()
    train_set, val_set = PARTS["random_split"](records)

    def evaluate(model, epoch):
        for batch in DataLoader(val_set, batch_size=SIZE):
            seen.add("evaluated", batch)
        seen.predict(val_set)
        return {}

    run = builder(train=seen.train, dataset=train_set, batch_size=SIZE, way=way, epochs=3)
    run.eval_fn(evaluate).run().join(WAIT_S)
    assert seen.num == {"trained": 48, "evaluated": 24, "predicted": 24}
    assert (records.overlaps.most, seen.false) == (1, 0)


def test_an_evaluation_in_the_body_of_a_loop_takes_turns_with_training(records):
    seen = Seen()
    train_set, val_set = PARTS["random_split"](records)

    def body(worker):
        for batch in worker.batches():
            worker.step(seen.train(worker.model, batch))
            worker.evaluate(val_set, seen.validate)

    run = Trainer.loop(counter, lambda model: torch.optim.SGD(model.parameters(), 1.0), body)
    run.dataset(train_set).batch_size(SIZE).num_epochs(2).devices(["cpu"] * 2).run().join(WAIT_S)
    assert seen.num == {"trained": 32, "validated": 32}
    assert (records.overlaps.most, seen.false) == (1, 0)


@pytest.mark.parametrize("kind", [list, iter], ids=["by index", "stream"])
def test_predictions_take_turns_with_a_run(records, kind):
    seen = Seen()
    train_set, val_set = PARTS["random_split"](records)
    held_out = val_set if kind is list else Items(val_set)
    run = builder(train=seen.train, dataset=train_set, batch_size=SIZE, epochs=4).run()
    for _ in range(2):
        seen.predict(held_out)
    run.join(WAIT_S)
    assert seen.num == {"trained": 64, "predicted": 16}
    assert (records.overlaps.most, seen.false) == (1, 0)


class Items(IterableDataset):
    """The samples of a data set as a stream."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


def test_a_stream_and_a_validation_on_one_file_take_turns(records):
    seen = Seen()
    train_set, val_set = PARTS["random_split"](records)
    run = builder(train=seen.train, dataset=Items(train_set), batch_size=SIZE, epochs=3)
    run.val_dataset(val_set, fn=seen.validate).run().join(WAIT_S)
    assert seen.num == {"trained": 48, "validated": 24}
    assert (records.overlaps.most, seen.false) == (1, 0)


def test_two_runs_at_once_on_one_file_take_turns(records):
    seen = Seen()
    runs = [
        builder(train=seen.train, dataset=part, batch_size=SIZE, epochs=2).run()
        for part in PARTS["random_split"](records)
    ]
    for run in runs:
        run.join(WAIT_S)
    assert seen.num == {"trained": 48}
    assert (records.overlaps.most, seen.false) == (1, 0)


def test_data_sets_that_join_the_same_files_in_other_orders_do_not_block_each_other(tmp_path):
    overlaps, files = Overlaps(), []
    for name in "abc":
        path = tmp_path / name
        path.write_bytes(bytes(range(N)))
        files.append(path.open("rb", buffering=0))
    one, two, three = (Records(file, overlaps) for file in files)
    orders = [(one, two, three), (three, two, one), (two, three, one), (two, one)]
    adapters = [adapt_dataset(ConcatDataset(order)) for order in orders]

    def read(adapter):
        return [adapter.load(indices) for indices in BATCHES * 2]

    batches = [batch for found in at_once(read, adapters * 2) for batch in found]
    for file in files:
        file.close()
    assert all(torch.equal(batch[:, 0], batch[:, 1]) for batch in batches)


class Holding(Dataset):
    """Waits in the read of a sample."""

    def __init__(self, file):
        self.file = file
        self.entered, self.released = threading.Event(), threading.Event()
        self.order = []

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == 0:
            self.entered.set()
            assert self.released.wait(WAIT_S)
        self.order.append(index)
        return torch.tensor([index, self.file.seek(index)])


def test_a_first_read_waits_for_another_one_however_long_and_says_so(records, caplog, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    data = Holding(records.file)
    adapter = adapt_dataset(data)
    threads = [
        threading.Thread(target=adapter.load, args=(torch.tensor([index]),)) for index in (0, 1)
    ]
    threads[0].start()
    assert data.entered.wait(WAIT_S)
    threads[1].start()
    while not caplog.records:  # the second one waits
        threads[1].join(0.001)
        assert threads[1].is_alive()
    data.released.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert data.order == [0, 1]
    assert caplog.messages == ["a read of Holding waits for another one since 0.01 s"]


class Pairs(Dataset):
    """Draws a number once for each sample, and keeps it on ``self``."""

    def __init__(self):
        self.overlaps = Overlaps()

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.start = random.randrange(1000)
        with self.overlaps:
            return torch.tensor([self.start, self.start])


class PairsByBatch(Pairs):
    __getitem__ = None

    def get_batch(self, indices):
        self.start = random.randrange(1000)
        with self.overlaps:
            return torch.tensor([[self.start, self.start]] * len(indices))


def stateful_collate():
    """A list of samples, and a function that keeps a number while it makes a batch."""
    state, overlaps = {"start": 0}, Overlaps()

    def collate(samples):
        state["start"] = random.randrange(1000)
        with overlaps:
            return torch.tensor([[state["start"], state["start"]]] * len(samples))

    collate.overlaps = overlaps
    return collate


KEPT = "at a time reads it; dataset_lock(False) turns this off"
STATEFUL = {
    "__getitem__": ("Pairs sets its 'start' in each read", lambda: (Pairs(), None)),
    "get_batch": ("PairsByBatch sets its 'start' in each read", lambda: (PairsByBatch(), None)),
    "collate_fn": (
        "stateful_collate.<locals>.collate sets its 'state' in each read",
        lambda: (list(range(N)), stateful_collate()),
    ),
}


@pytest.mark.parametrize("door", ["train", "validate", "predict"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_value_that_reads_keep_on_an_object_is_that_of_one_read(kind, door, caplog):
    reason, make = STATEFUL[kind]
    data, collate = make()
    seen, reads = Seen(), (collate or data).overlaps
    loader = data if collate is None else DataLoader(data, batch_size=2, collate_fn=collate)
    if door == "predict":
        seen.predict(loader)
    elif door == "train":
        builder(train=seen.train, dataset=loader, batch_size=2).run().join(WAIT_S)
    else:
        run = builder(dataset=40).val_dataset(loader, fn=seen.validate)
        run.run().join(WAIT_S)
    assert (seen.num.total(), seen.false, reads.most) == (N, 0, 1)
    lines = [record for record in caplog.records if "reads it" in record.message]
    assert [(r.levelno, r.message.split(":")[0]) for r in lines] == [(logging.WARNING, reason)]
    assert lines[0].message.endswith(KEPT)


@pytest.mark.parametrize("door", ["train", "predict", "evaluate"])
def test_dataset_lock_false_lets_reads_overlap(records, door):
    seen = Seen()
    if door == "predict":
        seen.predict(records, dataset_lock=False)
    elif door == "evaluate":
        state = train(dataset=4)
        state.evaluate(records, seen.validate, ["cpu"] * 2, batch_size=2, dataset_lock=False)
    else:
        run = builder(train=seen.train, dataset=records, batch_size=2).dataset_lock(False)
        run.run().join(WAIT_S)
    assert (records.overlaps.num, records.overlaps.most) == (N, 2)


def test_a_data_set_that_changes_nothing_is_read_at_once_beside_one_that_does(records):
    overlaps = Overlaps()

    class Plain(Pairs):
        def __getitem__(self, index):
            with overlaps:
                return torch.tensor(index)

    marked, plain = adapt_dataset(records), adapt_dataset(Plain())
    for indices in BATCHES[:4]:
        marked.load(indices)
        plain.load(indices)
    at_once(plain.load, BATCHES[4:])
    assert overlaps.most == 2


def test_under_dataset_lock_no_two_data_sets_draw_from_the_generators_of_the_process_at_once():
    drawn = []

    class Draws(Pairs):
        def __getitem__(self, index):
            with overlaps:
                drawn.append(random.random())
            return torch.tensor(index)

    overlaps = Overlaps()
    run = builder(dataset=Draws(), batch_size=SIZE).dataset_lock(True)
    run.val_dataset(Draws(), fn=lambda model, batch: {}).run().join(WAIT_S)
    assert (len(drawn), overlaps.most) == (2 * N, 1)


def test_reads_of_a_loader_process_are_free():
    adapter = adapt_dataset(Pairs(), lock=True)
    assert not adapter._reads.are_free
    assert pickle.loads(pickle.dumps(adapter._reads)).are_free


@pytest.mark.parametrize("value", ["yes", 1])
def test_predict_refuses_a_lock_that_is_no_flag(value):
    with pytest.raises(TypeError, match=rf"dataset_lock\({value!r}\): pass True or False"):
        predict(torch.nn.Identity(), X, dataset_lock=value)


def test_a_turn_is_logged_once_for_a_data_set_however_often_it_is_evaluated(caplog, tmp_path):
    class OneFile(Dataset):
        def __init__(self, path):
            path.write_bytes(bytes(N))
            self.file = open(path, "rb")  # noqa: SIM115

        def __len__(self):
            return N

        def __getitem__(self, index):
            self.file.seek(index)
            return float(self.file.read(1)[0])

    def loop(worker):
        for batch in worker.batches():
            worker.step(count_up(worker.model, batch))
            worker.evaluate(dataset, lambda model, batch: {"mean": batch.mean()})

    caplog.set_level(logging.INFO)
    dataset, other = OneFile(tmp_path / "one"), OneFile(tmp_path / "other")
    b = Trainer.loop(counter, lambda model: torch.optim.SGD(model.parameters(), 1.0), loop)
    state = b.dataset((X,)).batch_size(SIZE).num_epochs(1).devices(["cpu"] * 2).run().join(WAIT_S)
    for _ in range(2):
        state.evaluate(dataset, lambda model, batch: {"mean": batch.mean()}, ["cpu"] * 2)
        predict(counter("cpu"), dataset, lambda model, batch: batch, ["cpu"] * 2)
    assert caplog.text.count("one thread at a time reads it") == 1
    predict(counter("cpu"), other, lambda model, batch: batch, ["cpu"] * 2)
    assert caplog.text.count("one thread at a time reads it") == 2
    dataset.file.close()
    other.file.close()
