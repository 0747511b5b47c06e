"""Held-out quality of averaged training against solo training and PyTorch's DDP.

Usage: ``python -m benchmarks.quality --data FOLDER --out FILE [--minutes 90]``, as often as
it takes, then ``--report TABLE.md`` with the same ``--out``. What is measured and how stands
in ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence_child import AVERAGED, MODES, SOLO
from benchmarks.convergence_data import DataMissing, check_folder, default_folder
from benchmarks.convergence_report import judge
from benchmarks.convergence_tables import markdown
from benchmarks.harness.measure import ENVIRONMENT, QUIET, MachineLoad, describe
from benchmarks.harness.studies import STUDIES

ROOT = Path(__file__).resolve().parents[1]
RUN_S = 900.0
"""A run that takes longer is killed."""
NUMBERS = {"lr": float, "num_epochs": int, "batch_size": int, "part": float}
"""What ``--override`` may change in a study."""
SETTINGS = {
    "anchor": int,
    "min_anchor": int,
    "max_anchor": int,
    "max_overshoot": int,
    "max_batch_diff": int,
    "overhead_target": float,
    "divergence_threshold": float,
    "max_grad_norm": float,
    "lr_scale_ratio": float,
}
"""Settings of the trainer's builder that ``--set`` may give the averaged modes."""
RECOMMENDED = ["lr_scale_ratio=0.2"]
"""What they have otherwise, as the README recommends with Adam and its like."""

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: what the child is told, and what tells it apart in the record."""

    spec: Line
    definition: str

    @property
    def name(self) -> str:
        """For progress and for what is missing."""
        return f"{self.spec['model']} {self.spec['mode']} seed {self.spec['seed']}"

    def key(self) -> Line:
        """What a line of the record must have to be this run's result."""
        kept = {name: self.spec[name] for name in ("model", "mode", "seed", "settings")}
        return {**kept, "definition": self.definition}


def make_job(args: argparse.Namespace, model: str, mode: str, seed: int) -> Job:
    """The run of one cell and seed under the arguments."""
    study = replace(STUDIES[model], **args.override)
    spec = {
        "model": model,
        "mode": mode,
        "seed": seed,
        "data": None if args.synthetic else str(args.data.resolve()),
        "overrides": args.override,
        "settings": args.settings if mode in AVERAGED else {},
    }
    stand_in = " (on stand-in data)" if args.synthetic else ""
    return Job(spec=spec, definition=study.definition() + stand_in)


def batches_of_jobs(args: argparse.Namespace) -> Iterator[list[Job]]:
    """All runs in the order they are made, those in one list at the same time.

    Seeds go round by pairs, so that a record that is cut short has every cell.
    """
    seeds = range(args.seeds)
    for pair in (seeds[i : i + 2] for i in range(0, len(seeds), 2)):
        for model in args.models:
            for mode in args.modes:
                jobs = [make_job(args, model, mode, seed) for seed in pair]
                if args.pair_solo and mode in SOLO:
                    yield jobs
                else:
                    yield from ([job] for job in jobs)


def read_record(file: Path) -> list[Line]:
    """The lines of a record; a last line that was cut off is left out."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def find(record: Sequence[Line], job: Job) -> Line | None:
    """The result of a run, if the record has it."""
    key = job.key()
    return next((line for line in record if all(line.get(k) == v for k, v in key.items())), None)


def run_together(jobs: Sequence[Job]) -> list[Line | None]:
    """Make runs at the same time, each in a process of its own; ``None`` for one that failed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    module = "benchmarks.convergence_child"
    load = MachineLoad()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(job.spec)],
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,
        )
        for job in jobs
    ]
    outputs: list[str] = []
    try:
        deadline = time.monotonic() + RUN_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                outputs.append(child.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
                continue
            outputs.append("")
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    others = round(load.others(), 4)
    return [
        _line(job, output, others) if child.returncode == 0 else None
        for job, child, output in zip(jobs, children, outputs, strict=True)
    ]


def _line(job: Job, output: str, others: float) -> Line:
    result = json.loads(output.splitlines()[-1])
    return {**job.key(), **result, "used_by_others": others, "torch": torch.__version__}


def make_runs(args: argparse.Namespace) -> bool:
    """Make the runs that the record lacks, as long as there is time; whether all went well."""
    until = time.monotonic() + args.minutes * 60 if args.minutes else None
    record = read_record(args.out)
    if args.out.exists() and not args.out.read_bytes().endswith(b"\n"):
        with args.out.open("a") as file:
            file.write("\n")
    well = True
    for jobs in batches_of_jobs(args):
        wanted = [job for job in jobs if find(record, job) is None]
        if not wanted:
            continue
        if until is not None and time.monotonic() > until:
            print("Out of time: call again to go on.")
            return well
        for job, line in zip(wanted, run_together(wanted), strict=True):
            if line is None:
                well = False
                print(f"{job.name}: FAILED", flush=True)
                continue
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{job.name}: loss {line['loss']:.5f}, {line['train_s']:.1f} s", flush=True)
    return well


def write_report(args: argparse.Namespace) -> None:
    """Judge the record's results that belong to the arguments; write Markdown and JSON."""
    record = read_record(args.out)
    results: dict[str, dict[str, dict[int, Line]]] = {}
    notes: dict[str, Line] = {}
    num_runs = num_disturbed = 0
    for model in args.models:
        runs: dict[str, dict[int, Line]] = {mode: {} for mode in args.modes}
        missing = []
        for mode in args.modes:
            lacks = []
            for seed in range(args.seeds):
                job = make_job(args, model, mode, seed)
                if (line := find(record, job)) is None:
                    lacks.append(str(seed))
                    continue
                runs[mode][seed] = line
                num_runs += 1
                num_disturbed += line["used_by_others"] > QUIET
            if lacks:
                missing.append(f"{mode} seed {' '.join(lacks)}")
        results[model] = runs
        notes[model] = {"definition": job.definition, "missing": missing}
    report = judge(results, args.modes)
    for model, note in notes.items():
        report["models"][model] |= note
    report |= {"machine": describe(), "settings": args.settings, "quiet": QUIET}
    report |= {"num_runs": num_runs, "num_disturbed": num_disturbed}
    args.report.write_text(markdown(report))
    args.report.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def _assignments(
    parser: argparse.ArgumentParser, given: Sequence[str], types: Mapping[str, type]
) -> Line:
    values = {}
    for one in given:
        name, _, value = one.partition("=")
        if name not in types:
            parser.error(f"{one}: give NAME=VALUE, NAME one of {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            parser.error(f"{one}: {value!r} is no {types[name].__name__}")
    return values


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=default_folder(), help="folder of the digits and the text")
    add("--out", type=Path, required=True, help="record of the runs: a line of JSON for each")
    add("--models", nargs="+", choices=STUDIES, default=list(STUDIES))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--seeds", type=int, default=5, help="runs of each cell (5)")
    add("--minutes", type=float, help="start no run after that long; call again to go on")
    add("--pair-solo", action="store_true", help="two seeds of a solo mode at the same time")
    add("--report", type=Path, help="make no runs; write the tables to this .md and its .json")
    add("--override", nargs="+", default=[], metavar="NAME=VALUE", help=", ".join(NUMBERS))
    add(
        "--set",
        nargs="*",
        default=RECOMMENDED,
        metavar="NAME=VALUE",
        help=f"{', '.join(SETTINGS)} ({' '.join(RECOMMENDED)}); nothing: the builder's defaults",
    )
    add("--synthetic", action="store_true", help="tiny stand-in data: for tests")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    args.override = _assignments(parser, args.override, NUMBERS)
    args.settings = _assignments(parser, args.set, SETTINGS)
    if not (args.synthetic or args.report):
        try:
            check_folder(args.data)
        except DataMissing as error:
            parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a run failed."""
    args = parse_args(argv)
    if args.report:
        write_report(args)
        print(f"{args.report} and {args.report.with_suffix('.json')} written")
        return 0
    return 0 if make_runs(args) else 1


if __name__ == "__main__":
    sys.exit(main())
