"""Slots: preallocated pinned and device memory for batches, guarded by reused events.

A batch is written to a pinned host slot, copied to a device slot in the copy stream, and
read there in the compute stream. Three waits order these uses:

- the host writes to a host slot only after the copy from it has completed (its ``ready``);
- the copy stream overwrites a device slot only after its last use (its ``free``, recorded
  in the compute stream when the worker has issued all work on the batch);
- the compute stream reads a device slot only after the copy into it (its ``ready``).

Slots need no ``record_stream``, and are not freed during the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.core.nested import movable_parts
from runtime.data.budget import padded_bytes
from runtime.device.base import Device, DeviceEvent

_POLL_S = 0.001


class SlotPool:
    """The slots of one worker.

    ``grow``, ``take`` and ``release`` are called by the worker's thread under its compute stream,
    ``fill`` by the loader's thread. The caller ensures that ``fill`` finds a free slot.

    Args:
        layout: Shapes and dtypes of a slot's tensors.
    """

    def __init__(self, context: Device, layout: BatchLayout) -> None:
        self.layout = layout
        self._context = context
        self._lock = threading.Lock()  # guards the queues; not held while waiting
        self._hosts: deque[HostSlot] = deque()
        self._num_hosts = 0
        self._free: deque[DeviceSlot] = deque()
        self._all: list[DeviceSlot] = []

    @property
    def num_device_slots(self) -> int:
        """Number of device slots, used or not."""
        return len(self._all)

    @property
    def held_bytes(self) -> int:
        """Device memory of all slots."""
        return len(self._all) * self.layout.slot_bytes

    def grow(self, num_device: int, num_host: int) -> int:
        """Allocate up to these numbers of slots; fewer if the device runs out of memory.

        Returns:
            Number of device slots.
        """
        while self._num_hosts < num_host:
            host = HostSlot(self._tensors(self._context.empty_pinned), self._context.new_event())
            self._num_hosts += 1
            with self._lock:
                self._hosts.append(host)
        while len(self._all) < num_device:
            try:
                tensors = self._tensors(self._context.empty)
            except torch.OutOfMemoryError:
                break
            slot = DeviceSlot(tensors, self._context.new_event(), self._context.new_event())
            # Kernels issued before may still read this memory.
            self._context.record(slot.free)
            self._all.append(slot)
            with self._lock:
                self._free.append(slot)
        return len(self._all)

    def fill(
        self, num_rows: Sequence[int | None], write: Callable[[list[Tensor]], None]
    ) -> tuple[DeviceSlot, list[Tensor]]:
        """Write a batch to a host slot and start its copy to a device slot.

        Blocks while an earlier copy from the host slot is in progress.

        Args:
            num_rows: Rows of each tensor; ``None``: its full shape.
            write: Writes the batch into the pinned tensors passed to it.

        Returns:
            The slot, and the views of its tensors that hold the batch.
        """
        with self._lock:
            host = self._hosts.popleft()
        try:
            self._context.wait_host(host.ready)
            sources = _prefixes(host.tensors, num_rows)
            write(sources)
            with self._lock:
                slot = self._free.popleft()
            try:
                targets = _prefixes(slot.tensors, num_rows)
                self._copy(host, slot, sources, targets)
            except BaseException:
                self.return_slot(slot)
                raise
        finally:
            with self._lock:
                self._hosts.append(host)
        return slot, targets

    def _copy(
        self, host: HostSlot, slot: DeviceSlot, sources: list[Tensor], targets: list[Tensor]
    ) -> None:
        with self._context.copying(), self._context.driver_call():
            self._context.wait_event(slot.free)
            for target, source in zip(targets, sources, strict=True):
                self._context.copy(target, source)
            self._context.record(host.ready)
            self._context.record(slot.ready)

    def take(self, slot: DeviceSlot) -> None:
        """Make the current stream wait for the copy into ``slot``."""
        self._context.wait_event(slot.ready)

    def release(self, slot: DeviceSlot) -> None:
        """Return ``slot`` after all work on its batch was issued to the current stream."""
        self._context.record(slot.free)
        self.return_slot(slot)

    def return_slot(self, slot: DeviceSlot) -> None:
        """Return a slot that was filled but not taken; the copy stream is ordered by itself."""
        with self._lock:
            self._free.append(slot)

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until no copy is in progress; True if none is within the timeout.

        Otherwise the memory could be reallocated while a copy still writes to it.
        """
        deadline = time.monotonic() + timeout_s
        for slot in self._all:
            while not self._context.is_complete(slot.ready):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
        return True

    def _tensors(self, allocate: Callable[[Sequence[int], torch.dtype], Tensor]) -> list[Tensor]:
        size = self.layout.batch_size
        return [allocate(spec.full_shape(size), spec.dtype) for spec in self.layout.specs]


@dataclass(slots=True, eq=False)
class HostSlot:
    """Pinned memory for one batch.

    Attributes:
        tensors: One for each spec, of full size.
        ready: Recorded after the copy from it.
    """

    tensors: list[Tensor]
    ready: DeviceEvent


@dataclass(slots=True, eq=False)
class DeviceSlot:
    """Device memory for one batch.

    Attributes:
        tensors: One for each spec, of full size.
        ready: Recorded in the copy stream after the copy into it.
        free: Recorded in the compute stream after the last use.
    """

    tensors: list[Tensor]
    ready: DeviceEvent
    free: DeviceEvent


class BatchLayout:
    """Shapes and dtypes of a slot's tensors.

    Args:
        specs: One for each tensor, in container order.
    """

    def __init__(self, specs: Sequence[TensorSpec], batch_size: int) -> None:
        self.specs = tuple(specs)
        self.batch_size = batch_size

    @classmethod
    def of(cls, batch: Any, num_samples: int, batch_size: int) -> BatchLayout | None:
        """The layout of batches like this one; ``None`` if slots cannot hold it."""
        tensors = slot_tensors(batch)
        if not tensors:
            return None
        specs = []
        for tensor in tensors:
            has_rows = tensor.dim() > 0 and tensor.shape[0] == num_samples
            shape = tuple(tensor.shape[1:] if has_rows else tensor.shape)
            specs.append(TensorSpec(shape, tensor.dtype, has_rows))
        return cls(specs, batch_size)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """True if a slot can hold these tensors."""
        return len(tensors) == len(self.specs) and all(
            self._fits(tensor, spec) for tensor, spec in zip(tensors, self.specs, strict=True)
        )

    def _fits(self, tensor: Tensor, spec: TensorSpec) -> bool:
        shape = tuple(tensor.shape)
        if tensor.dtype != spec.dtype:
            return False
        if not spec.has_rows:
            return shape == spec.shape
        return len(shape) > 0 and shape[1:] == spec.shape and shape[0] <= self.batch_size

    @property
    def slot_bytes(self) -> int:
        """Device memory of one slot."""
        total = 0
        for spec in self.specs:
            numel = 1
            for size in spec.full_shape(self.batch_size):
                numel *= size
            total += padded_bytes(numel * spec.dtype.itemsize)
        return total


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor in every batch.

    Attributes:
        shape: Its sizes, without dimension 0 if ``has_rows``.
        dtype: Its dtype.
        has_rows: True if it has one row for each sample, so that it may be shorter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_rows: bool

    def full_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, *self.shape) if self.has_rows else self.shape


def slot_tensors(batch: Any) -> list[Tensor] | None:
    """The tensors of a batch; ``None`` if a slot cannot hold one of them."""
    tensors = movable_parts(batch)
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
        if not is_plain or tensor.requires_grad:
            return None
    return tensors


def _prefixes(tensors: Sequence[Tensor], num_rows: Sequence[int | None]) -> list[Tensor]:
    return [
        tensor if rows is None or rows == tensor.shape[0] else tensor[:rows]
        for tensor, rows in zip(tensors, num_rows, strict=True)
    ]
