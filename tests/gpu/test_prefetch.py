"""Batches on their way to a real GPU: exact under delays, without a sync, within the budget."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime import Trainer
from runtime.budget import DeviceBudget
from runtime.cuda_copies import CudaCopies
from runtime.cuda_device import CudaDevice
from runtime.cuda_memory import CAPS, MEMORY
from runtime.data import EpochIndex, adapt_dataset
from runtime.prefetch import PrefetchLoader, SlotStage
from runtime.resident import ResidentData
from runtime.stage import Pace

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
GIB = 2**30
N, SIZE, WIDTH = 1000, 8, 4096
DELAY_CYCLES = 2_000_000  # about a millisecond
PLANS = [EpochPlan(epoch=epoch, batches=(range(N // SIZE),)) for epoch in range(3)]
WAIT_S = 120.0


class Rows(Dataset):
    """Row i holds i everywhere; runs code, so that it is streamed."""

    def __len__(self):
        return N

    def get_batch(self, indices):
        return indices, indices[:, None].expand(-1, WIDTH).float()


def tensors():
    return torch.arange(N), torch.arange(N)[:, None].expand(-1, WIDTH).float()


class DelayedCopies(CudaCopies):
    """Holds the copy stream up before every batch."""

    def wait_event(self, event):
        super().wait_event(event)
        torch.cuda._sleep(DELAY_CYCLES)


@contextmanager
def loader_of(dataset, *, kind=CudaCopies, resident=False, depth=None):
    """A loader under the compute stream of a device of its own."""
    ready = threading.Semaphore(0)
    adapter, index = adapt_dataset(dataset), EpochIndex(N, SIZE, 0)
    device = CudaDevice(GPU)
    with device.activate():
        copies = kind(GPU, lambda: device.copy)
        stage = SlotStage(
            copies,
            DeviceBudget(0.5),
            rank=0,
            batch_size=SIZE,
            pace=Pace(3),
            depth=depth,
            data=ResidentData(adapter) if resident else None,
        )
        loader = PrefetchLoader(
            adapter, index, stage=stage, copies=copies, seed=0, rank=0, on_ready=ready.release
        )

        def batches(plan):
            loader.submit(plan)
            for _ in range(plan.num_batches):
                while (loaded := loader.try_next()) is None:
                    assert ready.acquire(timeout=WAIT_S)
                yield loaded, index.indices(loaded.epoch, loaded.batch)

        try:
            yield loader, batches
        finally:
            assert loader.close(20)


@pytest.mark.parametrize("dataset", [Rows(), tensors()], ids=["read", "gathered"])
@pytest.mark.parametrize("slow", ["compute", "copy", "both"])
def test_streamed_batches_are_exact_under_delay_kernels(dataset, slow):
    kind = CudaCopies if slow == "compute" else DelayedCopies
    sums, wanted = [], []
    with loader_of(dataset, kind=kind, depth=2) as (loader, batches):
        for plan in PLANS:
            for loaded, indices in batches(plan):
                if slow != "copy":
                    torch.cuda._sleep(DELAY_CYCLES)
                # Read behind the delay: a slot that is reused early has another sum by then.
                sums.append(loaded.data[1].double().sum())
                wanted.append(float(indices.sum()) * WIDTH)
        assert loader._stage.depth == 2
    assert torch.stack(sums).tolist() == wanted


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("resident", [True, False])
def test_the_loop_waits_for_no_stream_once_it_is_calibrated(resident):
    with loader_of(tensors(), resident=resident) as (loader, batches):
        for _ in batches(PLANS[0]):
            pass
        assert (loader._stage.resident is not None) is resident
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in batches(PLANS[1]):
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_resident_batches_are_those_that_are_streamed():
    taken = []
    for resident in (True, False):
        with loader_of(tensors(), resident=resident) as (_, batches):
            taken.append([x.data[1][:, 0].clone() for plan in PLANS for x, _ in batches(plan)])
    assert torch.equal(torch.cat(taken[0]), torch.cat(taken[1]))


def test_slots_are_allocated_once():
    with loader_of(Rows()) as (_, batches):
        for _ in batches(PLANS[0]):
            pass
        before = torch.cuda.memory_stats(GPU)["allocated_bytes.all.current"]
        for plan in PLANS[1:]:
            for _ in batches(plan):
                pass
        assert torch.cuda.memory_stats(GPU)["allocated_bytes.all.current"] <= before


# -- whole runs ---------------------------------------------------------------------------


def run(dataset, *, fraction=0.9, batch_size=SIZE, width=WIDTH, hidden=1024):
    def train_fn(model, batch):
        return model(batch[1]).square().mean()

    def model(device):
        return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1)).to(device)

    return (
        Trainer.builder(model, lambda p: torch.optim.SGD(p, 1e-9, fused=True), train_fn)
        .dataset(dataset)
        .batch_size(batch_size)
        .num_epochs(2)
        .devices([GPU])
        .vram_fraction(fraction)
        .run()
    )


@pytest.mark.parametrize("budget_gib", [2, 8, 32])
def test_memory_stays_within_the_budget(budget_gib):
    total = MEMORY.total_bytes(GPU)
    if total < budget_gib * GIB:
        pytest.skip(f"needs a device with {budget_gib} GiB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    # Over the small budget, so that they must be streamed; within the others, resident.
    rows = min(budget_gib * GIB // (WIDTH * 4) + 1000, 400_000)
    data = (torch.arange(rows), torch.zeros(1, WIDTH).expand(rows, -1))
    before = MEMORY.fraction(GPU)
    state = run(data, fraction=budget_gib * GIB / total, batch_size=4096).join(WAIT_S)
    assert state.metrics[0].num_samples == rows
    assert torch.cuda.memory_stats(GPU)["reserved_bytes.all.peak"] <= budget_gib * GIB
    assert MEMORY.fraction(GPU) == before
    assert not CAPS._wanted[GPU]


def test_an_out_of_memory_in_the_model_names_the_budget():
    total = MEMORY.total_bytes(GPU)
    torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match=r"budget of 1\.00 GiB.*smaller batch_size"):
        run(Rows(), fraction=GIB / total, hidden=100_000).join(WAIT_S)
    torch.cuda.empty_cache()


def test_a_run_trains_every_sample_once_through_slots():
    state = run(Rows()).join(WAIT_S)
    assert [m.num_samples for m in state.metrics] == [N, N]
