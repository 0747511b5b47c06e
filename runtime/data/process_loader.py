"""Loader with worker processes, for data sets that spend their time in Python."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from coordinator.messages import EpochPlan
from runtime.data.batches import (
    Position,
    read_batch,
)
from runtime.data.dataset import DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import LoadedBatch, LoaderSpec, Stage, ThreadLoader

_EXIT_S = 10.0  # the DataLoader notices a dead process within this time

Request = tuple[int, int, npt.NDArray[np.int64]]
"""Epoch, batch position and sample indices."""


class ProcessLoader(ThreadLoader):
    """Batches from the processes of a ``torch.utils.data.DataLoader``, received by a thread.

    Call :meth:`start` before the run starts any other thread. The processes ignore Ctrl-C and
    SIGTERM, so that the run can finish a step.

    Args:
        spec: See :class:`~runtime.data.loader.Loader`. Each process gets a copy of the data set
            (tensors are shared, memory maps reopened). If one dies, ``try_next`` raises
            ``RuntimeError`` within about five seconds, and for every later batch.
        on_ready: See :class:`~runtime.data.loader.ThreadLoader`.
        stage: Likewise.
        num_processes: Number of processes.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        *,
        on_ready: Callable[[], None],
        stage: Stage,
        num_processes: int,
    ) -> None:
        super().__init__(spec, on_ready=on_ready, stage=stage)
        self._num_processes = num_processes
        self._dataloader: Any = None
        self._batches: Any = None  # the DataLoader's one iterator, restarted by each pass
        self._pass_generation: int | None = None  # of the current pass, if any
        self._fatal_error: str | None = None  # set once a process has died

    def start(self) -> None:
        """Start the processes with forkserver or else spawn. Does not wait for them.

        Raises:
            TypeError: The data set or ``collate_fn`` cannot be sent to a process.
        """
        source = _BatchDataset(self._adapter, self._seed, self.rank)
        check_picklable(source)
        methods = multiprocessing.get_all_start_methods()
        if "forkserver" in methods:
            _preload()
        self._dataloader = DataLoader(
            source,
            batch_size=None,
            sampler=cast("Any", _PlanSampler(self._take_for_pass, self._index)),
            num_workers=self._num_processes,
            collate_fn=_identity,
            worker_init_fn=_init_process,
            multiprocessing_context="forkserver" if "forkserver" in methods else "spawn",
            persistent_workers=True,
            generator=torch.Generator(),  # else it would draw from the global generator
        )
        self._batches = iter(self._dataloader)  # an empty pass: no plan is queued yet

    def submit(self, plan: EpochPlan) -> None:
        """Queue the batches of ``plan`` and wake the thread."""
        if self._dataloader is None and not self._closed:
            raise RuntimeError("start() the loader before the first plan")
        super().submit(plan)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread and the processes; kill processes that take longer than ``timeout_s``."""
        ended = super().close(timeout_s)
        batches, self._batches, self._dataloader = self._batches, None, None
        if batches is None:
            return ended
        processes, queues = list(batches._workers), list(batches._index_queues)
        if not ended:
            # The thread waits for a stuck process, and wakes once that is dead.
            _terminate(processes)
            ended = super().close(_EXIT_S)
        killer = threading.Timer(timeout_s, _terminate, [processes])
        killer.start()
        # torch has no public way to stop persistent workers before the iterator is freed,
        # which the traceback of an exception can delay.
        batches._shutdown_workers()
        killer.cancel()
        killer.join()
        for feeder in [queue._thread for queue in queues if queue._thread is not None]:
            feeder.join(_EXIT_S)  # its queue is closed
        return ended and not any(process.is_alive() for process in processes)

    def _has_work(self) -> bool:
        return super()._has_work() or self._pass_generation == self._generation

    def _take_for_pass(self) -> Position | None:
        # Called by the prefetch thread (and by start(), when no position is queued).
        generation = self._pass_generation
        return None if generation is None else self._take(generation)

    def _load_next(self, generation: int) -> LoadedBatch | None:
        batches, dataloader = self._batches, self._dataloader
        if self._fatal_error is not None:
            raise RuntimeError(self._fatal_error)
        try:
            if self._pass_generation != generation:
                self._pass_generation = generation
                # Waits for batches of a cancelled pass that processes are still loading.
                iter(dataloader)
            epoch, batch, num_samples, data = next(batches)
        except StopIteration:
            self._pass_generation = None
            return None
        except Exception as error:
            codes = [process.exitcode for process in batches._workers if not process.is_alive()]
            if not codes:
                raise
            # Permanent: torch would continue without the dead process's batches.
            self._fatal_error = (
                f"a loader process of rank {self.rank} died with exit code {codes[0]}: it was "
                "killed, perhaps because memory ran out, or it could not import the main script or "
                "the data set's class; start runs with loader_workers(n) under "
                "if __name__ == '__main__': and define the data set in a module"
            )
            raise RuntimeError(self._fatal_error) from error
        return LoadedBatch(data, num_samples, epoch, batch)


class _BatchDataset(Dataset[Any]):
    """The data set in a loader process; each item is a whole batch."""

    def __init__(self, adapter: DatasetAdapter, seed: int, rank: int) -> None:
        self._adapter = adapter
        self._seed = seed
        self._rank = rank

    def __getitem__(self, request: Request) -> tuple[int, int, int, Any]:
        epoch, batch, samples = request
        data = read_batch(
            self._adapter,
            torch.from_numpy(samples),
            seed=self._seed,
            rank=self._rank,
            position=Position(epoch, batch),
            alone=True,
        )
        return epoch, batch, len(samples), data


class _PlanSampler:
    """Sampler of the DataLoader, and its own iterator over one pass.

    A pass includes plans queued while it runs, so that consecutive plans are loaded without a
    gap. It ends when no position is queued.
    """

    def __init__(self, take: Callable[[], Position | None], index: EpochIndex) -> None:
        self._take = take
        self._index = index
        self._ended = False

    def __iter__(self) -> Iterator[Request]:
        return _PlanSampler(self._take, self._index)

    def __next__(self) -> Request:
        # The DataLoader calls again after the end, but no longer refills its queues.
        position = None if self._ended else self._take()
        if position is None:
            self._ended = True
            raise StopIteration
        epoch, batch, piece = position
        start, stop = piece or self._index.bounds(batch)
        return epoch, batch, self._index.order(epoch)[start:stop].numpy()


def _preload() -> None:
    """Import PyTorch and this module once in the fork server, instead of in each process.

    Has no effect on a server that is already running or that the program has configured.
    """
    if forkserver._forkserver._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload(["__main__", "torch", __name__])


def _identity(item: Any) -> Any:
    return item


def _init_process(process: int) -> None:
    # Signals reach the whole process group, but the run still needs data to finish its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _terminate(processes: list[Any]) -> None:
    for process in processes:
        process.kill()


class _NullFile:
    """A file that discards its content."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


class _DryPickler(pickle.Pickler):
    """Pickles everything but the contents of tensors and arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            if obj.is_cuda:
                raise TypeError("it holds a CUDA tensor")
            return int, ()
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return int, ()
        return NotImplemented


def check_picklable(source: object) -> None:
    """Raise ``TypeError``, with the remedy, if ``source`` cannot be sent to a process."""
    try:
        _DryPickler(_NullFile(), pickle.HIGHEST_PROTOCOL).dump(source)
    except Exception as error:
        raise TypeError(
            f"loader_workers(n) sends the data set and collate_fn to other processes, and they "
            f"cannot be pickled: {error}. Define their classes and functions at the top of a "
            "module, keep data on the CPU and open files in __getitem__, or use loader_workers(0)"
        ) from error
