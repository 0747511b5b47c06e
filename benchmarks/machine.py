"""The machine that a benchmark runs on: its settings, and who else uses it."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch

# The same for every system and process: glibc reads them only at start-up.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "OMP_NUM_THREADS": "1",
}


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this script again with these variables, unless they are set already."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        argv = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, argv, {**os.environ, **environment})


def describe() -> dict[str, Any]:
    """What a reader of the results must know, without names or paths."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "environment": ENVIRONMENT,
    }


class MachineLoad:
    """How much of the machine other processes took: a busy machine spoils the ratios."""

    def __init__(self) -> None:
        self._start = self._read()

    def others(self) -> float:
        """Fraction of all cores that other processes used since construction.

        Children count as this process's own, those too that ended and were waited for.
        """
        wall, busy, own = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        process = psutil.Process()
        ended = process.cpu_times()
        own = ended.children_user + ended.children_system
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = one.cpu_times()
                own += used.user + used.system
        return time.perf_counter(), busy, own
