"""Stream order between the thread that calls and the threads of the replicas.

Work goes from the caller to the replicas and comes back. On the way there every replica's
compute stream waits for what the caller's streams were given before; on the way back the
caller's streams wait for every replica's. So memory may be handed over in both directions,
and be freed on either side, without the host waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.device import cuda_api
from runtime.device.cuda_api import CudaApi, Event


class Crossing:
    """Orders streams by events; does nothing where no GPU is involved.

    Args:
        devices: The replicas' devices.
        api: The way to CUDA; ``None``: the real one.
    """

    def __init__(self, devices: Sequence[torch.device], api: CudaApi | None = None) -> None:
        self._api = cuda_api.API if api is None else api
        self._gpus = list(dict.fromkeys(d for d in devices if d.type == "cuda"))

    def depart(self, tensors: Sequence[Tensor] = ()) -> list[Event]:
        """Mark what the calling thread's current streams were given so far.

        Args:
            tensors: What crosses; may lie on a GPU that no replica uses.
        """
        if not self._gpus and not any(self._api.device_of(t).type == "cuda" for t in tensors):
            return []
        places = (self._api.device_of(t) for t in tensors)
        gpus = dict.fromkeys([*self._gpus, *(place for place in places if place.type == "cuda")])
        return [self._mark(gpu) for gpu in gpus]

    def arrive(self, device: torch.device, events: Sequence[Event]) -> None:
        """Called by a replica's thread before it works: what it does comes after the events."""
        for event in events:
            if device.type == "cuda":
                self._api.wait_event(event)
            else:  # a replica on the CPU reads with the host
                self._api.wait_host(event)

    def leave(self, device: torch.device) -> Event | None:
        """Called by a replica's thread when it has given its work to its device."""
        return self._mark(device) if device.type == "cuda" else None

    def rejoin(self, events: Sequence[Event | None]) -> None:
        """Let the calling thread's current streams wait for the replicas."""
        marks = [event for event in events if event is not None]
        if not marks:
            return
        for gpu in self._gpus:
            with self._api.on_device(gpu):
                for mark in marks:
                    self._api.wait_event(mark)

    def _mark(self, gpu: torch.device) -> Event:
        with self._api.on_device(gpu):
            event = self._api.new_event()
            self._api.record(event)
        return event
