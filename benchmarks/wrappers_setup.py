"""``Trainer.setup`` against PyTorch: samples/s of whole training loops, side by side.

Usage: ``python benchmarks/wrappers_setup.py [--quick] [--models lenet transformer]``.

Two replicas on the CPU, with one intra-op thread each, against ``DistributedDataParallel``
with two Gloo processes of one thread each, and against one process that trains the same global
batch with all cores. And a bare loop against ``Trainer.setup`` on one device, which shall cost
nothing. Every system trains batches of the same size for each worker, gathered from memory;
cells are measured in turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.loops import batches, train_step
from benchmarks.harness.measure import ENVIRONMENT, MachineLoad, describe, restart_with
from benchmarks.harness.models import WORKLOADS, Batch, Workload
from benchmarks.harness.processes import DdpGroup
from runtime import Trainer

NUM_WORKERS = 2
LONG_STEP_S = 5e-3
"""The target against DDP holds for steps of one worker's batch from this length on."""
TITLES = {
    "setup": "Trainer.setup, 2 CPU replicas",
    "ddp": "DistributedDataParallel, 2 Gloo processes",
    "cores": "one process, all cores, the global batch",
    "bare": "bare loop, 1 thread",
    "one": "Trainer.setup, 1 device, 1 thread",
}


def timed(step: Callable[[], None], seconds: float) -> float:
    """Steps a second, after a fifth of the time to warm up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds / 5:
        step()
    num_steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        num_steps += 1
    return num_steps / elapsed


def bare_rate(
    workload: Workload, data: Batch, num_threads: int, size: int, seconds: float
) -> float:
    """Samples/s of a loop without any runtime."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = workload.make_model()
        optimizer = workload.make_optimizer(model.parameters())
        source = batches(data, size, 0)
        return size * timed(lambda: train_step(workload, model, optimizer, next(source)), seconds)
    finally:
        torch.set_num_threads(before)


def setup_rate(workload: Workload, data: Batch, num_devices: int, seconds: float) -> float:
    """Samples/s of the same loop over ``Trainer.setup``."""
    size = num_devices * workload.batch_size
    source = batches(data, size, 0)
    with Trainer.setup(
        workload.make_model(), workload.make_optimizer, ["cpu"] * num_devices
    ) as model:

        def step() -> None:
            workload.loss(model, next(source)).backward()
            model.step()

        return size * timed(step, seconds)


class Bench:
    """Measures one workload in all systems.

    Attributes:
        step_s: Time of a bare step of one worker's batch.
        rates: Samples/s of every repetition, for each system.
        loads: Share of the cores that other processes used meanwhile.
    """

    def __init__(self, workload: Workload, seconds: float, ddp: DdpGroup) -> None:
        self._workload = workload
        self._seconds = seconds
        self._ddp = ddp
        calibration = workload.make_data(32 * workload.batch_size)
        rate = bare_rate(workload, calibration, 1, workload.batch_size, seconds / 4)
        self.step_s = workload.batch_size / rate
        wanted = NUM_WORKERS * max(4, int(seconds / 3 / self.step_s))
        self._num_batches = min(wanted, workload.max_batches)
        self._data = workload.make_data(self._num_batches * workload.batch_size)
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.loads: dict[str, list[float]] = defaultdict(list)

    def repeat(self, index: int) -> None:
        """Measure every system once; every other repetition in reverse order."""
        keys = list(TITLES)
        for key in keys if index % 2 == 0 else reversed(keys):
            load = MachineLoad()
            self.rates[key].append(self._measure(key))
            self.loads[key].append(load.others())

    def _measure(self, key: str) -> float:
        workload, data, seconds = self._workload, self._data, self._seconds
        if key == "setup":
            return setup_rate(workload, data, NUM_WORKERS, seconds)
        if key == "one":
            return setup_rate(workload, data, 1, seconds)
        if key == "bare":
            return bare_rate(workload, data, 1, workload.batch_size, seconds)
        if key == "cores":
            size = NUM_WORKERS * workload.batch_size
            return bare_rate(workload, data, os.cpu_count() or 1, size, seconds)
        return self._ddp.measure(workload.name, self._num_batches, 4, ())

    def result(self) -> dict[str, Any]:
        """Medians, ratios and the verdict."""
        medians = {key: statistics.median(runs) for key, runs in self.rates.items()}
        return {
            "step_s": self.step_s,
            "median_rates": medians,
            "rates": self.rates,
            "used_by_others": self.loads,
            "setup_over_ddp": medians["setup"] / medians["ddp"],
            "setup_over_cores": medians["setup"] / medians["cores"],
            "one_device_over_bare": medians["one"] / medians["bare"],
            "target_holds_here": self.step_s >= LONG_STEP_S,
        }


def print_result(workload: Workload, result: dict[str, Any]) -> None:
    print(f"## {workload.what}: {result['step_s'] * 1e3:.2f} ms a step\n")
    print("| system | samples/s |\n| --- | --- |")
    for key, title in TITLES.items():
        print(f"| {title} | {result['median_rates'][key]:,.0f} |")
    wanted = "wanted: 1.00" if result["target_holds_here"] else "no target under 5 ms a step"
    print(f"\nTrainer.setup / DDP: {result['setup_over_ddp']:.2f} ({wanted})")
    print(f"Trainer.setup / one process with all cores: {result['setup_over_cores']:.2f}")
    print(f"one device / bare loop: {result['one_device_over_bare']:.3f}\n", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each cell")
    parser.add_argument("--seconds", type=float, help="length of one measurement (2)")
    parser.add_argument("--quick", action="store_true", help="about half a minute in all")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.seconds is None:
        args.seconds = 0.4 if args.quick else 2.0
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": describe(), "models": {}}
    results |= {"repeat": args.repeat, "seconds": args.seconds}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; medians of {args.repeat} runs of")
    print(f"about {args.seconds} s each, in turns\n")
    with DdpGroup(NUM_WORKERS) as ddp:
        for name in args.models:
            bench = Bench(WORKLOADS[name], args.seconds, ddp)
            for index in range(args.repeat):
                bench.repeat(index)
            results["models"][name] = bench.result()
            print_result(WORKLOADS[name], bench.result())
            if args.json:  # after every model: a run that is cut short keeps what it has
                args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
