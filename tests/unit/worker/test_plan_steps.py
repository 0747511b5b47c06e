"""The steps of a plan, against a computation batch by batch."""

from __future__ import annotations

from itertools import product

import pytest

from coordinator.messages import EpochPlan
from runtime import WorkerConfig
from runtime.worker.plan_steps import PlanSteps
from tests.support.step_plans import step_plan

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
    plan = EpochPlan(epoch=0, batches=(range(0, 6, 2),), pieces=((0, 7), (8, 9), (16, 17)))
    steps = [list(step) for step in PlanSteps(plan, config).steps]
    assert steps == ([[7], [1], [1]] if accumulate == 1 else [[7, 1], [1]])


SHORT = step_plan(((4, 2), (3, 3)), 2, last=((2, 0), (0, 0)), first_step=6)


@pytest.mark.parametrize(
    ("rank", "accumulate", "sizes", "num_empty"),
    [
        (0, 1, [[4, 3], [2]], {1: 1}),
        (0, 2, [[4, 3, 2]], {0: 1}),
        (1, 1, [[2, 3], []], {1: 2}),
        (2, 1, [[], []], {}),  # it has left the epoch
    ],
)
def test_steps_under_sync_are_those_of_all_ranks(rank, accumulate, sizes, num_empty):
    config = WorkerConfig(rank=rank, world_size=3, accumulate=accumulate)
    steps = PlanSteps(EpochPlan(epoch=0, steps=SHORT), config)
    assert ([list(step) for step in steps.steps], steps.num_empty) == (sizes, num_empty)
    assert [steps.position(i) for i in range(len(sizes))] == [6, 8][: len(sizes)]


def test_the_ranks_of_a_step_are_those_with_samples():
    config = WorkerConfig(rank=0, world_size=2)
    steps = PlanSteps(EpochPlan(epoch=0, steps=SHORT), config)
    assert [steps.ranks(i) for i in range(2)] == [(0, 1), (0,)]
    alone = PlanSteps(EpochPlan(epoch=0, batches=(range(2),)), config)
    assert (alone.ranks(0), alone.position(0)) == ((), None)
