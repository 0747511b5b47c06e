"""What carrying batches to a device needs of it: events, a copy stream, copies, readings.

Slots and resident data speak to this interface alone. ``CpuCopies`` is its twin without
streams; the one for CUDA stands in :mod:`runtime.device.cuda_copies`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from runtime.data.budget import MemoryReading

Event = Any
"""A mark in a stream, made by :meth:`CopyDevice.new_event`. One that was never recorded is
complete."""


class CopyDevice(ABC):
    """One worker's way to its device. The current stream is the calling thread's.

    Attributes:
        device: Where batches go.
    """

    device: torch.device

    @abstractmethod
    def new_event(self) -> Event:
        """An event, to be recorded again and again."""

    @abstractmethod
    def copy_stream(self) -> AbstractContextManager[None]:
        """Makes the copy stream current in this thread; orders nothing by itself."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Mark the work issued so far to the current stream."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Make what is issued to the current stream from here on wait for ``event``.

        The event's last recording counts; the host does not wait.
        """

    @abstractmethod
    def wait_host(self, event: Event) -> None:
        """Block the calling thread, without the interpreter lock, until ``event`` is complete."""

    @abstractmethod
    def is_complete(self, event: Event) -> bool:
        """Whether the work before the event's last recording is done."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream, without waiting if the host side is pinned."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory on the device, of the current stream."""

    @abstractmethod
    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host. Allocating may wait for the device."""

    @abstractmethod
    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy of a tensor of the host; any other as it is."""

    @abstractmethod
    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor on the device, copied in the current stream if need be.

        From pinned memory the host does not wait, and the source may be dropped at once.
        """

    @abstractmethod
    def memory(self) -> MemoryReading:
        """The device's memory now. Waits for nothing."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let ``peak_bytes`` count from here on."""


class CpuCopies(CopyDevice):
    """The twin without streams: every call is over when it returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def new_event(self) -> Event:
        """Nothing is ever pending."""
        return None

    @contextmanager
    def copy_stream(self) -> Iterator[None]:
        """The thread does one thing after another."""
        yield

    def record(self, event: Event) -> None:
        """Nothing to mark."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_host(self, event: Event) -> None:
        """Nothing to wait for."""

    def is_complete(self, event: Event) -> bool:
        """True."""
        return True

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host."""
        return torch.empty(tuple(shape), dtype=dtype)

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host, as there is nothing to lock it for."""
        return torch.empty(tuple(shape), dtype=dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def bring(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy if it was elsewhere."""
        return tensor.to(self.device)

    def memory(self) -> MemoryReading:
        """That of the host; what the process uses counts as taken by others."""
        memory = psutil.virtual_memory()
        return MemoryReading(
            total_bytes=memory.total,
            free_bytes=memory.available,
            reserved_bytes=0,
            active_bytes=0,
            peak_bytes=0,
        )

    def reset_peak(self) -> None:
        """There is no peak."""


def available_host_bytes() -> int:
    """Memory of the host that can be had without swapping."""
    return int(psutil.virtual_memory().available)
