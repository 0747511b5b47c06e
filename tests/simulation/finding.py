"""Helpers of the tests of planted faults, which prove that the simulator finds faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.cluster_harness import simulate_cluster
from tests.simulation.effects import Violation
from tests.simulation.harness import SimulationFailed, simulate
from tests.simulation.schedule import Schedule, draw_schedule
from tests.support.pairs import SCALE

NUM_SCHEDULES = 400 if SCALE == 1 else 1000 * SCALE
"""Number of schedules, more than any planted fault needs."""
MAX_SCHEDULES = 5000
"""Time limit for finding a planted fault."""
STUCK = "nothing can happen any more"
CHECKS = (Violation.__name__, AssertionError.__name__)
"""Failures of a check, of the simulation or of the coordinator, and not of a planted fault."""


def drawn(accepts: Callable[[Schedule], object]) -> Callable[[int], Schedule]:
    """A function that draws schedules from a seed until one satisfies ``accepts``."""

    def draw(seed: int) -> Schedule:
        schedule = draw_schedule(seed)
        while not accepts(schedule):
            seed += 10**6
            schedule = draw_schedule(seed)
        return schedule

    return draw


def assert_is_found(
    expected: str,
    draw: Callable[[int], Schedule] = draw_schedule,
    *,
    tensors: bool = False,
    first: int = 0,
) -> None:
    """Assert that some schedule fails with the expected words of a check.

    A crash of the run is none of these. The search begins at seed ``first``, which found the fault
    before, or at 0 for ``TEST_SCALE`` above 1.
    """
    text = _first_failure(lambda seed: simulate(seed, draw=draw, tensors=tensors), expected, first)
    assert "coordinator ->" in text


def assert_cluster_is_found(expected: str, *, first: int = 0) -> None:
    """Assert that some schedule of a cluster fails with the expected words of a check."""
    assert "--cluster" in _first_failure(simulate_cluster, expected, first)


def _first_failure(run: Callable[[int], object], expected: str, first: int) -> str:
    assert expected, "a planted fault names its violation"
    first = first if SCALE == 1 else 0
    for seed in (*range(first, MAX_SCHEDULES), *range(first)):
        try:
            run(seed)
        except SimulationFailed as error:
            text = str(error)
            at, kind, words = text.splitlines()[0].split(": ", 2)
            if kind in CHECKS and expected in words:
                assert f"--{at}" in text
                return text
    pytest.fail(f"{MAX_SCHEDULES} schedules found nothing")


def simulate_all_quietly() -> None:
    """Assert that no schedule fails with the changes made so far."""
    for seed in range(100):
        simulate(seed)
