"""A worker's device: where work is ordered, how time is told, when values are read.

The worker speaks to its device through one object. On a CPU there are no streams: work
runs in order in the worker's thread, so ordering calls do nothing and a value can be
read as soon as it exists.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from coordinator.messages import Tally


class LogMark(NamedTuple):
    """Where a log stood.

    Attributes:
        losses: Losses kept.
        scalars: Scalars kept.
        step: Number of the batch that comes next.
    """

    losses: int
    scalars: int
    step: int


class ValueLog:
    """Losses and scalars of the steps since the last report, read late.

    ``push`` only keeps a reference; ``harvest`` reads what is ready. On a CPU everything
    is ready. Sums are kept in step order, so that they are reproducible.

    Attributes:
        on_bad_loss: Called by ``harvest`` with the number of the first batch whose loss is
            not finite, counted from 0; ``None``: such losses are summed as they are.
    """

    def __init__(self) -> None:
        self.on_bad_loss: Callable[[int], None] | None = None
        self._step = 0
        self._losses: list[tuple[torch.Tensor, int, int]] = []
        self._scalars: list[tuple[str, float | torch.Tensor, int]] = []

    def push_loss(self, loss: torch.Tensor, num_samples: int) -> None:
        """Keep the mean loss of the next batch; it must be detached."""
        self._losses.append((loss, num_samples, self._step))
        self._step += 1

    def push_scalar(self, name: str, value: float | torch.Tensor, num_samples: int) -> None:
        """Keep a scalar of a batch."""
        self._scalars.append((name, value, num_samples))

    def mark(self) -> LogMark:
        """Where the log stands; good until the next harvest."""
        return LogMark(len(self._losses), len(self._scalars), self._step)

    def since(self, mark: LogMark) -> Sequence[tuple[torch.Tensor, int, int]]:
        """``(loss, samples, number of the batch)`` of what was pushed since."""
        return self._losses[mark.losses :]

    def rewind(self, mark: LogMark) -> None:
        """Forget the values pushed since; their batches stay counted."""
        del self._losses[mark.losses :]
        del self._scalars[mark.scalars :]

    def retract(self, mark: LogMark) -> None:
        """Forget the values pushed since, and their batches: they were not trained."""
        self.rewind(mark)
        self._step = mark.step

    def harvest(self) -> tuple[float, int, tuple[tuple[str, float, int], ...]]:
        """``(loss sum, its samples, scalars)`` of everything that is ready."""
        losses, self._losses = self._losses, []
        scalars, self._scalars = self._scalars, []
        loss_sum, loss_samples = 0.0, 0
        for loss, (_, n, step) in zip(_read([t for t, _, _ in losses]), losses, strict=True):
            if self.on_bad_loss is not None and not math.isfinite(loss):
                self.on_bad_loss(step)
            loss_sum += loss * n
            loss_samples += n
        sums: dict[str, tuple[float, int]] = {}
        for value, (name, _, n) in zip(_read([v for _, v, _ in scalars]), scalars, strict=True):
            total, weight = sums.get(name, (0.0, 0))
            sums[name] = (total + value * n, weight + n)
        return loss_sum, loss_samples, tuple((k, s, w) for k, (s, w) in sums.items())


def _read(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The values as numbers, with one read for all where they are alike."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    alike = {(t.dtype, t.device, t.shape) for t in tensors}
    if len(tensors) < 2 or len(tensors) < len(values) or len(alike) > 1:
        return [float(v) for v in values]
    numbers: list[float] = torch.stack(tensors).double().view(-1).tolist()
    return numbers


class StepMeter:
    """Batches, samples and compute time since the last report.

    Attributes:
        num_skipped: Samples whose effect was dropped because of values that are not finite.
    """

    def __init__(self, log: ValueLog) -> None:
        self.log = log
        self.num_batches = 0
        self.num_samples = 0
        self.num_skipped = 0
        self.compute_s = 0.0

    def add(
        self, num_batches: int, num_samples: int, compute_s: float, *, num_skipped: int = 0
    ) -> None:
        """Count a step, and those of its samples whose effect was dropped."""
        self.num_batches += num_batches
        self.num_skipped += num_skipped
        self.num_samples += num_samples
        self.compute_s += compute_s

    def take(self) -> Tally:
        """Everything since the last call."""
        loss_sum, loss_samples, scalars = self.log.harvest()
        tally = Tally(
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            num_skipped=self.num_skipped,
            compute_s=self.compute_s,
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            scalars=scalars,
        )
        self.num_batches = self.num_samples = self.num_skipped = 0
        self.compute_s = 0.0
        return tally


class DeviceContext(ABC):
    """What a worker needs of its device."""

    device: torch.device

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Context in which the worker's thread lives: device, streams, threads."""

    @abstractmethod
    def comm(self) -> AbstractContextManager[None]:
        """Context for copies and collectives: after all compute, before any that follows."""

    @abstractmethod
    def now(self) -> float:
        """Time for measuring steps, in seconds."""


class CpuDevice(DeviceContext):
    """The CPU twin: one thread, its share of the cores, no streams.

    Args:
        num_threads: Intra-op threads of the worker.
    """

    def __init__(self, num_threads: int) -> None:
        self.device = torch.device("cpu")
        self._num_threads = num_threads

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Give the thread its share of the cores; run backward in it."""
        torch.set_num_threads(self._num_threads)
        # Thread-local: backward of this thread's graphs stays on this thread.
        with torch.autograd.set_multithreading_enabled(False):
            yield

    @contextmanager
    def comm(self) -> Iterator[None]:
        """Nothing to order: the thread does one thing after another."""
        yield

    def now(self) -> float:
        """Wall time; a CPU step is over when its call returns."""
        return time.perf_counter()


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


def open_device(device: torch.device, num_cpu_workers: int) -> DeviceContext:
    """The device object of a worker.

    Args:
        device: Where it trains.
        num_cpu_workers: CPU workers of the run, which share the cores.

    Raises:
        ValueError: A kind of device that this version does not run on.
    """
    if device.type != "cpu":
        raise ValueError(
            f"device {device}: this version trains on CPU devices alone; call .devices(['cpu'])"
        )
    # What the process was told to use, by OMP_NUM_THREADS or torch.set_num_threads, holds
    # for all workers together.
    return CpuDevice(max(1, IntraOpThreads.budget() // max(1, num_cpu_workers)))


class IntraOpThreads:
    """Restores ``torch.set_num_threads`` when the last run of the process ends.

    What a worker sets leaks into every thread created later, so it is put back.
    """

    _lock = threading.Lock()
    _users = 0
    _before = 0

    @classmethod
    def budget(cls) -> int:
        """Intra-op threads that all CPU workers of a run may have together."""
        with cls._lock:
            before = cls._before if cls._users else torch.get_num_threads()
        return min(num_cores(), before)

    @classmethod
    def acquire(cls) -> None:
        """A run starts."""
        with cls._lock:
            if cls._users == 0:
                cls._before = torch.get_num_threads()
            cls._users += 1

    @classmethod
    def release(cls) -> None:
        """A run has ended, from any thread."""
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                torch.set_num_threads(cls._before)
