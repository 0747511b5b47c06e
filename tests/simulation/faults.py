"""Faults put into a simulated run: deaths of workers at a step that a seed decides."""

from __future__ import annotations

import random

from tests.simulation.harness import Hooks, Simulation, Vanish, simulate
from tests.simulation.sim_worker import SimWorker


class UserError(RuntimeError):
    """What a user's function raises."""


class DieAt(Hooks):
    """One rank dies before one of its steps.

    Attributes:
        num_shots: How often the fault fired.
    """

    def __init__(self, rank: int, step: int, error: BaseException) -> None:
        self._rank = rank
        self._step = step
        self._error = error
        self.num_shots = 0

    def before_step(self, worker: SimWorker) -> None:
        """See :class:`Hooks`."""
        if worker.rank == self._rank and worker.num_steps == self._step:
            self.num_shots += 1
            raise self._error


def simulate_a_death(seed: int) -> tuple[Simulation, DieAt]:
    """Run the schedule of a seed while one rank raises or vanishes in one of its steps."""
    rng = random.Random(seed)
    error = rng.choice((UserError("raised in a step"), Vanish()))
    hooks = DieAt(rng.choice((0, 0, 1, 2)), rng.choice((0, 1, 2, 5)), error)
    return simulate(seed, hooks), hooks
