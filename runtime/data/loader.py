"""Loaders: a worker's batches in plan order, loaded in its own thread or ahead in another."""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.messages import AfterPlan, EpochPlan
from runtime.core.threads import in_own_context
from runtime.data.batches import (
    PlanQueue,
    Position,
    batch_bytes,
    copy_batch_to_device,
    move_batch,
    pin_batch,
    read_batch,
)
from runtime.data.budget import host_prefetch_depth
from runtime.data.dataset import DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.epoch_order import EpochOrder
from runtime.data.slots import DeviceSlot
from runtime.device.base import Device, available_host_bytes

logger = logging.getLogger(__name__)

# A loader's thread reads a batch and puts it on the stage; the worker takes it. By requesting the
# next batch the worker releases the previous one (:meth:`Stage.advance`).

MEASURED_STEPS = 3
"""Optimizer steps whose memory is measured before the prefetch depth is set."""

SIZING_BATCHES = 64
"""Minimum number of batches between two sizings, since reading memory statistics takes time."""


class Loader(ABC):
    """Yields the batches of one worker's plans. Used by that worker's thread only."""

    def __init__(self, spec: LoaderSpec) -> None:
        self.rank = spec.rank
        self._adapter = spec.adapter
        self._index = spec.index
        self._device = spec.device
        self._seed = spec.seed
        self._worker = spec.worker
        self._moves = spec.device.type != "cpu" or not spec.adapter.on_cpu
        self._positions = PlanQueue(spec.rank)
        self._drop_order()

    @abstractmethod
    def submit(self, plan: EpochPlan) -> None:
        """Load the batches of ``plan`` after those already submitted. Does not block.

        Raises:
            RuntimeError: The loader is closed, or its thread could not be started.
        """

    @abstractmethod
    def try_next(self) -> LoadedBatch | None:
        """Return the next batch in order; ``None`` if it is not ready.

        Does not wait for the data set (except :class:`InlineLoader`, which reads here). Releases
        the previous batch: all work on it must have been issued to the current stream, and its
        memory may be reused.

        Raises the data set's exception in place of the batch that failed, with its traceback.
        Later batches follow unless ``cancel`` is called.
        """

    @property
    def reads_inline(self) -> bool:
        """True if ``try_next`` may block in the data set."""
        return False

    @property
    def reads_ahead(self) -> bool:
        """True if batches are read while the worker trains earlier ones."""
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Drop all batches not yet taken. Does not wait for the data set."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop threads and processes. Idempotent.

        Args:
            timeout_s: Seconds to wait for a thread that is in the data set.

        Returns:
            True if all have ended. A thread stuck in the data set cannot be killed; it is a
            daemon and has no effect if it returns.
        """

    def _read(self, position: Position) -> LoadedBatch:
        indices, num_samples = self._indices(position)
        began = time.perf_counter()
        if self._adapter.in_memory:
            data = self._adapter.load(indices)  # no user code, so no generator is needed
        else:
            data = read_batch(
                self._adapter,
                indices,
                seed=self._seed,
                rank=self.rank,
                position=position,
                worker=self._worker,
            )
        # All ranks wait for the one reader of a stream.
        load_s = 0.0 if self._index.of_stream else time.perf_counter() - began
        return LoadedBatch(data, num_samples, position.epoch, position.batch, load_s=load_s)

    def _drop_order(self) -> None:
        """Drop the cached permutation, which takes 8 bytes a sample."""
        self._epoch = -1
        self._order: torch.Tensor | EpochOrder = torch.empty(0, dtype=torch.int64)

    def _indices(self, position: Position) -> tuple[torch.Tensor, int]:
        """Sample indices of a batch, and their number; caches the epoch's order."""
        epoch, batch, piece = position
        start, stop = piece or self._index.bounds(batch)
        if self._index.of_stream:
            first = epoch * self._index.num_samples
            return torch.arange(first + start, first + stop), stop - start
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._index.order(epoch)
        return self._order[start:stop], stop - start

    def _on_device(self, loaded: LoadedBatch) -> LoadedBatch:
        if self._moves:
            loaded.data = move_batch(loaded.data, self._device)
        return loaded


class InlineLoader(Loader):
    """Loads each batch in ``try_next``.

    Intended for tensors in memory; with any other data set it blocks while the data set reads.
    Batches are copied to a GPU in the current stream from pinned copies, so the host does not
    wait, and a data set may reuse the tensors that it returned.

    Args:
        spec: See :class:`Loader`.
        context: The worker's device context; ``None``: the CPU.
    """

    def __init__(self, spec: LoaderSpec, *, context: Device | None = None) -> None:
        super().__init__(spec)
        self._context = Device() if context is None else context
        self._closed = False

    @property
    def reads_inline(self) -> bool:
        """True for a data set with user code."""
        return not self._adapter.in_memory

    def submit(self, plan: EpochPlan) -> None:
        """Queue the batches of ``plan``."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        self._positions.put(plan)

    def try_next(self) -> LoadedBatch | None:
        """Load the next batch; ``None`` if none is left."""
        position = self._positions.pop()
        if position is None:
            return None
        loaded = self._read(position)
        if self._moves:
            loaded.data = copy_batch_to_device(pin_batch(loaded.data, self._context), self._context)
        return loaded

    def cancel(self) -> None:
        """Drop all batches not yet taken."""
        self._positions.clear()

    def close(self, timeout_s: float = 5.0) -> bool:
        self._closed = True
        self._worker = None  # breaks a reference cycle
        self.cancel()
        return True


class ThreadLoader(Loader):
    """Loads ahead in a daemon thread ``prefetch-{rank}``, started by the first plan.

    Args:
        spec: See :class:`Loader`.
        on_ready: Called in the loader's thread after a batch is ready or has failed; by then
            the batch may already be taken or cancelled.
        stage: Holds finished batches and limits their number; not shared.
    """

    def __init__(self, spec: LoaderSpec, *, on_ready: Callable[[], None], stage: Stage) -> None:
        super().__init__(spec)
        self._on_ready = on_ready
        self._stage = stage
        self._moves = self._moves and not self._stage.copies_to_device
        self._thread: threading.Thread | None = None
        # Guards everything below, and the positions.
        self._changed = threading.Condition()
        self._ready: deque[LoadedBatch | _FailedBatch] = deque()
        self._generation = 0  # number of cancellations; batches of an older one are dropped
        self._depth = self._stage.depth
        self._is_waiting = False  # the worker waits for a batch
        self._closed = False

    @property
    def reads_ahead(self) -> bool:
        """True unless each batch is read on request."""
        return self._stage.reads_ahead

    def submit(self, plan: EpochPlan) -> None:
        """Queue the batches of ``plan`` and wake the thread."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader is closed")
            self._positions.put(plan)
            self._changed.notify_all()
        self._stage.submitted(plan.num_loads(self.rank), more=plan.then is AfterPlan.MORE)
        if self._thread is None:
            thread = threading.Thread(
                target=in_own_context(self._run), name=f"prefetch-{self.rank}", daemon=True
            )
            thread.start()
            self._thread = thread

    def try_next(self) -> LoadedBatch | None:
        """Return the next batch if it is ready, and let the thread continue."""
        self._stage.advance()
        return self._take_ready()

    def _take_ready(self) -> LoadedBatch | None:
        with self._changed:
            self._depth = self._stage.depth
            self._changed.notify_all()
            self._is_waiting = not self._ready
            if self._is_waiting:
                return None
            loaded = self._ready.popleft()
        self._stage.taken()
        if isinstance(loaded, _FailedBatch):
            try:
                raise loaded.error
            finally:
                del loaded  # the traceback refers to this frame: avoid a cycle
        self._stage.take(loaded)
        return self._on_device(loaded)

    def cancel(self) -> None:
        """Drop all batches not yet taken, including one being loaded."""
        with self._changed:
            self._clear()
        self._stage.cancelled()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread, waiting at most ``timeout_s``."""
        with self._changed:
            self._closed = True
            self._clear()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        return self._stage.close(timeout_s)

    def _clear(self) -> None:
        self._generation += 1
        self._positions.clear()
        for loaded in self._ready:
            self._drop(loaded)
        self._ready.clear()
        self._is_waiting = False
        self._changed.notify_all()

    def _drop(self, loaded: LoadedBatch | _FailedBatch) -> None:
        if isinstance(loaded, LoadedBatch):
            self._stage.drop(loaded)

    def _run(self) -> None:
        while (generation := self._wait_for_work()) is not None:
            loaded: LoadedBatch | _FailedBatch | None
            try:
                loaded = self._load_next(generation)
                if loaded is not None and generation == self._generation:
                    self._stage.put(loaded)
            except BaseException as error:  # raised in the worker's thread
                loaded = _FailedBatch(error)
            if loaded is None:
                continue
            with self._changed:
                is_current = generation == self._generation
                if is_current:
                    self._ready.append(loaded)
                else:
                    self._drop(loaded)
            del loaded  # else the batch would stay alive while the thread waits
            if is_current:
                self._on_ready()

    def _wait_for_work(self) -> int | None:
        """Wait until a batch can be loaded; return its generation, or ``None`` once closed."""
        with self._changed:
            while not self._closed:
                # A batch that the worker waits for is loaded even with depth 0.
                if len(self._ready) < max(self._depth, self._is_waiting) and self._has_work():
                    return self._generation
                self._changed.wait()
        return None

    def _has_work(self) -> bool:
        """True if batches are left to load; called with the condition held."""
        return len(self._positions) > 0

    def _load_next(self, generation: int) -> LoadedBatch | None:
        """Load the next batch, in the thread; ``None`` if it has been cancelled."""
        position = self._take(generation)
        return None if position is None else self._read(position)

    def _take(self, generation: int) -> Position | None:
        """The next position; ``None`` if there is none or the generation was cancelled."""
        with self._changed:
            return self._positions.pop() if generation == self._generation else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """Data set, device and seed of one worker's loader.

    Attributes:
        adapter: The data set, shared with the other ranks.
        index: Sample indices of each batch, shared with the other ranks.
        device: Device of the tensors that ``try_next`` returns.
        worker: Worker to which ``current_worker()`` delegates while the data set reads.
    """

    adapter: DatasetAdapter
    index: EpochIndex
    device: torch.device
    seed: int
    rank: int
    worker: object = None


@dataclass(slots=True)
class _FailedBatch:
    """The exception raised for one batch."""

    error: BaseException


class Stage:
    """Limits finished batches to a fixed depth and leaves their data unchanged.

    The first word of each method's docstring is the thread that calls it.

    Args:
        depth: See ``depth``.
        sizing: Schedule of depth changes; not shared.

    Attributes:
        depth: Maximum number of batches that may wait; 0: each is loaded on request. Written
            by the worker's thread.
        copies_to_device: True if ``take`` copies batches to the worker's device.
    """

    copies_to_device = False

    def __init__(self, depth: int, sizing: SizingSchedule | None = None) -> None:
        self.depth = depth
        self._sizing = sizing or SizingSchedule(0)

    @property
    def reads_ahead(self) -> bool:
        """Worker: True unless each batch is read on request, for longer than the first steps."""
        return self.depth > 0

    def submitted(self, num_batches: int, *, more: bool = False) -> None:
        """Worker: a plan was queued; ``more``: others follow it."""
        self._sizing.submitted(num_batches, more=more)

    def advance(self) -> None:
        """Worker: the last batch is released and the next one requested."""

    def taken(self) -> None:
        """Worker: a batch, or the exception in its place, was taken."""
        self._sizing.taken()

    def take(self, loaded: LoadedBatch) -> None:
        """Worker: make ``loaded.data`` usable in the current stream."""

    def cancelled(self) -> None:
        """Worker: all plans were cancelled."""
        self._sizing.cancelled()

    def put(self, loaded: LoadedBatch) -> None:
        """Loader: receive a batch that was read."""

    def drop(self, loaded: LoadedBatch) -> None:
        """Any thread: discard a batch that will not be taken."""

    def close(self, timeout_s: float) -> bool:
        """Worker or run: free all memory, once the loader's thread has ended.

        Returns:
            True if no copy is in progress any more.
        """
        return True


class HostStage(Stage):
    """Batches in host memory, as many as the available memory allows.

    The depth is 1 during the first steps, which measure the model's memory, then up to
    ``MAX_DEPTH`` by the largest batch so far. It is adapted when a plan ends.

    Args:
        num_workers: Workers that load into host memory.
        sizing: Schedule of depth changes.
    """

    def __init__(self, num_workers: int, sizing: SizingSchedule) -> None:
        super().__init__(1, sizing)
        self._num_workers = num_workers
        self._batch_bytes = 0  # written by the loader's thread

    def advance(self) -> None:
        """Worker: adapt the depth if it is due."""
        plan_batches = self._sizing.due()
        if plan_batches is None:
            return
        self.depth = host_prefetch_depth(
            available_host_bytes(), self._num_workers, self._batch_bytes, plan_batches
        )
        logger.debug("%d batches of %d bytes ahead", self.depth, self._batch_bytes)

    def put(self, loaded: LoadedBatch) -> None:
        """Loader: measure the batch."""
        self._batch_bytes = max(self._batch_bytes, batch_bytes(loaded.data))


@dataclass(slots=True)
class LoadedBatch:
    """One batch, on the worker's device.

    Attributes:
        epoch: Epoch it belongs to.
        batch: Its position in the epoch's permutation.
        slot: The reusable memory that holds it, if any.
        load_s: Seconds in which it was read, divided by the number of concurrent readers; 0.0 if
            they serve all ranks, or if it was on the device.
    """

    data: Any
    num_samples: int
    epoch: int
    batch: int
    slot: DeviceSlot | None = None
    load_s: float = 0.0


class SizingSchedule:
    """Times to set the prefetch depth: after the first steps, then at the end of a plan.

    Used by the worker's thread only.

    Args:
        calibration_batches: Batches in the first steps.
        spacing: Minimum number of batches between two sizings.
    """

    def __init__(self, calibration_batches: int, spacing: int = 0) -> None:
        self._num_left = calibration_batches
        self._spacing = spacing
        self._plans: deque[list[int]] = deque()  # batches to read ahead, and those not taken yet
        self._is_due = False
        self._num_since = spacing  # batches since the last sizing

    def submitted(self, num_batches: int, *, more: bool = False) -> None:
        """A plan was queued; ``more``: others follow it."""
        if num_batches:
            self._plans.append([sys.maxsize if more else num_batches, num_batches])

    def taken(self) -> None:
        """A batch was taken."""
        if self._num_left:
            self._num_left -= 1
            self._is_due = self._num_left == 0
        self._num_since += 1
        if self._plans:
            self._plans[0][1] -= 1
            if self._plans[0][1] == 0:
                self._plans.popleft()
                self._is_due = self._num_left == 0

    def cancelled(self) -> None:
        self._plans.clear()
        self._is_due = self._num_left == 0

    def due(self) -> int | None:
        """Batches of the current plan, or without a limit if others follow it, if the depth is to
        be set now; else ``None``.
        """
        if not self._is_due or not self._plans or self._num_since < self._spacing:
            return None
        self._is_due, self._num_since = False, 0
        return self._plans[0][0]
