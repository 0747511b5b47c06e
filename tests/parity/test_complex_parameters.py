"""Complex parameters train on several devices as on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime import ApplyPolicy, AverageBackend, DataParallelCoordinator, Trainer
from tests.support.pairs import pairwise

NUM_SAMPLES, NUM_STEPS = 24, 12
X = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(NUM_SAMPLES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Waves(nn.Module):
    """The complex parameter comes first, and has an odd number of elements before others."""

    def __init__(self, only=False):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
        self.turn = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(1, dtype=torch.complex128))
        if not only:
            self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex128))

    def forward(self, x):
        scale = getattr(self, "scale", 1.0)
        return ((x * scale).to(torch.complex128) @ self.turn + self.bias * self.phase).abs()


def make(device="cpu", only=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Waves(only).to(device)


def adamw(params, lr=0.05):
    return torch.optim.AdamW(params, lr)


def loss_of(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def one_device(only=False, max_norm=None):
    model = make(only=only)
    optimizer = adamw(model.parameters())
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, (X, Y)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model.state_dict()


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    assert not expected["turn"].equal(make().turn)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-8, atol=1e-8)


@pairwise(
    only=[False, True],
    backend=[AverageBackend.THREAD, AverageBackend.GLOO],
    settings=[
        {},
        {"bucket_cap_mb": 1e-5},
        {"max_grad_norm": 0.1},
        {"on_non_finite": "skip"},
        {"batch_size": [10, 14]},
        {"accumulate": 2, "batch_size": [6, 6]},
    ],
)
def test_sync_equals_one_device(settings, backend, only):
    builder = (
        Trainer.builder(lambda device: make(device, only), adamw, loss_of)
        .dataset(torch.utils.data.TensorDataset(X, Y))
        .batch_size(NUM_SAMPLES // 2)
        .num_epochs(NUM_STEPS)
        .devices(["cpu"] * 2)
        .policy(ApplyPolicy.SYNC)
        .backend(backend)
        .progress(False)
    )
    for name, value in settings.items():
        builder = getattr(builder, name)(value)
    state = builder.run().join(40)
    assert_same(state.state_dict(), one_device(only, settings.get("max_grad_norm")))


@pytest.mark.parametrize("backend", [AverageBackend.CPU, AverageBackend.THREAD])
def test_cadence_averages_complex_parameters(backend):
    """Those of rank 1 are turned by 90 degrees, and no rank changes them: the average is a part of
    the way.
    """

    def turn(epoch, worker):
        if worker.rank == 1 and epoch == 0:
            with torch.no_grad():
                worker.model.turn.mul_(1j)

    state = (
        Trainer.builder(make, lambda params: adamw(params, 0.0), loss_of)
        .dataset(torch.utils.data.TensorDataset(X, Y))
        .batch_size(4)
        .num_epochs(1)
        .devices(["cpu"] * 2)
        .policy(ApplyPolicy.CADENCE)
        .backend(backend)
        .partition_ratios([1, 1])
        .anchor(100)
        .epoch_fn(turn)
        .progress(False)
        .run()
        .join(40)
    )
    torch.testing.assert_close(state.params["turn"], make().turn.detach() * (0.5 + 0.5j))


@pytest.mark.parametrize("way", ["by the caller", "by the ranks", "accumulated"])
def test_own_loops_equal_one_device(way, monkeypatch):
    if way == "by the ranks":  # as gradients of large models are added up
        monkeypatch.setattr("runtime.loop.rank_replica.MAX_INLINE_ELEMENTS", 0)
    half = NUM_SAMPLES // 2
    with Trainer.setup(make(), adamw, ["cpu"] * 2) as model:
        for _ in range(NUM_STEPS):
            if way == "accumulated":
                model.accumulate(loss_of, [(X[:half], Y[:half]), (X[half:], Y[half:])])
            else:
                loss_of(model, (X, Y)).backward()
            model.step()
        assert_same(model.state_dict(), one_device())


def test_data_parallel_equals_one_device():
    with DataParallelCoordinator(make, adamw, loss_of, ["cpu"] * 2) as coordinator:
        for _ in range(NUM_STEPS):
            coordinator.train_batch((X, Y))
        assert_same(coordinator.models[0].state_dict(), one_device())
