"""Data sets resident on the device, whose batches are gathered there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeGuard

import torch
from torch import Tensor

from coordinator.messages import EpochPlan
from runtime.data.batches import (
    Position,
)
from runtime.data.budget import padded_bytes
from runtime.data.dataset import ColumnAdapter, DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import InlineLoader, LoadedBatch, LoaderSpec
from runtime.device.base import Device

_CHUNK_BYTES = 64 * 2**20

_KEPT_EPOCHS = 3


class ResidentLoader(InlineLoader):
    """Batches of resident data, in the worker's thread. Brings the data with the first plan.

    Args:
        spec: What it reads.
        data: The data set's columns on the device.
        copies: The worker's way to its device.
    """

    def __init__(self, spec: LoaderSpec, *, data: ResidentData, context: Device) -> None:
        super().__init__(spec, context=context)
        self._moves = False
        self._data = data
        self._reader: ResidentReader | None = None

    def submit(self, plan: EpochPlan) -> None:
        """Append the batches of ``plan``; the first one waits until the data is there.

        Raises:
            RuntimeError: The loader is closed.
            ValueError: The device has no room for the data.
        """
        super().submit(plan)
        if self._reader is None:
            if not self._data.is_loaded:
                check_device_memory(self._data.num_bytes, self._context)
            self._reader = ResidentReader(self._data, self._index, self._context)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let go of the data."""
        self._reader = None
        return super().close(timeout_s)

    def _read(self, position: Position) -> LoadedBatch:
        assert self._reader is not None, "it was made with the first plan"
        return self._reader.read(position)


class ResidentReader:
    """One worker's batches from resident data, gathered in its current stream.

    Args:
        data: The columns.
        index: Which samples a batch holds.
        copies: The worker's way to its device.
    """

    def __init__(self, data: ResidentData, index: EpochIndex, context: Device) -> None:
        self._columns = data.load(context)
        self._batch_of = data.batch_of
        self._index = index
        self._context = context
        # On the device, and this worker's own: freed memory goes back to its stream.
        self._orders: OrderedDict[int, Tensor] = OrderedDict()

    def read(self, position: Position) -> LoadedBatch:
        """Gather a batch. The host waits for nothing on the device."""
        epoch, batch, piece = position
        start, stop = piece or self._index.bounds(batch)
        indices = self._order(epoch)[start:stop]
        parts = [column.index_select(0, indices) for column in self._columns]
        return LoadedBatch(self._batch_of(parts), stop - start, epoch, batch)

    def _order(self, epoch: int) -> Tensor:
        order = self._orders.get(epoch)
        if order is None:
            pinned = self._context.pin(self._index.order(epoch))
            order = self._orders[epoch] = self._context.bring(pinned)
            if len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        return order


class ResidentData:
    """The columns of a data set on one device, shared by the workers there. Thread-safe.

    Args:
        adapter: The data set.

    Attributes:
        num_bytes: What it takes there: the bytes of one sample times their number.
        batch_of: See :meth:`ColumnAdapter.batch_of`.
    """

    def __init__(self, adapter: ColumnAdapter) -> None:
        self._adapter = adapter
        self.batch_of = adapter.batch_of
        self.num_bytes = padded_bytes(adapter.sample_bytes * adapter.num_samples)
        self._lock = threading.Lock()
        self._columns: tuple[Tensor, ...] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether it lies on the device."""
        return self._columns is not None

    def load(self, context: Device) -> tuple[Tensor, ...]:
        """Bring it there, unless it is; the columns, complete on the device.

        Blocks while it is read and copied, by this thread or another.
        """
        with self._lock:
            if self._columns is None:
                self._columns = self._copy(context)
            return self._columns

    def _copy(self, context: Device) -> tuple[Tensor, ...]:
        total = self._adapter.num_samples
        step = max(1, _CHUNK_BYTES // max(1, self._adapter.sample_bytes))
        columns: list[Tensor] = []
        for start in range(0, total, step):
            rows = torch.arange(start, min(total, start + step))
            chunk = self._adapter.gather(rows)
            if not columns:
                columns = [context.empty((total, *part.shape[1:]), part.dtype) for part in chunk]
            for column, part in zip(columns, chunk, strict=True):
                context.copy(column[start : start + len(rows)], part)
        done = context.new_event()
        context.record(done)
        # Workers with other streams read it, and nothing orders them after this one.
        context.wait_host(done)
        return tuple(columns)


def can_be_resident(adapter: DatasetAdapter) -> TypeGuard[ColumnAdapter]:
    """Whether a data set is rows alone, so that a copy of it gives what it gives.

    One with code of its own may draw or change, and is always read.
    """
    return isinstance(adapter, ColumnAdapter)


def check_device_memory(needed_bytes: int, context: Device) -> None:
    """Raise ``ValueError``, with both figures, if a device has no room for resident data."""
    reading = context.memory()
    there = reading.free_bytes + reading.reserved_bytes - reading.active_bytes
    check_fits(needed_bytes, there, f"{context.device} has {there:,} free")


def check_fits(needed_bytes: int, there_bytes: int, what_is_there: str) -> None:
    """Raise ``ValueError`` if resident data does not fit."""
    if needed_bytes > there_bytes:
        raise ValueError(
            f"resident(True): the data set needs {needed_bytes:,} bytes and {what_is_there}; "
            "use resident(False), which streams it, a smaller data set or a narrower dtype"
        )
