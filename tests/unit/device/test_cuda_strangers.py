"""Work on a GPU outside of the worker: the caller's, a data set's, another device's."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import Dataset

from runtime.data.dataset import ColumnAdapter
from runtime.device.cuda import CudaDevice
from runtime.device.memory import CudaMemory
from runtime.replica.build import BuildOrder
from tests.support.fake_cuda import CPU, GPU, FakeCuda
from tests.support.fake_streams import COMPUTE, COPY, DelayedCopies
from tests.support.loading import SIZE, N
from tests.support.prefetching import CALIBRATION, EPOCHS, Rig
from tests.support.running import WAIT_S, Trace, builder
from tests.unit.worker.test_cuda_worker import pose

OTHER = torch.device("cuda", 1)


# -- pending work of the caller ------------------------------------------------------------


@pytest.mark.parametrize("index", range(3), ids=["compute", "comm", "copy"])
def test_every_stream_is_ordered_behind_earlier_work_of_the_thread(index):
    fake = FakeCuda(patience=None, allow_default=True)
    fake.mark("data")
    with CudaDevice(GPU, api=fake).activate():
        with fake.stream(fake.streams[index]):
            fake.mark("use")
        fake.run(fake.streams[index])
    assert fake.done == ["data", "use"]


def test_a_run_waits_for_the_stream_of_the_thread_that_starts_it(monkeypatch):
    fake = FakeCuda(patience=2)
    pose(monkeypatch, lambda: fake)
    seen = []

    def look(model, batch):
        fake.run(fake.current)
        seen.append("data" in fake.done)
        return -model.w.sum()

    with fake.stream(fake.new_stream(GPU)):
        fake.mark("data")
        handle = builder(train=Trace(look), dataset=8).run()
    handle.join(WAIT_S)
    assert seen
    assert all(seen)


# -- streams ---------------------------------------------------------------------------------


def test_streams_are_used_again_by_the_next_worker_and_by_no_other_at_once():
    fake = FakeCuda(patience=None)
    first, second, third = (CudaDevice(GPU, api=fake) for _ in range(3))
    with first.activate():
        with second.activate():
            pass
        assert len(fake.streams) == 6
        with third.activate():
            assert third.compute is second.compute
            assert third.compute is not first.compute
    assert len(fake.streams) == 6
    with CudaDevice(OTHER, api=fake).activate():
        assert len(fake.streams) == 9


def test_streams_of_a_worker_that_died_are_left_alone():
    fake = FakeCuda(patience=None)
    with pytest.raises(KeyError), CudaDevice(GPU, api=fake).activate():
        raise KeyError
    with CudaDevice(GPU, api=fake).activate():
        assert len(fake.streams) == 6


# -- the current device ------------------------------------------------------------------------


class DeviceRecorder(FakeCuda):
    """Records the current device of each query of an event and each wait for one."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def wait_host(self, event):
        self.devices.append(getattr(self._local, "device", None))
        super().wait_host(event)

    def is_complete(self, event):
        self.devices.append(getattr(self._local, "device", None))
        return super().is_complete(event)


def test_a_loaders_thread_queries_events_under_its_own_device():
    """On the thread's default device the call would create a CUDA context."""
    fake = DeviceRecorder()
    copies = CudaDevice(OTHER, api=fake)
    event = copies.new_event()
    copies.wait_host(event)
    assert copies.is_complete(event)
    assert fake.devices == [OTHER, OTHER]


def test_the_cap_on_memory_leaves_the_current_device_as_it_was(monkeypatch):
    current = [GPU]

    @contextmanager
    def on_device(device):
        current.append(device)
        yield
        current.pop()

    def set_fraction(fraction, device):
        current[-1] = device  # as PyTorch does

    def get_fraction(device):
        current[-1] = device
        return 0.5

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", get_fraction)
    CudaMemory().set_fraction(OTHER, 0.5)
    assert CudaMemory().fraction(OTHER) == 0.5
    assert current == [GPU]


def test_seeding_rank_0_leaves_the_generators_of_other_devices_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    with BuildOrder(7).seeded(0, CPU):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []


# -- data sets on the device ---------------------------------------------------------------------


class Foreign(Dataset):
    """Yields tensors of another device, and records the stream on which each was made."""

    def __init__(self, copies):
        self._copies = copies
        self.streams = []

    def __len__(self):
        return N

    def get_batch(self, indices):
        self.streams.append(self._copies._stream)
        made = torch.empty(len(indices), 3, device="meta")
        self._copies.push(lambda: self._copies.made.append(made))
        return indices, made


class ForeignCopies(DelayedCopies):
    """Records if a batch existed before it was copied to the device."""

    def __init__(self):
        super().__init__()
        self.made, self.brought = [], []

    def pin(self, tensor):
        return tensor

    def to_device(self, tensor):
        if tensor.device.type == "meta":
            assert self._stream == COMPUTE
            self.brought.append(any(made is tensor for made in self.made))
        return tensor


def test_tensors_that_a_data_set_makes_on_the_device_are_complete_when_they_are_used():
    copies = ForeignCopies()
    dataset = Foreign(copies)
    with Rig(dataset, context=copies, resident=False) as rig:
        for plan in EPOCHS[:2]:
            for loaded in rig.take(plan):
                assert loaded.data[1].device.type == "meta"
    assert len(dataset.streams) == 2 * -(-N // SIZE) > CALIBRATION
    assert set(dataset.streams) == {COPY}
    assert copies.brought == [True] * len(dataset.streams)


def test_a_tensor_on_the_device_is_recorded_on_the_stream_that_uses_it():
    """The memory belongs to another stream, which would reuse it as soon as it is freed."""
    meta, lent = torch.device("meta"), []

    class Lends(FakeCuda):
        def lend(self, tensor):
            lent.append(tensor)

    copies = CudaDevice(meta, api=Lends())
    there = torch.empty(3, device=meta)
    assert copies.to_device(there) is there
    assert copies.to_device(torch.empty(3)).device == meta
    assert [tensor is there for tensor in lent] == [True]


def test_columns_on_a_device_are_gathered_without_a_wait_for_it(monkeypatch):
    moved = []
    to = torch.Tensor.to

    def spy(self, *args, **kwargs):
        moved.append(kwargs)
        return to(self, *args, **kwargs)

    adapter = ColumnAdapter((torch.empty(5, 2, device="meta"),))
    monkeypatch.setattr(torch.Tensor, "to", spy)
    (rows,) = adapter.load(torch.tensor([1, 3]))
    assert rows.shape == (2, 2)
    assert moved == [{"non_blocking": True}]
