"""BatchMeans: results of an evaluation, batch by batch, and their means over a data set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class BatchMeans(NamedTuple):
    """The means of one batch.

    Attributes:
        position: Its position among the batches.
        values: Name, mean and weight of each of its values.
    """

    position: int
    values: tuple[tuple[str, float, float], ...]


def weighted_means(batches: Iterable[BatchMeans]) -> dict[str, float]:
    """The exact weighted mean of each value over batches, independent of their order.

    Batches of weight 0 do not count, even if their value is NaN.
    """
    sums: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        for name, value, weight in batch.values:
            sums.setdefault(name, []).append((value, weight))
    return {name: _mean([(v, w) for v, w in pairs if w > 0]) for name, pairs in sums.items()}


def _mean(pairs: list[tuple[float, float]]) -> float:
    if not all(math.isfinite(value) for value, _ in pairs):
        return sum(value for value, _ in pairs)  # infinite or NaN
    total = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs) / total if total else math.nan
