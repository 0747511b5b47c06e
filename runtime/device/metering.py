"""Metering of a worker's steps: counts and times, and losses that are read late from the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coordinator.metrics import Exact, ReportStats, exact_sum
from runtime.core.loss_weights import Weight, check_read_weight
from runtime.device.cuda_api import Event
from runtime.device.timing import EventPool, StepTimer


class StepMeter:
    """Batches, samples and compute time since the last report.

    Args:
        timer: Times the steps; ``None``: times are passed to :meth:`add`.

    Attributes:
        num_skipped: Samples dropped because of values that are not finite.
        num_empty: Batches of which peers have trained all samples; not timed.
        most_samples: Reported: limit of samples in a micro-batch by the device's memory, if known.
    """

    def __init__(self, log: ValueLog, timer: StepTimer | None = None) -> None:
        self.log = log
        self.timer = timer
        self.num_batches = 0
        self.num_samples = 0
        self.num_skipped = 0
        self.num_empty = 0
        self.most_samples: int | None = None
        self.compute_s = 0.0
        self._load_s, self._num_loads, self._reads_ahead = 0.0, 0, False

    def add_empty(self, num_batches: int) -> None:
        """Count batches without samples."""
        self.num_batches += num_batches
        self.num_empty += num_batches

    def add(
        self, num_batches: int, num_samples: int, compute_s: float = 0.0, *, num_skipped: int = 0
    ) -> None:
        """Count a step, and those of its samples that were dropped."""
        self.num_batches += num_batches
        self.num_skipped += num_skipped
        self.num_samples += num_samples
        self.compute_s += compute_s

    def add_load(self, seconds: float, *, ahead: bool) -> None:
        """Count the time for which a batch was read.

        Args:
            seconds: The time, divided by the number of concurrent readers.
            ahead: Batches are read during the steps before them.
        """
        self._load_s += seconds
        self._num_loads += 1
        self._reads_ahead = ahead

    def take(self, *, wait: bool = True, learning_rate: float | None = None) -> ReportStats:
        """Everything since the last call.

        Args:
            wait: Block for losses and times that are still on the device; if not, a later tally
                has them.
            learning_rate: Reported with the tally.
        """
        compute_s, num_timed = self.compute_s, self.num_batches - self.num_empty
        if self.timer is not None:
            compute_s, num_timed = self.timer.take(wait=wait)
        loss_sum, loss_samples, scalars = self.log.harvest(wait=wait)
        tally = ReportStats(
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            num_skipped=self.num_skipped,
            compute_s=compute_s,
            num_timed=num_timed,
            data_wait_s=self._data_wait_s(compute_s, num_timed),
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            scalars=scalars,
            losses=self._take_losses(),
            learning_rate=learning_rate,
            most_samples=self.most_samples,
        )
        self.num_batches = self.num_samples = self.num_skipped = self.num_empty = 0
        self.compute_s = 0.0
        self._load_s, self._num_loads = 0.0, 0
        return tally

    def _data_wait_s(self, compute_s: float, num_timed: int) -> float | None:
        if not self._num_loads or (self._reads_ahead and not num_timed):
            return None
        batch_s = self._load_s / self._num_loads
        if self._reads_ahead:
            batch_s = max(0.0, batch_s - compute_s / num_timed)
        return batch_s * (self.num_batches - self.num_empty)

    def _take_losses(self) -> tuple[BatchLoss, ...]:
        if self.log.each is None:
            return ()
        return self.log.take_each() + ((0.0, 0.0, None),) * self.num_empty


Harvest = tuple[Exact, Exact, dict[str, tuple[Exact, Exact]]]
"""Loss sum, the sum of its weights, and ``(weighted sum, weight)`` of each scalar."""


class ReadValues:
    """Losses and scalars that were read, and their exact sums.

    Args:
        on_bad_loss: See :class:`ValueLog`.
        each: Receives the single losses as well.
    """

    def __init__(
        self,
        on_bad_loss: Callable[[int], None] | None,
        each: list[BatchLoss] | None = None,
    ) -> None:
        self._on_bad_loss = on_bad_loss
        self._each = each
        self._losses: list[float] = []
        self._weights: list[float] = []
        self._scalars: dict[str, tuple[list[float], list[float]]] = {}

    def add_losses(
        self,
        losses: Sequence[float],
        weights: Sequence[float],
        steps: Sequence[int],
        rates: Sequence[float | None],
    ) -> None:
        """Add the mean losses of batches, each with its weight, number and learning rate.

        Raises:
            ValueError: A weight is negative or not finite.
        """
        if not all(map(math.isfinite, weights)) or min(weights, default=0) < 0:
            for weight, step in zip(weights, steps, strict=True):
                check_read_weight(weight, f" in step {step}")
        if self._on_bad_loss is not None and not all(map(math.isfinite, losses)):
            for loss, step in zip(losses, steps, strict=True):
                if not math.isfinite(loss):
                    self._on_bad_loss(step)
        self._losses += [x * n for x, n in zip(losses, weights, strict=True) if n]
        self._weights += weights
        if self._each is not None:
            self._each += zip(losses, weights, rates, strict=True)

    def add_scalar(self, name: str, value: float, weight: float) -> None:
        """Add a scalar of a batch; with weight 0 it adds nothing, NaN included."""
        values, weights = self._scalars.setdefault(name, ([], []))
        if weight:
            values.append(value * weight)
            weights.append(weight)

    def harvest(self) -> Harvest:
        scalars = {k: (exact_sum(x), exact_sum(n)) for k, (x, n) in self._scalars.items()}
        return exact_sum(self._losses), exact_sum(self._weights), scalars


BatchLoss = tuple[float, float, float | None]
"""Mean loss of a batch, its weight, and the learning rate of its step, if known."""
_NOTHING = torch.zeros(())


class StepValues:
    """Losses and scalars of one optimizer step, which :meth:`ValueLog.keep` takes once it is made.

    Args:
        log: Has the learning rates.
        number: Number of its first batch.

    Attributes:
        losses: Mean loss, weight and learning rate of each batch; ``None``: it has no loss.
        further: Losses of a further step on a batch, which do not count.
        scalars: Name, value and weight of each scalar.
        number: See above.
    """

    __slots__ = ("_first", "_log", "further", "losses", "number", "scalars")

    def __init__(self, log: ValueLog, number: int) -> None:
        self._log = log
        self.number = number
        self.losses: list[tuple[Tensor, Weight, float | None] | None] = []
        self.further: list[Tensor] = []
        self.scalars: list[tuple[str, float | Tensor, Weight]] = []
        self._first = 0

    def begin_batch(self) -> None:
        """Begin the next batch; without one, losses are those of a further step."""
        self.losses.append(None)
        self._first = len(self.scalars)

    def push_loss(self, loss: Tensor, weight: Weight) -> None:
        """Add the mean loss of the batch, detached; to an earlier loss of the same batch."""
        if not self.losses:
            self.further.append(loss)
            return
        rate = None if self._log.each is None else self._log.rate()
        earlier = self.losses[-1]
        if earlier is not None:
            loss, weight = earlier[0] + loss, earlier[1]
        self.losses[-1] = loss, weight, rate

    def push_scalar(self, name: str, value: float | Tensor, weight: Weight) -> None:
        self.scalars.append((name, value, weight))

    def weigh_scalars(self, weight: Weight) -> None:
        """Set the weight of the scalars of the batch: that of its loss."""
        first = self._first
        self.scalars[first:] = [(name, value, weight) for name, value, _ in self.scalars[first:]]

    def keep(self, values: StepValues) -> None:
        self.losses += values.losses
        self.scalars += values.scalars

    def drop(self) -> None:
        """Drop the values of a step that is not made; its batches stay counted."""
        self.losses = [None if each is None else (_NOTHING, 0, each[2]) for each in self.losses]
        self.scalars.clear()


class ValueLog:
    """Losses and scalars of the steps since the last report, read late.

    ``push`` only keeps a reference; ``harvest`` reads the values that are ready, on a CPU all of
    them. Sums are exact, so that they do not depend on the boundaries between reports.

    Attributes:
        on_bad_loss: Called by ``harvest`` with the number of the first batch whose loss is
            not finite, counted from 0; ``None``: such losses are summed as they are.
        each: Losses that ``harvest`` has read, until :meth:`take_each`; ``None``: they are not
            kept.
        rate: The learning rate of the batch whose loss is pushed, with ``each``.
        number: Number of the next batch.
    """

    def __init__(self) -> None:
        self.on_bad_loss: Callable[[int], None] | None = None
        self.each: list[BatchLoss] | None = None
        self.rate: Callable[[], float | None] = lambda: None
        self.number = 0
        self._losses: list[tuple[torch.Tensor, Weight, int, float | None]] = []
        self._scalars: list[tuple[str, float | torch.Tensor, Weight]] = []

    def push_loss(self, loss: torch.Tensor, weight: Weight, rate: float | None = None) -> None:
        """Keep the mean loss of the next batch; it must be detached."""
        self._losses.append((loss, weight, self.number, rate))
        self.number += 1

    def push_scalar(self, name: str, value: float | torch.Tensor, weight: Weight) -> None:
        """Keep a scalar that belongs to no step in progress."""
        self._scalars.append((name, value, weight))

    def keep(self, values: StepValues) -> None:
        """Keep the values of a step that was made."""
        for loss in values.losses:
            if loss is not None:
                self.push_loss(*loss)
            elif self.each is None:
                self.number += 1
            else:
                self.push_loss(_NOTHING, 0)
        self._scalars += values.scalars

    def take_each(self) -> tuple[BatchLoss, ...]:
        """Every loss read since the last call; with weight 0 where it was dropped."""
        if self.each is None:
            return ()
        found, self.each = tuple(self.each), []
        return found

    def harvest(self, *, wait: bool = True) -> Harvest:
        """``(loss sum, its weight, scalars)`` of all values that are ready.

        Args:
            wait: Block for values that are still on the device; if not, a later harvest has them.
        """
        losses, self._losses = self._losses, []
        scalars, self._scalars = self._scalars, []
        found = ReadValues(self.on_bad_loss, self.each)
        if losses:
            tensors, sizes, steps, rates = zip(*losses, strict=True)
            found.add_losses(_read(tensors), _read_weights(sizes), steps, rates)
        values, weights = _read([v for _, v, _ in scalars]), _read_weights([n for *_, n in scalars])
        for (name, _, _), value, n in zip(scalars, values, weights, strict=True):
            found.add_scalar(name, value, n)
        return found.harvest()


def _read(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The values as numbers, in one copy to the host where their kinds are equal."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    alike = {(t.dtype, t.device, t.shape) for t in tensors}
    if len(tensors) < 2 or len(tensors) < len(values) or len(alike) > 1:
        return [float(v) for v in values]
    numbers: list[float] = torch.stack(tensors).cpu().double().view(-1).tolist()
    return numbers


def _read_weights(weights: Sequence[Weight]) -> Sequence[float]:
    if set(map(type, weights)) <= {int, float}:
        return weights  # type: ignore[return-value]
    return [float(w) if isinstance(w, torch.Tensor) else w for w in weights]


CAPACITY = 1024
"""Values in one copy to the host."""
NUM_BUFFERS = 8
"""Pinned buffers, allocated beforehand: pinning memory may wait for a collective."""


class _Entry(NamedTuple):
    """One value.

    Attributes:
        name: Name of a scalar; ``None``: the loss of a batch.
        value: The value if it is on the CPU; if not, its tensor until it is sent.
        weight: As the value.
        step: Number of the batch, for a loss.
        rate: Its learning rate, if known.
    """

    name: str | None
    value: float | Tensor | None
    weight: float | Tensor | None
    step: int = 0
    rate: float | None = None


class _Flight(NamedTuple):
    """A pending copy of values to the CPU, in step order."""

    event: Event
    buffer: Tensor
    entries: Sequence[_Entry]


class CudaLog(ValueLog):
    """Keeps the device scalars of each step and copies them to the CPU together.

    Each harvest gathers the values pushed since the last one into one tensor, copies that to
    a pinned buffer of a ring and records an event; a buffer is read once its event is
    complete, so a harvest that does not wait may return less than was pushed. Everything runs
    on the stream that is current in the worker's thread, the compute stream. A tensor that
    is pushed must not be written to again before the next harvest.
    """

    def __init__(self, events: EventPool) -> None:
        super().__init__()
        self._api = events.api
        self._events = events
        self._flights: deque[_Flight] = deque()
        self._free = [
            self._api.empty_pinned((CAPACITY,), torch.float64) for _ in range(NUM_BUFFERS)
        ]

    def harvest(self, *, wait: bool = True) -> Harvest:
        """Sums of the values on the CPU, in step order; blocks for the rest if ``wait``."""
        known = self._known
        entries = [_Entry(None, known(x), known(n), at, lr) for x, n, at, lr in self._losses]
        entries += [_Entry(name, known(v), known(n)) for name, v, n in self._scalars]
        self._losses, self._scalars = [], []
        found = ReadValues(self.on_bad_loss, self.each)
        size = CAPACITY // 2 if any(isinstance(e.weight, Tensor) for e in entries) else CAPACITY
        for start in range(0, len(entries), size):
            if not self._free:
                self._land(found)
            self._launch(entries[start : start + size])
        if wait and self._flights:
            self._api.wait_host(self._flights[-1].event)
        while self._flights and (wait or self._api.is_complete(self._flights[0].event)):
            self._land(found)
        return found.harvest()

    def _launch(self, entries: Sequence[_Entry]) -> None:
        tensors = [t for e in entries for t in (e.value, e.weight) if isinstance(t, Tensor)]
        buffer = self._free.pop()
        if tensors:
            self._api.copy(buffer[: len(tensors)], _gather(tensors))
        # The tensors are released: reuse of their memory is ordered behind the copy.
        entries = [_without_tensors(e) for e in entries]
        self._flights.append(_Flight(self._events.record(), buffer, entries))

    def _land(self, found: ReadValues) -> None:
        """Add up the oldest copy; blocks for it."""
        flight = self._flights.popleft()
        if not self._api.is_complete(flight.event):
            self._api.wait_host(flight.event)
        self._events.give_back(flight.event)
        self._free.append(flight.buffer)
        num_sent = sum((e.value is None) + (e.weight is None) for e in flight.entries)
        sent = iter(flight.buffer[:num_sent].tolist())
        losses, weights, steps, rates = [], [], [], []
        for name, value, weight, step, rate in flight.entries:
            number = next(sent) if value is None else float(value)
            n = next(sent) if weight is None else weight
            assert not isinstance(n, Tensor)
            if name is None:
                losses.append(number)
                weights.append(n)
                steps.append(step)
                rates.append(rate)
            else:
                found.add_scalar(name, number, n)
        found.add_losses(losses, weights, steps, rates)

    def _known(self, value: float | Tensor) -> float | Tensor:
        """A value, read if it is on the CPU."""
        on_cpu = isinstance(value, Tensor) and self._api.device_of(value).type == "cpu"
        return float(value) if on_cpu else value


def _without_tensors(entry: _Entry) -> _Entry:
    if isinstance(entry.value, Tensor):
        entry = entry._replace(value=None)
    return entry._replace(weight=None) if isinstance(entry.weight, Tensor) else entry


def _gather(tensors: Sequence[Tensor]) -> Tensor:
    """All values as one tensor of doubles; in two kernels at most where their kinds are equal."""
    if len({(t.dtype, t.shape) for t in tensors}) == 1:
        return torch.stack(list(tensors)).double().view(-1)
    return torch.stack([t.double().reshape(()) for t in tensors])
