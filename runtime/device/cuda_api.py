"""All calls of workers and collectives to CUDA.

Streams, events and pinned memory are created and used here and nowhere else, so that a recording
stand-in can replace :data:`API`. Importing the module initialises no device. :class:`StreamSync`
orders streams outside of a worker's own device.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from runtime.core.capabilities import DeviceCapabilities
from runtime.core.live_registry import LiveRegistry
from runtime.device import capture_gate

logger = logging.getLogger(__name__)

Stream = Any
"""A stream of a device, made by :meth:`CudaApi.new_stream`."""
Event = Any
"""An event of a stream, made by :meth:`CudaApi.new_event`; complete until it is recorded.
Recording it again moves it."""
Graph = Any
"""Captured work that can be replayed in a stream any number of times."""


_READ_HOST = """
.version 6.0
.target sm_50
.address_size 64
.visible .entry read_host(.param .u64 target, .param .u64 source)
{
    .reg .u64 %address<2>;
    .reg .f32 %value;
    ld.param.u64 %address0, [target];
    ld.param.u64 %address1, [source];
    ld.volatile.global.f32 %value, [%address1];
    st.global.f32 [%address0], %value;
    ret;
}
"""
"""Source for the driver, which compiles it for any later GPU. The PTX ISA gives a volatile load the
semantics of ``ld.relaxed.sys``: it sees what the host has written by then. Pinned memory has the
same address on host and device."""


class CudaApi:
    """Calls to CUDA; stateless and thread-safe. Only :meth:`wait_host` waits.

    The current device and the current stream are those of the calling thread.
    """

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes a device current in this thread."""
        return torch.cuda.device(device if device.index is None else device.index)

    def make_context_current(self, device: torch.device) -> None:
        """Make the context of a device current in this thread, as calls of the driver require.

        Neither :func:`torch.cuda.device` nor :func:`torch.cuda.set_device` calls CUDA for the
        device that is current already, which in a new thread is the first
        (``c10/cuda/CUDAFunctions.cpp``); a launch does.
        """
        with self.on_device(device):
            torch.zeros(1, device=device)

    def current_stream(self, device: torch.device) -> Stream:
        """The current stream of a device in this thread."""
        return torch.cuda.current_stream(device if device.index is None else device.index)

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that is not ordered with the default stream, nor with another one from here.

        PyTorch has 32 for each device and hands them out in turn, in use or not (pytorch#173729).
        On one stream, the kernels of two ranks that share a GPU would wait for each other for ever.
        Streams that are in use are passed over; if all are, one is shared.
        """
        with _streams_lock:
            in_use = {held.handle for held in _streams.all() if held.device == device}
            for _ in range(_NUM_STREAMS):
                stream: Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                if stream.cuda_stream not in in_use:
                    break
            held = _StreamInUse(stream)
            stream._gpuworker_in_use = held
            _streams.add(held)
        return stream

    def stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes a stream current in this thread; orders nothing by itself."""
        return torch.cuda.stream(stream)

    def mark_caller(self, device: torch.device) -> Event:
        """An event behind all work in the current stream of a device."""
        with self.on_device(device):
            event = self.new_event()
            self.record(event)
        return event

    def new_event(self, *, timing: bool = False) -> Event:
        """An event of the current device; a thread that waits for it leaves its core."""
        return torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=True
        )

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """Mark the work issued so far to a stream (``None``: the current one)."""
        event.record() if stream is None else event.record(stream)

    def wait_event(self, event: Event, stream: Stream | None = None) -> None:
        """Make later work of a stream (``None``: the current one) wait for an event.

        The event's last recording so far counts. The host does not wait.
        """
        event.wait() if stream is None else event.wait(stream)

    def is_complete(self, event: Event) -> bool:
        """True if the work before the event's last recording is done.

        Does not hold the interpreter lock, unlike ``torch.cuda.Event.query``
        (``THCPEvent_query`` in ``torch/csrc/cuda/Event.cpp``): a query that waits for a lock of
        the driver must not keep other threads from aborting what holds that lock.
        """
        query = event_query()
        if query is None:
            return bool(event.query())
        handle = event.cuda_event
        if not handle:  # never recorded
            return True
        result = query(handle)
        if result == _SUCCESS:
            return True
        # Any other error gets its text, and its type, from PyTorch.
        return False if result == _NOT_READY else bool(event.query())

    def wait_host(self, event: Event) -> None:
        """Block this thread until an event is complete, without the interpreter lock."""
        event.synchronize()

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two complete events that were made with ``timing``."""
        return float(start.elapsed_time(end)) / 1e3

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host; takes :func:`pinned_bytes`.

        Allocating may wait for the device, and never runs beside the launch of an exchange.
        """
        with capture_gate.GATE.driver_call():
            return self._new_pinned(shape, dtype)

    def _new_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream. The host does not wait if its side is pinned.

        From pageable memory it may ("API synchronization behavior" in CUDA's reference).

        The source must not change, and the target must not be read, until an event recorded behind
        the copy is complete.
        """
        target.copy_(source, non_blocking=True)

    def host_reader(self) -> Callable[[Tensor, Tensor], None] | None:
        """Load a kernel for the current device that reads pinned memory when it runs.

        A copy guarantees less: CUDA may read a small source when the copy is issued, so that a
        later change of the source may be missed.

        The context of the device must be current; see :meth:`make_context_current`.

        Returns:
            Launches the kernel in the current stream: ``target[0] = source[0]``, both float32, the
            target on the device, the source pinned. ``None``: PyTorch is built for ROCm.
        """
        if torch.version.hip is not None:
            return None
        with capture_gate.GATE.driver_call():
            return self._load_reader()

    def _load_reader(self) -> Callable[[Tensor, Tensor], None]:
        load: Any = torch.cuda._utils._cuda_load_module
        kernel = load(_READ_HOST, ["read_host"])["read_host"]

        def read(target: Tensor, source: Tensor) -> None:
            kernel(args=[target, source])

        return read

    def generator_state(self, device: torch.device) -> Tensor:
        """State of a device's default generator, on the CPU."""
        return torch.cuda.get_rng_state(device)

    def set_generator_state(self, device: torch.device, state: Tensor) -> None:
        """Restore a state of a device's default generator."""
        torch.cuda.set_rng_state(state, device)

    def new_pool(self) -> Any:
        """A memory pool that the graphs of one stream may share."""
        return torch.cuda.graph_pool_handle()

    def capture(
        self, work: Callable[[], None], *, pool: Any, generators: Sequence[torch.Generator] = ()
    ) -> Graph:
        """Capture the work that ``work`` issues to the current stream, without running it.

        Neither synchronizes the device nor frees memory. If ``work`` raises, or cannot be captured,
        the device's generators become usable again, the memory of the capture returns to the
        allocator, and the first error is raised. One capture at a time in the process.

        Args:
            work: Called once, in this thread.
            pool: From :meth:`new_pool`.
            generators: Generators of the current device that ``work`` draws from; the default one
                need not be named.
        """
        device = torch.cuda.current_device()
        try:
            return _capture(work, device, pool, generators)
        except BaseException:
            _heal(device, generators)
            raise

    def replay(self, graph: Graph) -> None:
        """Issue the work of a graph to the current stream; generators advance."""
        graph.replay()

    def lend(self, tensor: Tensor) -> None:
        """Delay reuse of a tensor's memory, of another stream, until the current stream is done."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def seed(self, device: torch.device, seed: int) -> None:
        """Seed the process's generator of one device; :func:`torch.manual_seed` seeds all."""
        with self.on_device(device):
            torch.cuda.manual_seed(seed)

    def device_of(self, tensor: Tensor) -> torch.device:
        return tensor.device


def pinned_bytes(num_bytes: int) -> int:
    """Size of the block that pinned memory of ``num_bytes`` takes: the next power of two.

    PyTorch's ``ATen/core/CachingHostAllocator.h`` rounds so (``c10::llvm::PowerOf2Ceil``), up to
    2.11 always, in 2.13 unless ``pinned_max_round_threshold_mb`` or ``pinned_max_cached_size_mb``
    of ``PYTORCH_ALLOC_CONF`` is set. It caches freed blocks for others of the same size.
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


_SUCCESS, _NOT_READY = 0, 600  # values of CUresult


@cache
def event_query() -> Callable[[int], int] | None:
    """``cuEventQuery`` of the driver, called without the interpreter lock; ``None`` without it."""
    if torch.version.hip is not None:
        return None
    try:
        query = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuEventQuery
    except (AttributeError, OSError):
        return None
    query.argtypes, query.restype = [ctypes.c_void_p], ctypes.c_int
    return query


_NUM_STREAMS = 32


class _StreamInUse:
    """Held by a stream of this process, for as long as the stream lives.

    Not a weak reference to the stream itself: the destructor of ``torch.cuda.Stream`` leaves such a
    reference dangling, and to follow it crashes the process (pytorch#183403).
    """

    def __init__(self, stream: Stream) -> None:
        self.device: torch.device = stream.device
        self.handle: int = stream.cuda_stream


_streams: LiveRegistry[_StreamInUse] = LiveRegistry()
_streams_lock = threading.Lock()


REQUIRED = DeviceCapabilities(kind="workers with streams", streams=True, events=True, memory=True)
"""Capabilities that :class:`CudaApi` requires of a device. ``host_reader``, ``collectives`` and
``graphs`` are optional: without the first the host waits, without the others such settings are
refused."""


_broken: list[Graph] = []
"""Graphs whose capture failed, for as long as the process lives; see :func:`_clear_up`."""


def _capture(
    work: Callable[[], object], device: int, pool: Any, generators: Sequence[torch.Generator]
) -> Graph:
    graph = torch.cuda.CUDAGraph()
    has_begun = False
    try:
        if torch.__version__ < "2.14":  # from then on it does nothing and warns (pytorch#176753)
            for generator in generators:
                graph.register_generator_state(generator)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        has_begun = True
        try:
            work()
        except BaseException:
            # Its error would only say that the capture is broken.
            with suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        _clear_up(graph, device, pool, has_begun=has_begun)
        raise
    return graph


def _clear_up(graph: Graph, device: int, pool: Any, *, has_begun: bool) -> None:
    """Undo the effects of a broken capture on PyTorch's allocators.

    ``capture_begin`` installs in the device's and the pinned allocator a filter that refers to the
    graph, and takes a reference to the pool. In 2.11, ``capture_end`` raises for a broken
    capture before it removes the filters (pytorch#180395); that of the pinned allocator
    cannot be removed from here, so the graph is kept alive. And ``reset`` releases only the pool
    of a capture that has ended, up to 2.13.0 (pytorch#190348). 2.11 shows both in
    ``libtorch_cuda.so``, in the calls of ``CUDAGraph::capture_end`` and ``reset``;
    ``torch/cuda/graphs.py`` only forwards to them. A pool released twice is taken from the
    graphs that share it, so it is kept if it may have been released.
    """
    _broken.append(graph)
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, pool)
    releases_pool = _resets_broken() or _has_ended(graph)
    with suppress(Exception):
        graph.reset()
    if has_begun and not releases_pool:
        with suppress(Exception):
            torch._C._cuda_releasePool(device, pool)


def _has_ended(graph: Graph) -> bool:
    """True if ``capture_end`` has made the graph; one without has no pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _resets_broken() -> bool:
    """True if ``CUDAGraph.reset`` returns the pool of a broken capture.

    Builds for ROCm have the change in older versions too.
    """
    return torch.version.hip is not None or torch.__version__ >= "2.13.1"


def _heal(device: int, generators: Sequence[torch.Generator]) -> None:
    """Make generators usable again that a broken capture has left waiting for its end.

    Their state must stay the same object, which other graphs refer to. A capture that succeeds
    ends the wait.
    """
    default = torch.cuda.default_generators[device]
    target = torch.empty(1, device=default.device)
    try:
        for generator in (default, *generators):
            target.uniform_(generator=generator)
    except RuntimeError:
        with suppress(Exception):  # the error that broke the capture is raised
            _capture(target.zero_, device, torch.cuda.graph_pool_handle(), generators)


API = CudaApi()
"""The default; looked up at each use."""


class StreamSync:
    """Orders streams by events; does nothing without a GPU. Thread-safe.

    Args:
        devices: Devices whose current streams :meth:`marks` and :meth:`join` use.
        api: Calls to CUDA; ``None``: the real ones.
    """

    def __init__(self, devices: Sequence[torch.device] = (), api: CudaApi | None = None) -> None:
        self._api = API if api is None else api
        self._gpus = list(dict.fromkeys(d for d in devices if d.type == "cuda"))

    def mark(self, device: torch.device, event: Event | None = None) -> Event | None:
        """Record an event behind all work in the calling thread's current stream of a device.

        Args:
            device: For a CPU, ``None`` is returned.
            event: An event to reuse; ``None``: a new one.
        """
        if device.type != "cuda":
            return None
        with self._api.on_device(device):
            event = self._api.new_event() if event is None else event
            self._api.record(event)
        return event

    def wait(self, device: torch.device, marks: Iterable[Event | None]) -> None:
        """Order later work of the calling thread on a device behind events of others.

        Its current stream waits; for a CPU the host does.
        """
        for mark in marks:
            if mark is None:
                continue
            if device.type == "cuda":
                with self._api.on_device(device):
                    self._api.wait_event(mark)
            else:
                self._api.wait_host(mark)

    def wait_host(self, mark: Event | None) -> None:
        """Block the calling thread until the work in front of an event is complete."""
        if mark is not None:
            self._api.wait_host(mark)

    def marks(self, tensors: Sequence[Tensor] = ()) -> list[Event]:
        """Events behind all work in the calling thread's current streams.

        Args:
            tensors: Tensors that cross; they may be on other GPUs than ``devices``.
        """
        return [mark for gpu in self._gpus_of(tensors) if (mark := self.mark(gpu)) is not None]

    def join(self, marks: Iterable[Event | None], tensors: Sequence[Tensor] = ()) -> None:
        """Makes the calling thread's current streams wait for marks of other threads.

        Args:
            marks: From :meth:`mark`.
            tensors: Tensors that cross; the streams of their GPUs wait as well.
        """
        marks = [mark for mark in marks if mark is not None]
        for gpu in self._gpus_of(tensors):
            self.wait(gpu, marks)

    def receive(
        self, device: torch.device, marks: Sequence[Event], tensors: Sequence[Tensor]
    ) -> None:
        """Orders copies of tensors to a device behind the marks of their owner, on both ends.

        PyTorch runs a copy between GPUs on the stream of the source's GPU that is current in the
        calling thread, and orders it with that of the target (``ATen/native/cuda/Copy.cu``). The
        contiguous copy of a source that is not contiguous comes before that, so the source's
        stream has to wait by itself.
        """
        self.wait(device, marks)
        for gpu in self._gpus_of(tensors, but=device):
            self.wait(gpu, marks)

    def _gpus_of(
        self, tensors: Sequence[Tensor], but: torch.device | None = None
    ) -> list[torch.device]:
        own = [] if but is not None else self._gpus
        places = dict.fromkeys([*own, *map(self._api.device_of, tensors)])
        return [place for place in places if place.type == "cuda" and place != but]
