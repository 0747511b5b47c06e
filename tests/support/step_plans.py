"""Plans under ``SYNC``."""

from __future__ import annotations

from typing import Any

from coordinator.steps import Pieces, StepPlan


def step_plan(whole: Pieces, num_global: int = 1, last: Pieces | None = None, **fields: Any) -> Any:
    """A plan whose pieces have these sizes, of global batches with one batch for each rank."""
    world = len(whole[0])
    fields = {"span": range(num_global * world), "per_global": world} | fields
    fields = {"epoch": 0, "start": 0, "first_step": 0, "key_stride": 1000} | fields
    return StepPlan(
        ranks=tuple(range(world)),
        whole=whole,
        last=whole if last is None else last,
        **fields,
    )
