"""Loaders: the batches of a worker's plans, in order, in its own thread or one beside it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from coordinator.messages import EpochPlan
from runtime.data.batches import (
    PlanQueue,
    Position,
    bring_batch,
    move_batch,
    pin_batch,
    read_batch,
)
from runtime.data.dataset import DatasetAdapter
from runtime.data.epoch_index import EpochIndex
from runtime.data.stage import LoadedBatch, Stage
from runtime.device.base import Device


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

    def __init__(self, spec: LoaderSpec, *, copies: Device | None = None) -> None:
        super().__init__(spec)
        self._copies = Device() if copies is None else copies
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
            loaded.data = bring_batch(pin_batch(loaded.data, self._copies), self._copies)
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
        self._moves = self._moves and not self._stage.brings
        self._thread: threading.Thread | None = None
        # The condition guards everything below, and the positions.
        self._changed = threading.Condition()
        self._ready: deque[LoadedBatch | _Failure] = deque()
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
        if isinstance(loaded, _Failure):
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

    def _drop(self, loaded: LoadedBatch | _Failure) -> None:
        if isinstance(loaded, LoadedBatch):
            self._stage.drop(loaded)

    def _run(self) -> None:
        while (generation := self._wait_for_work()) is not None:
            loaded: LoadedBatch | _Failure | None
            try:
                loaded = self._load_next(generation)
                if loaded is not None and generation == self._generation:
                    self._stage.put(loaded)
            except BaseException as error:  # the worker raises it, whatever it is
                loaded = _Failure(error)
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
class _Failure:
    """Stands in the place of a batch that could not be loaded."""

    error: BaseException
