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
        self._accumulate = accumulate = config.accumulate * plan.num_slices
        num_batches = plan.num_batches
        self.num_empty: dict[int, int] = {}
        # A plan may have millions of steps: full ones share one list.
        full = [config.batch_size] * accumulate
        self.steps: list[Sequence[int]] = [full] * (num_batches // accumulate)
        if rest := num_batches % accumulate:
            self.steps.append(full[:rest])
        longest = max(plan.shares, default=num_batches)
        self.steps += [()] * (-(-longest // accumulate) - len(self.steps))
        if plan.pieces:
            for step, start in enumerate(range(0, num_batches, accumulate)):
                pieces = plan.pieces[start : start + accumulate]
                self.steps[step] = sizes = [end - begin for begin, end in pieces if end > begin]
                if len(sizes) < len(pieces):
                    self.num_empty[step] = len(pieces) - len(sizes)
            return
        # Only the last batch of an epoch can be short, at the end of some span: spans ascend within
        # a plan, except for batches that a dead rank gave back.
        end = 0
        for span in plan.batches:
            if not span:
                continue
            end += len(span)
            start, stop = batch_bounds(span[-1], config.num_samples, config.batch_size)
            if stop - start < config.batch_size:
                step, place = divmod(end - 1, accumulate)
                shorter = list(self.steps[step])
                shorter[place] = stop - start
                self.steps[step] = shorter

    def ranks(self, index: int) -> Sequence[int]:
        """The ranks with samples in the lockstep step ``index``; empty without lockstep."""
        if self._plan.trained_by:
            return self._plan.trained_by[index]
        done = index * self._accumulate
        return [rank for rank, share in enumerate(self._plan.shares) if share > done]

    def position(self, index: int) -> int:
        """Batches of all ranks before the lockstep step ``index``."""
        if self._plan.per_global:  # also of a rank without pieces
            return self._plan.first_step + index * self._num_global * self._plan.per_global
        done = index * self._accumulate
        return self._plan.first_step + sum([min(done, share) for share in self._plan.shares])
