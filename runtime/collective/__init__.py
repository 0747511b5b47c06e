"""Collective operations between workers that are threads of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordinator.backend_choice import choose_backend
from coordinator.config import ApplyPolicy, AverageBackend
from runtime.collective.barrier import AbortableBarrier
from runtime.collective.base import Collective, Group, ReduceOp, close_collectives
from runtime.collective.nccl import NcclCollective, create_nccl_groups
from runtime.collective.nccl_library import has_nccl, launch_blocking_fault, shared_gpu_fault
from runtime.collective.process_group import ProcessGroupCollective, create_process_groups
from runtime.collective.subgroups import split, split_nodes
from runtime.collective.thread import StagedThreadCollective, ThreadCollective
from runtime.core.checks import check_word
from runtime.core.rng import install_thread_generators
from runtime.core.threads import prepare_threads

__all__ = [
    "AbortableBarrier",
    "Collective",
    "NcclCollective",
    "ProcessGroupCollective",
    "ReduceOp",
    "StagedThreadCollective",
    "ThreadCollective",
    "close_collectives",
    "create_collectives",
    "resolve_backend",
    "set_timeout_remedy",
    "split",
    "split_nodes",
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
        world_size: Number of ranks, at least 1.
        kind: ``"thread"``, which serves devices of any kind and number; ``"gloo"``, for
            CPU devices; ``"nccl"``, for a distinct CUDA device for each rank. Ranks may share a GPU
            over NCCL 2.30 or later with ``NCCL_MULTI_RANK_GPU_ENABLE=1``, for checks.
        devices: Each rank's device; ``None``: all on the CPU.
        timeout_s: Limit of a collective's wait for a rank to arrive, in seconds; over
            Gloo and NCCL as long again for the exchange.

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
    placed = [_place(device) for device in devices or ["cpu"] * world_size]
    create = _KINDS[check_word("kind", kind, tuple(_KINDS))]
    prepare_threads()  # each rank is a thread that computes
    install_thread_generators()
    return create(placed, timeout_s)


def set_timeout_remedy(collectives: Sequence[Collective], remedy: str) -> None:
    """Set the end of the message of a timeout, for a group whose limit the user sets elsewhere."""
    collectives[0]._group.barrier.remedy = remedy


def _place(device: torch.device | str) -> torch.device:
    """The device with its number, as in ``tensor.device``."""
    placed = torch.device(device)
    if placed.type not in ("cpu", "cuda"):
        raise ValueError(f"no collective serves {placed}; pass CPU or CUDA devices")
    return placed if placed.type == "cpu" else torch.device("cuda", placed.index or 0)


def _create_thread(devices: Sequence[torch.device], timeout_s: float) -> list[Collective]:
    world_size = len(devices)
    group = Group(world_size, timeout_s)
    return [
        ThreadCollective(rank, world_size, group)
        if device.type == "cpu"
        else StagedThreadCollective(rank, world_size, group, device)
        for rank, device in enumerate(devices)
    ]


def _create_gloo(devices: Sequence[torch.device], timeout_s: float) -> list[Collective]:
    if any(device.type != "cpu" for device in devices):
        raise ValueError("'gloo' collectives reduce CPU tensors; pass CPU devices")
    return list(create_process_groups(len(devices), timeout_s))


def _create_nccl(devices: Sequence[torch.device], timeout_s: float) -> list[Collective]:
    fault: str | None = "NCCL refuses CPU devices"
    if all(device.type == "cuda" for device in devices):
        fault = shared_gpu_fault() if len(set(devices)) < len(devices) else None
    if fault is not None:
        raise ValueError(
            f"'nccl' needs a distinct CUDA device for each rank: {fault}; use 'thread'"
        )
    if not has_nccl():
        raise ValueError("'nccl': this build of PyTorch has no NCCL; use 'thread'")
    if (fault := launch_blocking_fault(len(devices))) is not None:
        raise ValueError(f"'nccl': {fault}, or use 'thread'")
    return list(create_nccl_groups(devices, timeout_s))


_KINDS = {"thread": _create_thread, "gloo": _create_gloo, "nccl": _create_nccl}
"""Creates the groups of each kind, on checked devices."""


def resolve_backend(
    backend: AverageBackend,
    devices: Sequence[torch.device],
    policy: ApplyPolicy = ApplyPolicy.SYNC,
) -> tuple[AverageBackend, str]:
    """The transport between ranks on these devices, and why it is that one.

    Raises:
        ValueError: The backend does not serve the devices.
    """
    return choose_backend(
        backend,
        policy,
        [str(device) for device in devices],
        nccl_available=has_nccl(),
        shared_gpu_fault=shared_gpu_fault(),
        nccl_fault=launch_blocking_fault(len(devices)),
    )
