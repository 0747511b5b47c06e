"""Losses and scalars of steps on a CUDA device, read without holding it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.device.base import Harvest, Sums, ValueLog
from runtime.device.cuda_api import Event
from runtime.device.cuda_timing import EventPool

CAPACITY = 1024
"""Values that travel together."""
NUM_BUFFERS = 8
"""Pinned buffers. They are made beforehand: pinning memory may wait for a collective."""


class _Entry(NamedTuple):
    """One value.

    Attributes:
        name: Of a scalar; ``None``: the loss of a batch.
        value: The value where the CPU knows it, else its tensor until it is sent.
        weight: As the value.
        step: Number of the batch, for a loss.
    """

    name: str | None
    value: float | Tensor | None
    weight: float | Tensor | None
    step: int


class _Flight(NamedTuple):
    """Values on their way to the CPU, in step order."""

    event: Event
    buffer: Tensor
    entries: Sequence[_Entry]


class CudaLog(ValueLog):
    """Keeps the device scalars of each step and brings them to the CPU in one go.

    Each harvest gathers what was pushed since the last one into one tensor, copies that to
    a pinned buffer of a ring and records an event; a buffer is read once its event is
    complete, so a harvest that does not wait may give less than was pushed. Everything runs
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
        """What has arrived, in step order; blocks for the rest only if ``wait``."""
        known = self._known
        entries = [_Entry(None, known(loss), known(n), step) for loss, n, step in self._losses]
        entries += [_Entry(name, known(v), known(n), 0) for name, v, n in self._scalars]
        self._losses, self._scalars = [], []
        sums = Sums(self.on_bad_loss)
        size = CAPACITY // 2 if any(isinstance(e.weight, Tensor) for e in entries) else CAPACITY
        for start in range(0, len(entries), size):
            if not self._free:
                self._land(sums)
            self._launch(entries[start : start + size])
        if wait and self._flights:
            self._api.wait_host(self._flights[-1].event)
        while self._flights and (wait or self._api.is_complete(self._flights[0].event)):
            self._land(sums)
        return sums.harvest()

    def _launch(self, entries: Sequence[_Entry]) -> None:
        tensors = [t for e in entries for t in (e.value, e.weight) if isinstance(t, Tensor)]
        buffer = self._free.pop()
        if tensors:
            self._api.copy(buffer[: len(tensors)], _gather(tensors))
        # The tensors are let go of: what reuses their memory comes behind the copy.
        entries = [_without_tensors(e) for e in entries]
        self._flights.append(_Flight(self._events.record(), buffer, entries))

    def _land(self, sums: Sums) -> None:
        """Add up the oldest flight; waits for it."""
        flight = self._flights.popleft()
        if not self._api.is_complete(flight.event):
            self._api.wait_host(flight.event)
        self._events.give_back(flight.event)
        self._free.append(flight.buffer)
        num_sent = sum((e.value is None) + (e.weight is None) for e in flight.entries)
        sent = iter(flight.buffer[:num_sent].tolist())
        losses, batches = [], []
        for name, value, weight, step in flight.entries:
            number = next(sent) if value is None else float(value)
            n = next(sent) if weight is None else weight
            assert not isinstance(n, Tensor)
            if name is None:
                losses.append(number)
                batches.append((n, step))
            else:
                sums.add_scalar(name, number, n)
        sums.add_losses(losses, batches)

    def _known(self, value: float | Tensor) -> float | Tensor:
        """A value, read if it lies on the CPU."""
        on_cpu = isinstance(value, Tensor) and self._api.device_of(value).type == "cpu"
        return float(value) if on_cpu else value


def _without_tensors(entry: _Entry) -> _Entry:
    if isinstance(entry.value, Tensor):
        entry = entry._replace(value=None)
    return entry._replace(weight=None) if isinstance(entry.weight, Tensor) else entry


def _gather(tensors: Sequence[Tensor]) -> Tensor:
    """All values as one tensor of doubles; one kernel or two where they are alike."""
    if len({(t.dtype, t.shape) for t in tensors}) == 1:
        return torch.stack(list(tensors)).double().view(-1)
    return torch.stack([t.double().reshape(()) for t in tensors])
