"""What watching a run costs: throughput with a monitor and a page over neither, 1 ms steps."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import ENVIRONMENT, MachineLoad, describe, restart_with
from timeline import (
    BATCH_SIZE,
    JOIN_S,
    STEP_S,
    WAYS,
    fitting_width,
    loss_of,
    make_data,
    make_model,
    make_optimizer,
    median_interval,
    step_seconds,
)

from runtime import Monitor, Timeline, Trainer

TARGET = 0.98
SETTINGS = ("both", "plain")
VIEWER = """
import sys, urllib.request
stream = urllib.request.urlopen(sys.argv[1] + "events", timeout=60)
print("open", flush=True)
try:
    while stream.readline():
        pass
except OSError:
    pass
"""


@contextmanager
def viewer(url: str) -> Iterator[None]:
    """A page that reads all that is sent, in a process of its own, as a browser is one."""
    process = subprocess.Popen([sys.executable, "-c", VIEWER, url], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n", "the page could not be opened"
        yield
    finally:
        process.kill()
        process.communicate()


def measure(
    way: str, width: int, num_batches: int, *, watched: bool, recorded: bool
) -> tuple[float, float]:
    """Batches of a run after its first epoch for each second, and for each of CPU time.

    Args:
        way: Of :data:`WAYS`.
        width: Of the model.
        num_batches: In an epoch.
        watched: Whether a monitor with an open page is attached.
        recorded: Whether the run has a timeline as well.

    Returns:
        Batches/s by the clock and by the CPU time of the process, the page's left out.
    """
    num_workers, policy, backend = WAYS[way]
    builder = (
        Trainer.builder(lambda device: make_model(width).to(device), make_optimizer, loss_of)
        .dataset(make_data(num_batches))
        .batch_size(BATCH_SIZE)
        .num_epochs(3)
        .devices(["cpu"] * num_workers)
        .policy(policy)
        .backend(backend)
        .tune_allocator(False)
        .progress(False)
    )
    if recorded:
        builder.timeline(Timeline())
    with ExitStack() as stack:
        monitor = None
        if watched:
            monitor = stack.enter_context(Monitor())
            stack.enter_context(viewer(monitor.url))
        handle = builder.run()
        if monitor is not None:
            handle.attach(monitor)
        handle.next_metrics(JOIN_S)
        start, cpu_start = time.perf_counter(), time.process_time()
        before = sum(rank.num_batches for rank in handle.statistics().ranks)
        handle.join(JOIN_S)
        elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        trained = sum(rank.num_batches for rank in handle.statistics().ranks) - before
    return trained / elapsed_s, trained / cpu_s


def compare(way: str, width: int, setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Pairs of runs without and with a monitor, every other pair in reverse order."""
    num_batches = max(50, int(args.seconds / 2 / STEP_S))
    ratios, cpu_ratios, loads = [], [], []
    for pair in range(args.pairs):
        rates = {}
        load = MachineLoad()
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            recorded = watched and setting == "both"
            rates[watched] = measure(way, width, num_batches, watched=watched, recorded=recorded)
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS),
        help="with a timeline as well, or with the monitor alone",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs for each")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one run, about")
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs must be at least 1")
    if args.quick:
        args.seconds = 1.0
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    width = fitting_width()
    print(f"step of {step_seconds(width) * 1e3:.2f} ms, {args.pairs} interleaved pairs\n")
    print(
        "| way | watched with | with over without | 95 % interval | target "
        "| by CPU time | 95 % interval |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    result: dict[str, Any] = {"machine": describe(), "width": width, "ways": {}}
    for way in args.ways:
        for setting in args.settings:
            found = compare(way, width, setting, args)
            result["ways"][f"{way}/{setting}"] = found
            (median, low, high), (cpu, cpu_low, cpu_high) = found["wall"], found["cpu"]
            verdict = "met" if median >= TARGET else "missed"
            told = "monitor and timeline" if setting == "both" else "monitor"
            print(
                f"| {way} | {told} | {median:.4f} | {low:.4f} to {high:.4f} "
                f"| {TARGET} {verdict} | {cpu:.4f} | {cpu_low:.4f} to {cpu_high:.4f} |",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    busy = statistics.mean(x for found in result["ways"].values() for x in found["others"])
    print(f"\nOther processes used {busy:.0%} of the cores meanwhile, the page's among them.")


if __name__ == "__main__":
    main()
