"""Loader with worker processes, for data sets that spend their time in Python."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, spawn
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from coordinator.messages import EpochPlan
from runtime.core.nested import movable_parts
from runtime.core.rng import seed_of
from runtime.core.tracebacks import fold_tracebacks
from runtime.data.batches import Position, read_batch
from runtime.data.data_set_state import (
    MAX_SHARED_TENSORS,
    DataSetState,
    Packed,
    check_picklable,
    dumps,
)
from runtime.data.dataset import DatasetAdapter, Samples
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import LoadedBatch, LoaderSpec, Stage, ThreadLoader

_EXIT_S = 10.0  # the DataLoader notices a dead process within this time

EXIT_SEEN_S = 1.0
"""Longest wait for a process to end after a broken transfer."""

TERM_GRACE_S = 5.0
"""Time for which a loader process that receives SIGTERM still reads: the run may have received it,
too, and needs data up to a step boundary."""


class ProcessLoader(ThreadLoader):
    """Batches from the processes of a ``torch.utils.data.DataLoader``, received by a thread.

    Call :meth:`start` before the run starts any other thread. The processes ignore Ctrl-C and
    continue for ``TERM_GRACE_S`` after SIGTERM or SIGHUP, so that the run can finish a step. They
    end when the process that started them ends, for any reason.

    Args:
        spec: See :class:`~runtime.data.loader.Loader`. Each process gets a copy of the data set
            (tensors are shared, memory maps reopened), and a new copy at the start of an epoch if
            the data set has changed. If one dies, ``try_next`` raises ``RuntimeError`` within
            about five seconds, and for every later batch.
        on_ready: See :class:`~runtime.data.loader.ThreadLoader`.
        stage: Likewise.
        settings: Start method, timeout and ``worker_init_fn``; ``None``: the defaults.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        *,
        on_ready: Callable[[], None],
        stage: Stage,
        num_processes: int,
        settings: LoaderProcesses | None = None,
    ) -> None:
        super().__init__(spec, on_ready=on_ready, stage=stage)
        self._num_processes = num_processes
        self._settings = settings or LoaderProcesses()
        self._dataloader: Any = None
        self._batches: Any = None  # the DataLoader's one iterator, restarted by each pass
        self._pass_generation: int | None = None  # generation of the current pass
        self._fatal_error: str | None = None  # set once a process has died

    def start(self) -> None:
        """Start the processes with forkserver or else spawn. Does not wait for them.

        Raises:
            TypeError: The data set or ``collate_fn`` cannot be sent to a process.
            ValueError: The main script would start the run again in each process, or this
                process may not have child processes.
        """
        refuse_in_daemon(self._num_processes)
        source = _BatchDataset(self._adapter, self._seed, self.rank, self._settings.init_fn)
        source.pack(check_picklable(source))
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        method = self._settings.start_method or method
        if method != "fork":
            check_main_guard(self._num_processes)
        if method == "forkserver":
            _preload()
        state = DataSetState(self._adapter, self._num_processes)
        self._dataloader = DataLoader(
            source,
            batch_size=None,
            sampler=cast("Any", _PlanSampler(self._take_for_pass, self._index, state)),
            num_workers=self._num_processes,
            collate_fn=_identity,
            timeout=self._settings.timeout_s,
            prefetch_factor=self._settings.batches_ahead,
            worker_init_fn=_init_process,
            multiprocessing_context=method,
            persistent_workers=True,
            # Else it would draw from the global generator, and every rank had the same seeds.
            generator=self._seed_generator(),
        )
        try:
            self._batches = iter(self._dataloader)  # an empty pass: no plan is queued yet
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                "the loader processes could not be started: their server ended, probably while it "
                f"imported the main script. {_GUARD}"
            ) from error
        source.unpack()
        state.sent()

    def _seed_generator(self) -> torch.Generator:
        seed = seed_of(self._seed, self.rank, self._settings.generator_seed or 0)
        return torch.Generator().manual_seed(seed)

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
            epoch, batch, num_samples, packed, read_s = next(batches)
            data = pickle.loads(packed)
        except StopIteration:
            self._pass_generation = None
            return None
        except Exception as error:
            if isinstance(error, (EOFError, OSError)):
                # Perhaps of a process that died while it sent a batch, and is about to be gone.
                connection.wait([process.sentinel for process in batches._workers], EXIT_SEEN_S)
            codes = [process.exitcode for process in batches._workers if not process.is_alive()]
            if not codes:
                if "timed out" in str(error) and self._settings.timeout_s:
                    raise RuntimeError(
                        f"the loader processes of rank {self.rank} sent no batch within the "
                        f"timeout={self._settings.timeout_s:g} of the DataLoader: one of them "
                        "hangs in the data set, or takes longer; raise timeout then"
                    ) from error
                raise
            # Permanent: torch would continue without the dead process's batches.
            self._fatal_error = (
                f"a loader process of rank {self.rank} died with exit code {codes[0]}: it was "
                "killed, perhaps because memory ran out, or it could not import the main script or "
                f"the data set's class, which has to be defined in a module. {_GUARD}"
            )
            raise RuntimeError(self._fatal_error) from error
        load_s = read_s / self._num_processes
        return LoadedBatch(data, num_samples, epoch, batch, load_s=load_s)


_GUARD = (
    "Loader processes import the main script, so the run has to start below the line "
    "if __name__ == '__main__':"
)


def refuse_in_daemon(num_processes: int) -> None:
    """Raise ``ValueError`` in a daemonic process, which may not have child processes."""
    if multiprocessing.current_process().daemon:
        raise ValueError(
            f"{num_processes} loader processes: this process is daemonic, as those of "
            "multiprocessing.Pool are, and may not start processes. Use loader_workers(0), or "
            "DataLoader(num_workers=0), which read in threads here, or start this process with "
            "daemon=False, as concurrent.futures.ProcessPoolExecutor does"
        )


def check_main_guard(num_processes: int) -> None:
    """Refuse to start processes that would start the run again when they import the main script.

    Scripts that mention neither ``__main__`` nor the process that they run in are refused.

    Raises:
        ValueError: The main script has no guard.
    """
    data = spawn.get_preparation_data("guard")
    path = data.get("init_main_from_path")
    if path is None and "init_main_from_name" in data:
        path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return
    try:
        source = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if not any(name in source for name in ("__main__", "parent_process", "current_process")):
        raise ValueError(
            f"loader_workers({num_processes}): loader processes import the main script, {path}, "
            "which would start the run again in each of them: put the lines that start it into a "
            "function, def main(): ..., and call it at the end of the script below the line "
            "if __name__ == '__main__':"
        )


def refuse_import_of_main() -> None:
    """End a process that is about to start a run while it imports the main script.

    Raises:
        SystemExit: This is a child process that multiprocessing has started and that is importing
            the main script of its parent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"a run was started while a child process imported the script. {_GUARD}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProcesses:
    """Settings of a worker's loader processes.

    Attributes:
        init_fn: Called in each process with its number, before it reads the first batch and for
            each new copy of the data set.
        timeout_s: Seconds within which a batch has to arrive; 0: no bound.
        batches_ahead: Batches that each process has in work.
        start_method: Start method of ``multiprocessing``; ``None``:
            ``forkserver``, else ``spawn``.
        generator_seed: Keys ``get_worker_info().seed``, beside rank and seed of the run.
    """

    init_fn: Callable[[int], object] | None = None
    timeout_s: float = 0.0
    batches_ahead: int = 2
    start_method: str | None = None
    generator_seed: int | None = None


class BatchRequest(NamedTuple):
    """Request for one batch to a loader process.

    Attributes:
        batch: Its position in the epoch.
        version: The state of the data set that it is read from.
        adapter: The data set in that state, pickled, where the process may have an older one.
    """

    epoch: int
    batch: int
    samples: npt.NDArray[np.int64]
    version: int
    adapter: bytes | None


class _BatchDataset(Dataset[Any]):
    """The data set in a loader process; each item is a whole batch."""

    def __init__(
        self,
        adapter: DatasetAdapter,
        seed: int,
        rank: int,
        init_fn: Callable[[int], object] | None,
    ) -> None:
        self._adapter = adapter
        self._seed = seed
        self._rank = rank
        self._init_fn = init_fn
        self._version = 0
        self._packed: Packed | None = None

    def pack(self, num_tensors: int) -> None:
        """Pack the data set once for all processes if it holds many tensors."""
        self._packed = Packed(self._adapter) if num_tensors > MAX_SHARED_TENSORS else None

    def unpack(self) -> None:
        """Free the memory of :meth:`pack`."""
        self._packed = None

    def __getstate__(self) -> dict[str, Any]:
        adapter = self._packed or self._adapter  # either is the data set where it is loaded
        return {**self.__dict__, "_adapter": adapter, "_packed": None}

    def begin(self) -> None:
        """Prepare the process for a new copy of the data set, as ``DataLoader`` does."""
        info = get_worker_info()
        assert info is not None, "this is a loader process"
        dataset = getattr(self._adapter, "dataset", self._adapter)
        shown: Any = dataset.elements if isinstance(dataset, Samples) else dataset
        # Users' functions expect their own data set there.
        torch_worker._worker_info = type(info)(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=shown
        )
        if self._init_fn is None:
            return
        try:
            self._init_fn(info.id)
        except (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"worker_init_fn raised {error!r}") from error

    def __getitem__(self, request: BatchRequest) -> tuple[int, int, int, bytes, float]:
        try:
            return self._read(request)
        except Exception as error:
            fold_tracebacks(error, with_note=False)  # PyTorch sends it as text
            # What cannot be pickled would be lost, and the batch be waited for in vain.
            try:
                pickle.dumps(type(error))
            except Exception:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise

    def _read(self, request: BatchRequest) -> tuple[int, int, int, bytes, float]:
        if request.version != self._version and request.adapter is not None:
            self._adapter = pickle.loads(request.adapter)
            self._version = request.version
            self.begin()
        if request.version != self._version:
            raise RuntimeError("a loader process has an older state of the data set")
        began = time.perf_counter()
        data = read_batch(
            self._adapter,
            torch.from_numpy(request.samples),
            seed=self._seed,
            rank=self._rank,
            position=Position(request.epoch, request.batch),
            alone=True,
        )
        try:
            packed = dumps(data, len(movable_parts(data)))
        except Exception as error:
            raise TypeError(
                f"batch {request.batch} of epoch {request.epoch} cannot be sent from its loader "
                f"process: {error}. Return tensors without gradients and objects that can be "
                "pickled, or use loader_workers(0)"
            ) from error
        read_s = time.perf_counter() - began
        return request.epoch, request.batch, len(request.samples), packed, read_s


class _PlanSampler:
    """Sampler of the DataLoader, and its own iterator over one pass.

    A pass includes plans queued while it runs, so that consecutive plans are loaded without a
    gap. It ends when no position is queued.
    """

    def __init__(
        self,
        take: Callable[[], Position | None],
        index: EpochIndex,
        state: DataSetState,
    ) -> None:
        self._take = take
        self._index = index
        self._state = state
        self._ended = False

    def __iter__(self) -> Iterator[BatchRequest]:
        self._state.begin_pass()
        return _PlanSampler(self._take, self._index, self._state)

    def __next__(self) -> BatchRequest:
        # The DataLoader calls again after the end, but no longer refills its queues.
        position = None if self._ended else self._take()
        if position is None:
            self._ended = True
            raise StopIteration
        epoch, batch, piece = position
        start, stop = piece or self._index.bounds(batch)
        samples = self._index.order(epoch)[start:stop].numpy()
        state = self._state
        state.begin_epoch(epoch)
        adapter = state.take()
        return BatchRequest(epoch, batch, samples, state.version, adapter)


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
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end_soon)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    info = get_worker_info()
    assert info is not None, "this is a loader process"
    cast("Any", info.dataset).begin()


def _end_soon(number: int, frame: FrameType | None) -> None:
    timer = threading.Timer(TERM_GRACE_S, _end_at_once)
    timer.daemon = True
    timer.start()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended.

    PyTorch watches the parent by its id, which is the fork server's; the fork server in turn
    lasts while a process that it has started does.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _end_at_once()  # its own threads may wait for the parent


def _end_at_once() -> None:
    # On Windows, os.kill with SIGTERM ends the process like SIGKILL elsewhere.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _terminate(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
