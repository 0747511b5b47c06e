"""Prefetching to a device: through slots within a memory budget, or by making data resident.

During the first steps each batch is loaded on request, so that the steps' peak memory can be
measured. Then a data set that fits into the rest is copied to the device as a whole; otherwise
slots are allocated, and batches are loaded ahead through them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.core.nested import map_batch, movable_parts
from runtime.data.batches import (
    Position,
    batch_bytes,
    copy_batch_to_device,
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
"""Maximum pinned slots of a worker: the number of copies in progress while a batch is read."""


class PrefetchLoader(ThreadLoader):
    """Loads ahead in a daemon thread into slots on the device, or gathers resident data there.

    Call ``try_next`` under the worker's compute stream. A batch is valid until the next call;
    clone tensors to keep them.

    Args:
        spec: See :class:`~runtime.data.loader.Loader`.
        on_ready: See :class:`~runtime.data.loader.ThreadLoader`.
        stage: The slots; not shared.
        num_threads: Intra-op threads that gather a batch; one thread copies memory more slowly
            than a GPU consumes it.
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
        """Return the next batch if it is ready; resident batches always are."""
        self._slots.advance()
        data = self._slots.resident
        if data is None:
            return self._take_ready()
        if self._reader is None:
            # No batch was loaded ahead so far, so the thread stays idle from here on.
            self._reader = ResidentReader(data, self._index, self._context)
            self._drop_order()
        with self._changed:
            position = self._positions.pop()
        return None if position is None else self._reader.read(position)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread, and free slots and data."""
        ended = super().close(timeout_s)
        self._reader = None
        return ended

    def _run(self) -> None:
        if self._num_threads > 1:
            torch.set_num_threads(self._num_threads)  # restored when the run ends
        super()._run()

    def _read(self, position: Position) -> LoadedBatch:
        adapter = self._adapter
        if isinstance(adapter, ColumnAdapter):
            indices, num_samples = self._indices(position)
            gathered = self._slots.gather(adapter, indices)
            if gathered is not None:
                data, slot, load_s = gathered
                return LoadedBatch(data, num_samples, position.epoch, position.batch, slot, load_s)
        with self._context.copying():  # for data sets that return tensors on the device
            return super()._read(position)


class SlotStage(Stage):
    """Copies batches to the device through fixed slots; loads none ahead in the first steps.

    Args:
        budget: The device's budget, shared with its other workers.
        sizing: Schedule of depth changes.
        num_host_workers: Workers that load into host memory.
        snapshot_bytes: Returns the host memory that snapshots of all workers will need, which
            the first steps do not show.
        depth: Maximum number of batches ahead; ``None``: up to ``MAX_DEPTH``.
        data: Made resident if the budget allows; ``None``: always streamed.
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
        self._max_depth = depth
        self._data = data
        self._is_calibrated = False
        self._slot_limit: int | None = None  # set once the device has no memory for more
        self._taken: DeviceSlot | None = None
        # Written by the loader's thread.
        self._layout: BatchLayout | None = None
        self._batch_bytes = 0
        self._warned = False
        # Written by the worker's thread, fully built before the loader's thread sees it.
        self._pool: SlotPool | None = None

    # Called by the worker's thread.

    @property
    def reads_ahead(self) -> bool:
        """True unless each batch is read on request, for longer than the first steps."""
        return self.depth > 0 or not self._is_calibrated

    def submitted(self, num_batches: int, *, more: bool = False) -> None:
        """Count the plan's batches; on the first plan, reset the peak statistics."""
        super().submitted(num_batches, more=more)
        if self._budget.begin():
            self._context.reset_peak()

    def advance(self) -> None:
        """Release the previous batch's slot; set the depth if it is due."""
        taken, self._taken = self._taken, None
        if taken is not None and self._pool is not None:
            self._pool.release(taken)
        plan_batches = self._sizing.due()
        if plan_batches is not None and self.resident is None:
            self._size(plan_batches)

    def take(self, loaded: LoadedBatch) -> None:
        """Make the current stream wait for the slot's copy; copy a batch that has no slot."""
        if loaded.slot is None:
            loaded.data = copy_batch_to_device(loaded.data, self._context)
            return
        assert self._pool is not None
        self._pool.take(loaded.slot)
        self._taken = loaded.slot

    def _size(self, plan_batches: int) -> None:
        """Make the data resident or set the prefetch depth, by the measured memory of steps."""
        reading = self._context.memory()
        self._budget.observe(self._rank, reading)
        first, self._is_calibrated = not self._is_calibrated, True
        if first and self._make_resident(reading):
            return
        available = available_host_bytes() - (self._snapshot_bytes() if first else 0)
        host = host_prefetch_depth(
            available, self._num_host_workers, self._batch_bytes, plan_batches
        )
        layout = self._layout  # read once: the loader's thread may write it meanwhile
        if layout is None:
            # No slot can hold such batches: those loaded ahead wait in host memory.
            self.depth = min(host, MAX_DEPTH if self._max_depth is None else self._max_depth)
            return
        share = self._budget.share_bytes(self._rank, reading)
        if self._pool is not None:
            layout = self._pool.layout
        slot_bytes = layout.slot_bytes
        slots = prefetch_slots(share, slot_bytes, self._max_depth, plan_batches)
        if slots:
            slots = self._grow(layout, slots, min(_MAX_HOST_SLOTS, host))
        # Surplus slots stay unused: memory is not freed during the run.
        self.depth = max(0, slots - 1)
        logger.debug(
            "rank %d: %d batches of %d bytes ahead in a share of %d bytes",
            *(self._rank, self.depth, slot_bytes, share),
        )
        limit = self._max_depth
        if first and limit is not None and self.depth < min(limit, plan_batches):
            logger.warning(
                "rank %d: prefetch(%d) exceeds the memory budget, which allows %d batches ahead: "
                "raise vram_fraction, or use a smaller batch_size",
                *(self._rank, limit, self.depth),
            )

    def _grow(self, layout: BatchLayout, num_device: int, num_host: int) -> int:
        """Allocate up to these numbers of slots; return the number of usable device slots."""
        if self._slot_limit is not None:
            num_device = min(num_device, self._slot_limit)
        if num_device < 2:
            return 0
        pool = SlotPool(self._context, layout) if self._pool is None else self._pool
        before = pool.num_device_slots
        found = pool.grow(num_device, min(num_device, num_host))
        if found < num_device:
            self._slot_limit = found  # retrying would free memory that others wait for
        if found < 2:
            return 0
        if found > before:
            self._budget.hold(self._rank, pool.held_bytes, self._context.memory())
        self._pool = pool
        return min(found, num_device)

    def _make_resident(self, reading: MemoryReading) -> bool:
        """Copy the data set to the device if it fits; returns True if it is resident."""
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

    # Called by the loader's thread.

    def gather(
        self, adapter: ColumnAdapter, indices: Tensor
    ) -> tuple[Any, DeviceSlot, float] | None:
        """Gather rows directly into a slot, and time it without the waits for slots.

        Returns:
            The batch, its slot and the seconds; ``None`` if there is no slot that fits.
        """
        pool = self._pool
        if pool is None or len(indices) > pool.layout.batch_size:  # a rank's share has grown
            return None
        load_s = 0.0

        def write(out: list[Tensor]) -> None:
            nonlocal load_s
            began = time.perf_counter()
            adapter.load_into(indices, out)
            load_s = time.perf_counter() - began

        slot, parts = pool.fill([len(indices)] * len(pool.layout.specs), write)
        return adapter.batch_of(parts), slot, load_s

    def put(self, loaded: LoadedBatch) -> None:
        """Copy a batch to a slot, or to pinned memory if no slot fits."""
        if loaded.slot is not None:
            return
        tensors = slot_tensors(loaded.data)
        pool = self._pool
        if pool is None or not tensors or not pool.layout.fits(tensors):
            self._put_without_slot(loaded, pool)
            return
        rows = [
            part.shape[0] if spec.has_rows else None
            for part, spec in zip(tensors, pool.layout.specs, strict=True)
        ]
        loaded.slot, parts = pool.fill(rows, _writer(tensors))
        rest = iter(parts)
        loaded.data = map_batch(loaded.data, lambda _: next(rest))

    def _put_without_slot(self, loaded: LoadedBatch, pool: SlotPool | None) -> None:
        if pool is None:
            self._batch_bytes = max(self._batch_bytes, batch_bytes(loaded.data, pinned_bytes))
            self._layout = BatchLayout.of(loaded.data, loaded.num_samples, self._batch_size)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "rank %d: batches differ in shapes or dtypes (batch %d of epoch %d), so they are "
                "copied without a fixed slot, which is slower: pad them",
                *(self._rank, loaded.batch, loaded.epoch),
            )
        with self._context.copying():  # pins for this device, not for cuda:0
            loaded.data = pin_batch(loaded.data, self._context)
            if any(isinstance(p, Tensor) and not p.is_cpu for p in movable_parts(loaded.data)):
                # Created in this stream, which the worker's stream does not wait for.
                created = self._context.new_event()
                self._context.record(created)
                self._context.wait_host(created)

    # Called by either thread.

    def drop(self, loaded: LoadedBatch) -> None:
        """Return the slot of a batch that will not be taken."""
        if loaded.slot is not None and self._pool is not None:
            self._pool.return_slot(loaded.slot)

    def close(self, timeout_s: float) -> bool:
        """Free slots and data once no copy is in progress."""
        if self._pool is not None and not self._pool.wait_for_copies(timeout_s):
            return False
        self._sizing.cancelled()
        self._pool = self._taken = self._data = self.resident = None
        return True


def _writer(tensors: list[Tensor]) -> Callable[[list[Tensor]], None]:
    def write(out: list[Tensor]) -> None:
        for target, source in zip(out, tensors, strict=True):
            target.copy_(source)

    return write
