"""Loaders: the batches of a worker's plans, in order, in its own thread or one beside it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.messages import EpochPlan
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
from runtime.data.slots import DeviceSlot
from runtime.device.base import Device, available_host_bytes

logger = logging.getLogger(__name__)

# A loader's thread reads a batch and *puts* it on the stage; the worker *takes* it. When the
# worker asks for the next one, the batch before is used up (:meth:`Stage.advance`).

MEASURED_STEPS = 3
"""Optimizer steps whose memory is watched before batches are loaded ahead by measure."""

SIZING_BATCHES = 64
"""Batches between two sizings of a run at least: asking for the memory costs part of a step."""


class Loader(ABC):
    """Gives one worker the batches of its plans. Used by that worker's thread alone.

    Args:
        spec: What it reads.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        self.rank = spec.rank
        self._adapter = spec.adapter
        self._index = spec.index
        self._device = spec.device
        self._seed = spec.seed
        self._worker = spec.worker
        self._moves = spec.device.type != "cpu" or not spec.adapter.on_cpu
        self._positions = PlanQueue()
        self._forget_order()

    @abstractmethod
    def submit(self, plan: EpochPlan) -> None:
        """Load the batches of ``plan`` after those already submitted. Does not block.

        Raises:
            RuntimeError: The loader is closed, or its thread could not be started.
        """

    @abstractmethod
    def try_next(self) -> LoadedBatch | None:
        """Take the next batch in order; ``None`` if it is not there yet.

        Never waits for the data set (:class:`InlineLoader` excepted, which reads here).
        With this call the batch taken before is used up: all work on it has been issued to
        the current stream, and its memory may be written to again.

        Whatever the data set raised for a batch is raised in its place, with its
        traceback; the batches after it follow, and ``cancel`` forgets them.
        """

    @property
    def reads_inline(self) -> bool:
        """Whether ``try_next`` may be long in the data set."""
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Forget all that was submitted and not taken. Never waits for the data set."""

    @abstractmethod
    def close(self, timeout_s: float = 5.0) -> bool:
        """End threads and processes. Idempotent.

        Args:
            timeout_s: How long to wait for a thread that is in the data set.

        Returns:
            Whether everything has ended. A thread stuck in the data set cannot be
            killed; it is a daemon and touches nothing if it comes back.
        """

    def _read(self, position: Position) -> LoadedBatch:
        indices, num_samples = self._indices(position)
        if self._adapter.in_memory:
            data = self._adapter.load(indices)  # nobody draws, so no generator is made
        else:
            data = read_batch(
                self._adapter,
                indices,
                seed=self._seed,
                rank=self.rank,
                position=position,
                worker=self._worker,
            )
        return LoadedBatch(data, num_samples, position.epoch, position.batch)

    def _forget_order(self) -> None:
        """Keep no epoch's permutation, which takes 8 bytes a sample."""
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def _indices(self, position: Position) -> tuple[torch.Tensor, int]:
        """The samples of a batch, and their number; asks for an epoch's order once."""
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
    """Loads in ``try_next``, which therefore always has the next batch.

    Meant for tensors in memory; with any other data set it blocks while that reads. Batches
    go to a GPU in the current stream, from pinned copies of their own: the host waits for no
    copy, and a data set may write to what it gave.

    Args:
        spec: What it reads.
        copies: The worker's way to its device; ``None``: that is the CPU.
    """

    def __init__(self, spec: LoaderSpec, *, context: Device | None = None) -> None:
        super().__init__(spec)
        self._context = Device() if context is None else context
        self._closed = False

    @property
    def reads_inline(self) -> bool:
        """True for a data set of the user's, which may take its time or raise."""
        return not self._adapter.in_memory

    def submit(self, plan: EpochPlan) -> None:
        """Append the batches of ``plan``."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        self._positions.put(plan)

    def try_next(self) -> LoadedBatch | None:
        """Load the next batch; ``None`` if nothing is left."""
        position = self._positions.pop()
        if position is None:
            return None
        loaded = self._read(position)
        if self._moves:
            loaded.data = copy_batch_to_device(pin_batch(loaded.data, self._context), self._context)
        return loaded

    def cancel(self) -> None:
        """Forget all that was submitted and not taken."""
        self._positions.clear()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Forget everything; there is nothing to end."""
        self._closed = True
        self._worker = None  # which holds this loader
        self.cancel()
        return True


class ThreadLoader(Loader):
    """Loads ahead in a daemon thread ``prefetch-{rank}``, started by the first plan.

    Args:
        spec: What it reads.
        on_ready: Called in the loader's thread after each batch that became ready or
            failed. A call may be late: by then the batch can be taken or cancelled.
        stage: Carries batches to the device and says how many may wait; not shared.
    """

    def __init__(self, spec: LoaderSpec, *, on_ready: Callable[[], None], stage: Stage) -> None:
        super().__init__(spec)
        self._on_ready = on_ready
        self._stage = stage
        self._moves = self._moves and not self._stage.copies_to_device
        self._thread: threading.Thread | None = None
        # The condition guards everything below, and the positions.
        self._changed = threading.Condition()
        self._ready: deque[LoadedBatch | _FailedBatch] = deque()
        self._generation = 0  # counts cancellations: what an older one loads is discarded
        self._depth = self._stage.depth
        self._asked = False  # the worker waits for a batch
        self._closed = False

    def submit(self, plan: EpochPlan) -> None:
        """Append the batches of ``plan`` and wake the thread."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader is closed")
            self._positions.put(plan)
            self._changed.notify_all()
        self._stage.submitted(plan.num_loads)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"prefetch-{self.rank}", daemon=True)
            thread.start()
            self._thread = thread

    def try_next(self) -> LoadedBatch | None:
        """Take the next batch if it is ready, and let the thread go on."""
        self._stage.advance()
        return self._take_ready()

    def _take_ready(self) -> LoadedBatch | None:
        with self._changed:
            self._depth = self._stage.depth
            self._changed.notify_all()
            self._asked = not self._ready
            if self._asked:
                return None
            loaded = self._ready.popleft()
        self._stage.taken()
        if isinstance(loaded, _FailedBatch):
            try:
                raise loaded.error
            finally:
                del loaded  # the traceback refers to this frame: no cycle
        self._stage.take(loaded)
        return self._on_device(loaded)

    def cancel(self) -> None:
        """Forget all that was submitted and not taken, a batch in the making included."""
        with self._changed:
            self._forget()
        self._stage.cancelled()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread, waiting for at most ``timeout_s``."""
        with self._changed:
            self._closed = True
            self._forget()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        return self._stage.close(timeout_s)

    def _forget(self) -> None:
        self._generation += 1
        self._positions.clear()
        for loaded in self._ready:
            self._drop(loaded)
        self._ready.clear()
        self._asked = False
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
            except BaseException as error:  # the worker raises it, whatever it is
                loaded = _FailedBatch(error)
            if loaded is None:
                continue
            with self._changed:
                is_wanted = generation == self._generation
                if is_wanted:
                    self._ready.append(loaded)
                else:
                    self._drop(loaded)
            del loaded  # or a batch would live on while the thread waits
            if is_wanted:
                self._on_ready()

    def _wait_for_work(self) -> int | None:
        """Wait until a batch can be loaded; its generation, or ``None`` once closed."""
        with self._changed:
            while not self._closed:
                # One that is asked for is loaded even where none may be ahead.
                if len(self._ready) < max(self._depth, self._asked) and self._has_work():
                    return self._generation
                self._changed.wait()
        return None

    def _has_work(self) -> bool:
        """Whether something is left to load; called with the condition held."""
        return len(self._positions) > 0

    def _load_next(self, generation: int) -> LoadedBatch | None:
        """Load the next batch, in the thread; ``None`` if it was cancelled meanwhile."""
        position = self._take(generation)
        return None if position is None else self._read(position)

    def _take(self, generation: int) -> Position | None:
        """The next position, unless there is none or the generation is over."""
        with self._changed:
            return self._positions.pop() if generation == self._generation else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """What one worker's loader reads, and where to.

    Attributes:
        adapter: The data set, shared with the other ranks.
        index: Which samples a batch holds, shared with the other ranks.
        device: Where ``try_next`` puts the tensors.
        seed: Seed of the run.
        rank: The worker's rank.
        worker: What ``current_worker()`` delegates to while the data set reads.
    """

    adapter: DatasetAdapter
    index: EpochIndex
    device: torch.device
    seed: int
    rank: int
    worker: object = None


@dataclass(slots=True)
class _FailedBatch:
    """Stands in the place of a batch that could not be loaded."""

    error: BaseException


class Stage:
    """Carries nothing and keeps one depth: batches wait as the data set gave them.

    The thread that a method belongs to stands in its first word.

    Args:
        depth: See ``depth``.
        pace: Says when a depth is sized that does not stay; not shared.

    Attributes:
        depth: How many batches may wait; 0: each is loaded when it is asked for. Written
            by the worker's thread.
        brings: Whether ``take`` puts batches on the worker's device.
    """

    copies_to_device = False

    def __init__(self, depth: int, sizing: SizingSchedule | None = None) -> None:
        self.depth = depth
        self._sizing = sizing or SizingSchedule(0)

    def submitted(self, num_batches: int) -> None:
        """Worker: a plan follows those before it."""
        self._sizing.submitted(num_batches)

    def advance(self) -> None:
        """Worker: the batch taken last is used up, and the next one is asked for."""

    def taken(self) -> None:
        """Worker: a batch, or the error in its place, was taken."""
        self._sizing.taken()

    def take(self, loaded: LoadedBatch) -> None:
        """Worker: make ``loaded.data`` ready for use in the current stream."""

    def cancelled(self) -> None:
        """Worker: all that was submitted is forgotten."""
        self._sizing.cancelled()

    def put(self, loaded: LoadedBatch) -> None:
        """Loader: take over a batch that was read."""

    def drop(self, loaded: LoadedBatch) -> None:
        """Any thread: a batch that was put will not be taken."""

    def close(self, timeout_s: float) -> bool:
        """Worker or run: the loader's thread has ended; let go of all memory.

        Returns:
            Whether nothing is on its way any more.
        """
        return True


class HostStage(Stage):
    """Batches on the host, as many ahead as its available memory allows.

    One until the first steps have shown what the model takes, then up to ``MAX_DEPTH``,
    by the largest batch so far; sized anew where a plan ends.

    Args:
        num_workers: Workers that load into this memory.
        pace: Says when.
    """

    def __init__(self, num_workers: int, sizing: SizingSchedule) -> None:
        super().__init__(1, sizing)
        self._num_workers = num_workers
        self._batch_bytes = 0  # written by the loader's thread

    def advance(self) -> None:
        """Worker: size the depth where it is due."""
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
        data: What the data set gave.
        num_samples: Samples in it.
        epoch: Epoch it belongs to.
        batch: Its position in the epoch's permutation.
        slot: The memory that it lies in, if that is used again for a later batch.
    """

    data: Any
    num_samples: int
    epoch: int
    batch: int
    slot: DeviceSlot | None = None


class SizingSchedule:
    """Says when a depth is to be sized: after the first steps, then where a plan ends.

    Used by the worker's thread alone.

    Args:
        calibration_batches: Batches in the first steps.
        spacing: Batches between two sizings at least.
    """

    def __init__(self, calibration_batches: int, spacing: int = 0) -> None:
        self._num_left = calibration_batches
        self._spacing = spacing
        self._plans: deque[list[int]] = deque()  # size, and batches not taken yet
        self._is_due = False
        self._num_since = spacing  # batches since the last sizing

    def submitted(self, num_batches: int) -> None:
        """A plan follows those before it."""
        if num_batches:
            self._plans.append([num_batches, num_batches])

    def taken(self) -> None:
        """The worker has a batch."""
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
        """All plans are forgotten."""
        self._plans.clear()
        self._is_due = self._num_left == 0

    def due(self) -> int | None:
        """The batches of the plan in progress where the depth is to be sized now, once."""
        if not self._is_due or not self._plans or self._num_since < self._spacing:
            return None
        self._is_due, self._num_since = False, 0
        return self._plans[0][0]
