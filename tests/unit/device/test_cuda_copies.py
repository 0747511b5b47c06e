"""Copies of batches to a CUDA device, and queries of its memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime import run as run_module
from runtime.data import data_path
from runtime.data.batches import Position
from runtime.data.data_path import DataOptions, DataPath
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.prefetch import PrefetchLoader
from runtime.data.resident import ResidentData, ResidentReader
from runtime.data.slots import BatchLayout, SlotPool, TensorSpec
from runtime.device import memory as cuda_memory
from runtime.device.cuda import CudaDevice
from runtime.device.cuda_api import pinned_bytes
from runtime.device.memory import CudaMemory, MemoryCaps, MemoryReading, explain_out_of_memory
from tests.support.fake_cuda import GPU, FakeCuda
from tests.support.running import WAIT_S, builder, count_up
from tests.unit.data.test_data_path import loader_for

GIB = 2**30


class FakeMemory(CudaMemory):
    """A device with 16 GiB, of which a step takes 2."""

    def __init__(self, total_bytes=16 * GIB):
        self.total = total_bytes
        self.fractions = {}
        self.num_resets = 0

    def read(self, device):
        return MemoryReading(
            total_bytes=self.total,
            free_bytes=self.total - GIB,
            reserved_bytes=GIB,
            active_bytes=GIB,
            peak_bytes=2 * GIB,
        )

    def total_bytes(self, device):
        return self.total

    def reset_peak(self, device):
        self.num_resets += 1

    def fraction(self, device):
        return self.fractions.get(device, 1.0)

    def set_fraction(self, device, fraction):
        self.fractions[device] = fraction


class PosingDevice(CudaDevice):
    """Host memory that simulates device memory, filled late."""

    def empty(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def to_device(self, tensor):
        assert self.api.is_pinned(tensor), "the host waits for a copy from pageable memory"
        target = torch.zeros_like(tensor)
        self.api.copy(target, tensor)
        self.api.run(self.api.current)  # the reader is not queued behind it
        return target


def test_a_batch_takes_the_copy_stream_between_its_two_events():
    fake = FakeCuda(patience=None)
    device = PosingDevice(GPU, api=fake, memory=FakeMemory())
    with device.activate():
        pool = SlotPool(device, BatchLayout([TensorSpec((), torch.int64, True)], 2))
        pool.grow(2, 1)
        del fake.log[:]
        slot, (part,) = pool.fill([2], lambda out: out[0].copy_(torch.tensor([3, 4])))
        pool.take(slot)
        pool.release(slot)
        compute, copy = device.compute.name, device.copy_stream.name
        host = next(h for h in pool._hosts)
        assert fake.log == [
            ("wait_host", host.ready.number),
            ("enter", copy),
            ("wait", slot.free.number, copy),
            ("copy", copy),
            ("record", host.ready.number, copy),
            ("record", slot.ready.number, copy),
            ("leave", copy),
            ("wait", slot.ready.number, compute),
            ("record", slot.free.number, compute),
        ]
        assert part.tolist() == [0, 0]
        fake.run(device.compute)
        assert part.tolist() == [3, 4]
    assert not fake.violations


def test_a_pinned_copy_is_made_of_plain_host_tensors_alone():
    fake = FakeCuda()
    context = CudaDevice(GPU, api=fake, memory=FakeMemory())
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(context.pin(tensor), tensor)
    assert len(fake.calls("pin")) == 1
    for other in (torch.zeros(2, device="meta"), torch.eye(2).to_sparse()):
        assert context.pin(other) is other


@pytest.fixture
def moved(monkeypatch):
    """Records calls of ``Tensor.to``: sources and arguments."""
    found, to = [], torch.Tensor.to

    def spy(self, *args, **kwargs):
        found.append((self, kwargs))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    return found


PLANS = [EpochPlan(epoch=epoch, batches=(range(3),)) for epoch in range(3)]


def test_batches_read_in_the_step_go_from_pinned_memory_and_the_host_does_not_wait(moved):
    fake = FakeCuda(patience=None)
    context = CudaDevice(torch.device("meta"), api=fake, memory=FakeMemory())
    with loader_for(Reads(), [context], prefetch=0) as loader:
        for plan in PLANS:
            loader.submit(plan)
        batches = [loader.try_next() for _ in range(9)]
    assert {batch.data[0].device.type for batch in batches} == {"meta"}
    sources = [source for source, _ in moved]
    assert [how for _, how in moved] == [{"non_blocking": True}] * 9
    assert all(fake.is_pinned(source) for source in sources)
    # None is reused: each has its own block, which PyTorch keeps until its copy
    # has ended.
    assert len({source.data_ptr() for source in sources}) == len(fake.calls("pin")) == 9
    assert not fake.calls("wait_host")


def test_a_new_epochs_order_goes_from_pinned_memory_and_the_host_does_not_wait(moved):
    fake = FakeCuda(patience=None, allow_default=True)
    context = CudaDevice(torch.device("meta"), api=fake, memory=FakeMemory())
    columns = (torch.arange(41),)
    reader = ResidentReader(ResidentData(adapt_dataset(columns)), EpochIndex(41, 2, 0), context)
    fake.log.clear()  # one wait for the copy of the data
    for epoch in range(3):
        for batch in range(4):
            assert reader.read(Position(epoch, batch)).data[0].shape == (2,)
    assert [how for _, how in moved] == [{"non_blocking": True}] * 3
    assert all(fake.is_pinned(source) for source, _ in moved)
    assert not fake.calls("wait_host")


# -- whole runs, on a device that runs late ----------------------------------------------


class Reads(Dataset):
    def __len__(self):
        return 41

    def get_batch(self, indices):
        return (indices,)


@pytest.fixture
def late(monkeypatch):
    """Runs on a fake device; yields it and its memory."""
    fake, memory = FakeCuda(patience=None), FakeMemory()
    monkeypatch.setattr(run_module, "open_device", lambda *_: PosingDevice(GPU, api=fake))
    monkeypatch.setattr(data_path, "MEMORY", memory)
    monkeypatch.setattr(data_path, "CAPS", MemoryCaps(memory))
    monkeypatch.setattr(cuda_memory, "MEMORY", memory)
    yield fake, memory
    assert not fake.violations


class Seen:
    """A ``train_fn`` that reads each batch when the compute stream reaches it."""

    def __init__(self, fake):
        self._fake = fake
        self._lock = threading.Lock()
        self.indices = []

    def __call__(self, model, batch):
        self._fake.run(self._fake.current)
        with self._lock:
            self.indices += batch[0].tolist()
        return count_up(model, batch)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda b: b,
        lambda b: b.prefetch(0),
        lambda b: b.prefetch(2),
        lambda b: b.prefetch(2).accumulate(2),
        lambda b: b.dataset((torch.arange(41),)),
        lambda b: b.dataset((torch.arange(41),)).resident(False),
        lambda b: b.dataset((torch.arange(41),)).resident(True),
    ],
    ids=["auto", "inline", "depth", "windows", "fits", "streamed", "resident"],
)
def test_a_run_trains_every_sample_once_whatever_the_data_path(late, change, ranks):
    fake, memory = late
    seen = Seen(fake)
    b = change(builder(dataset=Reads(), train=seen, epochs=3, ranks=ranks)).vram_fraction(0.75)
    state = b.run().join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [41] * 3
    assert sorted(seen.indices) == sorted(list(range(41)) * 3)
    assert memory.fractions == {GPU: 1.0}


@pytest.mark.parametrize(
    ("settings", "is_mapped", "may_reside"),
    [({}, False, True), ({}, True, False), ({"resident": False}, False, False)],
    ids=["tensors", "mapped", "refused"],
)
def test_only_tensors_in_memory_are_made_resident_by_default(
    late, settings, is_mapped, may_reside, tmp_path
):
    fake, _ = late
    np.save(tmp_path / "x.npy", np.arange(8))
    data = np.load(tmp_path / "x.npy", mmap_mode="r" if is_mapped else None)
    with loader_for((data,), [PosingDevice(GPU, api=fake)], **settings) as loader:
        assert type(loader) is PrefetchLoader
        assert (loader._slots._data is not None) is may_reside


def test_peaks_count_from_the_first_plan_on_and_memory_is_capped_meanwhile(late):
    fake, memory = late
    during = []

    def train_fn(model, batch):
        during.append((memory.num_resets, memory.fractions[GPU]))
        fake.run(fake.current)
        return count_up(model, batch)

    b = builder(dataset=Reads(), train=train_fn, ranks=2).vram_fraction(0.5)
    b.run().join(WAIT_S)
    assert set(during) == {(1, 0.5)}


def test_run_refuses_resident_data_above_the_budget(late):
    _, memory = late
    memory.total = 1000
    b = builder(dataset=(torch.arange(200),)).resident(True).vram_fraction(0.5)
    with pytest.raises(ValueError, match=r"needs 2,048 bytes and vram_fraction\(0.5\) of cuda:0"):
        b.run()


def test_an_out_of_memory_names_the_budget(late):
    def train_fn(model, batch):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    handle = builder(dataset=Reads(), train=train_fn, ranks=1).vram_fraction(0.25).run()
    with pytest.raises(RuntimeError, match=r"budget of 4.00 GiB.*smaller batch_size") as caught:
        handle.join(WAIT_S)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "Tried to allocate 20.00 GiB" in str(caught.value)


# -- memory ------------------------------------------------------------------------------


def test_the_smallest_fraction_of_the_runs_on_a_device_holds():
    memory = FakeMemory()
    memory.fractions[GPU] = 0.95
    caps = MemoryCaps(memory)
    caps.acquire(GPU, 0.9)
    caps.acquire(GPU, 0.5)
    assert memory.fractions[GPU] == 0.5
    caps.release(GPU, 0.5)
    assert memory.fractions[GPU] == 0.9
    caps.release(GPU, 0.9)
    assert memory.fractions[GPU] == 0.95


def test_a_cap_that_the_user_has_set_is_not_raised():
    memory = FakeMemory()
    memory.fractions[GPU] = 0.3
    caps = MemoryCaps(memory)
    caps.acquire(GPU, 0.9)
    assert memory.fractions[GPU] == 0.3


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (5 * GIB, 8 * GIB)]
)
def test_pinned_memory_counts_as_pytorch_rounds_it(asked, taken):
    assert pinned_bytes(asked) == taken


class Pair:
    rank, world_size = 0, 2
    model = torch.nn.BatchNorm1d(3)


def test_the_budget_counts_the_pinned_memory_of_snapshots(late):
    fake, _ = late
    adapter = adapt_dataset(Reads())
    contexts = [PosingDevice(GPU, api=fake)] * 2
    path = DataPath(DataOptions(batch_size=2), adapter, EpochIndex(41, 2, 0), contexts)
    loaders = [path.make_loader(Pair(), lambda: None) for _ in contexts]
    # Twelve float32 numbers in a flat tensor, and the number of batches, for each worker.
    assert [loader._slots._snapshot_bytes() for loader in loaders] == [2 * (64 + 8)] * 2
    path.close()


def test_other_errors_are_left_alone():
    for error, device in (
        (RuntimeError("x"), GPU),
        (torch.OutOfMemoryError("x"), torch.device("cpu")),
    ):
        assert explain_out_of_memory(error, device, 0.9, GIB) is error
