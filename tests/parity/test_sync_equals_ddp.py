"""SYNC against PyTorch's DistributedDataParallel, and against one device on the union."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from itertools import count

import pytest
import torch
from torch import Tensor

from runtime import ApplyPolicy, AverageBackend, Trainer, current_worker
from tests.parity import ddp_process
from tests.parity.ddp_process import Case
from tests.support.pairs import SCALE
from tests.support.rank_processes import RankProcesses

NUM_STEPS = 50 if SCALE > 1 else 20
JOIN_S = 40.0

State = dict[str, Tensor]
Steps = list[list[Tensor]]  # [step][rank] -> sample indices, empty if the rank had none


def train_sync(case: Case, world_size: int, backend: AverageBackend) -> tuple[Steps, State]:
    """Train under SYNC; returns the samples of each step and rank, and the final state."""
    trained: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    seeds = count()

    def train_fn(model, batch):
        x, y, index = batch
        worker = current_worker()
        trained[worker.current_epoch, worker.rank].append(index.clone())
        return ddp_process.mean_loss(model, x, y)

    # Only rank 0's weights, built from seed 0, may have any effect.
    handle = (
        Trainer.builder(
            lambda device: ddp_process.make_model(case, next(seeds)).to(device),
            lambda params: ddp_process.make_optimizer(case, params),
            train_fn,
        )
        .dataset(ddp_process.make_data(case))
        .batch_size(case.batch_size)
        .num_epochs(case.num_epochs)
        .devices(["cpu"] * world_size)
        .policy(ApplyPolicy.SYNC)
        .backend(backend)
        .seed(3)
        .tune_allocator(False)
        .progress(False)
        .run()
    )
    state = handle.join(JOIN_S)
    return to_steps(trained, case.num_epochs, world_size), state.state_dict()


def to_steps(
    trained: dict[tuple[int, int], list[Tensor]], num_epochs: int, world_size: int
) -> Steps:
    """A rank's k-th batch of an epoch belongs to the k-th global step of that epoch."""
    nothing = torch.empty(0, dtype=torch.int64)
    steps: Steps = []
    for epoch in range(num_epochs):
        ranks = [trained.get((epoch, rank), []) for rank in range(world_size)]
        for step in range(max(map(len, ranks))):
            steps.append([own[step] if step < len(own) else nothing for own in ranks])
    return steps


def initial_state(case: Case) -> State:
    return ddp_process.make_model(case).state_dict()


def train_ddp(processes: RankProcesses, case: Case, steps: Steps) -> State:
    """DDP on the same batches of the same ranks."""
    job = {"case": asdict(case), "initial": initial_state(case), "indices": steps}
    return processes.train(len(steps[0]), job)


def train_one_device(case: Case, steps: Steps) -> State:
    """A plain loop over the union of the ranks' batches of each step."""
    model = ddp_process.make_model(case)
    optimizer = ddp_process.make_optimizer(case, model.parameters())
    ddp_process.train(case, model, optimizer, [torch.cat(step) for step in steps])
    return model.state_dict()


def assert_parity(case: Case, actual: State, expected: State) -> None:
    """Within the tolerances: each tensor in float64, the whole vector in float32."""
    assert list(actual) == list(expected)
    if case.dtype == "float64":
        for name, tensor in expected.items():
            error = ((actual[name] - tensor).norm() / tensor.norm()).item()
            assert error < 1e-8, f"{name}: relative error {error:.1e}"
        return
    flat, wanted = (torch.cat([t.flatten() for t in s.values()]) for s in (actual, expected))
    error = ((flat - wanted).norm() / wanted.norm()).item()
    assert error < 1e-4, f"relative error {error:.1e}"


def assert_trained(case: Case, steps: Steps, state: State) -> None:
    """All steps, each sample once an epoch, and weights far from the initial ones."""
    assert len(steps) == NUM_STEPS
    seen = torch.cat([indices for step in steps for indices in step])
    for epoch in seen.split(case.num_samples):
        assert epoch.sort().values.equal(torch.arange(case.num_samples))
    moved = sum((state[k] - v).norm().item() for k, v in initial_state(case).items())
    assert moved > 0.1


parametrize_over_all = pytest.mark.parametrize(
    ("world_size", "optimizer", "dtype", "backend"),
    # Every pair of values occurs.
    [
        (2, "sgd", "float64", AverageBackend.THREAD),
        (2, "adamw", "float32", AverageBackend.GLOO),
        (3, "sgd", "float32", AverageBackend.GLOO),
        (3, "adamw", "float64", AverageBackend.GLOO),
        (3, "adamw", "float32", AverageBackend.THREAD),
        (2, "adamw", "float64", AverageBackend.THREAD),
    ],
)


@parametrize_over_all
def test_sync_equals_distributed_data_parallel_on_the_same_batches(
    ddp_processes: RankProcesses,
    world_size: int,
    optimizer: str,
    dtype: str,
    backend: AverageBackend,
) -> None:
    case = Case(
        optimizer=optimizer,
        dtype=dtype,
        num_samples=8 * world_size * 10,
        batch_size=8,
        num_epochs=NUM_STEPS // 10,
    )
    steps, state = train_sync(case, world_size, backend)
    assert_trained(case, steps, state)
    assert all(len(indices) == case.batch_size for step in steps for indices in step)
    expected = train_ddp(ddp_processes, case, steps)
    assert_parity(case, state, expected)


@parametrize_over_all
@pytest.mark.parametrize("last", ["a short batch", "ranks without a batch"])
def test_sync_equals_one_device_whatever_the_remainder(
    world_size: int, optimizer: str, dtype: str, backend: AverageBackend, last: str
) -> None:
    is_short = last == "a short batch"
    case = Case(
        optimizer=optimizer,
        dtype=dtype,
        num_samples=8 * world_size * 5 - 5 if is_short else 8 * world_size * 4 + 5,
        batch_size=8,
        num_epochs=NUM_STEPS // 5,
    )
    steps, state = train_sync(case, world_size, backend)
    assert_trained(case, steps, state)
    sizes = [3] + [8] * (world_size - 1) if is_short else [0] * (world_size - 1) + [5]
    assert sorted(map(len, steps[-1])) == sizes
    assert_parity(case, state, train_one_device(case, steps))
