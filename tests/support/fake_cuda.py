"""A stand-in for CudaApi: streams that run late, in any permitted order.

Copies through the stand-in, a test's marks and events are queued in their streams, and run
on a wait for an event, on request of a test, or after a few queries of an
event. All other operations on tensors run at once. Pinned memory holds
garbage until a copy has run.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from weakref import WeakSet

import torch

from runtime.device import cuda_api
from runtime.device.cuda_api import CudaApi
from tests.support.tape import Tape

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
GARBAGE = 0x7F
TICK_S = 0.001
"""Time that passes on the device with every event."""


class FakeStream:
    """A queue of work, run in order."""

    def __init__(self, name):
        self.name = name
        self.queue = deque()


class FakeEvent:
    """A mark; ``recorded`` and ``reached`` count its recordings."""

    def __init__(self, number, timing):
        self.number = number
        self.timing = timing
        self.recorded = self.reached = 0
        self.stream = None
        self.time_s = None
        self.num_questions = 0


class Pool:
    """Memory of graphs, freed with the last of them."""

    def __init__(self):
        self.graphs = WeakSet()
        self.was_used = self.is_broken = False


class FakeGraph:
    """Stand-in for a CUDA graph; holds the captured tape."""

    def __init__(self, tape):
        self.tape = tape


class FakeCuda(CudaApi):
    """Records calls and runs streams late.

    Attributes:
        patience: Number of queries after which an event completes; ``None``:
            only a wait completes it.
        allow_default: True if work may be given to the default stream.
        prompt: True if copies to a device run at once, as if a test had run
            their stream.
        log: ``(name, ...)`` of every call, in order.
        done: Names of the marks that have run, in order.
        violations: Forbidden calls that were made.
        graphs: The captures that succeeded, in order.
        capturing: True during a capture.
    """

    def __init__(self, *, patience=2, allow_default=False, prompt=False):
        self.patience = patience
        self.allow_default = allow_default
        self.prompt = prompt
        self.log, self.done, self.violations = [], [], []
        self.streams, self.events = [], []
        self.graphs, self.capturing = [], False
        self.now_s = 0.0
        self._default = FakeStream("default")
        self._pinned = set()
        self._places = {}  # with the tensors, so that no address comes up twice
        self._local = threading.local()
        self._lock = threading.RLock()

    # -- interface of the runtime ------------------------------------------------------

    @contextmanager
    def on_device(self, device):
        before = getattr(self._local, "device", GPU)
        self._local.device = device
        try:
            yield
        finally:
            self._local.device = before

    def make_context_current(self, device):
        self._local.has_context = True

    def current_stream(self, device):
        return self.current

    def new_stream(self, device):
        with self._lock:
            self.streams.append(FakeStream(f"stream {len(self.streams)}"))
            return self.streams[-1]

    @contextmanager
    def stream(self, stream):
        before = self.current
        self._local.stream = stream
        self._note("enter", stream.name)
        try:
            yield
        finally:
            self._note("leave", stream.name)
            self._local.stream = before

    def mark_caller(self, device):
        with self._lock:
            event = self.new_event()
            event.recorded, event.stream = 1, self.current
            self.current.queue.append(("record", event, 1))
            return event

    def new_event(self, *, timing=False):
        with self._lock:
            self.events.append(FakeEvent(len(self.events), timing))
            return self.events[-1]

    def record(self, event, stream=None):
        stream = self._used(stream, "an event")
        with self._lock:
            event.recorded += 1
            event.stream, event.num_questions = stream, 0
            stream.queue.append(("record", event, event.recorded))
            self._note("record", event.number, stream.name)

    def wait_event(self, event, stream=None):
        stream = self._used(stream, "a wait")
        with self._lock:
            stream.queue.append(("wait", event, event.recorded, event.stream))
            self._note("wait", event.number, stream.name)

    def is_complete(self, event):
        with self._lock:
            if event.reached == event.recorded:
                return True
            event.num_questions += 1
            if self.patience is None or event.num_questions <= self.patience:
                return False
            self._reach(event, event.recorded, event.stream)
            return True

    def wait_host(self, event):
        if getattr(self._local, "captures", False):
            self._forbid("the host waits in a capture")
        self._note("wait_host", event.number)
        with self._lock:
            self._reach(event, event.recorded, event.stream)

    def elapsed_s(self, start, end):
        for event in (start, end):
            if event.reached != event.recorded or not event.timing:
                self._forbid(f"event {event.number} was read before it was complete")
        return end.time_s - start.time_s

    def empty_pinned(self, shape, dtype):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_(GARBAGE)
        with self._lock:
            self.place(tensor, CPU)
            self._pinned.add(tensor.untyped_storage().data_ptr())
            self._note("pin", tensor.numel() * tensor.element_size())
        return tensor

    def copy(self, target, source):
        stream = self._used(None, "a copy")
        given = source.clone() if self.is_pinned(source) else None

        def run():
            if given is not None and not _same_bytes(given, source):
                self._forbid("the source of a copy changed before the copy was over")
            target.copy_(source)

        with self._lock:
            stream.queue.append(("run", run))
            self._note("copy", stream.name)
            if self.prompt and self.device_of(target).type != "cpu":
                self.run(stream)

    def host_reader(self):
        if not hasattr(self._local, "has_context"):
            raise RuntimeError("CUDA driver error: invalid device context")
        self._note("load")

        def read(target, source):
            assert self.is_pinned(source)
            stream = self._used(None, "a kernel")
            with self._lock:
                stream.queue.append(("run", lambda: target.copy_(source)))
                if self.prompt:
                    self.run(stream)

        return read

    def generator_state(self, device):
        return torch.tensor([7], dtype=torch.uint8)

    def set_generator_state(self, device, state):
        self._note("generator", state.tolist())

    def new_pool(self):
        return Pool()

    def capture(self, work, *, pool, generators=()):
        with self._lock:
            if self.capturing:
                self._forbid("two captures at once")
            self.capturing = True
        if any(stream.queue for stream in self.streams if stream is self.current):
            self._forbid("a capture before the work in front of it is done")
        if pool.is_broken or (pool.was_used and not pool.graphs):
            self._forbid("a pool is used again that is broken, or has no graph any more")
        pool.was_used = True
        self._local.captures = True
        tape = Tape()
        try:
            with tape:
                work()
        except BaseException:
            pool.is_broken = True
            raise
        finally:
            self.capturing = self._local.captures = False
            self._note("capture", self.current.name)
        self.graphs.append(tape)
        graph = FakeGraph(tape)
        pool.graphs.add(graph)
        return graph

    def replay(self, graph):
        self._used(None, "a graph")
        self._note("replay", self.graphs.index(graph.tape))
        graph.tape.replay()

    def device_of(self, tensor):
        if tensor.device.type != "cpu":
            return tensor.device
        place = self._places.get(tensor.untyped_storage().data_ptr())
        return place[1] if place else getattr(self._local, "device", GPU)

    # -- interface of tests --------------------------------------------------------------

    @property
    def current(self):
        """The current stream of this thread."""
        return getattr(self._local, "stream", self._default)

    def place(self, tensor, device):
        """Let a tensor pose as on a device; others are on the current one. Returns it."""
        self._places[tensor.untyped_storage().data_ptr()] = tensor, device
        return tensor

    def is_pinned(self, tensor):
        """True if a tensor is in pinned memory, from which copies do not block."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def mark(self, name):
        """Enqueue work on the current stream that records its execution."""
        stream = self._used(None, name)
        with self._lock:
            stream.queue.append(("run", lambda: self.done.append(name)))

    def run(self, *streams):
        """Run all work of streams, one after the other, and the work that they wait for."""
        with self._lock:
            for stream in streams:
                while stream.queue:
                    self._step(stream)

    def run_all(self):
        """Run all work of every stream."""
        self.run(*self.streams, self._default)

    def calls(self, what):
        """Calls of one kind."""
        return [entry for entry in self.log if entry[0] == what]

    # -- inside ------------------------------------------------------------------------

    def _reach(self, event, recording, stream):
        while event.reached < recording:
            assert stream.queue, "an event is in no stream"
            self._step(stream)

    def _step(self, stream):
        what, *rest = stream.queue[0]
        if what == "wait":
            self._reach(*rest)
        stream.queue.popleft()
        if what == "record":
            event, recording = rest
            event.reached = max(event.reached, recording)
            self.now_s += TICK_S
            event.time_s = self.now_s
        elif what == "run":
            with torch.no_grad():
                rest[0]()

    def _used(self, stream, what):
        stream = self.current if stream is None else stream
        if stream is self._default and not self.allow_default:
            self._forbid(f"{what} on the default stream")
        return stream

    def _forbid(self, what):
        self.violations.append(what)
        raise AssertionError(what)

    def _note(self, *entry):
        with self._lock:
            self.log.append(entry)


def _same_bytes(one, other):
    """True if two tensors have the same bytes, NaN included."""
    one, other = (t.detach().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def pinned_alive_at_allocation(fake):
    """Numbers of pinned blocks in use at each new allocation from here on."""
    allocate, blocks, alive = fake.empty_pinned, [], []

    def users(tensor):  # of its memory, the stand-in among them, which keeps every tensor
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def empty_pinned(shape, dtype):
        alive.append(sum(users(block) > unused for block, unused in blocks))
        block = allocate(shape, dtype)
        blocks.append((block, users(block)))
        return block.view(-1)

    fake.empty_pinned = empty_pinned
    return alive


@contextmanager
def standing_in(fake):
    """Install the stand-in as the default API."""
    before, cuda_api.API = cuda_api.API, fake
    try:
        yield fake
    finally:
        cuda_api.API = before
