"""Arithmetic on flat tensors.

What makes two operations of one pass over the memory works in blocks that stay in the caches,
and is for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coordinator.blocks import PART_BYTES, block_length, blocks, dot_square, sum_squares

_LARGE_BYTES = 1 << 25
"""Tensors of this size and more take less time in blocks, measured with 32 MiB of cache in all;
smaller ones take more, for every operation on a block starts anew."""


def copy_measured(out: Tensor, source: Tensor) -> float:
    """Copy a flat tensor; returns its squared norm, NaN or infinite where a value is.

    Args:
        out: As ``source``, of which it shares no memory.
        source: Flat; floating-point or complex.
    """
    if source.is_complex():
        out, source = torch.view_as_real(out).view(-1), torch.view_as_real(source).view(-1)
    at_once = source.nbytes < _LARGE_BYTES
    if at_once:
        out.copy_(source)
    square = 0.0
    square_of = _square_of_narrow if source.dtype.itemsize < 4 else dot_square
    # In blocks in any case, for the sake of the sum.
    for target, block in blocks([out, source], _length(source)):
        square += sum_squares(block, square_of)
        if not at_once:
            target.copy_(block)
    return square


def add_progress(live: Tensor, average: Tensor, base: Tensor) -> None:
    """``live`` becomes ``average + (live - base)``: exactly the average where it is the base.

    Args:
        live: Flat; written to.
        average: As ``live``.
        base: As ``live``; holds nothing of use afterwards.
    """
    length = _length(live) if live.nbytes >= _LARGE_BYTES else live.numel()
    spare = base if live.numel() <= length else base[:length]  # the first block to be used up
    for now, mean, before in blocks([live, average, base], length):
        size = now.numel()
        progress = spare if size == spare.numel() else spare[:size]
        torch.sub(now, before, out=progress)
        torch.add(mean, progress, out=now)


def add(mean: Tensor, delta: Tensor, out: Tensor) -> None:
    """``mean + delta``, where the mean may still lie on the CPU."""
    if mean.device == out.device:
        torch.add(mean, delta, out=out)
    else:
        out.copy_(mean, non_blocking=True)
        out.add_(delta)


def change(new: Tensor, old: Tensor, out: Tensor) -> None:
    """``new - old``; 0 where both are the same infinity, as in a mask kept as a buffer."""
    same = new == old
    torch.sub(new, old, out=out)
    out.masked_fill_(same, 0)


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm over all tensors together, a scalar on their device."""
    parts = [torch.linalg.vector_norm(t) for t in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack([p.double() for p in parts]))
    return total


def _length(flat: Tensor) -> int:
    return block_length(flat.dtype, torch.get_num_threads(), PART_BYTES)


def _square_of_narrow(block: Tensor) -> float:
    """The squared norm of float16 or bfloat16, whose own sums are too coarse."""
    norm: float = torch.linalg.vector_norm(block, dtype=torch.float32).item()
    return norm * norm
