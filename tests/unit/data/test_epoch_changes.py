"""Changes that ``epoch_fn`` and ``set_epoch`` make hold for every sample of the epoch."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from runtime import WorkerFailed, current_worker
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
)

N, EPOCHS = 32, 3
ONCE = dict.fromkeys(range(EPOCHS), N)

WAYS = {
    "sync 1": {"way": (SYNC, THREAD), "ranks": 1},
    "sync 2": {"way": (SYNC, THREAD), "ranks": 2},
    "cadence": {"way": (CADENCE, OVER_CPU), "ranks": 1},
    "async": {"way": (ASYNC, OVER_CPU), "ranks": 1},
}


class Levels(Dataset):
    """Each sample is the level of the data set at the time of the read."""

    def __init__(self):
        self.level = -1
        self.levels = np.full(N, -1)
        self.shared = torch.full((N,), -1)

    def set_level(self, level):
        self.level = level
        self.levels[:] = level
        self.shared[:] = level

    def __len__(self):
        return N

    def __getitem__(self, index):
        assert self.level == self.levels[index] == self.shared[index]
        return torch.tensor(self.level)


class Level(Dataset):
    """Eight samples, each the level of the data set at the time of the read."""

    level = -1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(self.level)


class Table:
    """A table of the level, changed according to ``how``."""

    def __init__(self, how):
        self.how = how
        self.x = torch.full((N,), -1)
        self.data = {
            "tensor": TensorDataset(self.x),
            "dict": {"x": self.x},
            "subset": Subset(TensorDataset(torch.arange(N * EPOCHS) // N), range(N)),
            "loader": DataLoader(self.x, batch_size=4),
        }[how]

    def set_level(self, level):
        if self.how == "tensor":
            self.data.tensors = (torch.full((N,), level),)
        elif self.how == "dict":
            self.data["x"] = torch.full((N,), level)
        elif self.how == "subset":
            self.data.indices = range(N * level, N * (level + 1))
        else:
            self.x.fill_(level)


def levels_by_epoch(dataset, epoch_fn, *, workers=0, **way):
    """Samples counted by level, of a run whose epochs have one level each."""
    seen, lock = Counter(), threading.Lock()

    def train(model, batch):
        values = batch if isinstance(batch, torch.Tensor) else next(iter(parts(batch)))
        with lock:
            seen.update((current_worker().current_epoch, v) for v in values.tolist())
        return count_up(model, batch)

    b = builder(train=train, dataset=dataset, batch_size=4, epochs=EPOCHS, **way)
    b.epoch_fn(epoch_fn).loader_workers(workers).run().join(WAIT_S)
    assert all(epoch == level for epoch, level in seen), seen
    return {level: count for (_, level), count in sorted(seen.items())}


def parts(batch):
    return batch.values() if isinstance(batch, dict) else batch


@pytest.mark.leaks_thread  # Python's pickler, which passes shared tensors to other processes
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [0, 1], ids=["threads", "processes"])
def test_a_data_set_changed_by_epoch_fn_is_read_as_changed(workers, way):
    data = Levels()
    found = levels_by_epoch(data, lambda e, w: data.set_level(e), workers=workers, **WAYS[way])
    assert found == ONCE


@pytest.mark.parametrize("way", ["sync 2", "cadence"])
@pytest.mark.parametrize("how", ["tensor", "dict", "subset", "loader"])
def test_a_table_changed_by_epoch_fn_is_read_as_changed(how, way):
    table = Table(how)
    found = levels_by_epoch(table.data, lambda e, w: table.set_level(e), **WAYS[way])
    assert found == ONCE


@pytest.mark.leaks_thread  # Python's pickler, which passes shared tensors to other processes
@pytest.mark.parametrize("workers", [0, 1], ids=["threads", "processes"])
def test_no_rank_reads_an_epoch_before_rank_0_has_changed_the_data_set(workers):
    """Rank 0 begins each epoch only once rank 1 waits for it."""
    data, others = Levels(), [threading.Event() for _ in range(EPOCHS)]

    def begin(epoch, worker):
        if worker.rank:
            others[epoch].set()
            return
        assert others[epoch].wait(WAIT_S)
        data.set_level(epoch)

    assert levels_by_epoch(data, begin, workers=workers, **WAYS["sync 2"]) == ONCE


@pytest.mark.parametrize("place", ["epoch_fn", "train_fn"])
def test_a_process_without_a_batch_in_the_epoch_of_a_change_reads_it_as_changed(place):
    """Each rank reads one batch an epoch, by its first process, until the other rank dies."""
    data, levels = Level(), []

    def die_in(here, worker):
        if here == place and worker.rank == 1 and worker.current_epoch == 1:
            raise RuntimeError("lost")

    def epoch_fn(epoch, worker):
        if epoch == 0:
            data.level = 0
        die_in("epoch_fn", worker)

    def train(model, batch):
        worker = current_worker()
        die_in("train_fn", worker)
        levels.extend((worker.current_epoch, level) for level in batch.tolist())
        return count_up(model, batch)

    b = builder(train=train, dataset=data, batch_size=4, epochs=EPOCHS, way=(SYNC, THREAD))
    state = b.loader_workers(2).on_worker_failure("continue").epoch_fn(epoch_fn).run().join(WAIT_S)
    assert set(levels) == {(epoch, 0) for epoch in range(EPOCHS)}
    assert [metrics.num_samples for metrics in state.metrics] == [8] * EPOCHS


def test_a_resident_copy_of_a_changed_table_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(N))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = {"x": x}

    def change(epoch, worker):
        data["x"] = x if epoch == 0 else np.load(tmp_path / "x.npy", mmap_mode="r")

    b = builder(dataset=data, batch_size=4, epochs=EPOCHS, ranks=1).resident(True)
    with pytest.raises(WorkerFailed, match=r"before epoch 1, .* use resident\(False\)"):
        b.epoch_fn(change).run().join(WAIT_S)


@pytest.mark.parametrize("policy", [SYNC, CADENCE])
def test_a_rank_that_dies_in_epoch_fn_blocks_no_other_rank(policy):
    def begin(epoch, worker):
        if epoch == 1 and worker.rank == 1:
            raise ValueError("planted")

    way = (policy, THREAD if policy is SYNC else OVER_CPU)
    b = builder(dataset=Levels(), batch_size=4, epochs=EPOCHS, ranks=2, way=way).epoch_fn(begin)
    state = b.on_worker_failure("continue").run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [N] * EPOCHS


# Lengths.


class Growing(Dataset):
    """Has more samples in each epoch."""

    def __init__(self):
        self.size = 8

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)


class GrowingStream(IterableDataset):
    def __init__(self):
        self.size = 8

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size))


class Curriculum(Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8 * (self.epoch + 1)

    def __iter__(self):
        return iter(range(len(self)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["data set", "sampler", "stream", "table", "processes"])
def test_an_epoch_of_another_length_is_an_error_that_names_both(kind, way):
    data = {"stream": GrowingStream, "table": lambda: {"x": torch.zeros(8)}}.get(kind, Growing)()

    def grow(epoch, worker):
        if kind == "table":
            data["x"] = torch.zeros(8 * (epoch + 1))
        else:
            data.size = 8 * (epoch + 1)

    b = builder(dataset=data, epochs=EPOCHS, batch_size=4, **WAYS[way])
    if kind == "sampler":
        b.dataset(TensorDataset(torch.zeros(64))).sampler(Curriculum())
    else:
        b.epoch_fn(grow)
    b.loader_workers(int(kind == "processes"))
    with pytest.raises(WorkerFailed, match=r"has length 16 in epoch 1 and had 8 at the start"):
        b.run().join(WAIT_S)


def test_a_sampler_of_constant_length_may_draw_from_a_growing_data_set():
    class Newest(Curriculum):
        def __len__(self):
            return 8

        def __iter__(self):
            return iter(range(8 * self.epoch, 8 * (self.epoch + 1)))

    seen, data = [], Growing()

    def train(model, batch):
        seen.extend(batch.tolist())
        return count_up(model, batch)

    b = builder(train=train, dataset=data, epochs=EPOCHS, batch_size=4, ranks=1)
    b.epoch_fn(lambda epoch, worker: setattr(data, "size", 8 * (epoch + 1)))
    b.sampler(Newest()).run().join(WAIT_S)
    assert seen == list(range(8 * EPOCHS))
