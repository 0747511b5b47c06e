"""The machine that a benchmark runs on: its settings, and who else uses it."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

# The same for every system and process: glibc reads them only at start-up.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "OMP_NUM_THREADS": "1",
}
QUIET = 0.05
"""Share of the cores that other processes may use during an undisturbed measurement."""


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


def add_retry(parser: argparse.ArgumentParser) -> None:
    """Add ``--retry N``, which :func:`undisturbed` takes."""
    parser.add_argument(
        "--retry",
        type=int,
        default=0,
        help=f"repeat a measurement in which others used over {QUIET:.0%}% of the cores, at most "
        "this often",
    )


def undisturbed(num_retries: int, measure_once: Callable[[], float]) -> tuple[float, float]:
    """Measure until others leave the machine alone.

    Args:
        num_retries: How often a disturbed measurement is repeated at most.
        measure_once: Measures, and gives a number.

    Returns:
        Share of the cores that others used, and the number, of the least disturbed attempt.
    """
    attempts: list[tuple[float, float]] = []
    while len(attempts) <= num_retries:
        load = MachineLoad()
        measured = measure_once()
        attempts.append((load.others(), measured))
        if attempts[-1][0] <= QUIET:
            break
    return min(attempts)
