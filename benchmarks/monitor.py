"""What watching a run costs: throughput with a monitor and a page over neither, 1 ms steps."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.measure import ENVIRONMENT, describe, restart_with
from benchmarks.overhead import (
    WAYS,
    Rates,
    batches_for,
    builder_of,
    compare,
    fitting_width,
    step_seconds,
    timed,
)
from runtime import Monitor, Timeline

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


def measure(way: str, width: int, num_batches: int, *, watched: bool, recorded: bool) -> Rates:
    """See :func:`timeline.timed`, the page's own CPU time left out.

    Args:
        way: Of :data:`WAYS`.
        width: Of the model.
        num_batches: In an epoch.
        watched: Whether a monitor with an open page is attached.
        recorded: Whether the run has a timeline as well.
    """
    builder = builder_of(way, width, num_batches)
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
        return timed(handle)


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

            def measured(watched: bool, way: str = way, setting: str = setting) -> Rates:
                recorded = watched and setting == "both"
                batches = batches_for(args.seconds)
                return measure(way, width, batches, watched=watched, recorded=recorded)

            found = compare(measured, args.pairs)
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
