"""Selects each worker's loader and divides memory among the loaders of a run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from coordinator.messages import EpochPlan
from runtime.core.threads import IntraOpThreads
from runtime.data.batches import tensor_bytes
from runtime.data.budget import DeviceBudget
from runtime.data.dataset import DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.loader import (
    MEASURED_STEPS,
    SIZING_BATCHES,
    HostStage,
    InlineLoader,
    Loader,
    LoaderSpec,
    SizingSchedule,
    Stage,
    ThreadLoader,
)
from runtime.data.prefetch import PrefetchLoader, SlotStage
from runtime.data.process_loader import LoaderProcesses, ProcessLoader
from runtime.data.resident import ResidentData, ResidentLoader, can_be_resident, check_fits
from runtime.device.base import (
    WARM_UP_STEPS,
    Device,
    available_host_bytes,
)
from runtime.device.cuda_api import pinned_bytes
from runtime.device.memory import CAPS, MEMORY, explain_out_of_memory

logger = logging.getLogger(__name__)


class DataPath:
    """The loaders of a run, and their shared memory budgets.

    Args:
        options: Validated settings.
        index: Sample indices of each batch.
        contexts: Device context of each rank.

    Raises:
        ValueError: ``resident(True)`` for a data set that is not tabular, or does not fit.
    """

    def __init__(
        self,
        options: DataOptions,
        adapter: DatasetAdapter,
        index: EpochIndex,
        contexts: Sequence[Device],
    ) -> None:
        self._options = options
        self._adapter = adapter
        self._index = index
        self._contexts = contexts
        devices = [context.device for context in contexts]
        self._cuda = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        workers = {device: devices.count(device) for device in self._cuda}
        self._budgets = {
            device: DeviceBudget(options.vram_fraction, n, graphs=options.cuda_graphs and n == 1)
            for device, n in workers.items()
        }
        self._data: dict[torch.device, ResidentData] = {}
        if can_be_resident(adapter) and options.resident is not False:
            self._data = {device: ResidentData(adapter) for device in dict.fromkeys(devices)}
        self._lock = threading.Lock()
        self._snapshot_bytes = 0
        self._processes: dict[int, ProcessLoader] = {}
        self._capped: list[torch.device] = []
        if options.resident:
            self._check_resident()

    def _check_resident(self) -> None:
        if not can_be_resident(self._adapter):
            raise ValueError(
                "resident(True) is for tensors and arrays: a data set with its own code may draw "
                "random numbers or change; pass a tuple of its tensors, or leave resident out"
            )
        for device, data in self._data.items():
            if device.type == "cuda":
                total = MEMORY.total_bytes(device)
                fraction = self._options.vram_fraction
                available = int(total * fraction)
                limit = f"vram_fraction({fraction:g}) of {device} is {available:,}"
            elif self._adapter.in_memory:
                continue  # already in host memory
            else:
                available = available_host_bytes()
                limit = f"the host has {available:,} available"
            check_fits(data.num_bytes, available, limit)

    # Called by the run.

    def start(self, wake: Callable[[int], Callable[[], None]]) -> None:
        """Cap the memory of CUDA devices, and start loader processes if set.

        Args:
            wake: Returns a function that wakes the worker of a rank.
        """
        for device in self._cuda:
            CAPS.acquire(device, self._options.vram_fraction)
            self._capped.append(device)
        c = self._options
        if c.loader_workers == 0 or self._adapter.in_memory or c.resident:
            self._warn_of_init_fn()
            return  # gathering from memory is faster than processes
        for rank, context in enumerate(self._contexts):
            loader = ProcessLoader(
                self._spec(rank),
                on_ready=wake(rank),
                num_processes=c.loader_workers,
                stage=self._slots(rank) if context.device.type == "cuda" else self._host_stage(1),
                settings=c.loader_processes,
            )
            self._processes[rank] = loader
            loader.start()

    def _warn_of_init_fn(self) -> None:
        if self._options.loader_workers and self._options.loader_processes.init_fn is not None:
            logger.warning(
                "worker_init_fn is not called: tensors in memory are gathered without loader "
                "processes"
            )

    def close(self) -> None:
        """Stop loader processes and release the memory caps. Idempotent."""
        for loader in self._processes.values():
            loader.close()
        self._data = {}
        while self._capped:
            CAPS.release(self._capped.pop(), self._options.vram_fraction)

    def explain(self, rank: int, error: BaseException) -> BaseException:
        """Add the budget to an out-of-memory error; return any other error unchanged."""
        device = self._contexts[rank].device
        if device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError):
            return error
        total = MEMORY.total_bytes(device)
        return explain_out_of_memory(error, device, self._options.vram_fraction, total)

    # Called by the workers.

    def make_loader(self, worker: LoadingWorker, wake: Callable[[], None]) -> Loader:
        """Create the loader of a worker, in its thread.

        Args:
            wake: Wakes the worker; thread-safe.
        """
        rank, device = worker.rank, self._contexts[worker.rank].device
        if device.type == "cuda" and worker.world_size > 1:
            # Averaging needs memory that the first steps do not use: one flat tensor of each
            # dtype on the device, and a pinned one on the host.
            sizes: Counter[torch.dtype] = Counter()
            for tensor in (*worker.model.parameters(), *worker.model.buffers()):
                sizes[tensor.dtype] += tensor_bytes(tensor)
            self._budgets[device].reserve(sizes.total())
            with self._lock:
                self._snapshot_bytes += sum(map(pinned_bytes, sizes.values()))
        if rank in self._processes:
            return self._processes[rank]
        spec, context = self._spec(rank, worker), self._contexts[rank]
        if self._starts_resident(device):
            return ResidentLoader(spec, data=self._data[device], context=context)
        if self._loads_inline(device):
            return InlineLoader(spec, context=context)
        if device.type == "cuda":
            return PrefetchLoader(
                spec,
                on_ready=wake,
                stage=self._slots(rank),
                context=context,
                num_threads=self._gather_threads(),
            )
        return ThreadLoader(spec, on_ready=wake, stage=self._host_stage(None))

    def first_batch(self, worker: LoadingWorker) -> Any:
        """The first batch of epoch 0, on the device of a worker, in its thread."""
        rank = worker.rank
        loader = InlineLoader(self._spec(rank, worker), context=self._contexts[rank])
        loader.submit(EpochPlan(epoch=0, batches=(range(1),)))
        loaded = loader.try_next()
        loader.close()
        return None if loaded is None else loaded.data

    def _spec(self, rank: int, worker: object = None) -> LoaderSpec:
        return LoaderSpec(
            adapter=self._adapter,
            index=self._index,
            device=self._contexts[rank].device,
            seed=self._options.seed,
            rank=rank,
            worker=worker,
        )

    def _gather_threads(self) -> int:
        """Intra-op threads with which one rank gathers batches: its share of the idle cores."""
        if not self._adapter.in_memory or any(c.device.type == "cpu" for c in self._contexts):
            return 1
        return max(1, IntraOpThreads.budget() // len(self._contexts) - 1)

    def _starts_resident(self, device: torch.device) -> bool:
        """True if the data set is copied to the device at the start, with ``resident(True)``."""
        is_local = device.type == "cpu" and self._adapter.in_memory
        return self._options.resident is True and not is_local

    def _loads_inline(self, device: torch.device) -> bool:
        if device.type not in ("cpu", "cuda"):
            return True  # without streams nothing is copied ahead
        # Tensors already on a device are gathered there.
        gathers = self._adapter.in_memory and (device.type == "cpu" or not self._adapter.on_cpu)
        return gathers or self._options.prefetch == 0

    def _host_stage(self, default: int | None) -> Stage:
        """A stage on the host: depth ``prefetch``, else ``default``, else by available memory."""
        depth = default if self._options.prefetch is None else self._options.prefetch
        if depth is not None:
            return Stage(depth)
        return HostStage(len(self._contexts), self._sizing())

    def _sizing(self) -> SizingSchedule:
        # Including the captured step, whose memory is a private pool.
        steps = max(MEASURED_STEPS, WARM_UP_STEPS + 1 if self._options.cuda_graphs else 0)
        return SizingSchedule(steps * self._options.accumulate, SIZING_BATCHES)

    def _slots(self, rank: int) -> SlotStage:
        c, device = self._options, self._contexts[rank].device
        # Reading a whole memory map could take minutes: only with resident(True).
        may_reside = self._adapter.in_memory and c.resident is not False
        return SlotStage(
            self._contexts[rank],
            self._budgets[device],
            rank=rank,
            batch_size=c.batch_size,
            sizing=self._sizing(),
            num_host_workers=len(self._contexts),
            snapshot_bytes=lambda: self._snapshot_bytes,
            depth=c.prefetch,
            data=self._data.get(device) if may_reside else None,
        )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of the user for the data path; documented by :class:`~gpuworker.TrainerBuilder`.

    Attributes:
        vram_fraction: Fraction of a CUDA device's memory that the run may use.
        prefetch: Batches loaded ahead; ``None``: as many as free memory allows.
        resident: Keep the data set on the device; ``None``: if it fits.
        loader_workers: Loader processes of each worker.
    """

    vram_fraction: float = 0.90
    prefetch: int | None = None
    resident: bool | None = None
    loader_workers: int = 0
    loader_processes: LoaderProcesses = field(default_factory=LoaderProcesses)


@dataclass(frozen=True, kw_only=True)
class DataOptions(DataSettings):
    """These settings, and those of the run that concern its loaders."""

    batch_size: int = 1
    seed: int = 0
    accumulate: int = 1
    cuda_graphs: bool = False


class LoadingWorker(Protocol):
    """The attributes of a worker that its loader uses; data sets see it as ``current_worker()``."""

    @property
    def rank(self) -> int:
        """The worker's rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def model(self) -> torch.nn.Module:
        """The worker's replica."""
