"""A worker's CUDA device: its streams, their order, and copies to and from the CPU.

Training runs on the compute stream, everything that moves state on the comm stream, batches
on the copy stream. Nothing runs on the default stream, and nothing waits for the whole
device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from coordinator.messages import Payload
from runtime.core.capabilities import DeviceCapabilities
from runtime.core.threads import IntraOpThreads
from runtime.device import cuda_api
from runtime.device import memory as cuda_memory
from runtime.device.accelerator import AcceleratorDevice
from runtime.device.base import Device, PendingCopy
from runtime.device.capture_gate import GATE, CaptureGate
from runtime.device.cuda_api import CudaApi, Event, Stream
from runtime.device.launch_load import LaunchLoad
from runtime.device.memory import CudaMemory, MemoryReading, StepMemory
from runtime.device.metering import CudaLog, ValueLog
from runtime.device.timing import CudaTimer, EventPool, StepTimer

MAX_RUN_AHEAD = 3
"""Steps that may be outstanding on a device."""
_OUTSIDE = (
    "the streams of {} exist only inside its activate(): build and use the worker in "
    "'with device.activate():'"
)


class CudaDevice(Device):
    """One worker's part of a GPU. Created in any thread, used in one, inside :meth:`activate`.

    Args:
        device: The GPU; several workers may share it.
        max_run_ahead: Steps that may be outstanding on it.
        api: Calls to CUDA; ``None``: the real ones.
        gate: Admits captures; ``None``: the gate of the process.
        memory: Queries of device memory; ``None``: the real ones.

    Attributes:
        copy_stream: Stream of copies of batches to the device; its users order it.
    """

    has_graphs = True
    is_prompt = False

    def __init__(
        self,
        device: torch.device,
        *,
        max_run_ahead: int = MAX_RUN_AHEAD,
        api: CudaApi | None = None,
        gate: CaptureGate | None = None,
        memory: CudaMemory | None = None,
    ) -> None:
        self.device = device
        self._memory = cuda_memory.MEMORY if memory is None else memory
        self.api = cuda_api.API if api is None else api
        self._max_run_ahead = max_run_ahead
        self._streams: tuple[Stream, Stream, Stream] | None = None
        self._before: Event | None = None
        self._events = EventPool(self.api)
        self._accumulators: list[Any] = []
        self._gate = GATE if gate is None else gate
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()  # those in the pool

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the device and a compute stream of its own current; run backward here.

        On exit, waits for all work that the worker has issued, so that other threads may use its
        tensors; not if it leaves by an exception.
        """
        with self.api.on_device(self.device):
            streams = STREAMS.take(self.api, self.device)
            self._streams = streams
            # Copies of the user's data and weights to the device may be pending.
            before = self._before or self.api.mark_caller(self.device)
            for stream in streams:
                self.api.wait_event(before, stream)
            self._gate.join(self, self.device)
            try:
                # Thread-local: backward of this thread's graphs stays on this thread.
                with self.api.stream(streams[0]), torch.autograd.set_multithreading_enabled(False):
                    yield
                self.finish()
                STREAMS.give_back(self.api, self.device, streams)
            finally:
                self._gate.leave(self)
                self._accumulators = []

    def follow_caller(self) -> None:
        """Order the worker's work behind all work in this thread's current stream."""
        self._before = self.api.mark_caller(self.device)

    @property
    def compute(self) -> Stream:
        return self._stream(0)

    @property
    def comm_stream(self) -> Stream:
        return self._stream(1)

    @property
    def copy_stream(self) -> Stream:
        return self._stream(2)

    def _stream(self, index: int) -> Stream:
        if self._streams is None:
            raise RuntimeError(_OUTSIDE.format(self.device))
        return self._streams[index]

    @contextmanager
    def comm(self, *, joined: bool = True) -> Iterator[None]:
        """The comm stream, ordered behind earlier compute and in front of later compute."""
        self._order(self.comm_stream, behind=self.compute)
        try:
            with self.api.stream(self.comm_stream):
                yield
        finally:
            if joined:
                self._order(self.compute, behind=self.comm_stream)

    def _order(self, stream: Stream, *, behind: Stream) -> None:
        event = self._events.record(behind)
        self.api.wait_event(event, stream)
        # A wait is for the last recording so far: the event may be recorded again at once.
        self._events.give_back(event)

    def new_log(self) -> ValueLog:
        """A log whose values are read some steps late."""
        return CudaLog(self._events)

    def new_timer(self, load: LaunchLoad | None = None) -> StepTimer:
        return CudaTimer(self.api, self.compute, self._max_run_ahead, load)

    def pin_accumulators(self, params: Sequence[nn.Parameter]) -> None:
        """Create the nodes that accumulate gradients, and keep them while active.

        A node belongs to the stream under which it was created. A node that lives only as long as
        a graph could belong to the stream of an evaluation, which PyTorch warns of
        (pytorch#166136).
        """
        edges = [torch.autograd.graph.get_gradient_edge(p) for p in params]
        self._accumulators = [edge.node for edge in edges]

    def finish(self) -> None:
        """Block until all work in the compute and the comm stream is complete."""
        for stream in (self.compute, self.comm_stream):
            CudaPendingCopy(self._events, self._events.record(stream)).wait()

    def generator_state(self) -> torch.Tensor:
        """State of the device's default generator, which its workers share."""
        return self.api.generator_state(self.device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Restore the state of the device's default generator."""
        self.api.set_generator_state(self.device, state)

    @property
    def is_shared(self) -> bool:
        """True if other workers of the process use the device."""
        return self._gate.num_workers(self.device) > 1

    def abandon(self) -> None:
        """Remove this worker from the count of the device's workers."""
        self._gate.leave(self)

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        self.finish()  # collectives included, before a peer waits for this worker's capture
        with self._gate.capturing() as granted:
            yield granted

    def capture(self, work: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
        """Capture on the compute stream; the graphs of this worker share a pool of memory.

        Their memory adds to the allocator's cache of eager steps, which is not freed:
        ``cudaFree`` may wait for a collective of a peer, and the peer for this worker.
        ``CUDAGraph.capture_begin`` and ``capture_end`` free nothing, while entering
        ``torch.cuda.graph`` synchronizes and empties the caches of all devices.
        """
        if not self._graphs:
            # A pool without a graph, or of a broken capture, must not be used again.
            self._pool = self.api.new_pool()
        self.finish()
        try:
            graph = self.api.capture(work, pool=self._pool, generators=[generator])
        except BaseException:
            self._graphs = WeakSet()
            raise
        self._graphs.add(graph)
        return partial(self.api.replay, graph)

    def host_twin(self, payload: Payload) -> Payload:
        """Pinned memory of the same shapes and dtypes."""
        return payload.map(lambda t: self.api.empty_pinned(t.shape, t.dtype))

    def fetch(self, source: Payload, target: Payload) -> PendingCopy:
        """Copy to pinned memory on the comm stream."""
        with self.api.stream(self.comm_stream):
            for pinned, tensor in zip(target.tensors, source.tensors, strict=True):
                self.api.copy(pinned, tensor)
        return self.arrival()

    def stage(self, average: Payload, twin: Payload) -> Payload:
        """Copy to pinned memory, on the CPU and at once."""
        for pinned, tensor in zip(twin.tensors, average.tensors, strict=True):
            pinned.copy_(tensor)
        return twin

    def arrival(self) -> PendingCopy:
        """Completion of all work in the comm stream."""
        return CudaPendingCopy(self._events, self._events.record(self.comm_stream))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Makes the device and its copy stream current in this thread."""
        with self.api.on_device(self.device), self.api.stream(self.copy_stream):
            yield

    def driver_call(self) -> AbstractContextManager[None]:
        """Context of calls that may wait for the device, not beside the launch of an exchange."""
        return self._gate.driver_call()

    def new_event(self) -> Event:
        """An event; a thread that waits for it leaves its core."""
        return self.api.new_event()

    def record(self, event: Event) -> None:
        """Mark the work issued so far to the current stream."""
        self.api.record(event)

    def wait_event(self, event: Event) -> None:
        """Make the current stream wait."""
        self.api.wait_event(event)

    def wait_host(self, event: Event) -> None:
        """Block this thread."""
        # The loader's thread has no current device: on the first one, which the run may not
        # use, the call would create a context.
        with self.api.on_device(self.device):
            self.api.wait_host(event)

    def is_complete(self, event: Event) -> bool:
        """True if the work before the event is complete."""
        with self.api.on_device(self.device):
            return self.api.is_complete(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream."""
        self.api.copy(target, source)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the device, of the current stream."""
        with self.driver_call():  # a prefetching thread allocates, too
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host."""
        return self.api.empty_pinned(shape, dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy of a strided CPU tensor; others are returned as they are."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.requires_grad:
            return tensor
        pinned = self.api.empty_pinned(tensor.shape, tensor.dtype)
        return pinned.copy_(tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; PyTorch keeps a pinned source until the copy is complete
        (``ATen/cuda/CachingHostAllocator.h``).

        A tensor already on the device was created on another stream, and must be complete.
        """
        if tensor.device == self.device:
            self.api.lend(tensor)
            return tensor
        return tensor.to(self.device, non_blocking=True)

    def memory(self) -> MemoryReading:
        """The device's memory now."""
        return self._memory.read(self.device)

    def reset_peak(self) -> None:
        """Restart peaks from the current use."""
        self._memory.reset_peak(self.device)

    def step_memory(self) -> StepMemory:
        """A limit of step sizes by the device's memory."""
        return StepMemory(self._memory, self.device, lambda: self._gate.num_workers(self.device))


def open_device(device: torch.device, num_cpu_workers: int) -> Device:
    """The device object of a worker."""
    if device.type == "cpu":
        # The limit of the process, by OMP_NUM_THREADS or torch.set_num_threads, holds for all
        # workers together.
        return Device(max(1, IntraOpThreads.budget() // max(1, num_cpu_workers)))
    if DeviceCapabilities.of(device).missing(cuda_api.REQUIRED):
        return AcceleratorDevice(device)
    return CudaDevice(device)


def devices_differ(devices: Sequence[torch.device]) -> bool:
    """True if devices differ in type, name, compute capability or memory."""
    return len({_kind_of(device) for device in devices}) > 1


def _kind_of(device: torch.device) -> tuple[object, ...]:
    if device.type != "cuda":
        return (device.type,)
    properties = torch.cuda.get_device_properties(device)
    # To a GiB: memory reserved by the driver may differ between two of a kind.
    memory_gib = round(properties.total_memory / 2**30)
    return (properties.name, properties.major, properties.minor, memory_gib)


Streams = tuple[Stream, Stream, Stream]
"""A worker's compute, comm and copy stream."""


class StreamPool:
    """Streams of workers that have ended, for reuse by later ones. Thread-safe.

    Cached memory of PyTorch's allocator, and the workspaces of cuBLAS, belong to a stream. If each
    run made new ones, a process would pay for the memory of up to 32.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: WeakKeyDictionary[CudaApi, defaultdict[torch.device, list[Streams]]] = (
            WeakKeyDictionary()
        )

    def take(self, api: CudaApi, device: torch.device) -> Streams:
        """Three streams that no other worker uses."""
        with self._lock:
            idle = self._idle.setdefault(api, defaultdict(list))[device]
            if idle:
                return idle.pop()
        return api.new_stream(device), api.new_stream(device), api.new_stream(device)

    def give_back(self, api: CudaApi, device: torch.device, streams: Streams) -> None:
        """Return streams that get no more work; issued work may still run."""
        with self._lock:
            self._idle.setdefault(api, defaultdict(list))[device].append(streams)


STREAMS = StreamPool()
"""The pool of the process."""


class CudaPendingCopy(PendingCopy):
    """Copies in front of an event. For the thread that started them."""

    def __init__(self, events: EventPool, event: Event) -> None:
        self._events = events
        self._event: Event | None = event

    @property
    def done(self) -> bool:
        """True once the event is complete; it then returns to its pool."""
        if self._event is not None and self._events.api.is_complete(self._event):
            self._release()
        return self._event is None

    def wait(self) -> None:
        """Block until the event is complete."""
        if self._event is not None:
            self._events.api.wait_host(self._event)
            self._release()

    def _release(self) -> None:
        self._events.give_back(self._event)
        self._event = None
