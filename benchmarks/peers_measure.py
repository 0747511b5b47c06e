"""Measuring cells in turn, undisturbed by others."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.measure import QUIET, undisturbed


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a section measures.

    Attributes:
        seconds: Length of one measurement.
        repeat: Repetitions of each cell.
        num_retries: How often a disturbed measurement is repeated.
        quick: Whether the section measures fewer cells.
        models: Workloads of the sections ``peers`` and ``efficiency``.
        slowdowns: How often rank 1's step takes a bare one's there.
    """

    seconds: float
    repeat: int
    num_retries: int
    quick: bool
    models: tuple[str, ...]
    slowdowns: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to measure.

    Attributes:
        key: Its name.
        guess: First guess of its rate, which only sizes the first repetition.
        run: Given the expected rate, measures and gives the rate, in samples/s.
    """

    key: str
    guess: float
    run: Callable[[float], float]


@dataclass(frozen=True)
class Measured:
    """What all repetitions gave.

    Attributes:
        rates: Samples/s of every repetition, for each cell.
        loads: Share of the cores that other processes used meanwhile, likewise.
    """

    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def medians(self) -> dict[str, float]:
        """The median of each cell's undisturbed repetitions.

        Of all repetitions, unless every cell has an undisturbed one: ratios of both kinds
        would say nothing.
        """
        quiet = {
            key: [rate for rate, load in zip(runs, self.loads[key], strict=True) if load <= QUIET]
            for key, runs in self.rates.items()
        }
        used = quiet if all(quiet.values()) else self.rates
        return {key: statistics.median(runs) for key, runs in used.items()}

    def ratios(self, key: str, base: str) -> list[float]:
        """One cell over another in each repetition, where they were measured in turn.

        Of the pairs that nobody disturbed, if there are any.
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
        """For each measurement, whether others used too much of the machine."""
        return [load > QUIET for runs in self.loads.values() for load in runs]

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "median_rates": self.medians(),
            "rates": dict(self.rates),
            "used_by_others": dict(self.loads),
        }


def interleaved(cells: Sequence[Cell], options: Options) -> Measured:
    """Measure every cell once, then again; every other repetition in reverse order."""
    found = Measured()
    for index in range(options.repeat):
        for cell in cells if index % 2 == 0 else reversed(cells):
            _measure(cell, found, options.num_retries)
    return found


def _measure(cell: Cell, found: Measured, num_retries: int) -> None:
    """Measure one cell."""
    runs = found.rates[cell.key]
    # The fastest: after a disturbed repetition the next one would be too short.
    expected = max(runs, default=cell.guess)
    others, rate = undisturbed(num_retries, lambda: cell.run(expected))
    found.loads[cell.key].append(others)
    runs.append(rate)
