"""A simulated device with delayed streams, and a checker of the order of slot uses.

Operations are queued in their stream; a seed chooses the stream that runs next. A copy reads its
source and writes its target when it runs, and every use out of order is recorded as a violation.
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
    """Refers to the mark of its last recording; complete if there is none."""

    def __init__(self):
        self.mark = None
        self.num_recorded = 0


class Mark:
    def __init__(self):
        self.done = False


class DelayedCopies(Device):
    """Host memory simulating a device with streams.

    Args:
        seed: Chooses every delay.
        faults: Waits to omit: ``"free"``, ``"ready"``, ``"host"``.
        step_bytes: Peak memory of a training step.
        limit_bytes: Allocated memory beyond which ``empty`` raises out-of-memory.
        total_bytes: The device's memory.

    Attributes:
        violations: Uses out of order.
        num_used: Uses that have run.
        allocated_bytes: Memory allocated by ``empty``.
        num_brought: Tensors copied to the device without a slot.
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
        self._bias = self._random.choice((0.02, 0.5, 0.98))  # chooses the slow stream
        self._streams = {COMPUTE: deque(), COPY: deque()}
        self._readers = defaultdict(set)  # uses in progress, by address
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
            self.step()  # the device progresses while the host polls
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

    def to_device(self, tensor):
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

    # -- execution -----------------------------------------------------------------

    def use(self, tensors, expected):
        """Issue a forward and a backward pass that read a batch, in the compute stream."""
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
        """Run the next operation of some stream; False if there is none."""
        with self._lock:
            first = COMPUTE if self._random.random() < self._bias else COPY
            order = (first, COMPUTE if first == COPY else COPY)
            streams = [self._streams[name] for name in order if self._streams[name]]
            for stream in streams:
                if stream[0]() is not False:  # a wait is retried until its event is complete
                    stream.popleft()
                    return True
            assert not streams, "the streams wait for each other"
            return False

    def finish(self):
        """Run all operations; fails on a violation."""
        while self.step():
            pass
        assert not self.violations, self.violations[0]

    @property
    def _stream(self):
        return getattr(self._local, "stream", COMPUTE)

    def push(self, work):
        """Enqueue an operation in the current stream; one that returns False is retried."""
        with self._lock:
            self._streams[self._stream].append(work)
            for _ in range(self._random.choice((0, 0, 1, 3))):
                self.step()
