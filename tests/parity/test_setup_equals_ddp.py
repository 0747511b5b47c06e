"""``Trainer.setup`` against PyTorch's DistributedDataParallel in real processes."""

from __future__ import annotations

import pytest
import torch

from runtime import DdpConfig, ReplicatedModule, Trainer
from tests.parity import ddp_process
from tests.parity.ddp_process import Case
from tests.parity.test_sync_equals_ddp import (
    NUM_STEPS,
    State,
    Steps,
    assert_parity,
    initial_state,
    train_ddp,
)
from tests.support.rank_processes import RankProcesses


def make_case(world_size: int, optimizer: str, dtype: str) -> Case:
    return Case(
        optimizer=optimizer,
        dtype=dtype,
        num_samples=8 * world_size * 10,
        batch_size=8,
        num_epochs=NUM_STEPS // 10,
    )


def make_steps(case: Case, world_size: int) -> Steps:
    """Each epoch in a new order, divided equally among the ranks of each step."""
    steps: Steps = []
    for epoch in range(case.num_epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(case.num_samples, generator=generator)
        for indices in order.split(case.batch_size * world_size):
            steps.append(list(indices.split(case.batch_size)))
    return steps


def set_up(case: Case, world_size: int, config: DdpConfig) -> ReplicatedModule:
    model = ddp_process.make_model(case)
    model.load_state_dict(initial_state(case))
    return Trainer.setup_with(
        model,
        lambda params: ddp_process.make_optimizer(case, params),
        ["cpu"] * world_size,
        config=config,
    )


def train_setup(case: Case, world_size: int, steps: Steps) -> State:
    """The usual loop, on the union of each step's batches, divided unequally."""
    x, y, _ = ddp_process.make_data(case)
    # Shares are unequal from the start, and change with every re-balance.
    config = DdpConfig(speed_hint=(0, 2.5))
    with set_up(case, world_size, config) as model:
        assert max(model.chunk_ratios) > 1.5 * min(model.chunk_ratios)
        for step in steps:
            indices = torch.cat(step)
            ddp_process.mean_loss(model, x[indices], y[indices]).backward()
            model.step()
        return model.state_dict()


def train_rounds(case: Case, world_size: int, steps: Steps) -> State:
    """A whole batch for each device and step."""
    x, y, _ = ddp_process.make_data(case)
    with set_up(case, world_size, DdpConfig(max_anchor=0)) as model:
        for step in steps:
            model.accumulate(
                lambda module, batch: ddp_process.mean_loss(module, *batch),
                [(x[indices], y[indices]) for indices in step],
            )
            model.step()
        return model.state_dict()


@pytest.mark.parametrize("train", [train_setup, train_rounds])
@pytest.mark.parametrize(
    ("world_size", "optimizer", "dtype"),
    [(2, "sgd", "float64"), (3, "adamw", "float64"), (2, "adamw", "float32")],
)
def test_setup_equals_distributed_data_parallel(
    ddp_processes: RankProcesses, world_size: int, optimizer: str, dtype: str, train
) -> None:
    case = make_case(world_size, optimizer, dtype)
    steps = make_steps(case, world_size)
    assert len(steps) == NUM_STEPS
    state = train(case, world_size, steps)
    moved = sum((state[k] - v).norm().item() for k, v in initial_state(case).items())
    assert moved > 0.1
    expected = train_ddp(ddp_processes, case, steps)
    assert_parity(case, state, expected)
