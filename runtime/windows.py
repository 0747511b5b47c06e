"""A plan cut into optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from coordinator.dispatch import batch_bounds
from coordinator.messages import EpochPlan
from runtime.worker_types import WorkerConfig


class Windows:
    """A plan cut into optimizer steps of up to ``accumulate`` micro-batches.

    Attributes:
        steps: Samples in each micro-batch of each step; under ``SYNC`` as many steps as the rank
            with most batches makes, the last ones empty where this rank has run out.
    """

    def __init__(self, plan: EpochPlan, config: WorkerConfig) -> None:
        self._plan = plan
        self._accumulate = config.accumulate
        num_batches = plan.num_batches
        sizes = [config.batch_size] * num_batches
        # Only the last batch of an epoch can be short, and spans rise within a plan
        # except where a batch came back from a dead rank: look at each span's end.
        end = 0
        for span in plan.batches:
            if not span:
                continue
            end += len(span)
            start, stop = batch_bounds(span[-1], config.num_samples, config.batch_size)
            sizes[end - 1] = stop - start
        longest = max(plan.shares) if plan.shares else num_batches
        self.steps: Sequence[Sequence[int]] = [
            sizes[first : first + config.accumulate]
            for first in range(0, longest, config.accumulate)
        ]

    def position(self, index: int) -> int:
        """Batches that all ranks together have trained before a lockstep step."""
        done = index * self._accumulate
        return self._plan.first_step + sum(min(done, share) for share in self._plan.shares)


def count_samples(batch: Any) -> int:
    """Length of the first tensor of a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return 1
    for value in values:
        return count_samples(value)
    return 1
