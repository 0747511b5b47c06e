"""When replicas average, over what, and how the transport is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class ApplyPolicy(Enum):
    """When the work of one replica reaches the others."""

    SYNC = "sync"
    """Gradients are averaged before every optimizer step, weighted by samples or by the weights
    that come with the losses."""
    CADENCE = "cadence"
    """Parameters are averaged once the slowest rank has computed for ``anchor`` batches."""
    ASYNC = "async"
    """Parameters are averaged once every rank has run its own batch count; fast ranks
    go on by a bounded overshoot."""


class AverageBackend(Enum):
    """The transport of an averaging."""

    AUTO = "auto"
    """The coordinator chooses, and says why."""
    CPU = "cpu"
    """Snapshots are averaged by the coordinator; no rank waits for another."""
    THREAD = "thread"
    """All-reduce between the worker threads in shared memory."""
    GLOO = "gloo"
    """All-reduce by PyTorch's Gloo process group, one for each thread."""
    NCCL = "nccl"
    """All-reduce by NCCL, one communicator for each thread."""


def choose_backend(
    requested: AverageBackend,
    policy: ApplyPolicy,
    devices: Sequence[str],
    *,
    nccl_available: bool,
) -> tuple[AverageBackend, str]:
    """Resolve ``AUTO`` and refuse what cannot work.

    Args:
        requested: What the user asked for.
        policy: When replicas average.
        devices: One device name for each rank, as ``"cpu"`` or ``"cuda:0"``.
        nccl_available: Whether this build of PyTorch has NCCL.

    Returns:
        The backend and a sentence that says why.

    Raises:
        ValueError: The requested backend cannot serve these devices.
    """
    on_cuda = [d.startswith("cuda") for d in devices]
    distinct = len(set(devices)) == len(devices)
    names = ", ".join(devices)
    if requested is AverageBackend.AUTO:
        return _choose_auto(policy, devices, on_cuda, distinct, nccl_available)
    if requested is AverageBackend.NCCL:
        if not all(on_cuda) or not distinct:
            raise ValueError(
                f"backend(NCCL) needs distinct CUDA devices, got [{names}]: NCCL refuses CPU "
                "devices and two ranks on one GPU; use THREAD, CPU or AUTO"
            )
        if not nccl_available:
            raise ValueError(
                "backend(NCCL): this build of PyTorch has no NCCL; use THREAD, CPU or AUTO"
            )
    if requested is AverageBackend.GLOO and any(on_cuda):
        raise ValueError(
            f"backend(GLOO) serves CPU devices only, got [{names}]; use NCCL, THREAD, CPU or AUTO"
        )
    if requested is AverageBackend.CPU and policy is ApplyPolicy.SYNC:
        return requested, "SYNC over CPU is the in-process reduction in CPU memory, as THREAD"
    return requested, "asked for"


def _choose_auto(
    policy: ApplyPolicy,
    devices: Sequence[str],
    on_cuda: list[bool],
    distinct: bool,
    nccl_available: bool,
) -> tuple[AverageBackend, str]:
    default = AverageBackend.THREAD if policy is ApplyPolicy.SYNC else AverageBackend.CPU
    what = "SYNC reduces in shared memory" if policy is ApplyPolicy.SYNC else "nobody waits on CPU"
    if len(devices) == 1:
        return default, "one device: nothing is averaged"
    if not all(on_cuda):
        return default, f"not all devices are CUDA devices, so NCCL is out; {what}"
    if not distinct:
        return default, f"a GPU stands more than once, which NCCL refuses; {what}"
    if not nccl_available:
        return default, f"this build of PyTorch has no NCCL; {what}"
    return AverageBackend.NCCL, f"{len(devices)} distinct CUDA devices and NCCL is available"
