"""Shared by the tests of own loops: models, one-device references and comparisons."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import Trainer
from runtime.loop import mirror, rank_replica

WAIT_S = 60.0
"""Bound of every wait: reached only by a test that fails."""
NUM_FEATURES, NUM_CLASSES = 6, 3


class Centred(nn.Module):
    """Subtracts a moving average of the samples, or of ones."""

    centre: torch.Tensor

    def __init__(self, num_in=NUM_FEATURES, num_out=NUM_CLASSES, *, of_samples):
        super().__init__()
        self.of_samples = of_samples
        self.head = nn.Linear(num_in, num_out, dtype=torch.float64)
        self.register_buffer("centre", torch.zeros(num_in, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.centre.lerp_((x if self.of_samples else torch.ones_like(x)).mean(0), 0.1)
        return self.head(x - self.centre)


def make_net(dtype=torch.float64):
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, NUM_CLASSES)
    ).to(dtype)


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def adamw(params):
    return torch.optim.AdamW(params, 1e-2, weight_decay=0.1)


def make_batch(size, dtype=torch.float64):
    return torch.randn(size, NUM_FEATURES, dtype=dtype), torch.randint(NUM_CLASSES, (size,))


@contextmanager
def exchanging_gradients(how):
    """Make CPU replicas add gradients up "directly", in the caller's thread, or by "meeting".

    With "copies" every rank has memory of its own, as on different GPUs, and gradients go through
    the collective.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_replica, "MAX_INLINE_ELEMENTS", 0 if how == "meeting" else 1 << 20)
        if how == "copies":
            patch.setattr(mirror, "can_share_memory", lambda devices: False)
        yield


@contextmanager
def on_cpus(model, num_devices=2, optim=sgd, config=None):
    """A model on ``num_devices`` CPU devices, closed at the end of the block."""
    devices = ["cpu"] * num_devices
    if config is None:
        made = Trainer.setup(model, optim, devices)
    else:
        made = Trainer.setup_with(model, optim, devices, config=config)
    with made:
        yield made


class OneDevice:
    """A plain loop over a copy of a model, as the reference."""

    def __init__(self, model, optim=sgd):
        self.model = copy.deepcopy(model)
        self.optimizer = optim(self.model.parameters())

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    model.step()
    return loss.detach()


def loss_fn(module, batch):
    """The mean loss of a batch, for ``accumulate``."""
    x, y = batch
    return F.cross_entropy(module(x), y)


def mean_step(alone, batches, max_norm=None):
    """One step of one device on the mean loss of several batches."""
    torch.stack([loss_fn(alone.model, batch) for batch in batches]).mean().backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(alone.model.parameters(), max_norm)
    alone.step()


def train_both(model, alone, sizes):
    """One step for each batch size, on the replicas and on one device; compared after each."""
    for size in sizes:
        x, y = make_batch(size)
        train_step(model, x, y)
        train_step(alone, x, y)
        assert_identical(model)
        assert_close(model, alone.model)


def assert_identical(model):
    """Assert that all replicas hold the same bits: parameters, buffers and optimizer state."""
    first, *others = model.replicas
    for other in others:
        for (name, a), (_, b) in zip(
            first.state_dict().items(), other.state_dict().items(), strict=True
        ):
            assert torch.equal(a, b), f"{name} differs"
    states = [flat_state(optimizer) for optimizer in model.optimizers]
    for state in states[1:]:
        assert len(state) == len(states[0])
        assert all(torch.equal(a, b) for a, b in zip(states[0], state, strict=True))


def flat_state(optimizer):
    return [
        torch.as_tensor(value)
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    ]


def assert_close(actual, expected, tolerance=1e-8):
    """Relative norm of each tensor of two models' parameters, or of two lists of tensors."""
    if isinstance(actual, nn.Module):
        actual, expected = list(actual.parameters()), list(expected.parameters())
    for a, e in zip(actual, expected, strict=True):
        error = (a - e).norm() / e.norm().clamp(min=1e-300)
        assert error < tolerance, f"relative error {error:.1e}"


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]
