"""Training throughput, side by side in one call: bare loops, this runtime, PyTorch's DDP.

Usage: ``python benchmarks/throughput.py [--quick] [--models mlp lenet] [--json FILE]``.
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

from benchmarks import report
from benchmarks.harness.loops import solo_rate, threads_rate
from benchmarks.harness.measure import (
    ENVIRONMENT,
    QUIET,
    add_retry,
    describe,
    restart_with,
    undisturbed,
)
from benchmarks.harness.models import WORKLOADS, Batch, Workload
from benchmarks.harness.processes import DdpGroup
from benchmarks.runtime_builder import runtime_builder
from runtime import ApplyPolicy, AverageBackend

SLOWDOWN = 3.0
POLICIES = {
    "one": (1, ApplyPolicy.CADENCE, AverageBackend.AUTO),
    "sync": (2, ApplyPolicy.SYNC, AverageBackend.AUTO),
    "cadence": (2, ApplyPolicy.CADENCE, AverageBackend.AUTO),
    "cadence_thread": (2, ApplyPolicy.CADENCE, AverageBackend.THREAD),
    "async": (2, ApplyPolicy.ASYNC, AverageBackend.AUTO),
}
# First guess of a rate over the bare loop's; it only sizes the first repetition.
GUESS = {"one": 1.0, "sync": 1.3, "ddp": 1.0, report.slowed("sync"): 0.6}
GUESS |= {report.slowed("ddp"): 0.5}
GUESS |= {report.slowed(s): 1.25 for s in ("cadence", "cadence_thread", "async")}
JOIN_S = 180.0
MIN_BATCHES = 24
"""Batches in an epoch: at least one averaging by default."""


class Bench:
    """Measures the systems on one workload.

    Attributes:
        step_s: Time of a bare loop's step, the fastest of five runs, which also sets the
            slowed rank's pause.
        rates: Samples/s of every repetition, for each system.
        loads: Share of the cores that other processes used meanwhile, likewise.
        details: Rank shares and averagings of the last repetition, for each runtime cell.
    """

    def __init__(
        self, workload: Workload, measure_s: float, num_retries: int, ddp: DdpGroup
    ) -> None:
        self._workload = workload
        self._measure_s = measure_s
        self._num_retries = num_retries
        self._ddp = ddp
        self.step_s = self._calibrate()
        wanted = int(measure_s / 5 * 2 / self.step_s)
        self.num_batches = 2 * (min(max(wanted, MIN_BATCHES), workload.max_batches) // 2)
        self._data = workload.make_data(self.num_batches * workload.batch_size)
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.loads: dict[str, list[float]] = defaultdict(list)
        self.details: dict[str, dict[str, Any]] = {}

    def repeat(self, index: int) -> None:
        """Measure every system once; every other repetition in reverse order."""
        keys = [*report.TITLES, *(report.slowed(s) for s in report.SLOWED)]
        for key in keys if index % 2 == 0 else reversed(keys):
            others, rate = undisturbed(self._num_retries, partial(self._measure, key))
            self.loads[key].append(others)
            self.rates[key].append(rate)

    def medians(self) -> dict[str, float]:
        """The median of each system's repetitions."""
        return {key: statistics.median(runs) for key, runs in self.rates.items()}

    def _calibrate(self) -> float:
        data = self._workload.make_data(40 * self._workload.batch_size)
        runs = [solo_rate(self._workload, data, warmup_s=0.1, measure_s=0.3) for _ in range(5)]
        return self._workload.batch_size / max(runs)

    def _measure(self, key: str) -> float:
        system, _, suffix = key.partition("/")
        pauses = (0.0, (SLOWDOWN - 1.0) * self.step_s) if suffix else ()
        if system == "bare":
            return solo_rate(
                self._workload,
                self._data,
                warmup_s=self._measure_s / 5,
                measure_s=self._measure_s,
            )
        if system == "threads":
            return threads_rate(
                self._workload,
                self._data,
                num_threads=2,
                warmup_s=self._measure_s / 5,
                measure_s=self._measure_s,
                pauses_s=pauses,
            )
        num_epochs = self._num_epochs(key)
        if system == "ddp":
            return self._ddp.measure(self._workload.name, self.num_batches, num_epochs, pauses)
        rate, self.details[key] = runtime_rate(
            self._workload, self._data, system, num_epochs, pauses
        )
        return rate

    def _num_epochs(self, key: str) -> int:
        runs = self.rates[key]
        solo = self._workload.batch_size / self.step_s
        rate = runs[-1] if runs else GUESS.get(key, 1.7) * solo
        num_samples = self.num_batches * self._workload.batch_size
        return 1 + max(2, round(self._measure_s * rate / num_samples))


def runtime_rate(
    workload: Workload, data: Batch, system: str, num_epochs: int, pauses_s: tuple[float, ...]
) -> tuple[float, dict[str, Any]]:
    """Samples/s from the close of epoch 0 to the return of ``join()``, and details.

    Fast ranks may be in epoch 1 when epoch 0 closes, so the batches trained by then are
    counted, not derived from the epoch.
    """
    num_workers, policy, backend = POLICIES[system]
    counts = [0] * num_workers
    builder = runtime_builder(
        workload, data, counts, num_epochs=num_epochs, policy=policy, pauses_s=pauses_s
    )
    handle = builder.backend(backend).run()
    handle.next_metrics(JOIN_S)
    start = time.perf_counter()
    before = sum(counts)
    state = handle.join(JOIN_S)
    elapsed_s = time.perf_counter() - start
    num_samples = (sum(counts) - before) * workload.batch_size
    details = {
        "backend": handle.backend.name,
        "shares": [round(share, 3) for share in state.metrics[-1].per_rank_batch_share],
        "averagings": sum(m.num_averagings for m in state.metrics[1:]),
        "epochs": num_epochs - 1,
    }
    return num_samples / elapsed_s, details


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each cell")
    parser.add_argument("--seconds", type=float, help="length of one measurement (2.2)")
    parser.add_argument("--quick", action="store_true", help="about 1.5 minutes in all")
    add_retry(parser)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.seconds is None:
        args.seconds = 0.3 if args.quick else 2.2
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": describe(), "models": {}}
    result |= {"repeat": args.repeat, "seconds": args.seconds, "slowdown": SLOWDOWN}
    verdicts = {}
    print(
        f"torch {torch.__version__}, {result['machine']['cores']} cores, "
        "1 intra-op thread everywhere;"
    )
    print(f"medians of {args.repeat} interleaved runs of about {args.seconds} s each\n")
    with DdpGroup(2) as ddp:
        disturbed = []
        for name in args.models:
            bench = Bench(WORKLOADS[name], args.seconds, args.retry, ddp)
            for index in range(args.repeat):
                bench.repeat(index)
            medians = bench.medians()
            verdicts[name] = report.judge(name, medians)
            print(f"## {WORKLOADS[name].what}: {bench.step_s * 1e3:.2f} ms a step\n")
            print(report.rate_table(medians), end="\n\n", flush=True)
            result["models"][name] = {
                "step_s": bench.step_s,
                "num_batches": bench.num_batches,
                "median_rates": medians,
                "rates": bench.rates,
                "used_by_others": bench.loads,
                "details": bench.details,
                "targets": verdicts[name],
            }
            disturbed += [load > QUIET for runs in bench.loads.values() for load in runs]
            if args.json:  # after every model: a run that is cut short keeps what it has
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(report.verdict_table(verdicts), end="\n\n")
    print(
        f"Other processes used over {QUIET:.0%} of the cores in {sum(disturbed)} of "
        f"{len(disturbed)} measurements."
    )


if __name__ == "__main__":
    main()
