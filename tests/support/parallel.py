"""Shared by the tests of data-parallel replicas: small models and comparisons."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from runtime import DataParallelCoordinator

NUM_FEATURES, NUM_CLASSES = 6, 3


def mlp(device, dtype=torch.float64, norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).to(device, dtype)


def adam(params):
    return torch.optim.AdamW(params, 1e-2, weight_decay=0.05)


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def loss_fn(model, samples):
    x, y = samples
    logits = model(x)
    return F.cross_entropy(logits, y), (logits.argmax(1) == y).sum()


def samples_of(count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(NUM_CLASSES, (count,), generator=generator)


def replicas(world_size=2, *, model=mlp, optim=adam, loss=loss_fn, **kwargs):
    return DataParallelCoordinator(model, optim, loss, ["cpu"] * world_size, **kwargs)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def identical(coordinator):
    """True if every replica holds the same bits."""
    first = state(coordinator.primary)
    return all(equal(state(model), first) for model in coordinator.models)
