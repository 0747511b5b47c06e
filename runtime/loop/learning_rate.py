"""Learning rates of one optimizer, by a scheduler and a scale."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from runtime.replica.schedule import Schedule, SchedulerFactory


class LearningRate:
    """Sets the learning rates of rank 0's optimizer; the other ranks copy its settings.

    Args:
        optimizer: Rank 0's optimizer.
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
        """Use the scheduler ``factory(optimizer)``, from its first step, from here on."""
        self._attach(factory)
        self._scheduled = True

    def set_scale(self, scale: float) -> None:
        """Multiply the scheduler's rates, or the current rates without a scheduler."""
        self.check()
        self._scale = scale
        if not self._attached:
            self._attach(_constant)
        self._schedule.set_scale(scale)

    def check(self) -> None:
        """Without a scheduler, apply the scale to parameter groups added since; called before each
        step. A scheduler continues without them.

        Raises:
            RuntimeError: Groups were removed.
        """
        groups = self._optimizer.param_groups
        if not self._attached or len(groups) == self._num_groups:
            return
        if len(groups) < self._num_groups:
            raise RuntimeError(
                f"the optimizer has {len(groups)} parameter groups, and the learning rate was set "
                f"up for {self._num_groups}: call model.set_scheduler(...) again, which makes a "
                "scheduler for those that are left"
            )
        if not self._scheduled:
            self._attach(_constant)

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
        """Remove the scale, so that a new scheduler does not start from scaled rates."""
        groups = self._optimizer.param_groups
        if not self._attached:
            return
        if len(groups) < self._num_groups:
            self._schedule = Schedule(self._optimizer)  # from the current rates
            if self._scale:
                self._schedule.scale_lr(1 / self._scale)
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
        """Advance the schedule after an optimizer step."""
        self._num_steps += 1
        self._schedule.advance(self._num_steps)


def _constant(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ConstantLR(optimizer, factor=1.0, total_iters=1)
