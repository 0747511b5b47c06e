"""``DataParallelCoordinator`` equals one device on the whole mini-batch."""

from __future__ import annotations

import pytest
import torch

from runtime import AverageBackend, DataParallelCoordinator
from tests.parity import ddp_process
from tests.parity.ddp_process import Case
from tests.parity.test_sync_equals_ddp import assert_parity
from tests.support.pairs import SCALE, pairwise

NUM_STEPS = 100 if SCALE > 1 else 40
BATCH_SIZES = (16, 7, 1, 2, 24)  # also fewer samples than replicas, and remainders


def cut(case: Case) -> list[torch.Tensor]:
    order = torch.randperm(case.num_samples, generator=torch.Generator().manual_seed(7))
    sizes = [BATCH_SIZES[i % len(BATCH_SIZES)] for i in range(NUM_STEPS)]
    assert sum(sizes) == case.num_samples
    return list(order.split(sizes))


THREAD, GLOO = AverageBackend.THREAD, AverageBackend.GLOO


@pairwise(
    world_size=[2, 3],
    optimizer=["sgd", "adamw"],
    dtype=["float64", "float32"],
    backend=[THREAD, GLOO],
)
def test_many_batches_equal_those_on_one_device(
    world_size: int, optimizer: str, dtype: str, backend: AverageBackend
) -> None:
    case = Case(
        optimizer=optimizer,
        dtype=dtype,
        num_samples=sum(BATCH_SIZES) * NUM_STEPS // len(BATCH_SIZES),
        batch_size=0,
        num_epochs=1,
    )
    batches = cut(case)
    x, y, _ = ddp_process.make_data(case)
    model = ddp_process.make_model(case)
    alone = ddp_process.make_optimizer(case, model.parameters())
    with DataParallelCoordinator(
        lambda device: ddp_process.make_model(case).to(device),
        lambda params: ddp_process.make_optimizer(case, params),
        lambda model, samples: ddp_process.mean_loss(model, *samples),
        ["cpu"] * world_size,
        backend=backend,
    ) as coordinator:
        for indices in batches:
            alone.zero_grad()
            loss = ddp_process.mean_loss(model, x[indices], y[indices])
            loss.backward()
            alone.step()
            result = coordinator.train_batch((x[indices], y[indices]))
            tolerance = 1e-8 if dtype == "float64" else 1e-3
            assert result.avg_loss == pytest.approx(loss.item(), rel=tolerance, abs=tolerance)
        first, *others = (replica.state_dict() for replica in coordinator.models)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert_parity(case, first, model.state_dict())
    start = ddp_process.make_model(case).state_dict()
    assert sum((first[name] - start[name]).norm().item() for name in first) > 0.1
