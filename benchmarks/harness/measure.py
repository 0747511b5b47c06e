"""Measurement tools: the machine, cells in turn, medians and intervals, bounds, tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

# -- the machine and its other processes ----------------------------------------------------


# The same for every system and process: glibc reads them only at start-up.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "OMP_NUM_THREADS": "1",
}
QUIET = 0.05
"""Share of the cores that other processes may use during an undisturbed measurement."""


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this script again with these variables, unless they are set already."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        argv = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, argv, {**os.environ, **environment})


def describe() -> dict[str, Any]:
    """Facts on the machine for readers of the results, without names or paths."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "environment": ENVIRONMENT,
    }


class MachineLoad:
    """CPU use by other processes, which distorts ratios."""

    def __init__(self) -> None:
        self._start = self._read()

    def others(self) -> float:
        """Fraction of all cores that other processes used since construction.

        Children count as this process's own, including ended ones that were waited for.
        """
        wall, busy, own = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        process = psutil.Process()
        ended = process.cpu_times()
        own = ended.children_user + ended.children_system
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = one.cpu_times()
                own += used.user + used.system
        return time.perf_counter(), busy, own


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a text, with ``--json FILE``."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all results to this file")
    return parser


def parser_of_sections(
    text: str | None, sections: Mapping[str, Callable[..., object]]
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """A parser with a command for each section, and those of the commands.

    The function of the command is in ``run``, its name in ``section``.
    """
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    commands = parser.add_subparsers(dest="section", required=True)
    found = {}
    for name, run in sections.items():
        parent = parser_of(run.__doc__)
        found[name] = commands.add_parser(
            name, parents=[parent], add_help=False, description=parent.description
        )
        found[name].set_defaults(run=run)
    return parser, found


def save(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write the results so far, if a file was requested, in case the run is interrupted."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def begin(environment: Mapping[str, str] = ENVIRONMENT) -> dict[str, Any]:
    """Restart with an environment, use one intra-op thread; the head of a record."""
    restart_with(environment)
    torch.set_num_threads(1)
    return {"machine": {**describe(), "environment": dict(environment)}}


def add_retry(parser: argparse.ArgumentParser) -> None:
    """Add ``--retry N``, an argument of :func:`undisturbed`."""
    parser.add_argument(
        "--retry",
        type=int,
        default=0,
        help=f"repeat a measurement in which others used over {QUIET:.0%}% of the cores, at most "
        "this often",
    )


def undisturbed(num_retries: int, measure_once: Callable[[], float]) -> tuple[float, float]:
    """Measure until other processes do not disturb a measurement.

    Args:
        num_retries: Maximum number of repetitions of a disturbed measurement.
        measure_once: Measures, and returns a number.

    Returns:
        Share of the cores used by others, and the number, of the least disturbed attempt.
    """
    attempts: list[tuple[float, float]] = []
    while len(attempts) <= num_retries:
        load = MachineLoad()
        measured = measure_once()
        attempts.append((load.others(), measured))
        if attempts[-1][0] <= QUIET:
            break
    return min(attempts)


# -- cells in turn -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement.

    Attributes:
        key: Its name.
        guess: First guess of its rate, which only sizes the first repetition.
        run: Given the expected rate, measures and returns the rate, in samples/s.
    """

    key: str
    guess: float
    run: Callable[[float], float]


@dataclass(frozen=True)
class Measured:
    """Results of all repetitions.

    Attributes:
        rates: Samples/s of every repetition, for each cell.
        loads: Share of the cores that other processes used meanwhile, likewise.
    """

    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def medians(self) -> dict[str, float]:
        """The median of each cell's undisturbed repetitions.

        Of all repetitions, unless every cell has an undisturbed one: ratios of both kinds
        are meaningless.
        """
        quiet = {
            key: [rate for rate, load in zip(runs, self.loads[key], strict=True) if load <= QUIET]
            for key, runs in self.rates.items()
        }
        used = quiet if all(quiet.values()) else self.rates
        return {key: statistics.median(runs) for key, runs in used.items()}

    def ratios(self, key: str, base: str) -> list[float]:
        """One cell over another in each repetition, where they were measured in turn.

        Of the undisturbed pairs, if there are any.
        """
        pairs = [
            (rate / other, max(loads) <= QUIET)
            for rate, other, *loads in zip(
                *(self.rates[key], self.rates[base], self.loads[key], self.loads[base]),
                strict=True,
            )
        ]
        return [ratio for ratio, quiet in pairs if quiet] or [ratio for ratio, _ in pairs]

    def disturbed(self) -> list[bool]:
        """For each measurement, True if others used too much of the machine."""
        return [load > QUIET for runs in self.loads.values() for load in runs]

    def record(self) -> dict[str, Any]:
        """Fields for the JSON file."""
        return {
            "median_rates": self.medians(),
            "rates": dict(self.rates),
            "used_by_others": dict(self.loads),
        }


def interleaved(
    cells: Sequence[Cell],
    repeat: int,
    num_retries: int = 0,
    prepare: Callable[[], object] | None = None,
) -> Measured:
    """Measure every cell once, then again; every other repetition in reverse order.

    Args:
        cells: The measurements.
        repeat: Repetitions.
        num_retries: Maximum number of repetitions of a disturbed measurement.
        prepare: Called at the start of each repetition.
    """
    found = Measured()
    for index in range(repeat):
        if prepare is not None:
            prepare()
        for cell in cells if index % 2 == 0 else reversed(cells):
            _measure(cell, found, num_retries)
    return found


def _measure(cell: Cell, found: Measured, num_retries: int) -> None:
    """Measure one cell."""
    runs = found.rates[cell.key]
    # The fastest: after a disturbed repetition the next one would be too short.
    expected = max(runs, default=cell.guess)
    others, rate = undisturbed(num_retries, lambda: cell.run(expected))
    found.loads[cell.key].append(others)
    runs.append(rate)


# -- numbers and bounds ------------------------------------------------------------------


def time_of(work: Callable[[], object]) -> float:
    """Duration of a call, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median(values: Sequence[float]) -> float:
    """The median; ``nan`` without values."""
    return statistics.median(values) if values else math.nan


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median with its interval of 95 %, from the order of the values alone.

    Fewer than six values have no such interval: then it is all of them.
    """
    ordered, count = sorted(values), len(values)
    low, outside = 0, 2 / 2**count
    while outside + 2 * math.comb(count, low + 1) / 2**count <= 0.05:
        low += 1
        outside += 2 * math.comb(count, low) / 2**count
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured number and its bound.

    Attributes:
        what: The sentence in the report.
        measured: The number.
        wanted: The bound.
        at_most: True if ``wanted`` bounds it from above.
    """

    what: str
    measured: float
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """True if the target is met; ``nan``, a missing number, meets none."""
        if self.at_most:
            return self.measured <= self.wanted
        return self.measured >= self.wanted

    @property
    def verdict(self) -> str:
        """The verdict as a word."""
        return "met" if self.met else "MISSED"

    def __str__(self) -> str:
        """The number, its bound and the verdict in a sentence."""
        bound = f"at {'most' if self.at_most else 'least'} {self.wanted:g}"
        return f"{self.what}: {self.measured:.3f}, wanted {bound}: {self.verdict}"

    def record(self) -> dict[str, Any]:
        """Fields for the JSON file."""
        return {**asdict(self), "met": self.met}


# -- tables ------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> str:
    """A Markdown table; all columns but the first ``num_texts`` hold numbers."""
    rule = ["---"] * num_texts + ["---:"] * (len(head) - num_texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def checks_table(checks: Sequence[Check]) -> str:
    """A table of all targets."""
    rows = [
        [
            check.what,
            f"at {'most' if check.at_most else 'least'} {check.wanted:.2f}",
            f"{check.measured:.3f}",
            check.verdict,
        ]
        for check in checks
    ]
    return table(("target", "wanted", "measured", ""), rows)


def milliseconds(seconds: float | None) -> str:
    """A time for a table; empty if missing."""
    if seconds is None or math.isnan(seconds):
        return ""
    return f"{seconds * 1e3:,.{3 if seconds < 0.001 else 2 if seconds < 0.1 else 0}f}"


def disturbed_line(disturbed: Sequence[bool]) -> str:
    """A line with the number of disturbed measurements."""
    return (
        f"Other processes used over {QUIET:.0%} of the cores in {sum(disturbed)} of "
        f"{len(disturbed)} measurements."
    )
