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
        self._plan = plan.steps
        self._num_global = num = config.accumulate
        self.num_empty: dict[int, int] = {}
        self.steps: list[Sequence[int]] = []
        if plan.steps is not None:
            sizes = [stop - start for _, (start, stop) in plan.steps.pieces(config.rank)]
            num *= plan.steps.num_slices
            for first in range(0, plan.steps.num_global * plan.steps.num_slices, num):
                own = sizes[first : first + num]
                if 0 in own:
                    self.num_empty[len(self.steps)] = own.count(0)
                self.steps.append([size for size in own if size])
            return
        if plan.pieces:
            sizes = [stop - start for start, stop in plan.pieces]
            self.steps += [sizes[first : first + num] for first in range(0, len(sizes), num)]
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
        """The ranks with samples in the step ``index`` under ``SYNC``; else none."""
        first = index * self._num_global
        return () if self._plan is None else self._plan.trained_by(first, first + self._num_global)

    def position(self, index: int) -> int | None:
        """Batches of all ranks before the step ``index`` under ``SYNC``; else ``None``."""
        if self._plan is None:
            return None
        return self._plan.first_step + index * self._num_global * self._plan.per_global
