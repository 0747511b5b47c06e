"""Permutation and batches of an epoch, and splits of them by ratio or by measured cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt


class BatchSet:
    """A set of batch positions as disjoint ascending ranges, taken from the front."""

    def __init__(self, spans: Iterable[range] = ()) -> None:
        self._spans: list[range] = []
        self.put_back(spans)

    def __len__(self) -> int:
        return sum(map(len, self._spans))

    def __bool__(self) -> bool:
        return bool(self._spans)

    @property
    def spans(self) -> tuple[range, ...]:
        """The batches of the set, as ascending ranges."""
        return tuple(self._spans)

    def take(self, count: int, *, whole: int = 1) -> tuple[range, ...]:
        """Remove and return the first ``count`` batches (fewer if fewer are left).

        Args:
            count: Number of batches.
            whole: If not 0, take a multiple of this many batches from a range that is not
                exhausted.
        """
        taken: list[range] = []
        while count > 0 and self._spans:
            head, num = self._spans[0], count
            if len(head) > count and count % whole:
                if count < whole and taken:
                    break
                num = count // whole * whole or count
            taken.append(head[:num])
            if len(head) > num:
                self._spans[0] = head[num:]
            else:
                self._spans.pop(0)
            count -= len(taken[-1])
            if num < len(head):
                break
        return tuple(taken)

    def put_back(self, spans: Iterable[range]) -> None:
        """Put batches back, such as those of a dead rank."""
        self._spans = union((*self._spans, *spans))

    def remove(self, spans: Iterable[range]) -> None:
        """Remove those of these batches that the set holds."""
        left: list[range] = []
        gone = iter(union(spans))
        hole = next(gone, None)
        for span in self._spans:
            start = span.start
            while hole is not None and hole.start < span.stop:
                if start < hole.start:
                    left.append(range(start, hole.start))
                start = max(start, hole.stop)
                if hole.stop > span.stop:
                    break  # it extends into the next range
                hole = next(gone, None)
            if start < span.stop:
                left.append(range(start, span.stop))
        self._spans = left


def permutation(num_samples: int, epoch: int, seed: int) -> npt.NDArray[np.int64]:
    """The order in which an epoch visits the data set; depends on ``(seed, epoch)`` only.

    Args:
        num_samples: Length of the data set.
        epoch: Epoch, counted from 0.
        seed: Seed of the run, not negative.

    Returns:
        An int64 array of shape ``(num_samples,)``.
    """
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


LONG = 1 << 24
"""Length from which on a data set is shuffled by :func:`permuted`, without memory for the whole."""

_NUM_ROUNDS = 4


def permuted(
    positions: npt.NDArray[np.int64], num_samples: int, epoch: int, seed: int
) -> npt.NDArray[np.int64]:
    """Elements of a random permutation, each computed from its position alone.

    A Feistel network over the next power of two (Luby and Rackoff, 1988), repeated for results
    that are no sample (Black and Rogaway, 2002).

    Args:
        positions: The positions.
        num_samples: Length of the permutation.
        epoch: Epoch, counted from 0.
        seed: Seed of the run, not negative.
    """
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_NUM_ROUNDS, np.uint64)
    bits = (num_samples - 1).bit_length()
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)

    def once(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> low, values & masks[1]
        for key, other in zip(keys[::2], keys[1::2], strict=True):
            left ^= _mixed(right, key) & masks[0]
            right ^= _mixed(left, other) & masks[1]
        return (left << low) | right

    found = once(positions.astype(np.uint64))
    while (outside := found >= num_samples).any():
        found[outside] = once(found[outside])
    return found.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def count_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Number of batches in an epoch; at most one of them is short."""
    whole, rest = divmod(num_samples, batch_size)
    return whole if drop_last or not rest else whole + 1


def batch_bounds(batch: int, num_samples: int, batch_size: int) -> tuple[int, int]:
    """Positions ``[start, stop)`` of a batch within the epoch's permutation."""
    start = batch * batch_size
    return start, min(start + batch_size, num_samples)


def split_by_ratio(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` into integers proportional to ``ratios``, by largest remainder.

    Of equal remainders the lower rank is rounded up first.
    """
    scale = total / sum(ratios)
    exact = [ratio * scale for ratio in ratios]
    parts = [int(x) for x in exact]
    by_remainder = sorted(range(len(ratios)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def split_like(total: int, sizes: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``sizes``, with parts of at least ``least``."""
    assert total >= least * len(sizes), f"{total} samples are too few for {len(sizes)} parts"
    parts = list(split_by_ratio(total, sizes))
    while min(parts) < least:  # taken from the largest
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(min(parts))] += 1
    return tuple(parts)


Cost = tuple[float, float]
"""Compute time of a piece on a rank: ``(fixed seconds, seconds per sample)``."""


def seconds(cost: Cost, num_samples: float) -> float:
    """The compute time of a piece, in seconds."""
    return cost[0] + cost[1] * num_samples


def split_by_cost(total: int, costs: Sequence[Cost], least: int = 1) -> tuple[int, ...]:
    """Split ``total`` samples so that the longest compute time is minimal.

    Args:
        total: Samples, at least ``least`` for each rank.
        costs: Cost of each rank; the seconds per sample are above 0.
        least: Minimum samples of a rank.

    Returns:
        Integers of at least ``least`` that sum to ``total``.
    """
    assert total >= least * len(costs), f"{total} samples are too few for {len(costs)} ranks"
    parts = [least] * len(costs)
    free = list(range(len(costs)))
    while free:
        left = total - least * (len(costs) - len(free))
        per_s = sum(1 / costs[i][1] for i in free)
        end_s = (left + sum(costs[i][0] / costs[i][1] for i in free)) / per_s
        above = [i for i in free if end_s - costs[i][0] > least * costs[i][1]]
        if len(above) == len(free):
            for i in free:
                parts[i] = max(least, int((end_s - costs[i][0]) / costs[i][1]))
            break
        free = above
    while (rest := total - sum(parts)) != 0:
        if rest > 0:
            i = min(range(len(parts)), key=lambda i: seconds(costs[i], parts[i] + 1))
            parts[i] += 1
        else:  # float rounding
            i = max((i for i, n in enumerate(parts) if n > least), key=lambda i: parts[i])
            parts[i] -= 1
    return tuple(parts)


def split_within(
    total: int,
    ranks: Sequence[int],
    limits: Mapping[int, int],
    split: Callable[[int, Sequence[int]], Sequence[int]],
) -> tuple[int, ...]:
    """Split ``total`` samples so that no part is above the limit of its rank.

    Args:
        total: Samples, at least one for each rank and at most the sum of the limits.
        limits: Maximum samples of a rank; a missing one means no limit.
        split: Splits a number of samples between ranks, without limits.

    Returns:
        The part of each rank.
    """
    fixed: dict[int, int] = {}
    while True:
        free = [rank for rank in ranks if rank not in fixed]
        parts = dict(zip(free, split(total - sum(fixed.values()), free), strict=True))
        above = {r: limits[r] for r, n in parts.items() if n > limits.get(r, n)}
        if not above or len(above) == len(free):
            return tuple((fixed | parts)[rank] for rank in ranks)
        fixed |= above


def union(spans: Iterable[range]) -> list[range]:
    """Batches in ranges, as ascending ranges. An epoch may have millions: none is expanded."""
    found: list[range] = []
    for span in sorted((span for span in spans if span), key=lambda span: span.start):
        if found and span.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found
