"""Collective operations between workers that are threads of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.collective.barrier import AbortableBarrier
from runtime.collective.base import Collective, Group, ReduceOp
from runtime.collective.process_group import ProcessGroupCollective, create_process_groups
from runtime.collective.thread import ThreadCollective

__all__ = [
    "AbortableBarrier",
    "Collective",
    "ProcessGroupCollective",
    "ReduceOp",
    "ThreadCollective",
    "create_collectives",
]


def create_collectives(
    world_size: int,
    kind: str = "thread",
    devices: Sequence[torch.device | str] | None = None,
    timeout_s: float = 60.0,
) -> list[Collective]:
    """Creates one connected group.

    Blocks until all ranks are connected. Every rank must be closed in the end.

    Args:
        world_size: How many ranks, at least 1.
        kind: ``"thread"`` or ``"gloo"``.
        devices: Each rank's device; ``None``: all on the CPU.
        timeout_s: How long a collective may wait for a rank to arrive, in seconds; over
            Gloo as long again for the exchange.

    Returns:
        The end of each rank, in order of rank.

    Raises:
        ValueError: An argument is out of range, or the devices do not suit the kind.
        CollectiveAborted: A rank could not connect; the original is the cause.
        CollectiveTimeout: A rank did not connect in time.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
    if devices is not None and len(devices) != world_size:
        raise ValueError(f"{len(devices)} devices for {world_size} ranks; pass one for each rank")
    placed = None if devices is None else [torch.device(device) for device in devices]
    if kind == "nccl":
        _refuse_nccl(placed)
    if placed is not None and any(device.type != "cpu" for device in placed):
        raise ValueError(f"{kind!r} collectives reduce CPU tensors; pass CPU devices")
    if kind == "thread":
        group = Group(world_size, timeout_s)
        return [ThreadCollective(rank, world_size, group) for rank in range(world_size)]
    if kind == "gloo":
        return list(create_process_groups(kind, world_size, timeout_s))
    raise ValueError(f"unknown kind {kind!r}; pass 'thread' or 'gloo'")


def _refuse_nccl(devices: Sequence[torch.device] | None) -> None:
    if (
        devices is None
        or any(device.type != "cuda" for device in devices)
        or len(set(devices)) < len(devices)
    ):
        raise ValueError("'nccl' needs a distinct CUDA device for each rank; use 'thread'")
    raise ValueError("'nccl' is not available in this version; use 'thread' on CPU devices")
