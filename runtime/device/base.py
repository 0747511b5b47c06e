"""A worker's device: where work is ordered, how time is told, when values are read.

The worker speaks to its device through one object. On a CPU there are no streams: work
runs in order in the worker's thread, so ordering calls do nothing and a value can be
read as soon as it exists.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from coordinator.contents import Payload, Tally
from coordinator.exact_sum import ExactSum, WeightSum
from runtime.core.threads import IntraOpThreads
from runtime.core.weight import Weight, check_weight
from runtime.device.timing import HostTimer, StepTimer


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


Harvest = tuple[float, float, tuple[tuple[str, float, float], ...]]
"""Loss sum, the weight behind it, and ``(name, weighted sum, weight)`` of each scalar.

Sums are :class:`~coordinator.exact_sum.RoundedSum`.
"""


class Sums:
    """Adds up losses and scalars, exactly.

    Args:
        on_bad_loss: See :class:`ValueLog`.
    """

    def __init__(self, on_bad_loss: Callable[[int], None] | None) -> None:
        self._on_bad_loss = on_bad_loss
        self._loss_sum, self._loss_weight = ExactSum(), WeightSum()
        self._scalars: dict[str, tuple[ExactSum, WeightSum]] = {}

    def add_losses(self, losses: Sequence[float], batches: Sequence[tuple[float, int]]) -> None:
        """Add the mean losses of batches, given as weight and number of each.

        Raises:
            ValueError: A weight is negative or not finite.
        """
        for weight, step in batches:
            if not 0 <= weight < math.inf:
                check_weight(weight, f" in step {step}")
        if self._on_bad_loss is not None and not all(map(math.isfinite, losses)):
            for loss, (_, step) in zip(losses, batches, strict=True):
                if not math.isfinite(loss):
                    self._on_bad_loss(step)
        terms = [x * n if n else 0.0 for x, (n, _) in zip(losses, batches, strict=True)]
        self._loss_sum.add_all(terms)
        self._loss_weight.add_all([n for n, _ in batches])

    def add_scalar(self, name: str, value: float, weight: float) -> None:
        """Add a scalar of a batch; of weight 0, whatever it is, it adds nothing."""
        total, weights = self._scalars.setdefault(name, (ExactSum(), WeightSum()))
        if weight:
            total.add(value * weight)
            weights.add(weight)

    def harvest(self) -> Harvest:
        """Everything that was added."""
        scalars = tuple((k, s.value(), w.value()) for k, (s, w) in self._scalars.items())
        return self._loss_sum.value(), self._loss_weight.value(), scalars


class ValueLog:
    """Losses and scalars of the steps since the last report, read late.

    ``push`` only keeps a reference; ``harvest`` reads what is ready. On a CPU everything
    is ready. Sums are exact, so that where they are cut does not show.

    Attributes:
        on_bad_loss: Called by ``harvest`` with the number of the first batch whose loss is
            not finite, counted from 0; ``None``: such losses are summed as they are.
    """

    def __init__(self) -> None:
        self.on_bad_loss: Callable[[int], None] | None = None
        self._step = 0
        self._losses: list[tuple[torch.Tensor, Weight, int]] = []
        self._scalars: list[tuple[str, float | torch.Tensor, Weight]] = []

    def push_loss(self, loss: torch.Tensor, weight: Weight) -> None:
        """Keep the mean loss of the next batch; it must be detached."""
        self._losses.append((loss, weight, self._step))
        self._step += 1

    def push_scalar(self, name: str, value: float | torch.Tensor, weight: Weight) -> None:
        """Keep a scalar of a batch."""
        self._scalars.append((name, value, weight))

    @property
    def num_scalars(self) -> int:
        """Scalars kept."""
        return len(self._scalars)

    def weigh_scalars(self, first: int, weight: Weight) -> None:
        """The scalars from the ``first`` kept on are of a batch whose loss has this weight."""
        self._scalars[first:] = [(name, value, weight) for name, value, _ in self._scalars[first:]]

    def start_at(self, step: int) -> None:
        """Number the next batch."""
        self._step = step

    def mark(self) -> LogMark:
        """Where the log stands; good until the next harvest."""
        return LogMark(len(self._losses), len(self._scalars), self._step)

    def since(self, mark: LogMark) -> Sequence[tuple[torch.Tensor, Weight, int]]:
        """``(loss, weight, number of the batch)`` of what was pushed since."""
        return self._losses[mark.losses :]

    def rewind(self, mark: LogMark) -> None:
        """Forget the values pushed since; their batches stay counted."""
        del self._losses[mark.losses :]
        del self._scalars[mark.scalars :]

    def retract(self, mark: LogMark) -> None:
        """Forget the values pushed since, and their batches: they were not trained."""
        self.rewind(mark)
        self._step = mark.step

    def harvest(self, *, wait: bool = True) -> Harvest:
        """``(loss sum, its weight, scalars)`` of everything that is ready.

        Args:
            wait: Wait for what is still on the device; else it comes with a later harvest.
        """
        losses, self._losses = self._losses, []
        scalars, self._scalars = self._scalars, []
        sums = Sums(self.on_bad_loss)
        weights = _read_weights([n for _, n, _ in losses])
        batches = [(n, step) for n, (_, _, step) in zip(weights, losses, strict=True)]
        sums.add_losses(_read([t for t, _, _ in losses]), batches)
        values, weights = _read([v for _, v, _ in scalars]), _read_weights([n for *_, n in scalars])
        for (name, _, _), value, n in zip(scalars, values, weights, strict=True):
            sums.add_scalar(name, value, n)
        return sums.harvest()


def _read(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The values as numbers, with one read for all where they are alike."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    alike = {(t.dtype, t.device, t.shape) for t in tensors}
    if len(tensors) < 2 or len(tensors) < len(values) or len(alike) > 1:
        return [float(v) for v in values]
    numbers: list[float] = torch.stack(tensors).double().view(-1).tolist()
    return numbers


def _read_weights(weights: Sequence[Weight]) -> Sequence[float]:
    """The weights as numbers; what are numbers stay as they are."""
    if not any(isinstance(w, torch.Tensor) for w in weights):
        return weights  # type: ignore[return-value]
    return [float(w) if isinstance(w, torch.Tensor) else w for w in weights]


class StepMeter:
    """Batches, samples and compute time since the last report.

    Args:
        log: Losses and scalars of the steps.
        timer: Times the steps; ``None``: :meth:`add` is told their time.

    Attributes:
        num_skipped: Samples whose effect was dropped because of values that are not finite.
    """

    def __init__(self, log: ValueLog, timer: StepTimer | None = None) -> None:
        self.log = log
        self.timer = timer
        self.num_batches = 0
        self.num_samples = 0
        self.num_skipped = 0
        self.compute_s = 0.0

    def add(
        self, num_batches: int, num_samples: int, compute_s: float = 0.0, *, num_skipped: int = 0
    ) -> None:
        """Count a step, and those of its samples whose effect was dropped."""
        self.num_batches += num_batches
        self.num_skipped += num_skipped
        self.num_samples += num_samples
        self.compute_s += compute_s

    def take(self, *, wait: bool = True) -> Tally:
        """Everything since the last call.

        Args:
            wait: Wait for losses and times that are still on the device; else they come
                with a later tally.
        """
        compute_s, num_timed = self.compute_s, self.num_batches
        if self.timer is not None:
            compute_s, num_timed = self.timer.take(wait=wait)
        loss_sum, loss_samples, scalars = self.log.harvest(wait=wait)
        tally = Tally(
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            num_skipped=self.num_skipped,
            compute_s=compute_s,
            num_timed=num_timed,
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            scalars=scalars,
        )
        self.num_batches = self.num_samples = self.num_skipped = 0
        self.compute_s = 0.0
        return tally


class Arrival(ABC):
    """Copies that are on their way between a device and the CPU."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all of them have arrived."""

    @abstractmethod
    def wait(self) -> None:
        """Block until they have."""


class DeviceContext(ABC):
    """What a worker needs of its device."""

    device: torch.device
    is_prompt = False
    """Whether what the host gives to the device is done at once, so that values can be read."""
    has_graphs = False
    """Whether steps can be captured here."""

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Context in which the worker's thread lives: device, streams, threads."""

    @abstractmethod
    def comm(self) -> AbstractContextManager[None]:
        """Context for copies and collectives: after all compute, before any that follows."""

    def follow_caller(self) -> None:
        """Let all that this thread has given the device so far come before the worker's work.

        Called before :meth:`activate`, which else follows the stream it finds.
        """
        return

    now = staticmethod(time.perf_counter)
    """Wall time in seconds, for measuring what the host waits for."""

    def new_log(self) -> ValueLog:
        """A log for losses and scalars that live on this device."""
        return ValueLog()

    def new_timer(self) -> StepTimer:
        """A timer for steps on this device."""
        return HostTimer()

    def pin_accumulators(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Tie the accumulation of these parameters' gradients to the compute stream."""
        return

    def finish(self) -> None:
        """Block until all that this worker gave to the device is done. Never in a step."""
        return

    def generator_state(self) -> torch.Tensor | None:
        """State of the process's generator of the device, if it has one beside the CPU's."""
        return None

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Put a state back; nothing where there is no such generator."""
        return

    # -- graphs ---------------------------------------------------------------------

    def pause_point(self) -> None:
        """Between two steps: wait here while another worker captures a graph."""
        return

    def idle(self) -> AbstractContextManager[None]:
        """Context around a wait in which this worker gives the device nothing."""
        return nullcontext()

    def apart(self) -> AbstractContextManager[None]:
        """Context around a function of the user that may take long."""
        return nullcontext()

    def reserve(self) -> None:
        """Ask for :meth:`alone` in the next step."""
        return

    def unreserve(self) -> None:
        """There is no need for it after all."""
        return

    def abandon(self) -> None:
        """The run is over, and its thread may be stuck; from any thread. Idempotent."""
        return

    def alone(self) -> AbstractContextManager[bool]:
        """Context in which no other worker gives its device anything, if that can be had now."""
        return nullcontext(False)

    def capture(self, work: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
        """Record what ``work`` gives to the device, without running it.

        Blocks until what was given before is done. Inside :meth:`alone` only.

        Args:
            work: Called once.
            generator: Which it may draw from, beside the device's own.

        Returns:
            What gives the work to the device again, any number of times.
        """
        raise NotImplementedError(f"{self.device} has no graphs")

    # -- state on its way to the coordinator and back ------------------------------

    def host_twin(self, payload: Payload) -> Payload:
        """CPU memory for a payload of the device; the payload itself if it is there."""
        return payload

    def fetch(self, source: Payload, target: Payload) -> Arrival | None:
        """Start copying a payload of the device to its :meth:`host_twin`.

        Ordered behind everything in :meth:`comm`; what follows the copy there waits for it,
        compute does not. The target may be read, and the source be written outside
        :meth:`comm`, once it has arrived.

        Returns:
            ``None`` where the two are the same.
        """
        return None

    def stage(self, average: Payload, twin: Payload) -> Payload:
        """A payload of the CPU in memory that the device can copy from; blocks for that.

        Args:
            average: Only read, and not any more once this returns.
            twin: A :meth:`host_twin` that nobody else uses now.
        """
        return average

    def arrival(self) -> Arrival | None:
        """When all that :meth:`comm` was given so far has arrived; ``None``: it has."""
        return None


class CpuDevice(DeviceContext):
    """The CPU twin: one thread, its share of the cores, no streams.

    Args:
        num_threads: Intra-op threads of the worker.
    """

    is_prompt = True

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


def open_device(device: torch.device, num_cpu_workers: int) -> DeviceContext:
    """The device object of a worker.

    Args:
        device: Where it trains.
        num_cpu_workers: CPU workers of the run, which share the cores.

    Raises:
        ValueError: A kind of device that this version does not run on.
    """
    if device.type == "cuda":
        from runtime.device.cuda import CudaDevice  # which builds on this module

        return CudaDevice(device)
    if device.type != "cpu":
        raise ValueError(f"device {device} is not supported; pass 'cpu' or 'cuda:N'")
    # What the process was told to use, by OMP_NUM_THREADS or torch.set_num_threads, holds
    # for all workers together.
    return CpuDevice(max(1, IntraOpThreads.budget() // max(1, num_cpu_workers)))
