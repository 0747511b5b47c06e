"""The learning rate of a loop of the user's own: a scheduler driven by its steps."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from runtime.schedule import Schedule, SchedulerFactory


class LearningRate:
    """Drives the rates of one optimizer; where there are several, they follow it.

    Args:
        optimizer: Rank 0's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._schedule = Schedule(optimizer)
        self._attached = False
        self._num_steps = 0

    def set_scheduler(self, factory: SchedulerFactory) -> None:
        """From here on ``factory(optimizer)`` gives the rates, from its own beginning."""
        self._schedule.attach(factory)
        self._attached = True
        self._num_steps = 0

    def set_scale(self, scale: float) -> None:
        """Multiply what the scheduler gives, or the rates as they are without one."""
        if not self._attached:
            self.set_scheduler(_unchanged)
        self._schedule.set_scale(scale)

    @property
    def current(self) -> float:
        """Learning rate of the first parameter group."""
        return self._schedule.current

    def advance(self) -> None:
        """An optimizer step was made."""
        self._num_steps += 1
        self._schedule.advance(self._num_steps)


def _unchanged(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ConstantLR(optimizer, factor=1.0, total_iters=1)
