"""Prefetching tests: a loader whose batches are used with a delay."""

from __future__ import annotations

import threading

import torch
from torch.utils.data import Dataset

from coordinator.messages import EpochPlan
from runtime.data.budget import DeviceBudget
from runtime.data.dataset import ColumnAdapter, adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import LoaderSpec, SizingSchedule
from runtime.data.prefetch import PrefetchLoader, SlotStage
from runtime.data.resident import ResidentData
from tests.support.fake_streams import DelayedCopies
from tests.support.loading import INDEX, SEED, SIZE, Consumer, N

CALIBRATION = 2
EPOCHS = [EpochPlan(epoch=epoch, batches=(range(6),)) for epoch in range(4)]
TENSORS = (torch.arange(N), torch.arange(N * 3.0).reshape(N, 3))


class Numbers(Dataset):
    """Sample i is i and a row; has its own code, so it is never resident."""

    def __init__(self):
        self.num_reads = 0

    def __len__(self):
        return N

    def get_batch(self, indices):
        self.num_reads += 1
        return TENSORS[0][indices], TENSORS[1][indices]


class Rig(Consumer):
    """A prefetching loader, and a worker that uses each batch with a delay."""

    def __init__(
        self,
        dataset,
        *,
        context=None,
        depth=None,
        resident=None,
        budget=None,
        snapshot_bytes=int,
        threads=1,
    ):
        self.ready = threading.Semaphore(0)
        self.context = DelayedCopies() if context is None else context
        adapter = adapt_dataset(dataset)
        self.budget = budget or DeviceBudget(0.5, margin=0)
        data = resident or None
        if resident is None and isinstance(adapter, ColumnAdapter) and adapter.in_memory:
            data = ResidentData(adapter)
        self.stage = SlotStage(
            self.context,
            self.budget,
            rank=0,
            batch_size=SIZE,
            sizing=SizingSchedule(CALIBRATION),
            snapshot_bytes=snapshot_bytes,
            depth=depth,
            data=data,
        )
        self.loader = PrefetchLoader(
            LoaderSpec(
                adapter=adapter,
                index=EpochIndex(N, SIZE, SEED),
                device=self.context.device,
                seed=SEED,
                rank=0,
            ),
            stage=self.stage,
            context=self.context,
            num_threads=threads,
            on_ready=self.ready.release,
        )

    def use(self, plan):
        """Train a plan; each batch is checked when the device executes its step."""
        self.loader.submit(plan)
        for _ in range(plan.num_batches):
            self.use_next()

    def use_next(self):
        loaded = self.next()
        indices = INDEX.indices(loaded.epoch, loaded.batch)
        assert loaded.num_samples == len(indices)
        self.context.use(list(loaded.data), [TENSORS[0][indices], TENSORS[1][indices]])
        return loaded

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if exception[0] is None and isinstance(self.context, DelayedCopies):
            self.context.finish()


def slot_bytes():
    return 2 * 512  # each of the two tensors is padded
