"""Throughput against what people would use instead, and what more of everything costs.

Usage: ``python benchmarks/peers.py [--sections peers world] [--quick] [--json FILE]``.
What is measured and how stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers_report as report
from benchmarks.harness.measure import ENVIRONMENT, QUIET, add_retry, describe, restart_with
from benchmarks.harness.models import WORKLOADS
from benchmarks.peers_measure import Options
from benchmarks.speed import SECTIONS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--models",
        nargs="+",
        choices=WORKLOADS,
        default=["mlp", "lenet"],
        help="of the sections 'peers' and 'efficiency' (mlp lenet)",
    )
    parser.add_argument(
        "--slowdowns",
        nargs="+",
        type=float,
        help="how often rank 1's step takes a bare one's there (1 2 3 5)",
    )
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each cell")
    parser.add_argument("--seconds", type=float, help="length of one measurement (1.5)")
    parser.add_argument("--quick", action="store_true", help="few cells, each once and short")
    add_retry(parser)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    if args.quick:
        args.repeat = 1
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.seconds is None:
        args.seconds = 0.3 if args.quick else 1.5
    if args.slowdowns is None:
        args.slowdowns = [1.0, 3.0] if args.quick else [1.0, 2.0, 3.0, 5.0]
    if min(args.slowdowns) < 1:
        parser.error("--slowdowns must be at least 1")
    if not (math.isfinite(args.seconds) and args.seconds > 0):
        parser.error("--seconds must be above 0")
    return args


def main() -> None:
    args = parse_args()
    restart_with(ENVIRONMENT)
    torch.set_num_threads(1)
    options = Options(
        seconds=args.seconds,
        repeat=args.repeat,
        num_retries=args.retry,
        quick=args.quick,
        models=tuple(args.models),
        slowdowns=tuple(args.slowdowns),
    )
    result: dict[str, Any] = {"machine": describe(), "sections": {}}
    result |= {"repeat": args.repeat, "seconds": args.seconds}
    print(
        f"torch {torch.__version__}, {result['machine']['cores']} cores, "
        "1 intra-op thread everywhere;"
    )
    print(f"medians of {args.repeat} interleaved runs of about {args.seconds:g} s each\n")
    checks: list[report.Check] = []
    disturbed: list[bool] = []
    for name in args.sections:
        title, measure = SECTIONS[name]
        section = measure(options)
        print(f"## {title}\n")
        print("\n\n".join(section.markdown), end="\n\n", flush=True)
        checks += section.checks
        disturbed += section.disturbed
        result["sections"][name] = {
            **section.record,
            "targets": [check.record() for check in section.checks],
        }
        if args.json:  # after every section: a run that is cut short keeps what it has
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    if checks:
        print("## Targets\n")
        print(report.checks_table(checks), end="\n\n")
    print(
        f"Other processes used over {QUIET:.0%} of the cores in {sum(disturbed)} of "
        f"{len(disturbed)} measurements."
    )


if __name__ == "__main__":
    main()
