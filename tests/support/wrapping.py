"""Shared by the tests of wrapped replicas: a small model with every kind of tensor."""

from __future__ import annotations

import torch
from torch import nn

from runtime import Ddp


class Net(nn.Module):
    """Trainable, frozen and tied parameters, and buffers of two kinds."""

    def __init__(self, width=3):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.first_again = self.first


def nets(count=2, **kwargs):
    return [Net(**kwargs) for _ in range(count)]


def wrap(models, **kwargs):
    return Ddp.wrap(models, ["cpu"] * len(models), **kwargs)


def fill(models, values=None, names=None):
    """Give every trainable parameter of a replica a gradient of one value, 1, 2, ..."""
    for rank, model in enumerate(models):
        for name, p in model.named_parameters():
            if p.requires_grad and (names is None or name in names):
                p.grad = torch.full_like(p, values[rank] if values else rank + 1.0)


def grads(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left.values(), right.values(), strict=True)
    )


def all_same(models, of):
    return all(same(of(model), of(models[0])) for model in models[1:])


def tensors(model):
    return {n: t.clone() for n, t in model.state_dict().items()}
