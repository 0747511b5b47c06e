"""Devices and transport of the ranks of a check: distinct GPUs, one GPU that is shared, or CPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed

from runtime import AverageBackend, create_collectives
from runtime.collective.nccl_library import shared_gpu_fault
from runtime.core.errors import CollectiveAborted
from runtime.device.cuda_api import API

WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The device of each rank, and the kind of collective between them."""

    devices: tuple[torch.device, ...]
    kind: str

    @property
    def backend(self) -> AverageBackend:
        """The same as a backend of a run."""
        return AverageBackend(self.kind)

    @property
    def is_cuda(self) -> bool:
        return self.devices[0].type == "cuda"

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.devices))} over {self.kind}"


def distinct_gpus(at_most: int = 8) -> tuple[torch.device, ...]:
    """The visible GPUs."""
    return tuple(torch.device("cuda", i) for i in range(min(at_most, torch.cuda.device_count())))


def nccl_devices(world_size: int) -> list[torch.device] | None:
    """A GPU for each rank over NCCL, shared if there is only one; ``None`` without GPUs."""
    gpus = list(distinct_gpus())
    if len(gpus) == 1 and world_size > 1 and shared_gpu_fault() is None:
        return gpus * world_size
    return gpus[:world_size] if len(gpus) >= world_size else None


def default_placement(*, nccl_works: bool = True) -> Placement:
    """All GPUs, or two ranks on the only one, or two CPU ranks over Gloo.

    Args:
        nccl_works: False if a trial without this package failed: GPUs then reduce through pinned
            memory.
    """
    gpus = distinct_gpus()
    if not gpus:
        return Placement(devices=(torch.device("cpu"),) * 2, kind="gloo")
    over_nccl = nccl_devices(max(2, len(gpus))) if nccl_works else None
    if over_nccl is not None:
        return Placement(devices=tuple(over_nccl), kind="nccl")
    return Placement(devices=gpus if len(gpus) > 1 else gpus * 2, kind="thread")


def on_ranks(kind: str, devices, work, timeout_s: float = 60.0):
    """Run ``work(end, device)`` for every rank of a new group, each in a thread of its own.

    On a GPU in a stream of its own, with its backward passes in its thread. A rank that raises
    aborts the group, and its error is raised here.
    """
    placed = [torch.device(device) for device in devices]
    ends = create_collectives(len(placed), kind, placed, timeout_s)
    try:
        return run_ends(ends, placed, work)
    finally:
        for end in ends:
            end.close()


def run_ends(ends, devices, work):
    """Like :func:`on_ranks`, for an existing group."""

    def run(end):
        device = devices[end.rank]
        try:
            with ExitStack() as stack:
                if device.type == "cuda":
                    stack.enter_context(torch.cuda.device(device))
                    stack.enter_context(torch.cuda.stream(API.new_stream(device)))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                result = work(end, device)
                if device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                return result
        except BaseException:
            end.abort()
            raise

    with ThreadPoolExecutor(len(ends), thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, end) for end in ends]
        errors = [error for f in futures if (error := f.exception(WAIT_S)) is not None]
    if errors:  # errors of aborted ranks are not the cause
        raise min(errors, key=lambda error: isinstance(error, CollectiveAborted))
    return [future.result() for future in futures]
