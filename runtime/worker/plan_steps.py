"""Optimizer steps of an epoch plan: the samples of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.messages import EpochPlan
from coordinator.splitting import batch_bounds
from runtime.worker.worker_config import WorkerConfig


class PlanSteps:
    """The optimizer steps of a plan, of up to ``accumulate`` micro-batches each.

    Attributes:
        steps: For each step the samples of each micro-batch. Under ``SYNC`` all ranks have as many
            steps as the rank with most batches; steps without batches for this rank are empty.
        num_empty: By step index, the number of its batches without samples for this rank.
    """

    def __init__(self, plan: EpochPlan, config: WorkerConfig) -> None:
        self._plan = plan
        self._num_global = config.accumulate
        self.num_empty: dict[int, int] = {}
        num = config.accumulate * plan.num_slices
        if plan.pieces or plan.shares:
            longest = max(plan.shares, default=len(plan.pieces))
            self.steps: list[Sequence[int]] = []
            for step, first in enumerate(range(0, longest, num)):
                pieces = plan.pieces[first : first + num]
                sizes = [end - begin for begin, end in pieces if end > begin]
                self.steps.append(sizes)
                if len(sizes) < len(pieces):
                    self.num_empty[step] = len(pieces) - len(sizes)
            return
        # A plan may have millions of steps: full ones share one list.
        full = [config.batch_size] * num
        self.steps = [full] * (plan.num_batches // num)
        if rest := plan.num_batches % num:
            self.steps.append(full[:rest])
        # Only the last batch of an epoch can be short, at the end of some span: spans ascend within
        # a plan, except for batches that a dead rank gave back.
        end = 0
        for span in plan.batches:
            if not span:
                continue
            end += len(span)
            start, stop = batch_bounds(span[-1], config.num_samples, config.batch_size)
            if stop - start < config.batch_size:
                step, place = divmod(end - 1, num)
                shorter = list(self.steps[step])
                shorter[place] = stop - start
                self.steps[step] = shorter

    def ranks(self, index: int) -> Sequence[int]:
        """The ranks with samples in the lockstep step ``index``; empty without lockstep."""
        return self._plan.trained_by[index] if self._plan.trained_by else ()

    def position(self, index: int) -> int:
        """Batches of all ranks before the lockstep step ``index``."""
        return self._plan.first_step + index * self._num_global * self._plan.per_global
