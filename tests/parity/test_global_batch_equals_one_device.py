"""A global batch of one size gives the training of a plain loop, on any number of devices."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coordinator.splitting import permutation
from runtime import Trainer, current_worker
from tests.support.pairs import diagonal, pairwise
from tests.support.running import ASYNC, CADENCE, SYNC, WAIT_S

N, SIZE, EPOCHS = 53, 10, 3
STEPS = EPOCHS * math.ceil(N / SIZE)
LIMIT = 1e-8

_draw = torch.Generator().manual_seed(1)
X = torch.randn(N, 6, generator=_draw, dtype=torch.float64)
Y = X[:, :2] @ torch.randn(2, 2, generator=_draw, dtype=torch.float64)


def net(device="cpu"):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double().to(device)


def adamw(params):
    return torch.optim.AdamW(params, 1e-2)


def sgd(params):
    return torch.optim.SGD(params, 1e-3, momentum=0.9)


def mean_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sum_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def one_cycle(optimizer, total):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total)


def plain(
    optim=adamw, loss=mean_loss, schedule=None, *, size=SIZE, drop_last=False, most=None, clip=None
):
    """The parameters after a plain loop, and its number of steps."""
    model, steps = net(), 0
    optimizer = optim(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    for epoch in range(EPOCHS):
        for index in torch.from_numpy(permutation(N, epoch, 0)).split(size):
            if steps == most or (drop_last and len(index) < size):
                continue
            optimizer.zero_grad()
            loss(model, (X[index], Y[index])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            steps += 1
            if scheduler is not None:
                scheduler.step()
    return dict(model.named_parameters()), steps


def builder(ranks, optim=adamw, loss=mean_loss, *, size=SIZE, dataset=(X, Y), policy=SYNC):
    return (
        Trainer.builder(net, optim, loss)
        .dataset(dataset)
        .global_batch_size(size)
        .num_epochs(EPOCHS)
        .devices(["cpu"] * ranks)
        .policy(policy)
        .progress(False)
    )


def check(state, wanted):
    for name, value in wanted[0].items():
        value = value.detach()
        assert (state.params[name] - value).norm() / value.norm() < LIMIT, name


SETTINGS = {
    "plain": ({}, {}),
    "accumulate": ({"accumulate": 2}, {}),
    "accumulate unevenly": ({"accumulate": 3}, {}),
    "shares by speed": ({"balance": True}, {}),
    "shares by speed, accumulate": ({"balance": True, "accumulate": 2}, {}),
    "drop_last": ({"drop_last": True}, {"drop_last": True}),
    "clipped": ({"max_grad_norm": 0.1}, {"clip": 0.1}),
    "cut by max_steps": ({"max_steps": 8}, {"most": 8}),
    "cosine": ({"scheduler": cosine, "accumulate": 2}, {"schedule": cosine}),
    "one cycle": (
        {"scheduler": one_cycle, "accumulate": 2},
        {"schedule": lambda o: one_cycle(o, STEPS)},
    ),
    "buckets": ({"bucket_cap_mb": 1e-4, "accumulate": 2}, {}),
    "evaluated": ({"eval_fn": lambda m, e: {}, "eval_every": 4}, {}),
}


@diagonal(name=list(SETTINGS), ranks=[2, 3, 1])
def test_training_is_that_of_a_plain_loop(name, ranks):
    settings, of_plain = SETTINGS[name]
    b = builder(ranks)
    for setting, value in settings.items():
        getattr(b, setting)(value)
    wanted = plain(**of_plain)
    handle = b.run()
    state = handle.join(WAIT_S)
    check(state, wanted)
    assert handle.total_batches == handle.statistics().global_step == wanted[1]
    if ranks > 1:
        assert sum(m.num_averagings for m in state.metrics) == wanted[1]


@pairwise(ranks=[1, 2, 3], accumulate=[1, 3], optim=[sgd, adamw])
def test_sums_over_samples_are_those_of_a_plain_loop(ranks, accumulate, optim):
    b = builder(ranks, optim, sum_loss).loss_reduction("sum").accumulate(accumulate)
    b.max_grad_norm(5.0)
    state = b.run().join(WAIT_S)
    check(state, plain(optim, sum_loss, clip=5.0))
    means = builder(ranks, sgd, mean_loss).run().join(WAIT_S)
    ratio = state.metrics[0].avg_loss / means.metrics[0].avg_loss
    assert 1.0 < ratio < 4.0  # each is a mean over samples: of two outputs, and of their mean


def test_a_sum_whose_gradient_is_reduced_in_buckets():
    b = builder(2, sgd, sum_loss).loss_reduction("sum").bucket_cap_mb(1e-4)
    check(b.run().join(WAIT_S), plain(sgd, sum_loss))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_device_under_cadence_trains_as_a_plain_loop(accumulate):
    b = builder(1, sgd, sum_loss, policy=CADENCE).loss_reduction("sum").accumulate(accumulate)
    check(b.scheduler(cosine).run().join(WAIT_S), plain(sgd, sum_loss, cosine))


@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_of_ranks_that_step_alone_is_the_step_of_the_sum(policy, accumulate):
    """In one global batch, with each rank on its part: its gradient is scaled to the whole."""
    steps = threading.Barrier(2)

    def loss(model, batch):
        steps.wait(WAIT_S)
        return sum_loss(model, batch)

    b = builder(2, sgd, loss, size=12, dataset=(X[:12], Y[:12]), policy=policy)
    b.loss_reduction("sum").accumulate(accumulate).num_epochs(1)
    state = b.run().join(WAIT_S)
    model = net()
    optimizer = sgd(model.parameters())
    sum_loss(model, (X[:12], Y[:12])).backward()
    optimizer.step()
    check(state, (dict(model.named_parameters()), 1))


def test_the_batch_size_of_a_data_loader_is_not_used():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    check(builder(2, dataset=loader).run().join(WAIT_S), plain())


@pairwise(accumulate=[1, 2], ranks=[(2, 2), (2, 3), (3, 1), (1, 2)], steps=[7, 12])
def test_a_run_resumed_in_mid_epoch_trains_as_a_plain_loop(tmp_path, ranks, accumulate, steps):
    before, after = (builder(n).accumulate(accumulate).scheduler(cosine) for n in ranks)
    before.max_steps(steps).checkpoint_dir(tmp_path).run().join(WAIT_S)
    check(after.resume(tmp_path).run().join(WAIT_S), plain(schedule=cosine))


def test_a_run_of_one_device_is_resumed_on_several(tmp_path):
    b = builder(1)
    b._set(global_batch_size=None, batch_size=SIZE)
    b.scheduler(cosine).max_steps(7).checkpoint_dir(tmp_path).run().join(WAIT_S)
    again = builder(3).scheduler(cosine).resume(tmp_path).run()
    check(again.join(WAIT_S), plain(schedule=cosine))


class DyingAt:
    """A ``train_fn`` whose call number ``at`` on the last of ``ranks`` fails."""

    def __init__(self, ranks, at):
        self._rank, self._left, self._lock = ranks - 1, at, threading.Lock()

    def __call__(self, model, batch):
        if current_worker().rank == self._rank:
            with self._lock:
                self._left -= 1
            if self._left == 0:
                raise RuntimeError("planted")
        return mean_loss(model, batch)


@pairwise(accumulate=[1, 2], ranks=[2, 3], at=[1, 6])
def test_the_global_batch_is_kept_when_a_worker_dies(ranks, accumulate, at):
    b = builder(ranks, loss=DyingAt(ranks, at)).on_worker_failure("continue").scheduler(cosine)
    state = b.accumulate(accumulate).run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [ranks - 1]
    check(state, plain(schedule=cosine))
