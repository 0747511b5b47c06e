"""Runs an example as ``python FILE arguments`` would, and records the bits of each step.

``python recorded_example.py RECORD FILE arguments...`` writes one line of JSON for each rank
and step to ``RECORD``: checksums of inputs and results.
"""

from __future__ import annotations

import json
import runpy
import sys
import zlib
from pathlib import Path

from runtime import current_worker
from runtime.worker.step import WorkerSteps


def checksums(tensors):
    """The checksum of each tensor; ``None`` for ``None``."""
    return [None if t is None else zlib.crc32(t.detach().numpy().tobytes()) for t in tensors]


def recorded(lines, train_window, steps, sizes, first, train_fn):
    """Make a step and append its line; appending needs no lock between ranks."""
    replica = steps.replica
    params, states = replica.state.params.params, replica.optimizer.state
    step, before = replica.lockstep.step, checksums(params)
    log = replica.stepper.log.kept
    num_losses = len(log._losses)
    train_window(steps, sizes, first, train_fn)
    made = {
        "rank": current_worker().rank,
        "step": step,
        "sizes": list(sizes),
        "batch": checksums(first or ()),
        "losses": [float(loss) for loss, *_ in log._losses[num_losses:]],
        "params before": before,
        "reduced gradients": checksums(p.grad for p in params),
        "first moments": checksums(states[p]["exp_avg"] for p in params),
        "second moments": checksums(states[p]["exp_avg_sq"] for p in params),
        "optimizer steps": [float(states[p]["step"]) for p in params],
        "params after": checksums(params),
    }
    lines.append(json.dumps(made))


def main():
    record, file, *arguments = sys.argv[1:]
    lines, train_window = [], WorkerSteps.train_window

    def record_step(steps, sizes, first, train_fn):
        recorded(lines, train_window, steps, sizes, first, train_fn)

    WorkerSteps.train_window = record_step  # type: ignore[method-assign]
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).parent)
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        Path(record).write_text("\n".join(lines))


if __name__ == "__main__":
    main()
