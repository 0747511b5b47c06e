"""The one place through which workers and collectives speak to CUDA.

Streams, events and pinned memory are made and used here and nowhere else, so that a
recording stand-in can take this object's place. Importing the module touches no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Stream = Any
"""A queue of work of a device, made by :meth:`CudaApi.new_stream`."""
Event = Any
"""A mark in a stream, made by :meth:`CudaApi.new_event`. One that was never recorded is
complete; recording it again moves it."""


class CudaApi:
    """Every call to CUDA; stateless and thread-safe. Only :meth:`wait_host` waits.

    The current device and the current stream are those of the calling thread.
    """

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes a device current in this thread."""
        return torch.cuda.device(device)

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that is ordered with no other, the default stream included."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes a stream current in this thread; orders nothing by itself."""
        return torch.cuda.stream(stream)

    def new_event(self, *, timing: bool = False) -> Event:
        """An event of the current device; a thread that waits for it leaves its core."""
        return torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=True
        )

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """Mark the work issued so far to a stream (``None``: the current one)."""
        event.record() if stream is None else event.record(stream)

    def wait_event(self, event: Event, stream: Stream | None = None) -> None:
        """Let what a stream (``None``: the current one) gets from here on wait for an event.

        The event's last recording counts, whatever it is recorded for later. The host does
        not wait.
        """
        event.wait() if stream is None else event.wait(stream)

    def is_complete(self, event: Event) -> bool:
        """Whether the work before the event's last recording is done."""
        return bool(event.query())

    def wait_host(self, event: Event) -> None:
        """Block this thread until an event is complete, without the interpreter lock."""
        event.synchronize()

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two complete events that were made with ``timing``."""
        return float(start.elapsed_time(end)) / 1e3

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host. Allocating may wait for the device."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream. The host does not wait if its side is pinned.

        The source must stay as it is, and the target must not be looked at, until an event
        recorded behind the copy is complete.
        """
        target.copy_(source, non_blocking=True)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor lies."""
        return tensor.device


API = CudaApi()
"""What is used where no other is passed; looked up at each use."""
