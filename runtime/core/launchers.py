"""Detection of launchers that start one process for each device."""

from __future__ import annotations

import os
from collections.abc import Mapping

WORLD_SIZE = "WORLD_SIZE"
"""Environment variable with the number of processes, set by torchrun and accelerate launch."""


def num_launched(environ: Mapping[str, str], *names: str) -> int:
    """The largest number of processes in these variables, at least 1."""
    values = [environ.get(name, "") for name in names]
    return max([1, *(int(value) for value in values if value.isdecimal())])


def refuse_launcher(call: str) -> None:
    """Refuse to train in one of several processes that would train independently of each other.

    Raises:
        RuntimeError: A launcher has started this process and others.
    """
    num = num_launched(os.environ, WORLD_SIZE)
    if num > 1:
        raise RuntimeError(
            f"{call}: {WORLD_SIZE}={num}, so torchrun or another launcher has started {num} "
            "processes, each of which would train a model of its own on all devices. One process "
            "uses all devices of a machine: start the script by python, without the launcher; "
            "several machines train together with .cluster(address). For independent runs on "
            f'purpose, del os.environ["{WORLD_SIZE}"] first'
        )
