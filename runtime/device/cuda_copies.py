"""Batches on their way to a CUDA device: events, the copy stream, pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from runtime.data.budget import MemoryReading
from runtime.device import cuda_api
from runtime.device import memory as cuda_memory
from runtime.device.copying import CopyDevice, Event


class CudaCopies(CopyDevice):
    """A worker's copies, in its copy stream. Thread-safe.

    Args:
        device: Where they go.
        stream: Gives the copy stream, at the first copy.
        api: Speaks to CUDA.
        memory: Tells what the device has left.
    """

    def __init__(
        self,
        device: torch.device,
        stream: Callable[[], cuda_api.Stream],
        api: cuda_api.CudaApi | None = None,
        memory: cuda_memory.CudaMemory | None = None,
    ) -> None:
        self.device = device
        self._api = cuda_api.API if api is None else api
        self._memory = cuda_memory.MEMORY if memory is None else memory
        self._stream = stream

    def new_event(self) -> Event:
        """An event; a thread that waits for it leaves its core."""
        return self._api.new_event()

    @contextmanager
    def copy_stream(self) -> Iterator[None]:
        """Makes the device and its copy stream current in this thread."""
        with self._api.on_device(self.device), self._api.stream(self._stream()):
            yield

    def record(self, event: Event) -> None:
        """Mark the work issued so far to the current stream."""
        self._api.record(event)

    def wait_event(self, event: Event) -> None:
        """Let the current stream wait."""
        self._api.wait_event(event)

    def wait_host(self, event: Event) -> None:
        """Block this thread."""
        # The loader's thread has no device of its own: on the first one, which the run may
        # not use, the call would make a context.
        with self._api.on_device(self.device):
            self._api.wait_host(event)

    def is_complete(self, event: Event) -> bool:
        """Whether the work before the event is done."""
        with self._api.on_device(self.device):
            return self._api.is_complete(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream."""
        self._api.copy(target, source)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the device, of the current stream."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host."""
        return self._api.empty_pinned(shape, dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy of a strided CPU tensor; any other as it is."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.requires_grad:
            return tensor
        pinned = self._api.empty_pinned(tensor.shape, tensor.dtype)
        return pinned.copy_(tensor)

    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; PyTorch keeps a pinned source until the copy is done.

        One that lies there already was made in another stream, and must be complete.
        """
        if tensor.device == self.device:
            self._api.lend(tensor)
            return tensor
        return tensor.to(self.device, non_blocking=True)

    def memory(self) -> MemoryReading:
        """The device's memory now."""
        return self._memory.read(self.device)

    def reset_peak(self) -> None:
        """Let peaks count from here on."""
        self._memory.reset_peak(self.device)
