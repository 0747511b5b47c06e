"""Flat tensors in blocks: what several operations do to a block, they do in the caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

PART_BYTES = 1 << 21
"""Size of an intra-op thread's part of a block. Smaller ones would stay in a cache nearer to the
core, but every operation on a block starts anew, and all threads meet in it: the mean of two ranks
takes as long in blocks of 1,024 to 2,048 KiB, a twentieth more in those of 512 and a fifth more in
those of 256; measured with 1 MiB of cache for each core and 32 MiB for all."""
_MOST_BYTES = 8 << 20
"""Size of a block however many threads share it: three or four are to stay in the caches."""
_GROUP = 64
"""Blocks of which the views are made at once, which holds the interpreter's lock."""


def block_length(dtype: torch.dtype, num_threads: int, part_bytes: int) -> int:
    """Elements of a block.

    Args:
        dtype: What the elements are.
        num_threads: Intra-op threads that share it.
        part_bytes: Size of the part of each.
    """
    return min(num_threads * part_bytes, _MOST_BYTES) // dtype.itemsize


def blocks(flats: Sequence[Tensor], length: int) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of the first tensor, each with those of the others, all of one length but the last."""
    numel = flats[0].numel()
    if numel <= length:
        if numel:
            yield tuple(flats)
        return
    for start in range(0, numel, length * _GROUP):
        cut = [torch.split(flat[start : start + length * _GROUP], length) for flat in flats]
        yield from zip(*cut, strict=True)


def dot_square(block: Tensor) -> float:
    """The squared norm of a block of real numbers, by as many threads as there are.

    Summed in the block's own dtype: of a few million float32 numbers that are alike the fourth
    digit is wrong already, so that longer tensors are to be cut.
    """
    square: float = torch.dot(block, block).item()
    return square


def sum_squares(block: Tensor, square_of: Callable[[Tensor], float] = dot_square) -> float:
    """The squared norm of a block, also where its squares overflow; NaN or infinite if it is."""
    square = square_of(block)
    if not math.isfinite(square):
        square = float(block.double().square().sum())
    return square
