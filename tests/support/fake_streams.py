"""A device with delayed streams for the slots, and a checker of their order.

Work lies in its stream until it is its turn; a seed chooses whose turn it is. A copy reads
its source and writes its target when it runs, as a real one does, and every use that comes
too early or too late is noted as a violation.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from contextlib import contextmanager

import torch

from runtime.data.budget import padded_bytes
from runtime.device.base import Device
from runtime.device.memory import MemoryReading

COMPUTE, COPY = "compute", "copy"
GIB = 2**30


class FakeEvent:
    """Points at the mark of its last recording; complete if there is none."""

    def __init__(self):
        self.mark = None
        self.num_recorded = 0


class Mark:
    def __init__(self):
        self.done = False


class DelayedCopies(Device):
    """Host memory posing as a device's.

    Args:
        seed: Chooses every delay.
        faults: Waits that are left out: ``"free"``, ``"ready"``, ``"host"``.
        step_bytes: What a training step takes at its peak.
        limit_bytes: Where ``empty`` raises out-of-memory.
        total_bytes: The device's memory.

    Attributes:
        violations: What was used out of order.
        num_used: Uses that have run.
        allocated_bytes: Memory given out by ``empty``.
        num_brought: Tensors that went to the device without a slot.
    """

    def __init__(
        self, seed=0, *, faults=(), step_bytes=GIB, limit_bytes=None, total_bytes=16 * GIB
    ):
        self.device = torch.device("cpu")
        self.violations = []
        self.num_used = 0
        self.allocated_bytes = 0
        self.num_brought = 0
        self.num_resets = 0
        self.step_bytes = step_bytes
        self.total_bytes = total_bytes
        self._limit_bytes = limit_bytes
        self._faults = frozenset(faults)
        self._random = random.Random(seed)
        self._bias = self._random.choice((0.02, 0.5, 0.98))  # which stream is the slow one
        self._streams = {COMPUTE: deque(), COPY: deque()}
        self._readers = defaultdict(set)  # uses under way, for each address
        self._num_uses = 0
        self._lock = threading.RLock()
        self._local = threading.local()

    # -- the interface ---------------------------------------------------------

    def new_event(self):
        return FakeEvent()

    @contextmanager
    def copying(self):
        before, self._local.stream = self._stream, COPY
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, event):
        event.mark = mark = Mark()
        event.num_recorded += 1
        self.push(lambda: setattr(mark, "done", True))

    def wait_event(self, event):
        name = "free" if self._stream == COPY else "ready"
        mark = event.mark
        if name not in self._faults and mark is not None:
            self.push(lambda: mark.done)

    def wait_host(self, event):
        if "host" in self._faults:
            return
        while not self.is_complete(event):
            assert any(self._streams.values()), "a host waits for what nothing completes"

    def is_complete(self, event):
        if event.mark is not None and not event.mark.done:
            self.step()  # the device goes on while the host looks
        return event.mark is None or event.mark.done

    def copy(self, target, source):
        given = source.clone()
        before = set(self._readers[target.data_ptr()])

        def run():
            if not torch.equal(given, source):
                self.violations.append("the host wrote to a slot before the copy out of it")
            if before & self._readers[target.data_ptr()]:
                self.violations.append("a device slot was overwritten while in use")
            target.copy_(source)

        self.push(run)

    def empty(self, shape, dtype):
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        allocated = self.allocated_bytes + padded_bytes(tensor.nbytes)
        if self._limit_bytes is not None and allocated > self._limit_bytes:
            raise torch.OutOfMemoryError("planted: no memory")
        self.allocated_bytes = allocated
        return tensor

    def empty_pinned(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def pin(self, tensor):
        return tensor.clone()

    def bring(self, tensor):
        self.num_brought += 1
        return tensor.clone()

    def memory(self):
        active = GIB + self.allocated_bytes
        return MemoryReading(
            total_bytes=self.total_bytes,
            free_bytes=self.total_bytes - active,
            reserved_bytes=active,
            active_bytes=active,
            peak_bytes=active + self.step_bytes,
        )

    def reset_peak(self):
        self.num_resets += 1

    # -- the device at work --------------------------------------------------------

    def use(self, tensors, expected):
        """A forward and a backward pass that read a batch, in the compute stream."""
        number, self._num_uses = self._num_uses, self._num_uses + 1
        for tensor in tensors:
            self._readers[tensor.data_ptr()].add(number)

        def look():
            if not all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True)):
                self.violations.append("a batch was read that was not its own")

        def end():
            look()
            for tensor in tensors:
                self._readers[tensor.data_ptr()].discard(number)
            self.num_used += 1

        self.push(look)
        self.push(end)

    def step(self):
        """Run the next piece of work of some stream; whether there was one."""
        with self._lock:
            first = COMPUTE if self._random.random() < self._bias else COPY
            order = (first, COMPUTE if first == COPY else COPY)
            streams = [self._streams[name] for name in order if self._streams[name]]
            for stream in streams:
                if stream[0]() is not False:  # a wait stays until its event is complete
                    stream.popleft()
                    return True
            assert not streams, "the streams wait for each other"
            return False

    def finish(self):
        """Run all work; fails on a violation."""
        while self.step():
            pass
        assert not self.violations, self.violations[0]

    @property
    def _stream(self):
        return getattr(self._local, "stream", COMPUTE)

    def push(self, work):
        """Give the current stream a piece of work; one that gives False is tried again."""
        with self._lock:
            self._streams[self._stream].append(work)
            for _ in range(self._random.choice((0, 0, 1, 3))):
                self.step()
