"""Checks of PrefetchLoader on a device: every batch contains the right samples."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime.data.budget import DeviceBudget
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import LoaderSpec, SizingSchedule
from runtime.data.prefetch import PrefetchLoader, SlotStage
from runtime.data.resident import ResidentData
from runtime.device.base import Device
from runtime.device.cuda import CudaDevice
from tests.gpu.delays import delay

N, SIZE, WIDTH = 1000, 8, 4096
CALIBRATION = 3
BATCH_DELAY = 2_000_000  # clock cycles, about a millisecond
PLANS = [EpochPlan(epoch=epoch, batches=(range(N // SIZE),)) for epoch in range(3)]
WAIT_S = 60.0


class Rows(Dataset):
    """Row i is filled with i. Has its own code, so it is never resident. Counts its reads."""

    def __init__(self):
        self._changed = threading.Condition()
        self.num_reads = 0

    def __len__(self):
        return N

    def get_batch(self, indices):
        with self._changed:
            self.num_reads += 1
            self._changed.notify_all()
        return indices, indices[:, None].expand(-1, WIDTH).float()

    def wait_for_reads(self, num_reads, timeout_s=WAIT_S):
        with self._changed:
            return self._changed.wait_for(lambda: self.num_reads >= num_reads, timeout_s)


class DeviceRows(Rows):
    """Creates its batches on the device behind a delay, in the thread that reads them."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def get_batch(self, indices):
        super().get_batch(indices)
        rows = indices.to(self._device)
        delay(self._device, BATCH_DELAY)
        return rows, rows[:, None].expand(-1, WIDTH).float()


def tensors():
    return torch.arange(N), torch.arange(N)[:, None].expand(-1, WIDTH).float()


class DelayedDevice(CudaDevice):
    """Delays the copy stream before every batch."""

    def wait_event(self, event):
        super().wait_event(event)
        delay(self.device, BATCH_DELAY)


class LoaderRig:
    """A loader, and the sums of its batches as read by the compute stream."""

    def __init__(self, device, dataset, context, *, resident=False, depth=None):
        self.device = device
        self.ready = threading.Semaphore(0)
        adapter, self.index = adapt_dataset(dataset), EpochIndex(N, SIZE, 0)
        self.stage = SlotStage(
            context,
            DeviceBudget(0.5),
            rank=0,
            batch_size=SIZE,
            sizing=SizingSchedule(CALIBRATION),
            depth=depth,
            data=ResidentData(adapter) if resident else None,
        )
        self.loader = PrefetchLoader(
            LoaderSpec(adapter=adapter, index=self.index, device=context.device, seed=0, rank=0),
            stage=self.stage,
            context=context,
            on_ready=self.ready.release,
        )
        self._sums, self._expected = [], []

    def next(self):
        while (loaded := self.loader.try_next()) is None:
            assert self.ready.acquire(timeout=WAIT_S), "no batch became ready"
        return loaded

    def use(self, *, late=True):
        """Read a batch behind a delay, by which time a slot reused too early holds another one."""
        loaded = self.next()
        if late:
            delay(self.device, BATCH_DELAY)
        numbers, rows = loaded.data
        self._sums.append(numbers.sum() + rows.double().sum())
        indices = self.index.indices(loaded.epoch, loaded.batch)
        self._expected.append(float(indices.sum()) * (WIDTH + 1))
        return loaded

    def use_plan(self, plan, *, late=True):
        self.loader.submit(plan)
        for _ in range(plan.num_batches):
            self.use(late=late)

    def check(self):
        assert torch.stack(self._sums).tolist() == self._expected


@contextmanager
def rig_on(device, dataset, *, kind=CudaDevice, **settings):
    """A rig with its own device object, whose compute stream is current."""
    own = Device(torch.get_num_threads()) if device.type == "cpu" else kind(device)
    with own.activate():
        rig = LoaderRig(device, dataset, own, **settings)
        try:
            yield rig
        finally:
            assert rig.loader.close(20)


def exact(device, dataset, *, slow, **settings):
    kind = CudaDevice if slow == "compute" else DelayedDevice
    with rig_on(device, dataset, kind=kind, **settings) as rig:
        for plan in PLANS:
            rig.use_plan(plan, late=slow != "copy")
        rig.check()
        return rig.stage.depth


def slow_data_set(device):
    """``try_next`` returns ``None`` instead of blocking while the data set reads."""
    reads = threading.Semaphore(0)

    class Slow(Rows):
        def get_batch(self, indices):
            assert reads.acquire(timeout=WAIT_S)
            return super().get_batch(indices)

    with rig_on(device, Slow()) as rig:
        rig.loader.submit(PLANS[0])
        for _ in range(PLANS[0].num_batches):
            assert rig.loader.try_next() is None
            reads.release()
            rig.use(late=False)
        rig.check()


def fast_data_set(device):
    """The loader reads exactly ``depth`` batches ahead."""
    dataset = Rows()
    with rig_on(device, dataset, depth=4) as rig:
        rig.loader.submit(PLANS[0])
        for _ in range(20):
            rig.use()
        assert rig.stage.depth == 4
        assert dataset.wait_for_reads(20 + 4)
        assert not dataset.wait_for_reads(20 + 5, timeout_s=0.1)
        for _ in range(PLANS[0].num_batches - 20):
            rig.use()
        rig.check()


def failing_data_set(device):
    """An error is raised in place of its batch; all other batches are correct."""
    broken = 40

    class Fails(Rows):
        def get_batch(self, indices):
            batch = super().get_batch(indices)
            if self.num_reads == broken + 1:
                raise KeyError("planted")
            return batch

    with rig_on(device, Fails()) as rig:
        rig.loader.submit(PLANS[0])
        for batch in range(PLANS[0].num_batches):
            if batch == broken:
                with pytest.raises(KeyError, match="planted"):
                    rig.next()
            else:
                assert rig.use().batch == batch
        rig.use_plan(PLANS[1])
        rig.check()


def cancelled_plans(device):
    """After ``cancel`` the next plan is loaded in full, and every slot is returned."""
    with rig_on(device, Rows(), kind=DelayedDevice, depth=3) as rig:
        for plan in PLANS:
            rig.loader.submit(plan)
            for _ in range(30):
                rig.use()
            rig.loader.cancel()
            assert rig.loader.try_next() is None
            rig.use_plan(plan)
        rig.loader.cancel()
        rig.stage.advance()
        pool = rig.stage._pool
        # The loader's thread may still be returning its last slot.
        rig.check()
        assert rig.loader.close(20)
        assert len(pool._free) == pool.num_device_slots == 4


SCENARIOS = (
    slow_data_set,
    fast_data_set,
    failing_data_set,
    cancelled_plans,
)
