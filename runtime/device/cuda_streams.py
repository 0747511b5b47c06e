"""Streams that outlive their workers."""

from __future__ import annotations

import threading
from collections import defaultdict
from weakref import WeakKeyDictionary

import torch

from runtime.device.cuda_api import CudaApi, Stream

Streams = tuple[Stream, Stream, Stream]
"""A worker's compute, comm and copy stream."""


class StreamPool:
    """Streams of workers that have ended, for those to come. Thread-safe.

    What PyTorch's allocator keeps of freed memory, and the workspaces of cuBLAS, belong to a
    stream. If each run made new ones, a process would pay for the memory of up to 32.
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
        """A worker gives them no more work; what it gave may still run."""
        with self._lock:
            self._idle.setdefault(api, defaultdict(list))[device].append(streams)


STREAMS = StreamPool()
"""Those of the process."""
