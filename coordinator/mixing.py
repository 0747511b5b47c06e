"""The weighted mean of flat tensors: block by block, so that memory is passed over once.

A block stays in the processor's caches from the first reading to the last norm: of each
source one reading and of the result one writing reach the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coordinator.blocks import PART_BYTES, block_length, blocks, dot_square, sum_squares

_BLOCK_BYTES = 1 << 19
"""Size of an intra-op thread's part of a block. Smaller ones fit into the core's own cache, but
every operation on a block starts anew, and all threads meet in it: on a processor with 1 MiB of
cache for each core and 32 MiB for all, 512 to 1,024 KiB took a tenth less time than 256. Threads of
Python with a share each are slower, for every operation waits for the interpreter's lock."""
_SERIAL = 32_768
"""Elements that PyTorch's own operations, other than products, never split between threads."""
_CANCELLED = 0.01
"""A squared norm that is less than this part of those it is the difference of is measured: what
is wrong with their last digits would show."""
_TINY_NORM = 1e-10


class Mix:
    """The weights of one round, and the squared norms summed up in it.

    Ranks are blended one after the other, ``mean += share * (source - mean)`` in the form of
    ``torch.lerp`` from the heavier side: a tensor that is equal on all ranks averages to
    exactly itself, signs of zeros included, which a sum of products would not give.

    Args:
        weights: One for each source, not negative, not all 0.
        num_threads: Intra-op threads of the calling thread; 0: start none, whatever it has.
            The mean has the same bits for any number of them, the norms up to rounding.
    """

    def __init__(self, weights: Sequence[float], num_threads: int = 1) -> None:
        total = sum(weights)
        self._shares = [w / total for w in weights]
        self._live = [i for i, w in enumerate(weights) if w > 0]
        # When rank i is blended in, its part of all that has been blended so far.
        running: float = 0
        self._fractions: list[float] = []
        for i in self._live:
            running += weights[i]
            self._fractions.append(weights[i] / running)
        self._threads = num_threads
        # MKL splits a product of 8,192 elements already.
        self._square = dot_square if num_threads else _squared_norm
        self._distances = [0.0] * len(weights)
        self._norm = 0.0

    @property
    def divergences(self) -> tuple[float, ...]:
        """``||source - mean|| / ||mean||`` for each source, over all that was measured."""
        norm = math.sqrt(self._norm)
        if norm <= _TINY_NORM:
            return (0.0,) * len(self._distances)
        return tuple(math.sqrt(d) / norm for d in self._distances)

    def average(
        self,
        out: Tensor,
        sources: Sequence[Tensor],
        *,
        measure: bool,
        squares: Sequence[float] | None = None,
    ) -> None:
        """Write the mean of one flat tensor.

        Args:
            out: Where to.
            sources: One for each weight.
            measure: Whether to add to the norms.
            squares: The squared norm of each source, if known: may spare measuring the mean's.
        """
        if out.is_complex():
            out, sources = _as_real(out), [_as_real(s) for s in sources]
        reduced = out.dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if reduced else out.dtype
        if len(sources) == len(self._live) == 2 and not reduced:
            self._mix_pair(out.view(-1), [s.view(-1) for s in sources], measure, squares)
            return
        length = max(1, min(self._length(_BLOCK_BYTES, wide), out.numel()))
        spare = torch.empty(length, dtype=wide)
        copies = torch.empty(len(sources) + 1 if reduced else 0, length, dtype=wide)
        for target, *parts in blocks([out.view(-1), *(s.view(-1) for s in sources)], length):
            size = target.numel()
            scratch = spare if size == length else spare[:size]
            if reduced:
                self._mix_reduced(target, parts, copies[:, :size], scratch, measure)
            else:
                norm = self._blend(target, parts)
                if measure:
                    self._norm += norm
                    self._add_distances(target, parts, scratch)

    def _mix_pair(
        self,
        out: Tensor,
        sources: Sequence[Tensor],
        measure: bool,
        squares: Sequence[float] | None,
    ) -> None:
        """Both are on one line with their mean: one difference gives it and both distances.

        Where the difference is finite, so is the mean; where it or its square is not, the mean
        is mended as far as it can be.
        """
        # The other threads wait while this one interprets: nothing is looked up twice.
        sub, square_of, isfinite = torch.sub, self._square, math.isfinite
        shares = self._shares
        light, heavy = (0, 1) if shares[0] < shares[1] else (1, 0)
        share = shares[light]
        distance = norm = 0.0
        needs_norm = measure and squares is None
        length = max(1, self._length(PART_BYTES, out.dtype))
        # Of a large state the differences use the same memory, which stays in the cache.
        is_large = self._threads > 0 and out.numel() > length
        spare = torch.empty(length if is_large else 0, dtype=out.dtype)
        for target, less, more in blocks([out, sources[light], sources[heavy]], length):
            difference = target
            if is_large:
                difference = spare if target.numel() == length else spare[: target.numel()]
            sub(more, less, out=difference)
            square = sum_squares(difference, square_of)
            distance += square
            sub(more, difference, alpha=share, out=target)
            if not isfinite(square):
                self._mend(target, (less, more) if light == 0 else (more, less))
            if needs_norm:
                norm += sum_squares(target, square_of)
        if not measure:
            return
        if squares is not None:
            norm = self._norm_of_mean(out, squares, shares[0] * shares[1] * distance)
        self._norm += norm
        self._distances[0] += distance * shares[1] ** 2
        self._distances[1] += distance * shares[0] ** 2

    def _norm_of_mean(self, mean: Tensor, squares: Sequence[float], spread: float) -> float:
        """The squared norm of a mean: the sources' mean one, less their variance around it."""
        whole = sum(share * square for share, square in zip(self._shares, squares, strict=True))
        norm = whole - spread
        if norm > _CANCELLED * whole:  # not so for what is NaN, or nearly all cancelled
            return norm
        length = max(1, self._length(_BLOCK_BYTES, mean.dtype))
        return sum(sum_squares(block, self._square) for (block,) in blocks([mean], length))

    def _mix_reduced(
        self,
        target: Tensor,
        parts: Sequence[Tensor],
        copies: Tensor,
        scratch: Tensor,
        measure: bool,
    ) -> None:
        """Blend in float32."""
        *sources, mean = copies
        for copy, part in zip(sources, parts, strict=True):
            copy.copy_(part)
        self._blend(mean, sources)
        target.copy_(mean)
        if measure:
            # The ranks get the rounded average, so the distance is to that one.
            self._norm += self._sum_squares(mean.copy_(target))
            self._add_distances(mean, sources, scratch)

    def _blend(self, acc: Tensor, parts: Sequence[Tensor]) -> float:
        """Write the weighted mean of a block into ``acc``; returns its squared norm."""
        first, *others = self._live
        if not others:
            acc.copy_(parts[first])
            return self._sum_squares(acc)
        before = parts[first]
        for i, fraction in zip(others, self._fractions[1:], strict=True):
            # From the heavier side: a negative zero on all ranks then keeps its sign.
            if fraction < 0.5:
                torch.lerp(parts[i], before, 1.0 - fraction, out=acc)
            else:
                torch.lerp(before, parts[i], fraction, out=acc)
            before = acc
        return self._finite_norm(acc, parts)

    def _finite_norm(self, acc: Tensor, parts: Sequence[Tensor]) -> float:
        """The squared norm of a mean, which is mended where it is not finite."""
        norm = self._sum_squares(acc)
        if math.isfinite(norm):
            return norm
        self._mend(acc, parts)
        return self._sum_squares(acc)

    def _mend(self, acc: Tensor, parts: Sequence[Tensor]) -> None:
        """Redo as a sum of products what a difference made NaN or infinite.

        An infinity on all ranks (an attention mask kept as a buffer) stays itself, and
        so does every value whose difference overflowed but whose mean does not.
        """
        first, *others = self._live
        mean = parts[first] * self._shares[first]
        for i in others:
            mean.add_(parts[i], alpha=self._shares[i])
        acc.copy_(torch.where(acc.isfinite(), acc, mean))

    def _add_distances(self, mean: Tensor, parts: Sequence[Tensor], scratch: Tensor) -> None:
        for i, part in enumerate(parts):
            torch.sub(part, mean, out=scratch)
            self._distances[i] += self._sum_squares(scratch)

    def _sum_squares(self, block: Tensor) -> float:
        return sum_squares(block, self._square)

    def _length(self, part_bytes: int, dtype: torch.dtype) -> int:
        """Elements of a block, given the bytes of a thread's part."""
        return block_length(dtype, self._threads, part_bytes) if self._threads else _SERIAL


def _squared_norm(block: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(block).item()
    return norm * norm


def _as_real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1)
