"""What a worker adds to a step: blocks of a bare loop and of the worker's own steps in turn.

Usage: ``python benchmarks/step_overhead.py [--models mlp lenet] [--workers 1 2] [--json FILE]``.
What is measured and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.loops import batches, train_step
from benchmarks.harness.measure import ENVIRONMENT, QUIET, MachineLoad, describe, restart_with
from benchmarks.harness.models import WORKLOADS, Batch, Workload
from benchmarks.peers_report import table
from benchmarks.speed import step_seconds
from runtime import ApplyPolicy, Trainer, current_worker

BLOCK_S = 0.1
"""Length of a block: longer than what a scheduler's turn takes, shorter than a machine's moods."""
NEVER = 10**6
"""Batches between two rounds, so that none is made."""
SKIPPED = 3
"""Pairs at the start, in which the caches and the allocator warm up."""
JOIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A block of the worker's steps and the bare block that follows it in the same thread.

    Attributes:
        wall_s: Seconds a step, the worker's and the bare one.
        cpu_s: The same of the thread's CPU time.
    """

    wall_s: tuple[float, float]
    cpu_s: tuple[float, float]


@dataclass
class Turns(threading.local):
    """One thread's bare loop, and where its block began. Each worker's thread has its own."""

    num_steps: int = 0
    begun: tuple[float, float] | None = None
    bare: tuple[nn.Module, torch.optim.Optimizer, Iterator[Batch]] | None = None
    pairs: list[Pair] = field(default_factory=list)


def clocks() -> tuple[float, float]:
    """Wall time, and CPU time of the calling thread."""
    return time.perf_counter(), time.thread_time()


def measure(workload: Workload, num_workers: int, seconds: float) -> list[Pair]:
    """Trains under ``CADENCE`` without a round; after each block a worker runs a bare one."""
    step_s = step_seconds(workload)
    length = max(10, round(BLOCK_S / step_s))
    # Half of the time goes to the bare blocks.
    wanted = round(seconds / 2 / step_s) * num_workers
    num_batches = min(wanted, workload.max_batches)
    data = workload.make_data(num_batches * workload.batch_size)
    turns = Turns()
    found: dict[int, list[Pair]] = {}

    def bare_block() -> tuple[float, float]:
        if turns.bare is None:
            model = workload.make_model()
            order = batches(data, workload.batch_size, seed=current_worker().rank)
            turns.bare = model, workload.make_optimizer(model.parameters()), order
        model, optimizer, order = turns.bare
        train_step(workload, model, optimizer, next(order))  # finds the caches as the others do
        start = clocks()
        for _ in range(length):
            train_step(workload, model, optimizer, next(order))
        end = clocks()
        return (end[0] - start[0]) / length, (end[1] - start[1]) / length

    def train_fn(model: nn.Module, batch: Batch) -> Tensor:
        if turns.num_steps % length == 0:
            now = clocks()
            bare = bare_block()
            if turns.begun is not None:
                own = [(b - a) / length for a, b in zip(turns.begun, now, strict=True)]
                turns.pairs.append(Pair(wall_s=(own[0], bare[0]), cpu_s=(own[1], bare[1])))
                found[current_worker().rank] = turns.pairs
            turns.begun = clocks()
        turns.num_steps += 1
        return workload.loss(model, batch)

    def make_model(device: torch.device) -> nn.Module:
        torch.set_num_threads(1)  # in the worker's own thread
        return workload.make_model().to(device)

    builder = Trainer.builder(make_model, workload.make_optimizer, train_fn)
    builder = builder.dataset(data).batch_size(workload.batch_size)
    builder = builder.num_epochs(math.ceil(wanted / num_batches))
    builder = builder.devices(["cpu"] * num_workers).policy(ApplyPolicy.CADENCE)
    builder = builder.anchor(NEVER).max_anchor(NEVER).tune_allocator(False).progress(False)
    builder.run().join(JOIN_S)
    return [pair for rank in sorted(found) for pair in found[rank][SKIPPED:]]


def summarize(model: str, num_workers: int, pairs: list[Pair]) -> dict[str, Any]:
    """Medians over the pairs, in seconds."""
    added = [own - bare for own, bare in (p.wall_s for p in pairs)]
    return {
        "model": model,
        "workers": num_workers,
        "pairs": len(pairs),
        "bare_s": statistics.median(p.wall_s[1] for p in pairs),
        "added_s": statistics.median(added),
        "quartiles_s": statistics.quantiles(added, n=4)[::2],
        "added_cpu_s": statistics.median(p.cpu_s[0] - p.cpu_s[1] for p in pairs),
        "share": statistics.median(p.wall_s[1] / p.wall_s[0] for p in pairs),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = ["model", "workers", "bare step, us", "a worker adds, us", "quartiles"]
    head += ["of it CPU time", "bare / worker's step", "pairs"]
    cells = [
        [
            *(r["model"], str(r["workers"]), f"{r['bare_s'] * 1e6:.0f}"),
            f"{r['added_s'] * 1e6:.0f}",
            " to ".join(f"{quartile * 1e6:.0f}" for quartile in r["quartiles_s"]),
            *(f"{r['added_cpu_s'] * 1e6:.0f}", f"{r['share']:.3f}", str(r["pairs"])),
        ]
        for r in rows
    ]
    return table(head, cells)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["mlp", "lenet"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=40.0, help="about, for each row")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if min(args.workers) < 1 or args.seconds < 20 * BLOCK_S:
        parser.error(f"--workers must be at least 1 and --seconds at least {20 * BLOCK_S:g}")
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for num_workers in args.workers:
            load = MachineLoad()
            pairs = measure(WORKLOADS[model], num_workers, args.seconds)
            rows.append(summarize(model, num_workers, pairs) | {"used_by_others": load.others()})
    print(markdown(rows), end="\n\n")
    share = max(row["used_by_others"] for row in rows)
    print(f"Other processes used up to {share:.0%} of the cores; quiet is {QUIET:.0%}.")
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
