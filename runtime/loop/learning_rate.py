"""The learning rates of one optimizer."""

from __future__ import annotations

import torch
import torch.distributed
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from runtime.replica.schedule import Schedule, SchedulerFactory


class LearningRate:
    """Drives the rates of one optimizer; where there are several, they follow it.

    Args:
        optimizer: Rank 0's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._schedule = Schedule(optimizer)
        self._attached = False
        self._scheduled = False
        self._scale = 1.0
        self._num_groups = 0
        self._num_steps = 0

    def set_scheduler(self, factory: SchedulerFactory) -> None:
        """From here on ``factory(optimizer)`` gives the rates, from its own beginning."""
        self._attach(factory)
        self._scheduled = True

    def set_scale(self, scale: float) -> None:
        """Multiply what the scheduler gives, or the rates as they are without one."""
        self.check()
        self._scale = scale
        if not self._attached:
            self._attach(_unchanged)
        self._schedule.set_scale(scale)

    def check(self) -> None:
        """Before a step: take in parameter groups that were added. The scale holds for them.

        Raises:
            RuntimeError: A scheduler was made for other groups than there are now.
        """
        groups = self._optimizer.param_groups
        if not self._attached or len(groups) == self._num_groups:
            return
        if self._scheduled or len(groups) < self._num_groups:
            raise RuntimeError(
                f"the optimizer has {len(groups)} parameter groups, and the learning rate was set "
                f"up for {self._num_groups}: call model.set_scheduler(...) again, which makes a "
                "scheduler for all of them"
            )
        self._attach(_unchanged)

    def _attach(self, factory: SchedulerFactory) -> None:
        self._unscale()
        try:
            self._schedule.attach(factory)
        finally:
            self._schedule.set_scale(self._scale)
        self._attached = True
        self._num_groups = len(self._optimizer.param_groups)
        self._num_steps = 0

    def _unscale(self) -> None:
        """The scale is on top of a scheduler, which must not take it for its own rates."""
        groups = self._optimizer.param_groups
        if not self._attached:
            return
        if len(groups) < self._num_groups:
            self._schedule = Schedule(self._optimizer)  # from the rates as they are
            return
        added = groups[self._num_groups :]
        del groups[self._num_groups :]
        self._schedule.set_scale(1.0)
        groups.extend(added)

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
