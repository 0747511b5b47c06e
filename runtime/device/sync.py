"""Every wait of one stream for another that is made outside a worker's own device.

Work goes from a caller to other threads and comes back, or through memory that is used again.
A mark is made behind what a stream was given, and whoever touches the same memory from another
stream waits for the mark. So memory may be handed over in both directions, and be freed on
either side, without the host waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.device import cuda_api
from runtime.device.cuda_api import CudaApi, Event


class StreamSync:
    """Orders streams by events; does nothing where no GPU is involved. Thread-safe.

    Args:
        devices: Whose current streams :meth:`marks` and :meth:`join` mean.
        api: The way to CUDA; ``None``: the real one.
    """

    def __init__(self, devices: Sequence[torch.device] = (), api: CudaApi | None = None) -> None:
        self._api = cuda_api.API if api is None else api
        self._gpus = list(dict.fromkeys(d for d in devices if d.type == "cuda"))

    def mark(self, device: torch.device, event: Event | None = None) -> Event | None:
        """Mark what the calling thread's current stream of a device was given so far.

        Args:
            device: ``None`` is given for a CPU.
            event: One to record again; ``None``: a new one.
        """
        if device.type != "cuda":
            return None
        with self._api.on_device(device):
            event = self._api.new_event() if event is None else event
            self._api.record(event)
        return event

    def wait(self, device: torch.device, marks: Iterable[Event | None]) -> None:
        """What the calling thread gives a device from here on comes after the marks.

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
        """Block the calling thread until what is in front of a mark is done."""
        if mark is not None:
            self._api.wait_host(mark)

    def marks(self, tensors: Sequence[Tensor] = ()) -> list[Event]:
        """Marks of the calling thread's current streams.

        Args:
            tensors: What crosses; may lie on a GPU that is none of ours.
        """
        places = dict.fromkeys([*self._gpus, *map(self._api.device_of, tensors)])
        return [mark for place in places if (mark := self.mark(place)) is not None]

    def join(self, marks: Iterable[Event | None]) -> None:
        """The calling thread's current streams wait for the marks of others."""
        marks = [mark for mark in marks if mark is not None]
        for gpu in self._gpus:
            self.wait(gpu, marks)
