"""Loader with processes, for data sets that spend their time in Python."""

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

_EXIT_S = 10.0  # within it the DataLoader notices that a process has died

Request = tuple[int, int, npt.NDArray[np.int64]]
"""Epoch, batch position, samples: what a loader process is asked for."""


class ProcessLoader(ThreadLoader):
    """Batches from the processes of a ``torch.utils.data.DataLoader``, taken by a thread.

    Call :meth:`start` before any other thread of the run exists. Ctrl-C reaches the
    processes too; they ignore it, so that a run can still finish in order.

    Args:
        spec: What it reads. Each process gets a copy of the data set (tensors are shared,
            memory maps opened again). If one dies, ``try_next`` raises ``RuntimeError``
            within about five seconds, and for every later batch.
        on_ready: See :class:`ThreadLoader`; so is ``stage``.
        num_processes: How many processes to start.
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
        self._pass_generation: int | None = None  # of the pass that runs, if one does
        self._death: str | None = None  # why nothing can be loaded any more

    def start(self) -> None:
        """Start the processes, by forkserver or else spawn. Does not wait until they are up.

        Raises:
            TypeError: The data set or ``collate_fn`` cannot be sent to a process.
        """
        source = _Source(self._adapter, self._seed, self.rank)
        check_picklable(source)
        methods = multiprocessing.get_all_start_methods()
        if "forkserver" in methods:
            _preload()
        self._dataloader = DataLoader(
            source,
            batch_size=None,
            sampler=cast("Any", _Pass(self._take_for_pass, self._index)),
            num_workers=self._num_processes,
            collate_fn=_identity,
            worker_init_fn=_init_process,
            multiprocessing_context="forkserver" if "forkserver" in methods else "spawn",
            persistent_workers=True,
            generator=torch.Generator(),  # else it would draw from the process-wide one
        )
        self._batches = iter(self._dataloader)  # nothing is submitted yet: an empty pass

    def submit(self, plan: EpochPlan) -> None:
        """Append the batches of ``plan`` and wake the thread."""
        if self._dataloader is None and not self._closed:
            raise RuntimeError("start() the loader before the first plan")
        super().submit(plan)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread and the processes, waiting for ``timeout_s`` before killing them."""
        ended = super().close(timeout_s)
        batches, self._batches, self._dataloader = self._batches, None, None
        if batches is None:
            return ended
        processes, queues = list(batches._workers), list(batches._index_queues)
        if not ended:
            # The thread waits for a process that is stuck: it wakes once that is dead.
            _terminate(processes)
            ended = super().close(_EXIT_S)
        killer = threading.Timer(timeout_s, _terminate, [processes])
        killer.start()
        # torch has no public way to end persistent workers before the iterator is freed,
        # which the traceback of an exception can put off.
        batches._shutdown_workers()
        killer.cancel()
        killer.join()
        for feeder in [queue._thread for queue in queues if queue._thread is not None]:
            feeder.join(_EXIT_S)  # its queue is closed
        return ended and not any(process.is_alive() for process in processes)

    def _has_work(self) -> bool:
        return super()._has_work() or self._pass_generation == self._generation

    def _take_for_pass(self) -> Position | None:
        # Called by the prefetch thread (and by start(), when there is nothing to take).
        generation = self._pass_generation
        return None if generation is None else self._take(generation)

    def _load_next(self, generation: int) -> LoadedBatch | None:
        batches, dataloader = self._batches, self._dataloader
        if self._death is not None:
            raise RuntimeError(self._death)
        try:
            if self._pass_generation != generation:
                self._pass_generation = generation
                # Waits for what the processes have in hand of a pass that was cancelled.
                iter(dataloader)
            epoch, batch, num_samples, data = next(batches)
        except StopIteration:
            self._pass_generation = None
            return None
        except Exception as error:
            codes = [process.exitcode for process in batches._workers if not process.is_alive()]
            if not codes:
                raise
            # For good: torch would go on without the batches that were in the dead process.
            self._death = (
                f"a loader process of rank {self.rank} died with exit code {codes[0]}: the data "
                "set ended it, it was killed, perhaps for want of memory, or it could not import "
                "the main script or the data set's class; start runs with loader_workers(n) under "
                "if __name__ == '__main__': and define the data set in a module"
            )
            raise RuntimeError(self._death) from error
        return LoadedBatch(data, num_samples, epoch, batch)


class _Source(Dataset[Any]):
    """The data set as a loader process reads it, one whole batch an item."""

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


class _Pass:
    """The sampler, and the iterator of one pass over the DataLoader.

    A pass takes every position submitted before it runs out, so that plans which follow
    closely are loaded without a gap; it ends for good when there is none.
    """

    def __init__(self, take: Callable[[], Position | None], index: EpochIndex) -> None:
        self._take = take
        self._index = index
        self._ended = False

    def __iter__(self) -> Iterator[Request]:
        return _Pass(self._take, self._index)

    def __next__(self) -> Request:
        # The DataLoader asks again after the end, but never refills its queues then.
        position = None if self._ended else self._take()
        if position is None:
            self._ended = True
            raise StopIteration
        epoch, batch, piece = position
        start, stop = piece or self._index.bounds(batch)
        return epoch, batch, self._index.order(epoch)[start:stop].numpy()


def _preload() -> None:
    """Let the fork server import PyTorch and this module once, and not every process anew.

    A server that runs already stays as it is, and so does what the program has asked for.
    """
    if forkserver._forkserver._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload(["__main__", "torch", __name__])


def _identity(item: Any) -> Any:
    return item


def _init_process(process: int) -> None:
    # A terminal or a job manager signals the whole group; the run needs its data to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _terminate(processes: list[Any]) -> None:
    for process in processes:
        process.kill()


class _Discard:
    """A file that forgets what is written to it."""

    def write(self, data: Any) -> int:
        return len(memoryview(data))


class _Prober(pickle.Pickler):
    """Pickles all but the contents of tensors and arrays, which are known to be picklable."""

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
        _Prober(_Discard(), pickle.HIGHEST_PROTOCOL).dump(source)
    except Exception as error:
        raise TypeError(
            f"loader_workers(n) sends the data set and collate_fn to other processes, and they "
            f"cannot be pickled: {error}. Define their classes and functions at the top of a "
            "module, keep data on the CPU and open files in __getitem__, or use loader_workers(0)"
        ) from error
