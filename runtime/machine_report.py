"""What ``python -m runtime`` tells: the devices, and how replicas on them would average."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

import psutil
import torch
import torch.distributed

from coordinator.config import ApplyPolicy, AverageBackend, choose_backend
from runtime.core.threads import num_cores
from runtime.device.base import device_summary


def machine_report(devices: Sequence[torch.device] | None = None) -> str:
    """Some lines on the devices, the interpreter and the choices of ``AUTO``.

    Args:
        devices: Of a run; ``None``: every CUDA device, else two workers on the CPU.

    Returns:
        Lines that end with a line break. CUDA devices are asked for their properties, which
        gives them no work.
    """
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")] * 2
    lines = [device_summary(devices), ""]
    lines += [f"  {name:<10}{text}" for name, text in _facts(devices)]
    lines += ["", "backend(AUTO) would choose:"]
    nccl = _has_nccl()
    names = [str(device) for device in devices]
    for policy in ApplyPolicy:
        backend, reason = choose_backend(AverageBackend.AUTO, policy, names, nccl_available=nccl)
        lines.append(f"  {policy.name:<10}{backend.name:<8}{reason}")
    return "\n".join(lines) + "\n"


def _facts(devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    found = [("devices" if i == 0 else "", _device(d)) for i, d in enumerate(_distinct(devices))]
    found.append(("models", _models(devices)))
    memory = psutil.virtual_memory()
    found.append(
        ("host", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")
    )
    found.append(("NCCL", _nccl()))
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    found.append(("GIL", f"{'on' if gil else 'off'} ({python})"))
    return found


def _distinct(devices: Sequence[torch.device]) -> list[torch.device]:
    return list(dict.fromkeys(devices))


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {num_cores()} cores"
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.1f} GiB"
    return f"{device}, {properties.name}, {memory}, compute capability {capability}"


def _models(devices: Sequence[torch.device]) -> str:
    """Whether the devices are alike, on which it depends how much ElChe has to even out."""
    cuda = [device for device in _distinct(devices) if device.type == "cuda"]
    names = {torch.cuda.get_device_properties(device).name for device in cuda}
    if len(_distinct(devices)) > len(cuda) > 0:
        return "mixed: CUDA devices and the CPU"
    if len(names) > 1:
        return f"distinct: {len(names)} models of GPU, of which the slow ones get less work"
    return "one model of GPU" if names else "no GPU"


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def _nccl() -> str:
    if not _has_nccl():
        return "not in this build of PyTorch"
    return "available, for runs on distinct CUDA devices"
