"""What the benchmarks share: measuring, models, cells, processes. Imports no PyTorch by itself."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the repository that these benchmarks are from."""


def environment(**more: str) -> dict[str, str]:
    """Environment of a child process, which looks for modules in this repository first."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
