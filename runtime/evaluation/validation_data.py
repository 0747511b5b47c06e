"""ValidationData: the validation set of a run, read by all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch.utils.data import DataLoader, IterableDataset

from coordinator.messages import EpochPlan
from coordinator.splitting import batch_bounds, count_batches
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import InlineLoader, Loader, LoaderSpec, Stage, ThreadLoader
from runtime.data.process_loader import LoaderProcesses, ProcessLoader
from runtime.data.stream import is_stream
from runtime.data.torch_loader import settings_of_loader
from runtime.device.base import Device
from runtime.evaluation.batch_source import BatchSource, SampleRange, order_of_loader

NUM_AHEAD = 2
"""Batches that a rank's loader holds ready."""

_CALL = "val_dataset(ds)"


class ValidationData:
    """Reads batches of the validation set, in the data's order, each sample once.

    Args:
        dataset: A data set that is read by index, or a ``DataLoader`` of one, whose batch size,
            ``collate_fn``, processes and sampler are used unless that only shuffles.
        contexts: Device context of each rank.
        batch_size: Samples in a batch, for other data sets than a ``DataLoader``.
        collate_fn: Likewise.
        loader_workers: Likewise: loader processes of each rank.
        lock: See :class:`~runtime.data.shared_reads.SharedReads`.
        seed: Seed of the data set's random draws, which are the same in each validation.

    Raises:
        TypeError, ValueError: The data set cannot be read by index, or is empty.
    """

    def __init__(
        self,
        dataset: Any,
        contexts: Sequence[Device],
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
        lock: bool | None = None,
        seed: int = 0,
    ) -> None:
        self._settings = LoaderProcesses()
        order = None
        if isinstance(dataset, DataLoader):
            _refuse_stream(dataset.dataset)
            settings = settings_of_loader(dataset, _CALL)
            order = order_of_loader(dataset)
            dataset, batch_size = settings["dataset"], settings["batch_size"]
            collate_fn = settings.get("collate_fn")
            loader_workers = settings["loader_workers"]
            self._settings = settings["loader_processes"]
        _refuse_stream(dataset)
        self._adapter = adapt_dataset(dataset, collate_fn=collate_fn, lock=lock, call=_CALL)
        sampler = range(self._adapter.num_samples) if order is None else order
        self._index = EpochIndex(self._adapter.num_samples, batch_size, seed, sampler)
        self.num_batches = count_batches(len(sampler), batch_size, drop_last=False)
        self._contexts = contexts
        self._seed = seed
        self._num_processes = 0 if self._adapter.in_memory else loader_workers
        self._ready = [threading.Event() for _ in contexts]
        self._processes: dict[int, ProcessLoader] = {}

    def start(self) -> None:
        """Start the loader processes, if any, before the run's threads."""
        for rank in range(len(self._contexts)) if self._num_processes else ():
            loader = ProcessLoader(
                self._spec(rank),
                on_ready=self._ready[rank].set,
                num_processes=self._num_processes,
                stage=Stage(NUM_AHEAD),
                settings=self._settings,
            )
            self._processes[rank] = loader
            loader.start()

    def make_loader(self, rank: int, worker: object) -> ValidationLoader:
        """The loader of a rank."""
        loader: Loader
        spec, context = self._spec(rank, worker), self._contexts[rank]
        if rank in self._processes:
            loader = self._processes[rank]
        elif self._adapter.in_memory or context.device.type not in ("cpu", "cuda"):
            loader = InlineLoader(spec, context=context)
        else:
            loader = ThreadLoader(spec, on_ready=self._ready[rank].set, stage=Stage(NUM_AHEAD))
        return ValidationLoader(loader, self._ready[rank])

    def batches(self) -> BatchSource:
        """The batches in order, by number: each rank reads its own with its loader."""
        return _Batches(self._index)

    def _spec(self, rank: int, worker: object = None) -> LoaderSpec:
        return LoaderSpec(
            adapter=self._adapter,
            index=self._index,
            device=self._contexts[rank].device,
            seed=self._seed,
            rank=rank,
            worker=worker,
        )

    def close(self) -> None:
        """Stop the loader processes. Idempotent."""
        for loader in self._processes.values():
            loader.close()


class ValidationLoader:
    """The validation batches of one rank.

    Args:
        loader: Reads the batches.
        ready: Set when a batch is ready.
    """

    def __init__(self, loader: Loader, ready: threading.Event) -> None:
        self._loader = loader
        self._ready = ready

    @property
    def num_ahead(self) -> int:
        """Further batches to submit while one is evaluated."""
        return NUM_AHEAD if self._loader.reads_ahead else 0

    def submit(self, batch: int) -> None:
        self._loader.submit(EpochPlan(epoch=0, batches=(range(batch, batch + 1),)))

    def cancel(self) -> None:
        """Drop all batches not yet taken."""
        self._loader.cancel()

    def close(self) -> bool:
        """Stop threads and processes; False if one is alive. Idempotent."""
        return self._loader.close()

    def next(self) -> Any:
        """The next submitted batch, on the device; blocks until it is read."""
        while (loaded := self._loader.try_next()) is None:
            self._ready.wait()
            self._ready.clear()
        return loaded.data


class _Batches(BatchSource):
    """Numbers and samples of the batches; their data is read by the loaders of the ranks."""

    num_samples = None

    def __init__(self, index: EpochIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> SampleRange | None:
        """The next batch; does not block."""
        with self._lock:
            batch = self._next
            self._next += 1
        start, stop = batch_bounds(batch, self._index.num_samples, self._index.batch_size)
        return SampleRange(batch, start, stop, _not_loaded) if start < stop else None


def _not_loaded(start: int, stop: int) -> NoReturn:
    raise AssertionError("read by the loader of a rank")


def _refuse_stream(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or is_stream(dataset):
        raise TypeError(
            f"val_dataset({type(dataset).__name__}): a stream cannot be divided among the devices: "
            "pass list(stream) if it fits into memory, or evaluate it in eval_fn"
        )
