"""Buffers and gradients that depend on the samples of one rank, not on those of the batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

logger = logging.getLogger(__name__)

_ROUNDING_EPS = 8.0
"""Relative distance of two buffers that counts as rounding, in units of the dtype's precision."""


def warn_of_frequencies(model: nn.Module) -> None:
    """Warn of an embedding whose gradients depend on how often a batch has each index."""
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            logger.warning(
                "%s %r has scale_grad_by_freq=True: each device divides the gradient of a row by "
                "the count of its index in its own samples, one device by that in the whole batch. "
                "Leave it out, and weight the loss by frequencies of the data set if rare rows "
                "train too little",
                type(module).__name__,
                name,
            )
            return


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


def attributes_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules keep in attributes, alone or in a tuple, by name."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Tensor):
                    yield f"{prefix}.{key}" if prefix else key, part


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
