"""Batches of a data set in its order, handed out to the threads that evaluate them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from coordinator.splitting import batch_bounds
from runtime.core.nested import cut_batch, movable_parts, num_rows
from runtime.data.batches import Position, in_own_thread, read_batch
from runtime.data.dataset import DatasetAdapter, adapt_dataset
from runtime.data.epoch_order import EpochOrder, computed_order
from runtime.data.process_loader import refuse_in_daemon
from runtime.data.shared_reads import SharedReads
from runtime.data.stream import is_stream
from runtime.data.torch_loader import settings_of_loader

DEFAULT_BATCH_SIZE = 64
"""Samples in a batch where neither the caller nor a ``DataLoader`` specifies them."""


class BatchSource(ABC):
    """Hands out batches in order. Thread-safe.

    Attributes:
        num_samples: Samples in all; ``None``: not known before the end.
    """

    num_samples: int | None

    @abstractmethod
    def take(self) -> SampleRange | None:
        """The next batch; ``None`` after the last. May block while the data set reads."""


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Consecutive samples to evaluate as a batch.

    Attributes:
        batch: Number of the batch.
        start: Position of its first sample.
        stop: Position after its last sample.
        load: Returns the samples of a part, by positions, as one batch on the host.
    """

    batch: int
    start: int
    stop: int
    load: Callable[[int, int], Any]


class IndexedSource(BatchSource):
    """A data set that is read by index, in the thread that evaluates the batch.

    Args:
        order: Indices of the samples in order; ``None``: all.
    """

    def __init__(
        self,
        adapter: DatasetAdapter,
        batch_size: int,
        order: Tensor | EpochOrder | None = None,
    ) -> None:
        self.num_samples: int = adapter.num_samples if order is None else len(order)
        self._adapter = adapter
        self._batch_size = batch_size
        self._order = order
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> SampleRange | None:
        """The next batch; does not block."""
        with self._lock:
            batch = self._next
            start, stop = batch_bounds(batch, self.num_samples, self._batch_size)
            if start >= stop:
                return None
            self._next += 1
        return SampleRange(batch, start, stop, self._load)

    def _load(self, start: int, stop: int) -> Any:
        indices = torch.arange(start, stop) if self._order is None else self._order[start:stop]
        if self._adapter.in_memory:
            return self._adapter.load(indices)
        return read_batch(self._adapter, indices, seed=0, rank=0, position=Position(0, start))


class StreamSource(BatchSource):
    """Batches of an iterator, which one thread at a time reads.

    Args:
        batches: The number of samples of each batch, if known, and the batch.
        num_samples: Samples in all; ``None``: not known.
    """

    def __init__(
        self, batches: Iterator[tuple[int | None, Any]], num_samples: int | None = None
    ) -> None:
        self.num_samples = num_samples
        self._batches = batches
        self._lock = threading.Lock()
        self._num_batches = self._num_taken = 0

    def take(self) -> SampleRange | None:
        """Read the next batch; blocks while another thread reads."""
        with self._lock, in_own_thread():
            for size, data in self._batches:
                return self._range(_rows(data) if size is None else size, data)
        return None

    def _range(self, size: int, data: Any) -> SampleRange:
        start, batch = self._num_taken, self._num_batches
        self._num_taken += size
        self._num_batches += 1
        held = HeldBatch(lambda: data, start, self._num_taken)
        return SampleRange(batch, start, self._num_taken, held.load)


class HeldBatch:
    """A batch that is read at once, and divided in memory. For one thread.

    Args:
        read: Reads the batch.
        start: Position of its first sample.
        stop: Position after its last sample.
    """

    def __init__(self, read: Callable[[], Any], start: int, stop: int) -> None:
        self._read = read
        self._start, self._stop = start, stop
        self._data: Any = None

    def load(self, start: int, stop: int) -> Any:
        """Rows of the batch."""
        if self._data is None:
            self._data = self._read()
        if (start, stop) == (self._start, self._stop):
            return self._data
        num_samples = self._stop - self._start
        for part in movable_parts(self._data):
            if isinstance(part, Tensor) and (part.dim() == 0 or len(part) != num_samples):
                raise ValueError(
                    f"a batch of {num_samples} samples with a tensor of shape {tuple(part.shape)} "
                    "cannot be divided: use a smaller batch_size"
                )
        return cut_batch(self._data, start - self._start, stop - self._start, num_samples)


def _rows(data: Any) -> int:
    size = num_rows(data) if movable_parts(data) else None
    if size is None:
        raise ValueError("the number of samples in a batch without tensors is not known")
    return size


def open_source(
    dataset: Any,
    batch_size: int | None,
    num_devices: int,
    lock: bool | None = None,
    *,
    call: str,
) -> BatchSource:
    """Read a data set in its order, each sample once.

    Args:
        dataset: As for :meth:`TrainerBuilder.dataset <gpuworker.TrainerBuilder.dataset>`. From a
            ``DataLoader``: its data set, ``batch_size``, ``collate_fn``, processes, and the order
            of its sampler, unless that only shuffles; ``drop_last`` has no effect.
        batch_size: Samples in a batch; ``None``: the ``DataLoader``'s, else the default, or fewer
            for a short data set.
        lock: See :class:`~runtime.data.shared_reads.SharedReads`.
        call: The user's call, for errors.

    Raises:
        TypeError, ValueError: The data set cannot be read.
    """
    collate, order = None, None
    if isinstance(dataset, DataLoader):
        settings = settings_of_loader(dataset, call)
        order = order_of_loader(dataset)
        batch_size = batch_size or settings["batch_size"]
        collate = settings.get("collate_fn")
        if settings.get("loader_workers") or isinstance(dataset.dataset, IterableDataset):
            return _loaded_by_processes(dataset, batch_size, order, lock)
        dataset = settings["dataset"]
    if is_stream(dataset):
        batches = _batched(dataset, batch_size or DEFAULT_BATCH_SIZE, collate)
        reads = SharedReads(dataset, collate, lock=lock, is_serial=True)
        return StreamSource(_in_turn(batches, reads), _length(dataset))
    adapter = adapt_dataset(dataset, collate_fn=collate, lock=lock, call=call)
    if batch_size is None:
        shared = -(-adapter.num_samples // num_devices)
        batch_size = min(DEFAULT_BATCH_SIZE, shared)
    return IndexedSource(adapter, batch_size, order)


def order_of_loader(loader: DataLoader[Any]) -> Tensor | EpochOrder | None:
    """The indices of a loader's sampler; ``None``: the data's order."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is SequentialSampler:
        return None
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    if shuffles and sampler.num_samples == len(sampler.data_source):
        return None
    computed = computed_order(sampler, _length(loader.dataset) or 0)
    if computed is not None:
        return computed
    return torch.from_numpy(np.fromiter(map(int, sampler), np.int64))


def _loaded_by_processes(
    loader: DataLoader[Any],
    batch_size: int,
    order: Tensor | EpochOrder | None,
    lock: bool | None,
) -> StreamSource:
    """The batches of a loader with processes, or over a stream, in order and without the last one
    dropped.
    """
    streams = isinstance(loader.dataset, IterableDataset)
    processes = {}
    if loader.num_workers:
        refuse_in_daemon(loader.num_workers)
        processes = {
            "worker_init_fn": loader.worker_init_fn,
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    again: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=batch_size,
        sampler=order.tolist() if isinstance(order, Tensor) else order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        generator=torch.Generator(),
        **processes,
    )
    if streams:
        batches: Iterator[tuple[int | None, Any]] = ((None, data) for data in again)
        if not loader.num_workers:
            reads = SharedReads(loader.dataset, loader.collate_fn, lock=lock, is_serial=True)
            batches = _in_turn(batches, reads)
        return StreamSource(batches, _length(loader.dataset))
    total = len(loader.dataset) if order is None else len(order)  # type: ignore[arg-type]
    sizes = (min(batch_size, total - start) for start in range(0, total, batch_size))
    return StreamSource(zip(sizes, again, strict=True), total)


def _batched(
    items: Iterable[Any], batch_size: int, collate: Callable[[list[Any]], Any] | None
) -> Iterator[tuple[int, Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, batch_size)):
        yield len(batch), (collate or default_collate)(batch)


def _in_turn(
    batches: Iterator[tuple[int | None, Any]], reads: SharedReads
) -> Iterator[tuple[int | None, Any]]:
    """Batches that this process reads, each in turn with other reads."""
    while True:
        with reads.turn() as turn:
            found = next(batches, None)
            if found is None:
                return
            batch = found[0], turn.take(found[1])
        yield batch


def _length(dataset: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):
        return len(dataset)
    return None
