"""What the tests of planted faults share: a simulator that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.cluster_harness import simulate_cluster
from tests.simulation.harness import SimulationFailed, simulate
from tests.simulation.schedule import Schedule, draw_schedule
from tests.support.pairs import SCALE

NUM_SCHEDULES = 1000 * SCALE
"""More than any planted fault needs to be found."""
MAX_SCHEDULES = 5000
"""Within which a planted fault has to be found."""
STUCK = "nothing can happen any more"


def drawn(wanted: Callable[[Schedule], object]) -> Callable[[int], Schedule]:
    """Draws schedules until one is as wanted, each seed others."""

    def draw(seed: int) -> Schedule:
        schedule = draw_schedule(seed)
        while not wanted(schedule):
            seed += 10**6
            schedule = draw_schedule(seed)
        return schedule

    return draw


def assert_is_found(
    expected: str, draw: Callable[[int], Schedule] = draw_schedule, *, tensors: bool = False
) -> None:
    """Some schedule fails, with a message that says how."""
    text = _first_failure(lambda seed: simulate(seed, draw=draw, tensors=tensors), expected)
    assert "coordinator ->" in text


def assert_cluster_is_found(expected: str) -> None:
    """Some schedule of a cluster fails, with a message that says how."""
    assert "--cluster" in _first_failure(simulate_cluster, expected)


def _first_failure(run: Callable[[int], object], expected: str) -> str:
    for seed in range(MAX_SCHEDULES):
        try:
            run(seed)
        except SimulationFailed as error:
            text = str(error)
            if expected in text.splitlines()[0]:
                found = text.split(":", 1)[0].removeprefix("seed ")
                assert f"--seed {found}" in text
                return text
    pytest.fail(f"{MAX_SCHEDULES} schedules found nothing")


def simulate_all_quietly() -> None:
    """The change made so far is none that a run could not bear."""
    for seed in range(100):
        simulate(seed)
