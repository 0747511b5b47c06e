"""Buffers that each rank computes from its own samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_ROUNDING_EPS = 8.0
"""Relative distance of two buffers that counts as rounding, in units of the dtype's precision."""


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers by name, without those of normalization layers.

    Statistics of batch normalization are known to be those of each rank, unless they are
    synchronized. Float8 and sparse buffers, which are constants, are left out, too.
    """
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for key, buffer in module._buffers.items():
            if buffer is None or not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            if buffer.dtype.itemsize > 1 and buffer.layout is torch.strided:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


@torch.no_grad()
def first_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    """Name of the first buffer that differs by more than rounding; waits for the device."""
    for name, buffer in one.items():
        twin = other.get(name)
        if twin is None or twin.shape != buffer.shape or twin.dtype != buffer.dtype:
            continue
        if torch.equal(buffer, twin):
            continue
        norm = torch.linalg.vector_norm(buffer)
        distance = torch.linalg.vector_norm(twin - buffer)
        if distance > _ROUNDING_EPS * torch.finfo(buffer.dtype).eps * norm:
            return name
    return None
