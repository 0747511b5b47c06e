"""Batches on their way to a device while it trains: slots within a budget, or resident data.

In the first steps each batch is loaded when it is asked for, so that their memory shows
what the model takes. Then a data set that fits is brought to the device whole, or else
slots are allocated and batches are loaded ahead through them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import (
    Position,
    batch_bytes,
    copy_batch_to_device,
    map_batch,
    movable_parts,
    pin_batch,
)
from runtime.data.budget import MAX_DEPTH, DeviceBudget, host_prefetch_depth, prefetch_slots
from runtime.data.dataset import ColumnAdapter
from runtime.data.loader import LoadedBatch, LoaderSpec, SizingSchedule, Stage, ThreadLoader
from runtime.data.resident import ResidentData, ResidentReader
from runtime.data.slots import BatchLayout, DeviceSlot, SlotPool, slot_tensors
from runtime.device.base import Device, available_host_bytes
from runtime.device.cuda_api import pinned_bytes
from runtime.device.memory import MemoryReading

logger = logging.getLogger(__name__)

_MAX_HOST_SLOTS = 4
"""Pinned slots of a worker: as many copies can be under way while the next batch is read."""


class PrefetchLoader(ThreadLoader):
    """Loads ahead in a daemon thread into slots on the device, or gathers resident data there.

    ``try_next`` belongs under the worker's compute stream. A batch is good until the next
    call; a tensor of it that is to be kept must be cloned.

    Args:
        spec: What it reads.
        on_ready: See :class:`~runtime.data.loader.ThreadLoader`.
        stage: Carries the batches; not shared.
        copies: The worker's way to its device.
        num_threads: Intra-op threads that gather a batch; one thread copies memory at a
            fraction of what a GPU takes.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        *,
        on_ready: Callable[[], None],
        stage: SlotStage,
        context: Device,
        num_threads: int = 1,
    ) -> None:
        super().__init__(spec, on_ready=on_ready, stage=stage)
        self._slots = stage
        self._context = context
        self._num_threads = num_threads
        self._reader: ResidentReader | None = None

    def try_next(self) -> LoadedBatch | None:
        """Take the next batch if it is ready; resident ones always are."""
        self._slots.advance()
        data = self._slots.resident
        if data is None:
            return self._take_ready()
        if self._reader is None:
            # None was ahead until now and none is asked for again: the thread stays idle.
            self._reader = ResidentReader(data, self._index, self._context)
            self._forget_order()
        with self._changed:
            position = self._positions.pop()
        return None if position is None else self._reader.read(position)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread, and let go of slots and data."""
        ended = super().close(timeout_s)
        self._reader = None
        return ended

    def _run(self) -> None:
        if self._num_threads > 1:
            torch.set_num_threads(self._num_threads)  # put back when the run ends
        super()._run()

    def _read(self, position: Position) -> LoadedBatch:
        adapter = self._adapter
        if isinstance(adapter, ColumnAdapter):
            indices, num_samples = self._indices(position)
            gathered = self._slots.gather(adapter, indices)
            if gathered is not None:
                data, slot = gathered
                return LoadedBatch(data, num_samples, position.epoch, position.batch, slot)
        with self._context.copying():  # for data sets that give tensors of the device
            return super()._read(position)


class SlotStage(Stage):
    """Carries batches to the device through fixed slots; none ahead in the first steps.

    Args:
        copies: The worker's way to its device.
        budget: That of the device, shared with the other workers there.
        rank: The worker's rank.
        batch_size: Rows of a whole batch.
        pace: Says when depths are sized.
        num_host_workers: Workers that load into the host's memory.
        snapshot_bytes: Gives what snapshots of all workers will take of the host's memory
            beside the batches, and do not take in the first steps.
        depth: Batches to load ahead at most; ``None``: up to ``MAX_DEPTH``.
        data: Brought to the device if the budget allows; ``None``: always streamed.

    Attributes:
        resident: The data set, once it lies on the device.
    """

    copies_to_device = True

    def __init__(
        self,
        context: Device,
        budget: DeviceBudget,
        *,
        rank: int,
        batch_size: int,
        sizing: SizingSchedule,
        num_host_workers: int = 1,
        snapshot_bytes: Callable[[], int] = int,
        depth: int | None = None,
        data: ResidentData | None = None,
    ) -> None:
        super().__init__(0, sizing)
        self.resident: ResidentData | None = None
        self._context = context
        self._budget = budget
        self._rank = rank
        self._batch_size = batch_size
        self._num_host_workers = num_host_workers
        self._snapshot_bytes = snapshot_bytes
        self._wanted = depth
        self._data = data
        self._is_calibrated = False
        self._most_slots: int | None = None  # where the device had no memory for more
        self._taken: DeviceSlot | None = None
        # Written by the loader's thread.
        self._layout: BatchLayout | None = None
        self._batch_bytes = 0
        self._warned = False
        # Written by the worker's thread, complete before the loader's thread sees it.
        self._pool: SlotPool | None = None

    # On the worker's thread.

    def submitted(self, num_batches: int) -> None:
        """Count its batches; with the first plan, peaks begin to count."""
        super().submitted(num_batches)
        if self._budget.begin():
            self._context.reset_peak()

    def advance(self) -> None:
        """Free the slot of the batch that is used up; size the depth where it is due."""
        taken, self._taken = self._taken, None
        if taken is not None and self._pool is not None:
            self._pool.release(taken)
        plan_batches = self._sizing.due()
        if plan_batches is not None and self.resident is None:
            self._size(plan_batches)

    def take(self, loaded: LoadedBatch) -> None:
        """Let the current stream wait for the slot, or copy a batch that lies in none."""
        if loaded.slot is None:
            loaded.data = copy_batch_to_device(loaded.data, self._context)
            return
        assert self._pool is not None
        self._pool.take(loaded.slot)
        self._taken = loaded.slot

    def _size(self, plan_batches: int) -> None:
        """Decide where batches lie and how many are ahead, by what the steps have taken."""
        reading = self._context.memory()
        self._budget.observe(self._rank, reading)
        first, self._is_calibrated = not self._is_calibrated, True
        if first and self._reside(reading):
            return
        available = available_host_bytes() - (self._snapshot_bytes() if first else 0)
        host = host_prefetch_depth(
            available, self._num_host_workers, self._batch_bytes, plan_batches
        )
        layout = self._layout  # read once: the loader's thread may write it meanwhile
        if layout is None:
            # No slot can hold such batches: those ahead wait in the host's memory.
            self.depth = min(host, MAX_DEPTH if self._wanted is None else self._wanted)
            return
        share = self._budget.share_bytes(self._rank, reading)
        if self._pool is not None:
            layout = self._pool.layout
        slot_bytes = layout.slot_bytes
        wanted = prefetch_slots(share, slot_bytes, self._wanted, plan_batches)
        if wanted:
            wanted = self._grow(layout, wanted, min(_MAX_HOST_SLOTS, host))
        # Slots beyond it are left unused: nothing is freed while others run.
        self.depth = max(0, wanted - 1)
        logger.debug(
            "rank %d: %d batches of %d bytes ahead in a share of %d bytes",
            *(self._rank, self.depth, slot_bytes, share),
        )
        if first and self._wanted is not None and self.depth < min(self._wanted, plan_batches):
            logger.warning(
                "rank %d: prefetch(%d) takes more than the budget, which has room for %d batches "
                "ahead: raise vram_fraction, or use a smaller batch_size",
                *(self._rank, self._wanted, self.depth),
            )

    def _grow(self, layout: BatchLayout, num_device: int, num_host: int) -> int:
        """Have up to so many slots; the number that may be used."""
        if self._most_slots is not None:
            num_device = min(num_device, self._most_slots)
        if num_device < 2:
            return 0
        pool = SlotPool(self._context, layout) if self._pool is None else self._pool
        before = pool.num_device_slots
        found = pool.grow(num_device, min(num_device, num_host))
        if found < num_device:
            self._most_slots = found  # to try again would free memory that others wait for
        if found < 2:
            return 0
        if found > before:
            self._budget.hold(self._rank, pool.held_bytes, self._context.memory())
        self._pool = pool
        return min(found, num_device)

    def _reside(self, reading: MemoryReading) -> bool:
        """Bring the data set to the device if it fits; whether it lies there."""
        data = self._data
        if data is None:
            return False
        share = self._budget.share_bytes("resident", reading)
        if not data.is_loaded and data.num_bytes > share:
            return False
        data.load(self._context)
        self._budget.hold("resident", data.num_bytes, self._context.memory())
        self.resident = data
        logger.debug(
            "rank %d: %d bytes of data on %s", self._rank, data.num_bytes, self._context.device
        )
        return True

    # On the loader's thread.

    def gather(self, adapter: ColumnAdapter, indices: Tensor) -> tuple[Any, DeviceSlot] | None:
        """Gather rows straight into a slot; ``None`` where there is none that can hold them."""
        pool = self._pool
        if pool is None or len(indices) > pool.layout.batch_size:  # a rank's share has grown
            return None
        slot, parts = pool.fill(
            [len(indices)] * len(pool.layout.specs),
            lambda out: adapter.load_into(indices, out),
        )
        return adapter.batch_of(parts), slot

    def put(self, loaded: LoadedBatch) -> None:
        """Copy a batch to a slot, or to pinned memory where there is none for it."""
        if loaded.slot is not None:
            return
        tensors = slot_tensors(loaded.data)
        pool = self._pool
        if pool is None or not tensors or not pool.layout.fits(tensors):
            self._put_aside(loaded, pool)
            return
        rows = [
            part.shape[0] if spec.has_rows else None
            for part, spec in zip(tensors, pool.layout.specs, strict=True)
        ]
        loaded.slot, parts = pool.fill(rows, _writer(tensors))
        rest = iter(parts)
        loaded.data = map_batch(loaded.data, lambda _: next(rest))

    def _put_aside(self, loaded: LoadedBatch, pool: SlotPool | None) -> None:
        if pool is None:
            self._batch_bytes = max(self._batch_bytes, batch_bytes(loaded.data, pinned_bytes))
            self._layout = BatchLayout.of(loaded.data, loaded.num_samples, self._batch_size)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "rank %d: the batches' tensors change their shapes or dtypes (batch %d of epoch "
                "%d), so that they are copied without a fixed slot, which is slower: pad them",
                *(self._rank, loaded.batch, loaded.epoch),
            )
        with self._context.copying():  # pins for this device, not for the first one
            loaded.data = pin_batch(loaded.data, self._context)
            if any(isinstance(p, Tensor) and not p.is_cpu for p in movable_parts(loaded.data)):
                # The data set made it in this stream, which the worker's does not wait for.
                made = self._context.new_event()
                self._context.record(made)
                self._context.wait_host(made)

    # On either thread.

    def drop(self, loaded: LoadedBatch) -> None:
        """Give the slot of a batch back that nobody will take."""
        if loaded.slot is not None and self._pool is not None:
            self._pool.return_slot(loaded.slot)

    def close(self, timeout_s: float) -> bool:
        """Let go of slots and data once no copy is under way."""
        if self._pool is not None and not self._pool.wait_for_copies(timeout_s):
            return False
        self._sizing.cancelled()  # what is not submitted is never sized
        self._pool = self._taken = self._data = self.resident = None
        return True


def _writer(tensors: list[Tensor]) -> Callable[[list[Tensor]], None]:
    def write(out: list[Tensor]) -> None:
        for target, source in zip(out, tensors, strict=True):
            target.copy_(source)

    return write
