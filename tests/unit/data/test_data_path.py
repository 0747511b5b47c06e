"""The choice of loader, and the effect of the data path's settings."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from runtime.core.threads import IntraOpThreads
from runtime.data import data_path
from runtime.data import loader as stage
from runtime.data.data_path import DataOptions, DataPath
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import HostStage, InlineLoader, Stage, ThreadLoader
from runtime.data.process_loader import LoaderProcesses
from runtime.device.base import Device
from runtime.device.cuda import CudaDevice
from tests.support.running import WAIT_S, Gate, Trace, builder


class Counted(Dataset):
    """Counts its reads, and records the reading threads."""

    def __init__(self, n=40):
        self.n = n
        self.readers = []

    def __len__(self):
        return self.n

    def get_batch(self, indices):
        self.readers.append(threading.current_thread().name)
        return (indices,)


class Worker:
    rank = 0
    world_size = 1


@contextmanager
def loader_for(dataset, contexts=None, **settings):
    """The loader of rank 0."""
    options = DataOptions(batch_size=2, **settings)
    adapter = adapt_dataset(dataset)
    index = EpochIndex(adapter.num_samples, 2, 0)
    path = DataPath(options, adapter, index, contexts or [Device(1)])
    yield path.make_loader(Worker(), lambda: None)
    path.close()


def test_memory_for_graphs_is_reserved_only_if_each_worker_has_its_own_gpu():
    shared, own = torch.device("cuda", 0), torch.device("cuda", 1)
    contexts = [CudaDevice(device) for device in (shared, shared, own)]
    adapter = adapt_dataset(Counted())
    path = DataPath(DataOptions(cuda_graphs=True), adapter, EpochIndex(40, 1, 0), contexts)
    assert [path._budgets[device]._num_graphs for device in (shared, own)] == [0, 1]


def test_tensors_in_memory_are_gathered_in_the_workers_thread():
    for settings in ({}, {"prefetch": 3}):
        with loader_for((torch.arange(6),), **settings) as loader:
            assert type(loader) is InlineLoader


def test_worker_init_fn_for_tensors_in_memory_is_ignored_with_a_warning(caplog):
    options = DataOptions(
        batch_size=2, loader_workers=2, loader_processes=LoaderProcesses(init_fn=print)
    )
    adapter = adapt_dataset((torch.arange(6),))
    path = DataPath(options, adapter, EpochIndex(6, 2, 0), [Device(1)])
    path.start(lambda rank: lambda: None)
    path.close()
    assert "worker_init_fn is not called: tensors in memory are gathered" in caplog.text


def test_other_data_sets_are_loaded_ahead_to_a_measured_or_given_depth():
    with loader_for(Counted()) as loader:
        assert type(loader) is ThreadLoader
        assert type(loader._stage) is HostStage
    with loader_for(Counted(), prefetch=3) as loader:
        assert type(loader._stage) is Stage
        assert loader._stage.depth == 3


def test_memory_maps_are_streamed_unless_resident_is_set(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(8))
    with loader_for((np.load(tmp_path / "x.npy", mmap_mode="r"),)) as loader:
        assert type(loader) is ThreadLoader


@pytest.mark.parametrize(
    ("devices", "dataset", "threads"),
    [
        (("cuda",), "tensors", 15),
        (("cuda", "cuda"), "tensors", 7),
        (("cuda",) * 20, "tensors", 1),
        (("cuda", "cpu"), "tensors", 1),
        (("cuda",), "code", 1),
    ],
)
def test_gathering_uses_the_cores_without_workers(monkeypatch, devices, dataset, threads):
    monkeypatch.setattr(IntraOpThreads, "budget", lambda: 16)
    adapter = adapt_dataset((torch.arange(6),) if dataset == "tensors" else Counted())
    path = DataPath(DataOptions(batch_size=2), adapter, EpochIndex(6, 2, 0), [Device(1)])
    path._contexts = [SimpleNamespace(device=torch.device(kind)) for kind in devices]
    assert path._gather_threads() == threads


def test_measured_steps_are_whole_accumulation_windows():
    with loader_for(Counted(), accumulate=4) as loader:
        assert loader._stage._sizing._num_left == 12


def test_prefetch_of_zero_reads_in_the_workers_thread():
    dataset = Counted()
    with loader_for(dataset, prefetch=0) as loader:
        assert type(loader) is InlineLoader
    builder(dataset=dataset, ranks=1).prefetch(0).run().join(WAIT_S)
    assert set(dataset.readers) == {"gpu-worker-0"}


@pytest.mark.parametrize("depth", [1, 4])
def test_exactly_prefetch_batches_are_read_ahead(depth):
    dataset, gate = Counted(), Gate()
    handle = builder(dataset=dataset, train=gate, ranks=1).prefetch(depth).run()
    gate.await_entry()
    deadline = time.monotonic() + WAIT_S
    while len(dataset.readers) < 1 + depth:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(dataset.readers) == 1 + depth
    gate.opened.set()
    assert handle.join(WAIT_S).metrics[0].num_samples == 40
    assert set(dataset.readers) == {"prefetch-0"}


def test_the_measured_depth_grows_during_a_run(monkeypatch):
    monkeypatch.setattr(stage, "available_host_bytes", lambda: 10**12)
    made = []

    class Kept(HostStage):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(data_path, "HostStage", Kept)
    builder(dataset=Counted(80), ranks=1, epochs=2).run().join(WAIT_S)
    assert made[0].depth == 8


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_samples_do_not_depend_on_the_depth(depth):
    trace = Trace()
    builder(dataset=Counted(23), train=trace, ranks=2, epochs=2).prefetch(depth).run().join(WAIT_S)
    for epoch in range(2):
        seen = [index for _, indices in trace.of_epoch(epoch) for index in indices]
        assert sorted(seen) == list(range(23))
