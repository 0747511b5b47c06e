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
from runtime.data.columns import take_rows
from runtime.data.dataset import ColumnAdapter, DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import InlineLoader, LoadedBatch, LoaderSpec
from runtime.device.base import Device

_CHUNK_BYTES = 64 * 2**20

_KEPT_ORDERS = 3


class ResidentLoader(InlineLoader):
    """Gathers batches of resident data in the worker's thread. Copies the data on the first plan.

    Args:
        spec: See :class:`~runtime.data.loader.Loader`.
    """

    def __init__(self, spec: LoaderSpec, *, data: ResidentData, context: Device) -> None:
        super().__init__(spec, context=context)
        self._moves = False
        self._data = data
        self._reader: ResidentReader | None = None

    def submit(self, plan: EpochPlan) -> None:
        """Queue the batches of ``plan``. The first call blocks until the data is on the device.

        Raises:
            RuntimeError: The loader is closed.
            ValueError: The data does not fit into the device's free memory.
        """
        super().submit(plan)
        if self._reader is None:
            if not self._data.is_loaded:
                check_device_memory(self._data.num_bytes, self._context)
            self._reader = ResidentReader(self._data, self._index, self._context)

    def close(self, timeout_s: float = 5.0) -> bool:
        self._reader = None
        return super().close(timeout_s)

    def _read(self, position: Position) -> LoadedBatch:
        assert self._reader is not None, "created with the first plan"
        return self._reader.read(position)


class ResidentReader:
    """Gathers one worker's batches from resident data in the current stream.

    Args:
        index: Sample indices of each batch.
    """

    def __init__(self, data: ResidentData, index: EpochIndex, context: Device) -> None:
        self._data = data
        self._columns = data.load(context)
        self._batch_of = data.batch_of
        self._index = index
        self._context = context
        # On the device and not shared: freed memory is reused in this worker's stream.
        self._orders: OrderedDict[int, Tensor] = OrderedDict()

    def read(self, position: Position) -> LoadedBatch:
        """Gather a batch. Does not synchronise with the device."""
        epoch, batch, piece = position
        start, stop = piece or self._index.bounds(batch)
        indices = self._order(epoch)[start:stop]
        parts = [take_rows(column, indices) for column in self._columns]
        return LoadedBatch(self._batch_of(parts), stop - start, epoch, batch)

    def _order(self, epoch: int) -> Tensor:
        order = self._orders.get(epoch)
        if order is None:
            pinned = self._context.pin(self._index.order(epoch)[:])
            self._data.require_current(epoch, self._context)
            order = self._orders[epoch] = self._context.to_device(pinned)
            if len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
        return order


class ResidentData:
    """The columns of a data set on one device, shared by its workers. Thread-safe.

    Attributes:
        num_bytes: Memory on the device: the size of one sample times the number of samples.
        batch_of: See :meth:`ColumnAdapter.batch_of`.
    """

    def __init__(self, adapter: ColumnAdapter) -> None:
        self._adapter = adapter
        self.batch_of = adapter.batch_of
        self.num_bytes = padded_bytes(adapter.sample_bytes * adapter.num_samples)
        self._lock = threading.Lock()
        self._columns: tuple[Tensor, ...] | None = None
        self._content: tuple[object, ...] = ()

    @property
    def is_loaded(self) -> bool:
        """True once the data is on the device."""
        return self._columns is not None

    def load(self, context: Device) -> tuple[Tensor, ...]:
        """Copy the data to the device if needed, and return the columns.

        Blocks while this thread or another copies them.
        """
        with self._lock:
            if self._columns is None:
                self._content = self._adapter.content()
                self._columns = self._copy(context)
            return self._columns

    def require_current(self, epoch: int, context: Device) -> None:
        """Raise ``ValueError`` if the data set was changed after it was copied to the device.

        Writes through NumPy or ``.data`` do not show.
        """
        if self._adapter.content() != self._content:
            raise ValueError(
                f"the tensors of the data set have changed before epoch {epoch}, and their copy on "
                f"{context.device} has the old values: use resident(False), which reads them anew"
            )

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
        # Workers read it in other streams, which are not ordered after this one.
        context.wait_host(done)
        return tuple(columns)


def can_be_resident(adapter: DatasetAdapter) -> TypeGuard[ColumnAdapter]:
    """True for tabular data; a data set with its own code may draw random numbers or change."""
    return isinstance(adapter, ColumnAdapter)


def check_device_memory(needed_bytes: int, context: Device) -> None:
    """Raise ``ValueError`` if resident data does not fit into a device's free memory."""
    reading = context.memory()
    available = reading.free_bytes + reading.reserved_bytes - reading.active_bytes
    check_fits(needed_bytes, available, f"{context.device} has {available:,} free")


def check_fits(needed_bytes: int, available_bytes: int, limit: str) -> None:
    """Raise ``ValueError`` if resident data does not fit."""
    if needed_bytes > available_bytes:
        raise ValueError(
            f"resident(True): the data set needs {needed_bytes:,} bytes and {limit}; "
            "use resident(False), which streams it, a smaller data set or a narrower dtype"
        )
