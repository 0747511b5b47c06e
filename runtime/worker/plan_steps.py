"""Optimizer steps of an epoch plan: the samples of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.messages import EpochPlan
from coordinator.splitting import batch_bounds
from runtime.worker.worker_config import WorkerConfig


class PlanSteps:
    """A plan cut into optimizer steps of up to ``accumulate`` micro-batches.

    Attributes:
        steps: Samples in each micro-batch of each step; under ``SYNC`` as many steps as the rank
            with most batches makes, the last ones empty where this rank has run out.
        num_empty: Batches of a step, by its index, that have no samples for this rank.
    """

    def __init__(self, plan: EpochPlan, config: WorkerConfig) -> None:
        self._plan = plan
        self._num_global = config.accumulate
        self._accumulate = accumulate = config.accumulate * plan.num_slices
        num_batches = plan.num_batches
        self.num_empty: dict[int, int] = {}
        # A plan may have millions of steps: the whole ones share one list.
        whole = [config.batch_size] * accumulate
        self.steps: list[Sequence[int]] = [whole] * (num_batches // accumulate)
        if rest := num_batches % accumulate:
            self.steps.append(whole[:rest])
        longest = max(plan.shares, default=num_batches)
        self.steps += [()] * (-(-longest // accumulate) - len(self.steps))
        if plan.pieces:
            for step, start in enumerate(range(0, num_batches, accumulate)):
                pieces = plan.pieces[start : start + accumulate]
                self.steps[step] = sizes = [end - begin for begin, end in pieces if end > begin]
                if len(sizes) < len(pieces):
                    self.num_empty[step] = len(pieces) - len(sizes)
            return
        # Only the last batch of an epoch can be short, and spans rise within a plan
        # except where a batch came back from a dead rank: look at each span's end.
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

    def position(self, index: int) -> int:
        """Batches that all ranks together have trained before a lockstep step."""
        if self._plan.pieces:
            return self._plan.first_step + index * self._num_global * self._plan.per_global
        done = index * self._accumulate
        return self._plan.first_step + sum([min(done, share) for share in self._plan.shares])
