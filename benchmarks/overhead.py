"""What recording a timeline costs: throughput with it over throughput without, 1 ms steps."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measure import ENVIRONMENT, MachineLoad, describe, restart_with
from runtime import (
    ApplyPolicy,
    AverageBackend,
    Timeline,
    Trainer,
    TrainerBuilder,
    TrainerHandle,
)

TARGET = 0.99
STEP_S = 0.001
BATCH_SIZE = 16
NUM_FEATURES = 128
JOIN_S = 120.0
ANCHOR = 40
"""The same for both, so that no run averages more often than the other; about what steps of a
millisecond come to by themselves."""
WAYS = {
    "one": (1, ApplyPolicy.CADENCE, AverageBackend.AUTO),
    "sync": (2, ApplyPolicy.SYNC, AverageBackend.AUTO),
    "cadence": (2, ApplyPolicy.CADENCE, AverageBackend.CPU),
    "cadence_thread": (2, ApplyPolicy.CADENCE, AverageBackend.THREAD),
    "async": (2, ApplyPolicy.ASYNC, AverageBackend.CPU),
}
Rates = tuple[float, float]
"""Batches for each second by the clock, and for each second of the process's CPU time."""


def make_model(width: int) -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, 10))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def make_data(num_batches: int) -> tuple[Tensor, Tensor]:
    samples = num_batches * BATCH_SIZE
    return torch.randn(samples, NUM_FEATURES), torch.randint(10, (samples,))


def step_seconds(width: int) -> float:
    """The time of a bare step, the shortest of some."""
    model = make_model(width)
    optimizer = make_optimizer(model.parameters())
    batch = make_data(1)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return min(times)


def fitting_width() -> int:
    """The width of a model whose bare step takes a millisecond."""
    width = 256
    while step_seconds(width) < STEP_S and width < 1 << 16:
        width = math.ceil(width * 1.25)
    return width


def builder_of(way: str, width: int, num_batches: int) -> TrainerBuilder:
    """The run that is measured: three epochs, the first of which warms up."""
    num_workers, policy, backend = WAYS[way]
    return (
        Trainer.builder(lambda device: make_model(width).to(device), make_optimizer, loss_of)
        .dataset(make_data(num_batches))
        .batch_size(BATCH_SIZE)
        .num_epochs(3)
        .devices(["cpu"] * num_workers)
        .policy(policy)
        .backend(backend)
        .anchor(ANCHOR)
        .max_anchor(ANCHOR)
        .tune_allocator(False)
        .progress(False)
    )


def timed(handle: TrainerHandle) -> Rates:
    """From the close of the first epoch to the end of the run.

    Returns:
        Batches for each second, and for each second of the process's CPU time, which says
        what the recording itself costs where others keep the machine busy.
    """
    handle.next_metrics(JOIN_S)
    start, cpu_start = time.perf_counter(), time.process_time()
    before = sum(rank.num_batches for rank in handle.statistics().ranks)
    handle.join(JOIN_S)
    elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    trained = sum(rank.num_batches for rank in handle.statistics().ranks) - before
    return trained / elapsed_s, trained / cpu_s


def measure(way: str, width: int, num_batches: int, timeline: Timeline | None) -> Rates:
    """See :func:`timed`; with a timeline or without."""
    builder = builder_of(way, width, num_batches)
    if timeline is not None:
        builder.timeline(timeline)
    return timed(builder.run())


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median with its interval of 95 %, from the order of the values alone.

    Fewer than six values have no such interval: then it is all of them.
    """
    ordered, count = sorted(values), len(values)
    low, outside = 0, 2 / 2**count
    while outside + 2 * math.comb(count, low + 1) / 2**count <= 0.05:
        low += 1
        outside += 2 * math.comb(count, low) / 2**count
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def compare(measured: Callable[[bool], Rates], num_pairs: int) -> dict[str, Any]:
    """Pairs of runs without and with what is judged, every other pair in reverse order."""
    ratios, cpu_ratios, loads = [], [], []
    for pair in range(num_pairs):
        load = MachineLoad()
        order = (False, True) if pair % 2 == 0 else (True, False)
        rates = {judged: measured(judged) for judged in order}
        loads.append(load.others())
        ratios.append(rates[True][0] / rates[False][0])
        cpu_ratios.append(rates[True][1] / rates[False][1])
    return {
        "ratios": ratios,
        "wall": median_interval(ratios),
        "cpu_ratios": cpu_ratios,
        "cpu": median_interval(cpu_ratios),
        "others": loads,
    }


def batches_for(seconds: float) -> int:
    """Batches of an epoch, for a run of about so long."""
    return max(50, int(seconds / 2 / STEP_S))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--pairs", type=int, default=25, help="pairs of runs for each way")
    parser.add_argument("--seconds", type=float, help="length of one run, about (2.0)")
    parser.add_argument("--quick", action="store_true", help="15 short pairs")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs must be at least 1")
    if args.quick:
        args.pairs = min(args.pairs, 15)
    if args.seconds is None:
        args.seconds = 0.4 if args.quick else 2.0
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    width = fitting_width()
    print(f"step of {step_seconds(width) * 1e3:.2f} ms, {args.pairs} interleaved pairs\n")
    print("| way | with over without | 95 % interval | target | by CPU time | 95 % interval |")
    print("| --- | --- | --- | --- | --- | --- |")
    result: dict[str, Any] = {"machine": describe(), "width": width, "ways": {}}
    for way in args.ways:

        def measured(recorded: bool, way: str = way) -> Rates:
            timeline = Timeline() if recorded else None
            return measure(way, width, batches_for(args.seconds), timeline)

        found = result["ways"][way] = compare(measured, args.pairs)
        (median, low, high), (cpu, cpu_low, cpu_high) = found["wall"], found["cpu"]
        verdict = "met" if median >= TARGET else "missed"
        print(
            f"| {way} | {median:.4f} | {low:.4f} to {high:.4f} | {TARGET} {verdict} "
            f"| {cpu:.4f} | {cpu_low:.4f} to {cpu_high:.4f} |",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    busy = statistics.mean(x for found in result["ways"].values() for x in found["others"])
    print(f"\nOther processes used {busy:.0%} of the cores meanwhile.")


if __name__ == "__main__":
    main()
