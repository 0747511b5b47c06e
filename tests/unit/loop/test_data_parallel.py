"""Data-parallel batches equal one device, and replicas stay identical."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from runtime import AverageBackend, BatchResult, DataParallelCoordinator
from tests.support.parallel import (
    adam,
    identical,
    loss_fn,
    mlp,
    replicas,
    samples_of,
    sgd,
    state,
)


def one_device(batches, *, optim=adam, max_norm=None):
    """A plain loop over whole mini-batches, with the result of each."""
    model = mlp("cpu")
    optimizer = optim(model.parameters())
    results = []
    for samples in batches:
        optimizer.zero_grad()
        loss, correct = loss_fn(model, samples)
        loss.backward()
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        results.append(BatchResult(loss.item(), int(correct), len(samples[1]), norm.item()))
    return model, results


def assert_close(actual, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", [AverageBackend.AUTO, AverageBackend.GLOO])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_batch_on_replicas_equals_that_batch_on_one_device(world_size, backend):
    batches = [samples_of(n, seed) for seed, n in enumerate((12, 7, 1, 2, 30))]
    model, expected = one_device(batches)
    with replicas(world_size, backend=backend) as coordinator:
        results = []
        for samples in batches:
            assert identical(coordinator)
            results.append(coordinator.train_batch(samples))
        assert identical(coordinator)
        assert coordinator.num_devices == world_size
    assert_close(state(coordinator.primary), state(model))
    for result, wanted in zip(results, expected, strict=True):
        assert (result.correct, result.total) == (wanted.correct, wanted.total)
        assert result.avg_loss == pytest.approx(wanted.avg_loss, rel=1e-9)
        assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-9)


def test_clipping_uses_the_whole_batchs_gradient():
    batches = [samples_of(10, seed) for seed in range(5)]
    model, expected = one_device(batches, optim=sgd, max_norm=0.1)
    with replicas(3, optim=sgd, max_grad_norm=0.1) as coordinator:
        results = [coordinator.train_batch(samples) for samples in batches]
        assert identical(coordinator)
    assert_close(state(coordinator.primary), state(model))
    assert [r.grad_norm for r in results] == [pytest.approx(r.grad_norm) for r in expected]
    assert min(r.grad_norm for r in results) > 0.1


def test_every_sample_of_any_type_is_trained_exactly_once():
    trained = [[], [], []]

    def loss(model, samples):
        rank = int(threading.current_thread().name[-1])
        trained[rank].extend(samples)
        return model.weight.sum() * len(samples)

    def model(device):
        return nn.Linear(1, 1, bias=False)

    with replicas(3, model=model, loss=loss) as coordinator:
        result = coordinator.train_batch([f"sample {i}" for i in range(10)])
    assert [len(own) for own in trained] == [3, 3, 4]
    assert [s for own in trained for s in own] == [f"sample {i}" for i in range(10)]
    assert (result.total, result.correct) == (10, 0)


def test_fewer_samples_than_replicas_leave_the_rest_identical():
    """An optimizer step on one replica only would make them differ."""
    used = set()

    def count(model, samples):
        used.add(threading.current_thread().name)
        return loss_fn(model, samples)

    samples = samples_of(2)
    model, _ = one_device([samples])
    with replicas(4, loss=count) as coordinator:
        result = coordinator.train_batch(samples)
        assert identical(coordinator)
    assert len(used) == 2
    assert result.total == 2
    assert_close(state(coordinator.primary), state(model))


def test_only_parameters_used_on_some_replica_are_stepped():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.never = (nn.Linear(1, 1) for _ in range(3))

        def forward(self, x):
            return (self.second if x.sum() > 0 else self.first)(x)

    def model(device):
        torch.manual_seed(0)
        return Branches()

    with replicas(2, model=model, loss=lambda m, x: m(x).mean()) as coordinator:
        before = state(coordinator.primary)
        coordinator.train_batch(torch.tensor([[-1.0], [1.0]]))
        after = state(coordinator.primary)
        assert identical(coordinator)
        assert coordinator.primary.first.bias.grad.item() == 0.5
        assert all(m.never.weight.grad is None for m in coordinator.models)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name.split(".")[0] for name in changed} == {"first", "second"}


def test_buffers_are_copied_from_the_first_replica_that_had_samples():
    def with_norm(device):
        return mlp(device, norm=True)

    samples = samples_of(9)
    alone = with_norm("cpu").train()
    alone(samples[0][:3])
    with replicas(3, model=with_norm) as coordinator:
        coordinator.train_batch(samples)
        assert identical(coordinator)
        torch.testing.assert_close(coordinator.primary[1].running_mean, alone[1].running_mean)
        coordinator.primary.eval()  # one sample has no variance
        coordinator.train_batch(samples_of(1))
        assert identical(coordinator)


def test_the_modes_of_modules_are_copied_from_the_primary():
    modes = []

    def look(model, samples):
        modes.append((model.training, model[1].training))
        return loss_fn(model, samples)

    with replicas(2, model=lambda d: mlp(d, norm=True), loss=look) as coordinator:
        for change in (lambda m: m, lambda m: m.eval(), lambda m: m.train(), lambda m: m[1].eval()):
            change(coordinator.primary)
            coordinator.train_batch(samples_of(8))
    pairs = [(True, True), (False, False), (True, True), (True, False)]
    assert modes == [pair for pair in pairs for _ in range(2)]


def test_schedulers_on_every_optimizer_keep_the_replicas_identical():
    with replicas(2, optim=sgd) as coordinator:
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for optimizer in coordinator.optimizers
        ]
        for seed in range(4):
            coordinator.train_batch(samples_of(8, seed))
            for scheduler in schedulers:
                scheduler.step()
        assert identical(coordinator)
        assert coordinator.optimizers[1].param_groups[0]["lr"] == pytest.approx(0.1 / 16)


@pytest.mark.parametrize("batch", [2, 3, 5, 9])
def test_no_replica_gets_a_single_sample_where_batch_statistics_are_used(batch):
    sizes, lock = [], threading.Lock()

    def mean_loss(model, x):
        with lock:
            sizes.append(len(x))
        return model(x).square().mean()

    def net(device):
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    with DataParallelCoordinator(net, sgd, mean_loss, ["cpu"] * 4) as coordinator:
        assert coordinator.train_batch(torch.randn(batch, 6)).total == batch
        assert sum(sizes) == batch
        assert min(sizes) >= 2
        assert len(sizes) == min(4, batch // 2)
        sizes.clear()
        coordinator.primary.eval()
        coordinator.train_batch(torch.randn(batch, 6))
        assert len(sizes) == min(4, batch)
        assert identical(coordinator)


def test_a_loss_fn_may_write_to_its_samples():
    def batches():
        return [samples_of(n, seed) for seed, n in enumerate((8, 7))]

    model = mlp("cpu")
    optimizer = sgd(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        loss_fn(model, (x.mul_(0.5), y))[0].backward()
        optimizer.step()
    meeting = threading.Barrier(2)

    def loss(model, samples):
        x, y = samples
        first = meeting.wait(60.0) == 0
        if first:
            found = loss_fn(model, (x.mul_(0.5), y))
            meeting.wait(60.0)
        else:
            meeting.wait(60.0)
            found = loss_fn(model, (x.mul_(0.5), y))
        meeting.wait(60.0)  # the second rank writes after the first has saved its samples
        return found

    with replicas(2, optim=sgd, loss=loss) as coordinator:
        for samples in batches():
            coordinator.train_batch(samples)
    assert_close(state(coordinator.primary), state(model))
