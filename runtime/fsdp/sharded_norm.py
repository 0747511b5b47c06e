"""Norm and clipping of sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.collective import Collective, ReduceOp
from runtime.collective.base import LOW_PRECISION


@torch.no_grad()
def sharded_norm(shards: Sequence[nn.Parameter], group: Collective, norm_type: float) -> Tensor:
    """The norm of gradients sharded over a group; a collective call.

    Args:
        shards: This rank's shards; those without a gradient add nothing.
        group: The ranks that hold the other shards.
        norm_type: Order of the norm, infinity included.

    Returns:
        A scalar on the shards' device, of the same bits on every rank; in float64 if all
        gradients are, else in float32.
    """
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    filled = [gradient for gradient in gradients if gradient.numel()]
    device = shards[0].device
    # A shard's partial norm must not be rounded to a low precision.
    narrow = [g.double() for g in filled if g.dtype in LOW_PRECISION]
    low = torch.nn.utils.get_total_norm(narrow, norm_type)
    wide = [g for g in filled if g.dtype not in LOW_PRECISION]
    rest = torch.nn.utils.get_total_norm(wide, norm_type)
    parts = torch.stack([part.to(device, torch.float64) for part in (low, rest)])
    if math.isinf(norm_type):
        total = parts.amax()
        group.all_reduce_(total, ReduceOp.MAX)
    else:
        total = parts.pow(norm_type).sum()
        group.all_reduce_(total)
        total = total.pow(1.0 / norm_type)
    exact = all(gradient.dtype is torch.float64 for gradient in gradients)
    return total if exact else total.float()


def clip_by_(
    shards: Sequence[nn.Parameter], total: Tensor, max_norm: float, *, error_if_nonfinite: bool
) -> None:
    """Scale gradients, whose norm over all ranks is ``total``, down to ``max_norm``.

    Raises:
        RuntimeError: The norm is not finite with ``error_if_nonfinite``; nothing was changed.
    """
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the gradient's norm is {total.item()}, so it cannot be clipped; pass "
            "error_if_nonfinite=False to clip anyway"
        )
    torch.nn.utils.clip_grads_with_norm_(shards, max_norm, total)


def check_clip(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Validate the arguments of clipping before any exchange; return both as floats.

    Raises:
        TypeError: An argument is not a number.
        ValueError: ``max_norm`` is negative, or ``norm_type`` is not positive.
    """
    numbers = []
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}={value!r}: pass a number") from error
    limit, order = numbers
    if not limit >= 0:
        raise ValueError(f"max_norm={limit}: pass the largest norm after clipping, 0 or more")
    if not order > 0:
        raise ValueError(f"norm_type={order}: pass the order of the norm, above 0")
    return limit, order
