"""The process group of a loop's replicas: choice of backend, and creation on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed

from coordinator.backend_choice import choose_backend
from coordinator.config import ApplyPolicy, AverageBackend
from runtime.collective import Collective, close_collectives
from runtime.collective.nccl_library import launch_blocking_fault, shared_gpu_fault


class CollectiveGroup:
    """All ranks' collectives of one process group, created on first use and after an abort.

    Args:
        make: Creates one collective per rank.
    """

    def __init__(self, make: Callable[[], Sequence[Collective]]) -> None:
        self._make = make
        self._collectives: Sequence[Collective] = ()
        self._aborted = False

    def get(self) -> Sequence[Collective]:
        """The collectives in order of rank. Blocks until the group is connected."""
        if self._aborted:
            self.close()
        if not self._collectives:
            self._collectives = self._make()
        return self._collectives

    def abort(self) -> None:
        """Abort all collectives, so that waiting ranks raise. Thread-safe."""
        self._aborted = True
        for collective in self._collectives:
            collective.abort()

    def close(self) -> None:
        """Close the group. No rank may be inside a collective."""
        collectives, self._collectives, self._aborted = self._collectives, (), False
        close_collectives(collectives)


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
