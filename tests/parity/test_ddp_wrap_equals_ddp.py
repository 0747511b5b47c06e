"""``Ddp.wrap`` against DistributedDataParallel in real processes, and against one device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from runtime import AverageBackend, Ddp
from tests.parity import ddp_gan_process as gan
from tests.parity import ddp_process
from tests.parity.ddp_process import Case
from tests.parity.test_sync_equals_ddp import (
    State,
    Steps,
    assert_parity,
    train_ddp,
    train_one_device,
)
from tests.support import programs
from tests.support.pairs import diagonal
from tests.support.rank_processes import RankProcesses

PROCESS_S = 60.0
NUM_STEPS = 40
THREAD, GLOO = AverageBackend.THREAD, AverageBackend.GLOO


def make_case(optimizer: str, dtype: str, num_samples: int) -> Case:
    return Case(
        optimizer=optimizer, dtype=dtype, num_samples=num_samples, batch_size=8, num_epochs=1
    )


def deal(case: Case, sizes: list[int]) -> Steps:
    """Batches of these sizes for the ranks of every step, until no samples are left."""
    order = torch.randperm(case.num_samples, generator=torch.Generator().manual_seed(5))
    pieces = order.split(sizes * (case.num_samples // sum(sizes)))
    return [list(pieces[i : i + len(sizes)]) for i in range(0, len(pieces), len(sizes))]


def train_wrapped(case: Case, steps: Steps, backend: AverageBackend) -> State:
    """A loop over replicas, weighted if their batches differ in size."""
    world_size = len(steps[0])
    x, y, _ = ddp_process.make_data(case)
    # Only replica 0's weights, from seed 0, may have any effect.
    models = [ddp_process.make_model(case, seed) for seed in range(world_size)]
    optimizers = [ddp_process.make_optimizer(case, model.parameters()) for model in models]
    with Ddp.wrap(models, ["cpu"] * world_size, backend) as ddp:
        ddp.sync_params()
        for step in steps:
            for model, optimizer, indices in zip(models, optimizers, step, strict=True):
                optimizer.zero_grad()
                if len(indices):
                    ddp_process.mean_loss(model, x[indices], y[indices]).backward()
            counts = [len(indices) for indices in step]
            if len(set(counts)) == 1:
                ddp.all_reduce_gradients()
            else:
                ddp.weighted_all_reduce_gradients(counts)
            for optimizer in optimizers:
                optimizer.step()
    state = models[0].state_dict()
    for model in models[1:]:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), f"replicas differ in {name}"
    return state


WAYS = [(THREAD, "float64", "sgd"), (THREAD, "float32", "adamw"), (GLOO, "float64", "adamw")]


@diagonal(way=WAYS, world_size=[2, 3])
def test_wrapped_replicas_equal_distributed_data_parallel(
    ddp_processes: RankProcesses, world_size: int, way: tuple[AverageBackend, str, str]
) -> None:
    backend, dtype, optimizer = way
    case = make_case(optimizer, dtype, 8 * world_size * NUM_STEPS)
    steps = deal(case, [8] * world_size)
    assert len(steps) == NUM_STEPS
    expected = train_ddp(ddp_processes, case, steps)
    assert_parity(case, train_wrapped(case, steps, backend), expected)


@diagonal(way=WAYS, sizes=[[5, 11], [3, 6, 2, 5], [1, 0, 7]], times=2)
def test_unequal_batches_equal_their_union_on_one_device(
    sizes: list[int], way: tuple[AverageBackend, str, str]
) -> None:
    backend, dtype, optimizer = way
    case = make_case(optimizer, dtype, sum(sizes) * NUM_STEPS)
    steps = deal(case, sizes)
    assert len(steps) == NUM_STEPS
    expected = train_one_device(case, steps)
    assert_parity(case, train_wrapped(case, steps, backend), expected)


def train_wrapped_gan() -> tuple[list[nn.Module], list[nn.Module]]:
    """The GAN's loop with two replicas; DDP syncs buffers before every forward in training."""
    makers, judges = (list(models) for models in zip(*map(gan.make_models, range(2)), strict=True))
    steppers = [gan.make_optimizers(*pair) for pair in zip(makers, judges, strict=True)]
    devices = ["cpu"] * 2
    with Ddp.wrap(makers, devices) as maker_group, Ddp.wrap(judges, devices) as judge_group:
        maker_group.sync_params()
        judge_group.sync_params()
        for step in range(gan.NUM_STEPS):
            for index, group, loss in (
                (1, judge_group, gan.judge_loss),
                (0, maker_group, gan.maker_loss),
            ):
                maker_group.sync_buffers()
                for rank, (maker, judge) in enumerate(zip(makers, judges, strict=True)):
                    maker.zero_grad()
                    judge.zero_grad()
                    loss(maker, judge, step, rank).backward()
                group.all_reduce_gradients()
                for stepper in steppers:
                    stepper[index].step()
    return makers, judges


def test_a_gan_with_buffers_and_unused_parameters_equals_distributed_data_parallel(
    tmp_path: Path,
) -> None:
    result = tmp_path / "result"
    processes = [
        programs.Popen(
            [sys.executable, gan.__file__, str(rank), "2", str(tmp_path / "store"), str(result)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        makers, judges = train_wrapped_gan()
        assert [process.wait(PROCESS_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(10.0)
    untrained, unjudged = (model.state_dict() for model in gan.make_models())
    for model, expected in zip((makers[0], judges[0]), torch.load(result), strict=True):
        for name, tensor in model.state_dict().items():
            wanted = expected[name].double()
            error = ((tensor.double() - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()
            assert error < 1e-8, f"{name}: relative error {error:.1e}"
    for pair in (makers, judges):
        for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            assert torch.equal(p, q)
    trained = judges[1].state_dict()
    moved = {name for name in trained if not torch.equal(trained[name], unjudged[name])}
    assert {name.split(".")[0] for name in moved} == {"hidden", "sometimes", "last"}
    assert not torch.equal(makers[1].state_dict()["1.running_mean"], untrained["1.running_mean"])
