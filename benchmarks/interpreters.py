"""Workers in one process against as many processes, with the GIL and without it.

Usage: ``python -m benchmarks.interpreters [--python PATH] [--gil-python PATH] [--pairs 5]``.
``benchmarks/README.md`` describes the measurements.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.harness import environment
from benchmarks.harness.cells import POLICIES, Cells
from benchmarks.harness.measure import (
    ENVIRONMENT,
    Cell,
    Check,
    Measured,
    add_retry,
    begin,
    checks_table,
    disturbed_line,
    interleaved,
    median,
    median_interval,
    milliseconds,
    parser_of,
    save,
    table,
)
from benchmarks.harness.models import Workload, solo_rate, step_seconds, workload_of
from benchmarks.harness.processes import START_S, Child, serve

WARMUP_S = 0.3
DATA_BATCHES = 400
CODE = "from benchmarks.interpreters import serve_interpreter; serve_interpreter()"
FACTS = (
    "import json, sys, sysconfig, torch; print(json.dumps({"
    "'python': sys.version.split()[0], 'torch': torch.__version__, "
    "'free_threaded': bool(sysconfig.get_config_var('Py_GIL_DISABLED'))}))"
)


# -- the measurements --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of every worker.

    Attributes:
        model: Name of the workload.
        batch_size: Samples of the step.
        pause_s: Sleep within the step, in seconds, as if a device computed.
    """

    model: str
    batch_size: int
    pause_s: float = 0.0

    @property
    def workload(self) -> Workload:
        """The workload with this batch size."""
        return replace(workload_of(self.model), batch_size=self.batch_size)

    def __str__(self) -> str:
        """Cell of the table."""
        slept = f", {milliseconds(self.pause_s)} ms asleep" if self.pause_s else ""
        return f"{self.model}, batch {self.batch_size}{slept}"


SHORT = Step(model="mlp", batch_size=4)
LAUNCHES = Step(model="tiny", batch_size=8)
DEVICE = Step(model="tiny", batch_size=8, pause_s=0.002)
ROWS = {
    (SHORT, 2): ("cadence", "sync"),
    (Step(model="mlp", batch_size=64), 2): ("cadence", "sync"),
    (Step(model="lenet", batch_size=64), 2): ("cadence", "sync"),
    (SHORT, 4): ("cadence", "sync"),
    (SHORT, 8): ("cadence", "sync"),
    (LAUNCHES, 8): ("cadence",),
    (DEVICE, 8): ("cadence", "sync"),
}
"""Policies measured for a step and a number of workers."""
WANTED = {
    (SHORT, 2, "sync"): 0.8,
    (Step(model="mlp", batch_size=64), 2, "sync"): 0.9,
    (LAUNCHES, 8, "cadence"): 0.95,
    (DEVICE, 8, "cadence"): 0.95,
}
"""Targets without the GIL: rate over that of the processes."""


def serve_interpreter() -> None:
    """Measure on request in this process."""
    torch.set_num_threads(1)

    @cache
    def data_of(step: Step) -> Any:
        return step.workload.make_data(DATA_BATCHES * step.batch_size)

    def work(
        step: dict[str, Any], policy: str, num_workers: int, seconds: float, rate: float
    ) -> float:
        """Samples/s of a bare loop, or of the workers of a run."""
        made = Step(**step)
        if not policy:
            data = data_of(made)
            return solo_rate(
                made.workload, data, warmup_s=WARMUP_S, measure_s=seconds, pause_s=made.pause_s
            )
        cells = Cells(made.workload, made.batch_size * num_workers / rate, seconds)
        pauses = (made.pause_s,) * num_workers
        return cells.runtime("", POLICIES[policy], pauses).run(rate)

    is_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
    serve(work, {"gil": is_enabled()})


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """An interpreter with or without the GIL, and its processes.

    Attributes:
        name: Column of the table.
        run: The process of the runs.
        solos: The processes of bare loops.
    """

    name: str
    run: Child
    solos: Sequence[Child]

    def cells(self, step: Step, num_workers: int, seconds: float, guess: float) -> list[Cell]:
        """Bare loops in as many processes, and a run of each policy."""
        request: dict[str, Any] = {"step": asdict(step), "seconds": seconds}

        def processes(_: float) -> float:
            used = self.solos[:num_workers]
            for child in used:
                child.put({**request, "policy": "", "num_workers": 1, "rate": 0.0})
            return sum(float(child.answer()) for child in used)

        def workers(policy: str, expected: float) -> float:
            more = {"policy": policy, "num_workers": num_workers, "rate": expected}
            return float(self.run.ask(**{**request, **more}))

        policies = ROWS[step, num_workers]
        runs: dict[str, Callable[[float], float]] = {"": processes}
        runs |= {policy: partial(workers, policy) for policy in policies}
        return [
            Cell(key=self.key(step, num_workers, policy), guess=guess, run=run)
            for policy, run in runs.items()
        ]

    def key(self, step: Step, num_workers: int, policy: str = "") -> str:
        """First guess of a cell's rate."""
        return f"{self.name}: {step}, {num_workers} {policy or 'processes'}"


@contextmanager
def interpreter(name: str, python: str, gil: str, num_processes: int) -> Iterator[Interpreter]:
    """Start the processes of one column.

    Raises:
        RuntimeError: The GIL is not as requested: a package has turned it on.
    """
    env = environment(**ENVIRONMENT) | ({"PYTHON_GIL": gil} if gil else {})
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(f"{name}, process {index}", ["-c", CODE], env, python))
            for index in range(num_processes + 1)
        ]
        for child in children:
            if child.answer(START_S)["gil"] != (gil != "0"):
                raise RuntimeError(f"{name}: the GIL is not as PYTHON_GIL={gil or '1'} requests")
        yield Interpreter(name=name, run=children[0], solos=children[1:])


# -- the report --------------------------------------------------------------------------


def report(measured: Measured, names: Sequence[str], found: Sequence[Interpreter]) -> str:
    """A row for each step, number of workers and policy."""
    rows = []
    for (step, num_workers), policies in ROWS.items():
        for policy in policies:
            row = [str(step), f"{num_workers}", policy.upper()]
            for one in found:
                base = one.key(step, num_workers)
                middle, low, high = median_interval(
                    measured.ratios(one.key(step, num_workers, policy), base)
                )
                row.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
            first, last = (one.key(step, num_workers, policy) for one in (found[0], found[-1]))
            row.append(f"{median(measured.ratios(last, first)):.2f}")
            rows.append(row)
    head = ("step", "workers", "policy", *names, f"{names[-1]} over {names[0]}")
    return table(head, rows, num_texts=1)


def targets(measured: Measured, one: Interpreter) -> list[Check]:
    """Targets of the interpreter without the GIL."""
    return [
        Check(
            what=f"{step}, {num_workers} workers, {policy.upper()}: {one.name} over processes",
            measured=statistics.median(
                measured.ratios(one.key(step, num_workers, policy), one.key(step, num_workers))
            ),
            wanted=wanted,
        )
        for (step, num_workers, policy), wanted in WANTED.items()
    ]


def columns(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Name, interpreter and ``PYTHON_GIL`` of each column."""
    facts = json.loads(subprocess.check_output([args.python, "-c", FACTS], text=True))
    if not facts["free_threaded"]:
        raise SystemExit(f"{args.python} is built with the GIL: name another one by --python")
    found = [("GIL", args.gil_python, "")] if args.gil_python else []
    return [*found, ("GIL on", args.python, "1"), ("GIL off", args.python, "0")]


def guesses(steps: Sequence[Step], sizes: Mapping[Step, int]) -> dict[Step, float]:
    """First guesses of the rates, from a bare loop here."""
    found = {}
    for step in steps:
        workload = step.workload
        seconds = step_seconds(workload) + step.pause_s
        workers = min(sizes[step], os.cpu_count() or 1) if not step.pause_s else sizes[step]
        found[step] = 0.6 * workers * step.batch_size / seconds
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", default=sys.executable, help="an interpreter without the GIL")
    parser.add_argument(
        "--gil-python", help="an interpreter built with the GIL, for a further column"
    )
    parser.add_argument("--pairs", type=int, default=5, help="repetitions of each cell")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement")
    add_retry(parser)
    args = parser.parse_args(argv)
    result = begin()
    wanted = columns(args)
    sizes = dict(sorted(ROWS, key=lambda row: row[1]))
    guessed = guesses(list(sizes), sizes)
    with ExitStack() as stack:
        largest = max(num for _, num in ROWS)
        found = [stack.enter_context(interpreter(*column, largest)) for column in wanted]
        cells = [
            cell
            for (step, num), one in itertools.product(ROWS, found)
            for cell in one.cells(step, num, args.seconds, guessed[step])
        ]
        measured = interleaved(cells, args.pairs, args.retry)
    checks = targets(measured, found[-1])
    result |= {"columns": [name for name, *_ in wanted], **measured.record()}
    result["checks"] = [check.record() for check in checks]
    save(args.json, result)
    names = [name for name, *_ in wanted]
    print(report(measured, names, found), checks_table(checks), sep="\n\n")
    print(disturbed_line(measured.disturbed()))


if __name__ == "__main__":
    main()
