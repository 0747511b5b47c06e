"""Rows of ``gpuworker status`` and of the lighthouse's page: one for each run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RUN_COLUMNS = ("PID", "NAME", "EPOCH", "DONE", "SAMPLES/S", "LOSS", "LAST CHECKPOINT")


def run_cells(pid: int, run: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a run, in the order of :data:`RUN_COLUMNS`.

    Args:
        run: Its record; see :meth:`runtime.monitor.control.ListedRun.read`.
    """
    done = min(1.0, run["step"] / run["total_steps"]) if run["total_steps"] else 0.0
    return (
        str(pid),
        str(run["name"]),
        f"{run['epoch'] + 1}/{run['num_epochs']}",
        f"{done:.0%}",
        f"{run['samples_per_s']:,.0f}",
        "-" if run["loss"] is None else f"{run['loss']:.4g}",
        run["last_checkpoint"] or ("none yet" if run["checkpoint_dir"] else "no checkpoint_dir"),
    )
