"""A worker's device: where work is ordered, how time is told, when values are read, how batches
and state are carried.

The worker speaks to its device through one object, :class:`Device`. On a CPU there are no
streams: work runs in order in the worker's thread, so ordering calls do nothing, events are
always complete and a value can be read as soon as it exists.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor

from coordinator.messages import Payload
from runtime.core.capabilities import DeviceCapabilities
from runtime.core.checks import default_devices
from runtime.core.threads import num_cores
from runtime.device.launch_load import LaunchLoad
from runtime.device.memory import MemoryReading, StepMemory
from runtime.device.metering import ValueLog
from runtime.device.timing import HostTimer, StepTimer


def device_summary(devices: Sequence[torch.device] | None = None) -> str:
    """One line on the devices of a run, or on all that are visible.

    Args:
        devices: Those of a run; ``None``: every CUDA device, else the CPU.
    """
    if devices is None:
        devices = default_devices()
    names = [_describe(d) for d in devices]
    parts = [f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (
        f"{len(names)} worker{'s' if len(names) != 1 else ''} on {', '.join(parts)}; "
        f"torch {torch.__version__}, GIL {'on' if gil else 'off'}"
    )


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} {properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    if device.type != "cpu":
        return f"{device} ({DeviceCapabilities.of(device).kind})"
    memory = psutil.virtual_memory().total / 2**30
    return f"cpu ({num_cores()} cores, {memory:.0f} GiB)"


WARM_UP_STEPS = 3
"""Steps of a kind that are made eagerly before one can be captured."""


Event = Any
"""A mark in a stream, made by :meth:`Device.new_event`. One that was never recorded is
complete."""


def available_host_bytes() -> int:
    """Memory of the host that can be had without swapping."""
    return int(psutil.virtual_memory().available)


class PendingCopy(ABC):
    """Copies that are on their way between a device and the CPU."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all of them have arrived."""

    @abstractmethod
    def wait(self) -> None:
        """Block until they have."""


class Device:
    """One worker's device. This class is the CPU: one thread, its share of the cores, no streams.

    :class:`~runtime.device.cuda.CudaDevice` overrides what a GPU does otherwise. Ordering,
    timing and state are for the worker's thread, inside :meth:`activate`; what carries batches
    is for any thread, whose current stream is meant.

    Args:
        num_threads: Intra-op threads of the worker.

    Attributes:
        device: Where it trains.
        has_graphs: Whether steps can be captured here.
        is_prompt: Whether what the host gives to the device is done at once, so that values can
            be read.
    """

    has_graphs = False
    is_prompt = True

    def __init__(self, num_threads: int = 1) -> None:
        self.device = torch.device("cpu")
        self._num_threads = num_threads

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context in which the worker's thread lives: device, streams, threads.

        On a CPU the thread gets its share of the cores.
        """
        torch.set_num_threads(self._num_threads)
        # Thread-local: backward of this thread's graphs stays on this thread.
        with torch.autograd.set_multithreading_enabled(False):
            yield

    def comm(self, *, joined: bool = True) -> AbstractContextManager[None]:
        """Context for copies and collectives: after all compute, before any that follows.

        Args:
            joined: Whether compute that follows waits; else it waits for a later one.
        """
        return nullcontext()

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

    def new_timer(self, load: LaunchLoad | None = None) -> StepTimer:
        """A timer for steps on this device.

        Args:
            load: Receives samples of the launch times on a GPU.
        """
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

    @property
    def is_shared(self) -> bool:
        """Whether other workers of the process are on the device, so that it has no graphs."""
        return False

    def abandon(self) -> None:
        """The run is over, and its thread may be stuck; from any thread. Idempotent."""
        return

    def capturing(self) -> AbstractContextManager[bool]:
        """Context for captures; yields whether they can be made now.

        Blocks until what was given before is done, until no other worker of the process
        captures, and for some seconds at most until no data set is being read.
        """
        return nullcontext(False)

    def capture(self, work: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
        """Record what ``work`` gives to the device, without running it.

        Blocks until what was given before is done. Inside :meth:`capturing` only.

        Args:
            work: Called once.
            generator: Which it may draw from, beside the device's own.

        Returns:
            What gives the work to the device again, any number of times.
        """
        raise NotImplementedError(f"{self.device} has no graphs")

    def host_twin(self, payload: Payload) -> Payload:
        """CPU memory for a payload of the device; the payload itself if it is there."""
        return payload

    def fetch(self, source: Payload, target: Payload) -> PendingCopy | None:
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

    def arrival(self) -> PendingCopy | None:
        """When all that :meth:`comm` was given so far has arrived; ``None``: it has."""
        return None

    def copying(self) -> AbstractContextManager[None]:
        """Makes the copy stream current in this thread; orders nothing by itself."""
        return nullcontext()

    def driver_call(self) -> AbstractContextManager[None]:
        """Context of calls that may wait for the device; see :meth:`CaptureGate.driver_call`."""
        return nullcontext()

    def new_event(self) -> Event:
        """An event, to be recorded again and again."""
        return None

    def record(self, event: Event) -> None:
        """Mark the work issued so far to the current stream."""

    def wait_event(self, event: Event) -> None:
        """Make what is issued to the current stream from here on wait for ``event``.

        The event's last recording counts; the host does not wait.
        """

    def wait_host(self, event: Event) -> None:
        """Block the calling thread, without the interpreter lock, until ``event`` is complete."""

    def is_complete(self, event: Event) -> bool:
        """Whether the work before the event's last recording is done."""
        return True

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream, without waiting if the host side is pinned."""
        target.copy_(source)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory on the device, of the current stream."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host, plain on a CPU. Allocating may wait for the device."""
        return torch.empty(tuple(shape), dtype=dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy of a tensor of the host; any other as it is, on a CPU every one."""
        return tensor

    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor on the device, copied in the current stream if need be.

        From pinned memory the host does not wait, and the source may be dropped at once.
        """
        return tensor.to(self.device)

    def memory(self) -> MemoryReading:
        """The device's memory now; waits for nothing.

        Of the host, what the process uses counts as taken by others.
        """
        memory = psutil.virtual_memory()
        return MemoryReading(
            total_bytes=memory.total,
            free_bytes=memory.available,
            reserved_bytes=0,
            active_bytes=0,
            peak_bytes=0,
        )

    def reset_peak(self) -> None:
        """Let ``peak_bytes`` count from here on."""

    def step_memory(self) -> StepMemory | None:
        """Follows how large steps may be; ``None`` where memory is not followed, as on a CPU."""
        return None
