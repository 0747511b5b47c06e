"""One worker's device of any kind that PyTorch calls an accelerator, such as MPS or XPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coordinator.messages import Payload
from runtime.device.base import Device, PendingCopy
from runtime.device.launch_load import LaunchLoad
from runtime.device.memory import MemoryReading
from runtime.device.timing import HostTimer, StepTime, StepTimer


class AcceleratorDevice(Device):
    """A device that is used through :mod:`torch.accelerator` alone.

    Everything runs in order on the stream that is current in the worker's thread. The host waits
    for the device once a step, which bounds what is outstanding there and makes times right.

    Args:
        api: Stands in for :mod:`torch.accelerator`.
    """

    is_prompt = False

    def __init__(self, device: torch.device, api: Any = torch.accelerator) -> None:
        super().__init__()
        self.device = device
        self._api = api

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the device current and run backward in this thread.

        Waits for the device on both ends: threads may have streams of their own.
        """
        with self._api.device_index(self.device.index or 0):
            self.finish()
            # Thread-local: backward of this thread's graphs stays on this thread.
            with torch.autograd.set_multithreading_enabled(False):
                yield
            self.finish()

    def finish(self) -> None:
        """Block until the device has done all its work."""
        self._api.synchronize(self.device)

    def new_timer(self, load: LaunchLoad | None = None) -> StepTimer:
        """A timer that waits for the device at the end of each step."""
        return _SynchronizedTimer(self)

    def generator_state(self) -> Tensor:
        """State of the device's default generator, on the CPU."""
        state: Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return state

    def set_generator_state(self, state: Tensor) -> None:
        """Restore a state of the device's default generator."""
        torch.get_device_module(self.device).set_rng_state(state, self.device)

    def host_twin(self, payload: Payload) -> Payload:
        """CPU memory of the same shapes and dtypes."""
        return payload.map(lambda t: torch.empty(t.shape, dtype=t.dtype))

    def fetch(self, source: Payload, target: Payload) -> PendingCopy | None:
        """Copy to the CPU; blocks until the copy is complete."""
        for twin, tensor in zip(target.tensors, source.tensors, strict=True):
            twin.copy_(tensor)
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the device."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def memory(self) -> MemoryReading:
        """Memory of the device, or of the host where the kind does not report its own."""
        try:
            free, total = self._api.get_memory_info(self.device)
        except (AttributeError, RuntimeError):  # MPS shares the host's
            return super().memory()
        return MemoryReading(
            total_bytes=total, free_bytes=free, reserved_bytes=0, active_bytes=0, peak_bytes=0
        )


class _SynchronizedTimer(HostTimer):
    """Wall time of steps, each to its end on the device."""

    def __init__(self, device: AcceleratorDevice) -> None:
        super().__init__()
        self._device = device

    def stop(self, num_batches: int) -> StepTime:
        """The step has been launched; blocks until it is done."""
        self._device.finish()
        return super().stop(num_batches)
