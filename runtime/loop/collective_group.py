"""The process group of a loop's replicas: the choice of its backend, and its lazily made ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed

from coordinator.backend_choice import choose_backend
from coordinator.config import ApplyPolicy, AverageBackend
from runtime.collective import Collective
from runtime.collective.nccl_library import launch_blocking_fault, shared_gpu_fault


class CollectiveGroup:
    """The ranks' ends of one group, made when they are first needed.

    Args:
        make: Makes one end for each rank.
    """

    def __init__(self, make: Callable[[], Sequence[Collective]]) -> None:
        self._make = make
        self._collectives: Sequence[Collective] = ()
        self._aborted = False

    def get(self) -> Sequence[Collective]:
        """The collectives, new ones after an abort. Blocks until the group is connected."""
        if self._aborted:
            self.close()
        if not self._collectives:
            self._collectives = self._make()
        return self._collectives

    def abort(self) -> None:
        """Wake whoever waits in a collective. From any thread."""
        self._aborted = True
        for collective in self._collectives:
            collective.abort()

    def close(self) -> None:
        """Close the group; nobody is in it any more."""
        collectives, self._collectives, self._aborted = self._collectives, (), False
        for collective in collectives:
            collective.close()


def resolve_backend(
    backend: AverageBackend, devices: Sequence[torch.device]
) -> tuple[AverageBackend, str]:
    """The transport of gradients between replicas on these devices, and why it is that one.

    Raises:
        ValueError: The backend does not serve the devices.
    """
    return choose_backend(
        backend,
        ApplyPolicy.SYNC,
        [str(device) for device in devices],
        nccl_available=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        shared_gpu_fault=shared_gpu_fault(),
        nccl_fault=launch_blocking_fault(len(devices)),
    )
