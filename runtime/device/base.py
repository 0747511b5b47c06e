"""A worker's device: order of work, times, values read on the host, copies of batches and state.

The worker uses its device through one object, :class:`Device`. On a CPU there are no streams:
work runs in order in the worker's thread, so ordering calls do nothing, events are always
complete and a value can be read as soon as it exists.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor

from coordinator.messages import Payload
from runtime.core.capabilities import DeviceCapabilities, has_gil
from runtime.core.checks import default_devices
from runtime.core.threads import num_cores
from runtime.device.launch_load import LaunchLoad
from runtime.device.memory import MemoryReading, StepMemory
from runtime.device.metering import ValueLog
from runtime.device.timing import HostTimer, StepTimer


class Device:
    """One worker's device. This class is the CPU: one thread, its share of the cores, no streams.

    :class:`~runtime.device.cuda.CudaDevice` overrides the operations that differ on a GPU.
    Ordering, timing and state are for the worker's thread, inside :meth:`activate`; copies of
    batches are for any thread, and use its current stream.

    Args:
        num_threads: Intra-op threads of the worker.

    Attributes:
        device: The device of parameters and batches.
        has_graphs: True if steps can be captured.
        is_prompt: True if work is complete when its call returns, so that values can be read at
            no cost.
    """

    has_graphs = False
    is_prompt = True

    def __init__(self, num_threads: int = 1) -> None:
        self.device = torch.device("cpu")
        self._num_threads = num_threads

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context of the worker's thread: current device, streams, intra-op threads.

        On a CPU the thread gets its share of the cores.
        """
        torch.set_num_threads(self._num_threads)
        # Thread-local: backward of this thread's graphs stays on this thread.
        with torch.autograd.set_multithreading_enabled(False):
            yield

    def comm(self, *, joined: bool = True) -> AbstractContextManager[None]:
        """Context for copies and collectives: after all compute, before any that follows.

        Args:
            joined: Compute that follows waits for this context; if not, for a later one.
        """
        return nullcontext()

    def follow_caller(self) -> None:
        """Order the worker's work after all work that the calling thread has issued to the device.

        Called before :meth:`activate`, which otherwise follows its own thread's current stream.
        """
        return

    now = staticmethod(time.perf_counter)
    """Wall time in seconds, for waits of the host."""

    def new_log(self) -> ValueLog:
        """A log of losses and scalars of this device."""
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
        """Block until all work that this worker has issued is complete. Never in a step."""
        return

    def generator_state(self) -> torch.Tensor | None:
        """State of the device's default generator; ``None`` for the CPU."""
        return None

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Restore a state of the device's default generator; nothing for the CPU."""
        return

    @property
    def is_shared(self) -> bool:
        """True if other workers of the process use the device, which excludes graphs."""
        return False

    def abandon(self) -> None:
        """Release the device after a run whose thread may be stuck. Any thread; idempotent."""
        return

    def capturing(self) -> AbstractContextManager[bool]:
        """Context of captures; yields true if they can be made now.

        Blocks until issued work is complete, until no other worker of the process captures, and
        for some seconds at most until no data set is being read.
        """
        return nullcontext(False)

    def capture(self, work: Callable[[], None], generator: torch.Generator) -> Callable[[], None]:
        """Capture the work that ``work`` issues to the device, without running it.

        Blocks until issued work is complete. Inside :meth:`capturing` only.

        Args:
            work: Called once.
            generator: A generator that it draws from, beside the device's default one.

        Returns:
            A function that replays the work, any number of times.
        """
        raise NotImplementedError(f"{self.device} has no graphs")

    def host_twin(self, payload: Payload) -> Payload:
        """CPU memory for a payload of the device; the payload itself if it is on the CPU."""
        return payload

    def fetch(self, source: Payload, target: Payload) -> PendingCopy | None:
        """Start copying a payload of the device to its :meth:`host_twin`.

        Ordered behind all work in :meth:`comm`. Later work there waits for the copy, compute does
        not. The target may be read, and the source be written outside :meth:`comm`, once the copy
        is complete.

        Returns:
            ``None`` where nothing is pending.
        """
        return None

    def stage(self, average: Payload, twin: Payload) -> Payload:
        """A payload of the CPU in memory that the device can copy from; blocks for the copy.

        Args:
            average: Read until this returns, never written.
            twin: A :meth:`host_twin` that is not in use.
        """
        return average

    def arrival(self) -> PendingCopy | None:
        """Completion of all work issued so far in :meth:`comm`; ``None`` if it is complete."""
        return None

    def copying(self) -> AbstractContextManager[None]:
        """Makes the copy stream current in this thread; orders nothing by itself."""
        return nullcontext()

    def driver_call(self) -> AbstractContextManager[None]:
        """Context of calls that may wait for the device; see :meth:`CaptureGate.driver_call`."""
        return nullcontext()

    def new_event(self) -> DeviceEvent:
        return None

    def record(self, event: DeviceEvent) -> None:
        """Mark the work issued so far to the current stream."""

    def wait_event(self, event: DeviceEvent) -> None:
        """Make later work of the current stream wait for ``event``.

        The event's last recording counts; the host does not wait.
        """

    def wait_host(self, event: DeviceEvent) -> None:
        """Block the calling thread, without the interpreter lock, until ``event`` is complete."""

    def is_complete(self, event: DeviceEvent) -> bool:
        """True if the work before the event's last recording is complete."""
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
        """A page-locked copy of a CPU tensor for a GPU; other tensors are returned as they are."""
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor on the device, copied in the current stream if it is elsewhere.

        From pinned memory the host does not wait, and the source may be dropped at once.
        """
        return tensor.to(self.device)

    def memory(self) -> MemoryReading:
        """The device's memory now; does not wait for it.

        For the host, memory of this process counts as taken by others.
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
        """Restart ``peak_bytes`` from the current use."""

    def step_memory(self) -> StepMemory | None:
        """A limit of step sizes by memory; ``None`` where memory is not measured, as on a CPU."""
        return None


class PendingCopy(ABC):
    """Copies in progress between a device and the CPU."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once all of them are complete; does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Block until all of them are complete."""


def device_summary(devices: Sequence[torch.device] | None = None) -> str:
    """One line that names the devices of a run, or all that are visible.

    Args:
        devices: The devices of a run; ``None``: every CUDA device, else the CPU.
    """
    if devices is None:
        devices = default_devices()
    names = [_describe(d) for d in devices]
    parts = [f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    return (
        f"{len(names)} worker{'s' if len(names) != 1 else ''} on {', '.join(parts)}; "
        f"torch {torch.__version__}, GIL {'on' if has_gil() else 'off'}"
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
"""Eager steps of a kind before the first that can be captured."""


DeviceEvent = Any
"""An event of a stream, made by :meth:`Device.new_event`; complete until it is recorded."""


def available_host_bytes() -> int:
    """Host memory available without swapping."""
    return int(psutil.virtual_memory().available)
