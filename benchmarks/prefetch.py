"""What loading ahead gives: a data set that takes as long as the training step.

Usage: ``python benchmarks/prefetch.py [--models lenet] [--repeat 3] [--json FILE]``.
What is measured and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measure import ENVIRONMENT, add_retry, describe, restart_with, undisturbed
from benchmarks.harness.models import WORKLOADS, Batch, Workload
from runtime import Trainer

WANTED = 1.8
JOIN_S = 120.0
SYSTEMS = {
    "synchronous": "prefetch(0)",
    "one ahead": "prefetch(1)",
    "default": "default, by measure",
}
DEPTHS = {"synchronous": 0, "one ahead": 1, "default": None}


class SlowData:
    """Gathers batches from tensors, each after a pause outside the interpreter lock."""

    def __init__(self, data: Batch, pause_s: float) -> None:
        self._data = data
        self._pause_s = pause_s

    def __len__(self) -> int:
        return len(self._data[0])

    def get_batch(self, indices: Tensor) -> Batch:
        if self._pause_s:
            time.sleep(self._pause_s)
        return self._data[0].index_select(0, indices), self._data[1].index_select(0, indices)


def rate(
    workload: Workload, data: Batch, pause_s: float, depth: int | None, num_epochs: int
) -> float:
    """Samples/s of one worker from the close of epoch 0 to the return of ``join()``."""

    def make_model(device: torch.device) -> nn.Module:
        torch.set_num_threads(1)
        return workload.make_model().to(device)

    builder = (
        Trainer.builder(make_model, workload.make_optimizer, workload.loss)
        .dataset(SlowData(data, pause_s))
        .batch_size(workload.batch_size)
        .num_epochs(num_epochs)
        .devices(["cpu"])
        .tune_allocator(False)
        .progress(False)
    )
    if depth is not None:
        builder.prefetch(depth)
    handle = builder.run()
    first = handle.next_metrics(JOIN_S)
    assert first is not None
    start = time.perf_counter()
    state = handle.join(JOIN_S)
    elapsed_s = time.perf_counter() - start
    return sum(m.num_samples for m in state.metrics[1:]) / elapsed_s


def measure(workload: Workload, repeat: int, seconds: float, num_retries: int) -> dict[str, Any]:
    """Every system in turn, every other time in reverse order.

    The pause is measured anew in each repetition, so that it stays as long as a step.
    """
    probe = workload.make_data(24 * workload.batch_size)
    rates: dict[str, list[float]] = defaultdict(list)
    steps_s: list[float] = []
    others: list[float] = []
    for index in range(repeat):
        # A step as it is in the runtime, loading left out but for the gather.
        step_s = workload.batch_size / max(rate(workload, probe, 0.0, 0, 3) for _ in range(3))
        num_batches = max(8, round(seconds / 4 / (2 * step_s)))
        data = workload.make_data(num_batches * workload.batch_size)
        for system in SYSTEMS if index % 2 == 0 else reversed(SYSTEMS):
            run = partial(rate, workload, data, step_s, DEPTHS[system], 5)
            other, samples_per_s = undisturbed(num_retries, run)
            rates[system].append(samples_per_s)
            others.append(other)
        steps_s.append(step_s)
    return {
        "steps_s": steps_s,
        "rates": dict(rates),
        "ratios": {system: _median_ratio(runs, rates) for system, runs in rates.items()},
        "used_by_others": others,
    }


def _median_ratio(runs: list[float], rates: dict[str, list[float]]) -> float:
    """The median over the repetitions of a system's rate over the synchronous one."""
    pairs = zip(runs, rates["synchronous"], strict=True)
    return statistics.median(run / synchronous for run, synchronous in pairs)


def table(result: dict[str, Any]) -> str:
    """The systems of one model, as Markdown."""
    lines = ["| system | samples/s | / synchronous |", "| --- | ---: | ---: |"]
    for system, title in SYSTEMS.items():
        samples_per_s = statistics.median(result["rates"][system])
        lines.append(f"| {title} | {samples_per_s:,.0f} | {result['ratios'][system]:.2f} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["lenet"])
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each cell")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a synchronous run")
    add_retry(parser)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": describe(), "models": {}}
    for name in args.models:
        result = measure(WORKLOADS[name], args.repeat, args.seconds, args.retry)
        results["models"][name] = result
        ratio = result["ratios"]["default"]
        step_ms = statistics.median(result["steps_s"]) * 1e3
        print(f"## {WORKLOADS[name].what}: {step_ms:.2f} ms a step, as to load\n")
        print(table(result), end="\n\n")
        verdict = "met" if ratio >= WANTED else "MISSED"
        print(f"default / synchronous: {ratio:.2f}, wanted at least {WANTED}: {verdict}")
        print(f"others used at most {max(result['used_by_others']):.0%} of the cores\n")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
