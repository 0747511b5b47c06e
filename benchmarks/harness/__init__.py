"""Shared parts of the benchmarks: measuring, models, cells, processes. Does not import PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the repository that these benchmarks are from."""


FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Number of collectives that PyTorch's flight recorder keeps: its name, and the older one, which
2.11 still reads in one place."""


def environment(**more: str) -> dict[str, str]:
    """Environment of a child process, which looks for modules in this repository first.

    The flight recorder is off there, unless the user has set its size by either name.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    is_set = any(name in os.environ for name in FLIGHT_RECORDER)
    recorder = {} if is_set else dict.fromkeys(FLIGHT_RECORDER, "0")
    return {**os.environ, **recorder, "PYTHONPATH": os.pathsep.join(paths), **more}
