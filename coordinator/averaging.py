"""Weighted average of the replicas' state on the CPU, and how far they are apart.

The arithmetic is cut into blocks that stay in the cache, so that the snapshots are
read and the average is written once, the norms of the divergence included. Ranks are
blended one after the other, ``average += share * (snapshot - average)`` in the form of
``torch.lerp``: a tensor that is equal on all ranks averages to exactly itself, which a
sum of products would not give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coordinator.messages import Payload

_BLOCK_BYTES = 1 << 20
"""Size of a block of the result; of 256 KiB to 2 MiB the fastest on two cores."""
_TINY_NORM = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageResult:
    """What came out of a round.

    Attributes:
        average: The averaged state. Its tensors belong to the :class:`Averager`.
        num_samples: Sum of the weights; 0: the round changes nothing.
        divergences: ``||snapshot - average|| / ||average||`` over the parameters, one
            for each payload; 0 where ``||average|| <= 1e-10`` or ``num_samples == 0``,
            NaN or infinite where a snapshot is.
    """

    average: Payload
    num_samples: int
    divergences: tuple[float, ...]


class Averager:
    """Averages payloads into two result buffers used in turn.

    A result stays valid until the second :meth:`average` after the one that made it;
    copy what has to live longer. A coordinator that computes a round only after every
    rank has acknowledged the one before, or the one before was given up, keeps within
    that. Payloads are only read, and none is kept.

    Not thread-safe: one call at a time, from any thread. CPU only; blocks until done.
    """

    def __init__(self) -> None:
        self._results: list[Payload] = []
        self._turn = 0

    def average(self, payloads: Sequence[Payload], weights: Sequence[int]) -> AverageResult:
        """Average payloads of the same shapes and dtypes.

        float16 and bfloat16 are accumulated in float32, all others in their own
        precision; the norms are summed over blocks in float64.

        Args:
            payloads: One for each rank, flat CPU tensors.
            weights: Samples behind each payload. One of weight 0 is not read into the
                average, so its values may be NaN. If all are 0 the result is a copy of
                the first payload.

        Returns:
            The average, valid until the second call after this one. Buffers that are
            taken and not averaged come from the largest weight, the lowest rank first.

        Raises:
            ValueError: No payload, another number of weights, a negative weight, a
                tensor that is not on the CPU, or payloads that differ in shape or
                dtype. Earlier results are then as they were.
        """
        _check(payloads, weights)
        result = self._next_result(payloads[0])
        total = sum(weights)
        chosen = payloads[max(range(len(payloads)), key=lambda i: (weights[i], -i))]
        with torch.no_grad():
            _copy(result.taken, chosen.taken)
            if total == 0:
                _copy(result.params, payloads[0].params)
                _copy(result.buffers, payloads[0].buffers)
                return AverageResult(
                    average=result, num_samples=0, divergences=(0.0,) * len(payloads)
                )
            mix = _Mix(weights)
            for out, *sources in zip(result.params, *(p.params for p in payloads), strict=True):
                mix.average(out, sources, measure=True)
            for out, *sources in zip(result.buffers, *(p.buffers for p in payloads), strict=True):
                mix.average(out, sources, measure=False)
        return AverageResult(average=result, num_samples=total, divergences=mix.divergences)

    def _next_result(self, like: Payload) -> Payload:
        if self._results and _layout(self._results[0]) != _layout(like):
            self._results = []
        if len(self._results) < 2:
            self._results.append(payload_like(like))
            return self._results[-1]
        self._turn = 1 - self._turn
        return self._results[1 - self._turn]


def payload_like(payload: Payload) -> Payload:
    """A payload of the same shapes and dtypes whose values are not initialised."""
    return Payload(
        params=tuple(torch.empty_like(t, requires_grad=False) for t in payload.params),
        buffers=tuple(torch.empty_like(t, requires_grad=False) for t in payload.buffers),
        taken=tuple(torch.empty_like(t, requires_grad=False) for t in payload.taken),
    )


def clone_payload(payload: Payload) -> Payload:
    """A copy that shares no memory."""
    copied = payload_like(payload)
    for to, source in (
        (copied.params, payload.params),
        (copied.buffers, payload.buffers),
        (copied.taken, payload.taken),
    ):
        _copy(to, source)
    return copied


def usable_weights(samples: Sequence[int | None]) -> list[int]:
    """The weights of a round in which some states may not be used.

    Args:
        samples: Samples behind each state; ``None``: not to be used.

    Returns:
        The samples, 0 for what is not used. Where that would leave nothing, the states that
        can be used and have no samples count alike, so that the others can take them.
    """
    weights = [n or 0 for n in samples]
    if any(weights) or None not in samples:
        return weights
    return [int(n is not None) for n in samples]


class _Mix:
    """The weights of one round, and the squared norms summed up in it."""

    def __init__(self, weights: Sequence[int]) -> None:
        total = sum(weights)
        self._shares = [w / total for w in weights]
        self._live = [i for i, w in enumerate(weights) if w > 0]
        # When rank i is blended in, its part of all that has been blended so far.
        running = 0
        self._fractions: list[float] = []
        for i in self._live:
            running += weights[i]
            self._fractions.append(weights[i] / running)
        self._distances = [0.0] * len(weights)
        self._norm = 0.0

    @property
    def divergences(self) -> tuple[float, ...]:
        norm = math.sqrt(self._norm)
        if norm <= _TINY_NORM:
            return (0.0,) * len(self._distances)
        return tuple(math.sqrt(d) / norm for d in self._distances)

    def average(self, out: Tensor, sources: Sequence[Tensor], *, measure: bool) -> None:
        """Write the average of one flat tensor; add to the norms if ``measure``."""
        if out.is_complex():
            out, sources = _as_real(out), [_as_real(s) for s in sources]
        reduced = out.dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if reduced else out.dtype
        length = max(1, min(_BLOCK_BYTES // wide.itemsize, out.numel()))
        spare = torch.empty(length, dtype=wide)
        copies = torch.empty(len(sources) + 1 if reduced else 0, length, dtype=wide)
        flats = [torch.split(flat.view(-1), length) for flat in (out, *sources)]
        for target, *parts in zip(*flats, strict=True):
            size = target.numel()
            acc = target
            if reduced:
                acc = copies[-1, :size]
                parts = [copies[i, :size].copy_(part) for i, part in enumerate(parts)]
            norm = self._blend(acc, parts)
            if reduced:
                target.copy_(acc)
            if measure and reduced:
                # The ranks get the rounded average, so the distance is to that one.
                norm = _sum_squares(acc.copy_(target))
            if measure:
                self._norm += norm
                self._measure(acc, parts, spare[:size], rounded=reduced)

    def _blend(self, acc: Tensor, parts: Sequence[Tensor]) -> float:
        """Write the weighted mean of a block into ``acc``; returns its squared norm."""
        first, *others = self._live
        if not others:
            acc.copy_(parts[first])
            return _sum_squares(acc)
        before = parts[first]
        for i, fraction in zip(others, self._fractions[1:], strict=True):
            # From the heavier side: a negative zero on all ranks then keeps its sign.
            if fraction < 0.5:
                torch.lerp(parts[i], before, 1.0 - fraction, out=acc)
            else:
                torch.lerp(before, parts[i], fraction, out=acc)
            before = acc
        norm = _sum_squares(acc)
        if math.isfinite(norm):
            return norm
        self._mend(acc, parts)
        return _sum_squares(acc)

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

    def _measure(
        self, acc: Tensor, parts: Sequence[Tensor], scratch: Tensor, *, rounded: bool
    ) -> None:
        if len(parts) == len(self._live) == 2 and not rounded:
            # Both are on one line with their mean: one difference gives both distances.
            torch.sub(parts[0], parts[1], out=scratch)
            square = _sum_squares(scratch)
            for i in (0, 1):
                self._distances[i] += square * self._shares[1 - i] ** 2
            return
        for i, part in enumerate(parts):
            torch.sub(part, acc, out=scratch)
            self._distances[i] += _sum_squares(scratch)


def _sum_squares(block: Tensor) -> float:
    square = float(torch.dot(block, block))
    if not math.isfinite(square):  # Perhaps only the squares overflowed.
        square = float(block.double().square().sum())
    return square


def _as_real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1)


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, tensor in zip(to, source, strict=True):
        target.copy_(tensor)


def _layout(payload: Payload) -> list[list[tuple[torch.Size, torch.dtype]]]:
    groups = (payload.params, payload.buffers, payload.taken)
    return [[(t.shape, t.dtype) for t in group] for group in groups]


def _check(payloads: Sequence[Payload], weights: Sequence[int]) -> None:
    if not payloads:
        raise ValueError("nothing to average: hand over at least one payload")
    if len(weights) != len(payloads):
        raise ValueError(
            f"{len(payloads)} payloads but {len(weights)} weights: give one for each payload"
        )
    if min(weights) < 0:
        raise ValueError(f"weights count samples and cannot be negative, got {list(weights)}")
    layout = _layout(payloads[0])
    for i, payload in enumerate(payloads):
        if _layout(payload) != layout:
            raise ValueError(
                f"payload {i} differs in shape or dtype from payload 0: {_layout(payload)} "
                f"instead of {layout}; every replica must hold the same model"
            )
        for tensor in (*payload.params, *payload.buffers, *payload.taken):
            if tensor.device.type != "cpu":
                raise ValueError(f"payload {i} is on {tensor.device}: send CPU tensors")
