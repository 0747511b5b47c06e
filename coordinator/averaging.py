"""Weighted average of the replicas' states on the CPU, with their divergence."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coordinator.messages import Payload


class Averager:
    """Averages payloads into two result buffers used in turn.

    A result stays valid until the second following call of :meth:`average`; copy it to keep it
    longer. The coordinator respects that: it computes a round only after every rank has
    acknowledged the last one, or the last one was abandoned. Payloads are only read, and not kept.

    Not thread-safe: one call at a time, from any thread. CPU only; blocks until done,
    with the intra-op threads of the calling thread.

    States of at most ``SERIAL_BYTES`` in all are averaged without intra-op threads.
    """

    def __init__(self) -> None:
        self._results: list[Payload] = []
        self._turn = 0

    def average(
        self,
        payloads: Sequence[Payload],
        weights: Sequence[float],
        squares: Sequence[tuple[float, ...] | None] = (),
    ) -> AverageResult:
        """Average payloads of the same shapes and dtypes.

        float16 and bfloat16 are accumulated in float32, all others in their own
        precision; squared norms are summed over blocks in float64.

        Args:
            payloads: One for each rank, flat CPU tensors.
            weights: Weight of each payload, such as its samples. A payload of weight 0 is not part
                of the average, so its values may be NaN. If all are 0 the result is a copy of the
                first payload.
            squares: For each payload the squared norm of each of its parameter tensors, or
                ``None``. Where all are known, of two ranks and in float32 or wider, the norm
                of the average follows from them and is not measured.

        Returns:
            The average, valid until the second call after this one. ``other_buffers`` are copied
            from the largest weight, of equal ones from the lowest rank.

        Raises:
            ValueError: No payload, another number of weights, a negative weight, a
                tensor that is not on the CPU, or payloads that differ in shape or
                dtype, or squared norms of another number of payloads or tensors. Earlier
                results stay unchanged.
        """
        _check(payloads, weights)
        _check_squares(payloads, squares)
        result = self._next_result(payloads[0])
        total = sum(weights)
        chosen = payloads[max(range(len(payloads)), key=lambda i: (weights[i], -i))]
        with torch.no_grad():
            _copy(result.other_buffers, chosen.other_buffers)
            if total == 0:
                _copy(result.params, payloads[0].params)
                _copy(result.buffers, payloads[0].buffers)
                return AverageResult(
                    average=result, num_samples=0, divergences=(0.0,) * len(payloads)
                )
            is_small = sum(payload.num_bytes for payload in payloads) <= SERIAL_BYTES
            mix = WeightedMean(weights, 0 if is_small else torch.get_num_threads())
            known = _of_each_tensor(squares, len(result.params))
            params = zip(result.params, *(p.params for p in payloads), strict=True)
            for (out, *sources), square in zip(params, known, strict=True):
                mix.average(out, sources, measure=True, squares=square)
            for out, *sources in zip(result.buffers, *(p.buffers for p in payloads), strict=True):
                mix.average(out, sources, measure=False)
        return AverageResult(
            average=result, num_samples=total, divergences=mix.divergences, norm=mix.norm
        )

    def _next_result(self, like: Payload) -> Payload:
        if self._results and _layout(self._results[0]) != _layout(like):
            self._results = []
        if len(self._results) < 2:
            self._results.append(like.map(empty_like))
            return self._results[-1]
        self._turn = 1 - self._turn
        return self._results[1 - self._turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageResult:
    """The result of a round.

    Attributes:
        average: The averaged state. Its tensors belong to the :class:`Averager`.
        num_samples: Sum of the weights; 0: the round changes nothing.
        divergences: ``||snapshot - average|| / ||average||`` over the parameters, one
            for each payload; 0 where ``||average|| <= 1e-10`` or ``num_samples == 0``,
            NaN or infinite where a snapshot is.
        norm: ``||average||`` over the parameters; NaN where ``num_samples == 0``.
    """

    average: Payload
    num_samples: float
    divergences: tuple[float, ...]
    norm: float = math.nan


def clone_payload(payload: Payload) -> Payload:
    """A copy that shares no memory."""
    copied = payload.map(empty_like)
    _copy(copied.tensors, payload.tensors)
    return copied


def usable_weights(samples: Sequence[float | None]) -> list[float]:
    """The weights of a round with some unusable states.

    Args:
        samples: Weight of each state, such as its samples; ``None``: unusable.

    Returns:
        The weights, 0 for unusable states. If all would be 0, usable states have equal weights, so
        that the other ranks can copy them.
    """
    weights = [n or 0 for n in samples]
    if any(weights) or None not in samples:
        return weights
    return [int(n is not None) for n in samples]


def _of_each_tensor(
    squares: Sequence[tuple[float, ...] | None], num_tensors: int
) -> Sequence[tuple[float, ...] | None]:
    measured = [of_payload for of_payload in squares if of_payload is not None]
    if not measured or len(measured) < len(squares):
        return [None] * num_tensors
    return list(zip(*measured, strict=True))


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, tensor in zip(to, source, strict=True):
        target.copy_(tensor)


def _layout(payload: Payload) -> list[list[tuple[torch.Size, torch.dtype]]]:
    groups = (payload.params, payload.buffers, payload.other_buffers)
    return [[(t.shape, t.dtype) for t in group] for group in groups]


def _check_squares(
    payloads: Sequence[Payload], squares: Sequence[tuple[float, ...] | None]
) -> None:
    if not squares:
        return
    if len(squares) != len(payloads):
        raise ValueError(f"{len(payloads)} payloads but the squared norms of {len(squares)}")
    for i, (payload, of_payload) in enumerate(zip(payloads, squares, strict=True)):
        if of_payload is not None and len(of_payload) != len(payload.params):
            raise ValueError(
                f"payload {i} has {len(payload.params)} parameter tensors but {len(of_payload)} "
                "squared norms: give one for each"
            )


def _check(payloads: Sequence[Payload], weights: Sequence[float]) -> None:
    if not payloads:
        raise ValueError("nothing to average: pass at least one payload")
    if len(weights) != len(payloads):
        raise ValueError(
            f"{len(payloads)} payloads but {len(weights)} weights: give one for each payload"
        )
    if min(weights) < 0:
        raise ValueError(f"weights cannot be negative, got {list(weights)}")
    layout = _layout(payloads[0])
    for i, payload in enumerate(payloads):
        if _layout(payload) != layout:
            raise ValueError(
                f"payload {i} differs in shape or dtype from payload 0: {_layout(payload)} "
                f"instead of {layout}; every replica must hold the same model"
            )
        for tensor in payload.tensors:
            if tensor.device.type != "cpu":
                raise ValueError(f"payload {i} is on {tensor.device}: send CPU tensors")


_SERIAL_NUMEL = 32_768
"""Number of elements up to which PyTorch operations, except products, run on one thread."""

SERIAL_BYTES = 1 << 22
"""Size of all states together up to which intra-op threads cost more than they gain while workers
use the same cores: the threads synchronise at the end of each operation."""

_CANCELLATION = 0.01
"""A squared norm obtained as a difference is measured instead if it is below this share of the
operands: cancellation would amplify their rounding errors."""

_TINY_NORM = 1e-10


class WeightedMean:
    """A weighted mean, with its norm and the distance of each source.

    Sources are blended one by one, ``mean += share * (source - mean)``, by ``torch.lerp`` from the
    heavier side: a tensor that is equal on all ranks averages to exactly itself, with the signs of
    zeros, unlike in a sum of products.

    Args:
        weights: One for each source, not negative, not all 0.
        num_threads: Intra-op threads of the calling thread; 0: use none. The mean is bitwise equal
            for any number, the norms up to rounding.
    """

    def __init__(self, weights: Sequence[float], num_threads: int = 1) -> None:
        total = sum(weights)
        self._shares = [w / total for w in weights]
        self._live = [i for i, w in enumerate(weights) if w > 0]
        # Share of source i in the sources blended up to it.
        running: float = 0
        self._fractions: list[float] = []
        for i in self._live:
            running += weights[i]
            self._fractions.append(weights[i] / running)
        self._threads = num_threads
        # MKL splits products from 8,192 elements on.
        self._square = dot_square if num_threads else _squared_norm
        self._distances = [0.0] * len(weights)
        self._norm = 0.0

    @property
    def norm(self) -> float:
        """The norm of the mean, over all measured tensors."""
        return math.sqrt(max(0.0, self._norm))

    @property
    def divergences(self) -> tuple[float, ...]:
        """``||source - mean|| / ||mean||`` for each source, over all measured tensors."""
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
            sources: One for each weight.
            measure: Add to the norm and the distances.
            squares: The squared norm of each source, if known: may avoid measuring the mean.
        """
        if out.is_complex():
            out, sources = _as_real(out), [_as_real(s) for s in sources]
        reduced = out.dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if reduced else out.dtype
        if len(sources) == len(self._live) == 2 and not reduced:
            self._mix_pair(out.view(-1), [s.view(-1) for s in sources], measure, squares)
            return
        length = max(1, min(self._length(wide), out.numel()))
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
        """Average two sources: one difference gives their mean and both distances.

        A finite difference gives a finite mean; otherwise the mean is repaired where possible.
        """
        # Other threads wait for the GIL meanwhile: attributes are resolved once.
        sub, square_of, isfinite = torch.sub, self._square, math.isfinite
        shares = self._shares
        light, heavy = (0, 1) if shares[0] < shares[1] else (1, 0)
        share = shares[light]
        distance = norm = 0.0
        needs_norm = measure and squares is None
        length = max(1, self._length(out.dtype))
        # In a large state all differences reuse one block of memory, which stays in the cache.
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
        """The squared norm of a mean: the mean squared norm of the sources less their variance."""
        whole = sum(share * square for share, square in zip(self._shares, squares, strict=True))
        norm = whole - spread
        if norm > _CANCELLATION * whole:  # False for NaN and for heavy cancellation
            return norm
        length = max(1, self._length(mean.dtype))
        return sum(sum_squares(block, self._square) for (block,) in blocks([mean], length))

    def _mix_reduced(
        self,
        target: Tensor,
        parts: Sequence[Tensor],
        copies: Tensor,
        scratch: Tensor,
        measure: bool,
    ) -> None:
        *sources, mean = copies
        for copy, part in zip(sources, parts, strict=True):
            copy.copy_(part)
        self._blend(mean, sources)
        target.copy_(mean)
        if measure:
            # The ranks receive the rounded average: distances are to that one.
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
            # From the heavier side, so that a negative zero on all ranks keeps its sign.
            if fraction < 0.5:
                torch.lerp(parts[i], before, 1.0 - fraction, out=acc)
            else:
                torch.lerp(before, parts[i], fraction, out=acc)
            before = acc
        return self._finite_norm(acc, parts)

    def _finite_norm(self, acc: Tensor, parts: Sequence[Tensor]) -> float:
        norm = self._sum_squares(acc)
        if math.isfinite(norm):
            return norm
        self._mend(acc, parts)
        return self._sum_squares(acc)

    def _mend(self, acc: Tensor, parts: Sequence[Tensor]) -> None:
        """Recompute as a sum of products where a difference was NaN or infinite.

        An infinity on all ranks, as in an attention mask kept as a buffer, is preserved, and a
        value whose difference overflowed but whose mean does not becomes finite.
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

    def _length(self, dtype: torch.dtype) -> int:
        return block_length(dtype, self._threads) if self._threads else _SERIAL_NUMEL


def _squared_norm(block: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(block).item()
    return norm * norm


def _as_real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1)


# A block stays in the CPU caches from the first read to the last norm: each source is read from
# memory once, and the result written once.

BLOCK_BYTES = 1 << 19
"""Size of an intra-op thread's part of a block. Smaller parts fit the core's cache, but cost more
calls and synchronisation: on a CPU with 1 MiB of cache per core and 32 MiB shared, 512 to 1,024 KiB
took a tenth less time than 256, and a tenth to a quarter less than 2,048. Python threads with a
share each are slower, since every operation waits for the GIL."""

_MAX_BLOCK_BYTES = 8 << 20
"""Maximum size of a block: three or four of them must fit the caches."""

_BLOCKS_PER_SPLIT = 64
"""Blocks whose views are created in one call, which holds the GIL."""


def block_length(dtype: torch.dtype, num_threads: int) -> int:
    """Number of elements in a block.

    Args:
        dtype: The dtype.
        num_threads: Intra-op threads that share the block.
    """
    return min(num_threads * BLOCK_BYTES, _MAX_BLOCK_BYTES) // dtype.itemsize


def blocks(flats: Sequence[Tensor], length: int) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding blocks of the tensors, of one length except for the last."""
    numel = flats[0].numel()
    if numel <= length:
        if numel:
            yield tuple(flats)
        return
    for start in range(0, numel, length * _BLOCKS_PER_SPLIT):
        columns = [
            torch.split(flat[start : start + length * _BLOCKS_PER_SPLIT], length) for flat in flats
        ]
        yield from zip(*columns, strict=True)


def dot_square(block: Tensor) -> float:
    """The squared norm of a block of real numbers, on all intra-op threads.

    Accumulated in the block's dtype: with a few million equal float32 numbers the fourth digit is
    wrong, so longer tensors must be split into blocks.
    """
    square: float = torch.dot(block, block).item()
    return square


def sum_squares(block: Tensor, square_of: Callable[[Tensor], float] = dot_square) -> float:
    """The squared norm of a block, even if its squares overflow; not finite if the block is not."""
    square = square_of(block)
    if not math.isfinite(square):
        square = float(block.double().square().sum())
    return square


# A pass over a large state touches a new page, and needs a TLB entry, every 1,024 float32 numbers.
# Linux provides pages of 2 MiB on request, unless
# ``/sys/kernel/mm/transparent_hugepage/enabled`` is ``never``.

_HUGE_PAGE_MIN_BYTES = 32 << 20
"""Smaller tensors fit the caches, or reuse memory whose pages exist."""

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
"""``None`` if the system has no huge pages."""


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised contiguous CPU tensor of the same shape and dtype, in huge pages if large.

    It requires no gradient, and is on the CPU whatever the thread's default device is.
    """
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if made.nbytes >= _HUGE_PAGE_MIN_BYTES and _MADV_HUGEPAGE is not None:
        _advise(made.data_ptr(), made.nbytes, _MADV_HUGEPAGE)
    return made


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Call ``madvise`` for a range of memory; errors are ignored.

    A block of this size does not share its first and last page, so they are included.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + num_bytes - start
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
