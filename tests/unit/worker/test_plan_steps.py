"""The steps of a plan, against a computation batch by batch."""

from __future__ import annotations

from itertools import product

import pytest

from coordinator.messages import EpochPlan
from runtime import WorkerConfig
from runtime.worker.plan_steps import PlanSteps

SPANS = [
    (),
    (range(0),),
    (range(3),),
    (range(5),),
    (range(2), range(4, 5)),
    (range(4, 5), range(2)),  # the last batch came back from a dead rank
    (range(4, 5), range(0), range(3)),
]


def one_by_one(plan: EpochPlan, config: WorkerConfig) -> list[list[int]]:
    sizes = [
        min(config.batch_size, config.num_samples - b * config.batch_size)
        for span in plan.batches
        for b in span
    ]
    steps = []
    while sizes:
        steps.append(sizes[: config.accumulate])
        sizes = sizes[config.accumulate :]
    return steps


@pytest.mark.parametrize(("spans", "accumulate"), list(product(SPANS, (1, 2, 3))))
@pytest.mark.parametrize("num_samples", [20, 18])
def test_steps_have_the_sizes_of_their_batches(spans, accumulate, num_samples):
    config = WorkerConfig(num_samples=num_samples, batch_size=4, accumulate=accumulate)
    plan = EpochPlan(epoch=0, batches=spans)
    steps = PlanSteps(plan, config).steps
    assert [list(step) for step in steps] == one_by_one(plan, config)


def test_the_steps_of_a_long_plan_share_their_sizes():
    config = WorkerConfig(num_samples=4_000_001, batch_size=4, accumulate=2)
    steps = PlanSteps(EpochPlan(epoch=0, batches=(range(1_000_001),)), config).steps
    assert len(steps) == 500_001
    assert len({id(step) for step in steps}) == 2
    assert (list(steps[0]), list(steps[-1])) == ([4, 4], [1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_have_the_sizes_of_their_pieces(accumulate):
    config = WorkerConfig(num_samples=18, batch_size=4, accumulate=accumulate)
    pieces = ((0, 7), (8, 9), (16, 17))
    plan = EpochPlan(epoch=0, batches=(range(0, 6, 2),), shares=(3, 2), pieces=pieces)
    steps = [list(step) for step in PlanSteps(plan, config).steps]
    assert steps == ([[7], [1], [1]] if accumulate == 1 else [[7, 1], [1]])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_without_pieces_has_the_steps_of_the_others(accumulate):
    config = WorkerConfig(num_samples=18, batch_size=4, accumulate=accumulate)
    plan = EpochPlan(epoch=0, batches=(range(1),), shares=(3, 1), pieces=((0, 4),))
    steps = [list(step) for step in PlanSteps(plan, config).steps]
    assert steps == ([[4], [], []] if accumulate == 1 else [[4], []])
