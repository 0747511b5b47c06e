"""A worker's CUDA device: its streams, what orders them, and the copies to and from the CPU.

Training runs on the compute stream, everything that moves state on the comm stream, batches
on the copy stream. Nothing runs on the default stream, and nothing waits for the whole
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from coordinator.contents import Payload
from runtime.device import cuda_api
from runtime.device.base import Arrival, DeviceContext, ValueLog
from runtime.device.capture_gate import GATE, CaptureGate, GateMember
from runtime.device.cuda_api import CudaApi, Event, Stream
from runtime.device.cuda_streams import STREAMS
from runtime.device.cuda_timing import CudaTimer, EventPool
from runtime.device.timing import StepTimer
from runtime.device.values import CudaLog

MAX_RUN_AHEAD = 3
_OUTSIDE = (
    "the streams of {} exist only inside its activate(): build and use the worker in "
    "'with device.activate():'"
)


class CudaArrival(Arrival):
    """Copies in front of an event. For the thread that started them."""

    def __init__(self, events: EventPool, event: Event) -> None:
        self._events = events
        self._event: Event | None = event

    @property
    def done(self) -> bool:
        """Whether the event is complete; it then serves again elsewhere."""
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


class CudaDevice(DeviceContext):
    """One worker's part of a GPU. Made anywhere, used in one thread, inside :meth:`activate`.

    Args:
        device: The GPU; several workers may share it.
        max_run_ahead: Steps that may be outstanding on it.
        api: The way to CUDA; ``None``: the real one.
        gate: Keeps others still while this one captures; ``None``: that of the process.

    Attributes:
        compute: Stream of forward, backward and optimizer.
        comm_stream: Stream of collectives, snapshots and updates.
        copy: Stream of batches on their way to the device; ordered by whoever uses it.
    """

    has_graphs = True

    def __init__(
        self,
        device: torch.device,
        *,
        max_run_ahead: int = MAX_RUN_AHEAD,
        api: CudaApi | None = None,
        gate: CaptureGate | None = None,
    ) -> None:
        self.device = device
        self.api = cuda_api.API if api is None else api
        self._max_run_ahead = max_run_ahead
        self._streams: tuple[Stream, Stream, Stream] | None = None
        self._before: Event | None = None
        self._events = EventPool(self.api)
        self._accumulators: list[Any] = []
        self._gate = GATE if gate is None else gate
        self._member: GateMember | None = None
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()  # those in the pool

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the device and a compute stream of its own current; run backward here.

        On leaving, waits for all that the worker gave the device, so that other threads may
        use its tensors; not if it leaves by an exception.
        """
        with self.api.on_device(self.device):
            streams = STREAMS.take(self.api, self.device)
            self._streams = streams
            # Data and weights that the user has put there may still be on their way.
            before = self._before or self.api.mark_caller(self.device)
            for stream in streams:
                self.api.wait_event(before, stream)
            member = self._member = self._gate.join()
            try:
                # Thread-local: backward of this thread's graphs stays on this thread.
                with self.api.stream(streams[0]), torch.autograd.set_multithreading_enabled(False):
                    yield
                self.finish()
                STREAMS.give_back(self.api, self.device, streams)
            finally:
                member.leave()
                self._accumulators = []

    def follow_caller(self) -> None:
        """Let all that this thread's current stream has got so far come first."""
        self._before = self.api.mark_caller(self.device)

    @property
    def compute(self) -> Stream:
        """The compute stream."""
        return self._stream(0)

    @property
    def comm_stream(self) -> Stream:
        """The comm stream."""
        return self._stream(1)

    @property
    def copy(self) -> Stream:
        """The copy stream."""
        return self._stream(2)

    def _stream(self, index: int) -> Stream:
        if self._streams is None:
            raise RuntimeError(_OUTSIDE.format(self.device))
        return self._streams[index]

    @contextmanager
    def comm(self) -> Iterator[None]:
        """The comm stream, behind all compute before it and in front of all that follows."""
        with self._entered().collective():
            self._order(self.comm_stream, behind=self.compute)
            try:
                with self.api.stream(self.comm_stream):
                    yield
            finally:
                self._order(self.compute, behind=self.comm_stream)

    def _order(self, stream: Stream, *, behind: Stream) -> None:
        event = self._events.record(behind)
        self.api.wait_event(event, stream)
        # A wait is for the recording of before, so the event may be recorded again at once.
        self._events.give_back(event)

    def new_log(self) -> ValueLog:
        """A log that reads late."""
        return CudaLog(self._events)

    def new_timer(self) -> StepTimer:
        """A timer that bounds the run-ahead."""
        return CudaTimer(self.api, self.compute, self._max_run_ahead)

    def pin_accumulators(self, params: Sequence[nn.Parameter]) -> None:
        """Create the nodes that accumulate gradients, and keep them while active.

        A node belongs to the stream under which it was created. One that lived only as long
        as a graph could come from an evaluation under another stream.
        """
        edges = [torch.autograd.graph.get_gradient_edge(p) for p in params]
        self._accumulators = [edge.node for edge in edges]

    def finish(self) -> None:
        """Block until the compute and the comm stream have done what they got so far."""
        for stream in (self.compute, self.comm_stream):
            CudaArrival(self._events, self._events.record(stream)).wait()

    def generator_state(self) -> torch.Tensor:
        """That of the device's default generator, which workers on it share."""
        return self.api.generator_state(self.device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Put it back."""
        self.api.set_generator_state(self.device, state)

    # -- graphs -----------------------------------------------------------------------

    def pause_point(self) -> None:
        """Wait while another CUDA worker of the process captures."""
        self._entered().pause_point()

    def idle(self) -> AbstractContextManager[None]:
        """See :meth:`GateMember.idle`."""
        return self._entered().idle()

    def apart(self) -> AbstractContextManager[None]:
        """See :meth:`GateMember.apart`."""
        return self._entered().apart()

    def reserve(self) -> None:
        """See :meth:`GateMember.reserve`."""
        self._entered().reserve()

    def unreserve(self) -> None:
        """See :meth:`GateMember.unreserve`."""
        self._entered().unreserve()

    def abandon(self) -> None:
        """Let no capture of another run wait for this worker."""
        if self._member is not None:
            self._member.leave()

    def alone(self) -> AbstractContextManager[bool]:
        """See :meth:`GateMember.alone`."""
        return self._entered().alone()

    def capture(self, work: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
        """Capture on the compute stream; the graphs of this worker share a pool of memory."""
        if not self._graphs:
            # One without a graph is not to be used again, nor is that of a broken capture.
            self._pool = self.api.new_pool()
        self.finish()
        self.api.free_cache()  # the graph's memory is its own: it cannot use what is kept
        try:
            graph = self.api.capture(work, pool=self._pool, generators=[generator])
        except BaseException:
            self._graphs = WeakSet()
            raise
        self._graphs.add(graph)
        return partial(self.api.replay, graph)

    def _entered(self) -> GateMember:
        if self._member is None:
            raise RuntimeError(_OUTSIDE.format(self.device))
        return self._member

    # -- state on its way to the coordinator and back ------------------------------

    def host_twin(self, payload: Payload) -> Payload:
        """Pinned memory of the same shapes and dtypes."""
        return Payload(
            params=tuple(self.api.empty_pinned(t.shape, t.dtype) for t in payload.params),
            buffers=tuple(self.api.empty_pinned(t.shape, t.dtype) for t in payload.buffers),
            taken=tuple(self.api.empty_pinned(t.shape, t.dtype) for t in payload.taken),
        )

    def fetch(self, source: Payload, target: Payload) -> Arrival:
        """Copy to pinned memory on the comm stream."""
        with self.api.stream(self.comm_stream):
            for pinned, tensor in zip(_tensors(target), _tensors(source), strict=True):
                self.api.copy(pinned, tensor)
        return self.arrival()

    def stage(self, average: Payload, twin: Payload) -> Payload:
        """Copy to pinned memory, on the CPU and at once."""
        for pinned, tensor in zip(_tensors(twin), _tensors(average), strict=True):
            pinned.copy_(tensor)
        return twin

    def arrival(self) -> Arrival:
        """When the comm stream has done what it got so far."""
        return CudaArrival(self._events, self._events.record(self.comm_stream))


def _tensors(payload: Payload) -> tuple[torch.Tensor, ...]:
    return (*payload.params, *payload.buffers, *payload.taken)
