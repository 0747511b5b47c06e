"""The threads of replicas, with their devices, their cores and their collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordinator.policy import AverageBackend
from runtime.collective import Collective, create_collectives
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.core.threads import IntraOpThreads
from runtime.device.base import DeviceContext, open_device
from runtime.loop.rank_threads import Outcome, RankThreads


def start_threads(
    devices: Sequence[torch.device], backend: AverageBackend
) -> tuple[list[DeviceContext], Sequence[Collective], RankThreads]:
    """Start a thread for each replica, inside its device's context.

    The last thread to end closes the collective and gives the intra-op threads back.

    Args:
        devices: The replicas' devices.
        backend: The resolved transport.

    Returns:
        Device objects, ends of the collective (none for one device), and the threads.
    """
    num_cpu = sum(device.type == "cpu" for device in devices)
    contexts = [open_device(device, num_cpu) for device in devices]
    kind = backend.value if backend in (AverageBackend.NCCL, AverageBackend.GLOO) else "thread"
    ends = create_collectives(len(devices), kind, devices) if len(devices) > 1 else []
    IntraOpThreads.acquire()

    def on_end() -> None:
        IntraOpThreads.release()
        for end in ends:
            end.close()

    # Once the threads are made they end everything, even if one could not be started.
    activate = [c.activate for c in contexts]
    return contexts, ends, RankThreads("data-parallel", activate, on_end, lend=num_cpu)


def first_error(outcomes: Sequence[Outcome]) -> tuple[int, BaseException | None]:
    """The first failure that is not the echo of another rank's."""
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    echoes = (CollectiveAborted, CollectiveTimeout)
    first = [(rank, e) for rank, e in failed if not isinstance(e, echoes)]
    return next(iter(first or failed), (0, None))


def kind_of(device: torch.device) -> str:
    """What replicas must share to compute the same bits."""
    if device.type == "cpu":
        return device.type
    return str(torch.cuda.get_device_properties(device).name)
