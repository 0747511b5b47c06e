"""Weights of losses: what a batch's mean loss is a mean over, where that is not its samples.

Losses and gradients of several micro-batches and ranks are averaged by these weights, so that
the result is the mean over all units, as one device would compute it. A weight on the device is
never read in a step, but for the total where a step may have none at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Weight = float | Tensor
"""A number, or a scalar tensor."""

REMEDY = (
    "return (loss, weight) with the mean loss and what it is a mean over, a number or a scalar "
    "tensor from 0 up, for instance (labels != -100).sum()"
)


class WindowWeight(NamedTuple):
    """The weight of a step's losses on one rank: ``unit * units``.

    Attributes:
        unit: Weight that a micro-batch has whose loss was not scaled.
        units: Sum of what the losses of the micro-batches were scaled by.
    """

    unit: Weight
    units: Weight

    @property
    def total(self) -> Weight:
        """The sum of the micro-batches' weights."""
        return self.unit * self.units


def check_weight(weight: float, where: str = "") -> float:
    """The weight as a plain number.

    Raises:
        ValueError: It is negative or not finite.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"train_fn returned the weight {weight}{where}: {REMEDY}")
    return weight if isinstance(weight, int) else float(weight)


def split_loss(result: Any) -> tuple[Any, Any]:
    """What ``train_fn`` has returned as loss and weight; a weight of ``None``: it gave none."""
    if not isinstance(result, tuple):
        return result, None
    if len(result) != 2:
        raise ValueError(f"train_fn returned a tuple of {len(result)}: {REMEDY}")
    loss, weight = result
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"train_fn returned a weight of shape {tuple(weight.shape)}: {REMEDY}")
        if weight.dtype is torch.bool or weight.is_complex():
            raise TypeError(f"train_fn returned a weight of {weight.dtype}: {REMEDY}")
    elif isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"train_fn returned a weight of type {type(weight).__name__}: {REMEDY}")
    return loss, weight


class Mask:
    """Makes zeros of the gradients of a micro-batch of weight 0, which may be NaN.

    Attributes:
        live: Whether the weight of the micro-batch is above 0, on the device where the host
            does not know; ``None``: nothing is masked.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.live: Tensor | bool | None = None
        for p in params:
            p.register_hook(self._masked)  # type: ignore[no-untyped-call]

    def _masked(self, grad: Tensor) -> Tensor | None:
        if self.live is None or grad.layout is not torch.strided:
            return None
        if isinstance(self.live, Tensor):
            return torch.where(self.live, grad, 0)
        return torch.zeros_like(grad)
