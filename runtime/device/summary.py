"""What the machine has to train on, in a few words."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import psutil
import torch

from runtime.core.threads import num_cores


def device_summary(devices: Sequence[torch.device] | None = None) -> str:
    """One line on the devices of a run, or on all that are visible.

    Args:
        devices: Those of a run; ``None``: every CUDA device, else the CPU.
    """
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    names = [_describe(d) for d in devices]
    parts = [f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (
        f"{len(names)} worker{'s' if len(names) != 1 else ''} on {', '.join(parts)}; "
        f"torch {torch.__version__}, GIL {'on' if gil else 'off'}"
    )


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} {properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    memory = psutil.virtual_memory().total / 2**30
    return f"cpu ({num_cores()} cores, {memory:.0f} GiB)"
