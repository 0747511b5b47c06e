"""The automatic factor of the learning rate while replicas average their parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from coordinator.config import ApplyPolicy, CoordinatorConfig

logger = logging.getLogger(__name__)

MAX_ROUND_BATCHES = 200
"""Batches of a rank between two rounds, on average, above which the factor is 1: the factor was
checked up to there."""
_RESUMED_BATCHES = 160
"""The factor returns before rounds of at most this many batches."""
_MIN_CHANGE = 0.05
"""Relative change from which the factor follows the counts, if no rank has died: noise in the
speeds must not move it."""


class LrFactor:
    """Factor of the learning rate for optimizers whose steps ignore the scale of the gradient.

    Such an optimizer (Adam, RMSprop) moves by the learning rate times the ratio of the gradient's
    mean to its noise, which grows with the square root of the batch. Let the learning rate suit one
    device that trains the batches of all ranks together, of ``B`` samples. A rank with batches of
    ``b`` samples that trains ``n`` of them between two rounds enters the average with weight
    ``n b``, so that the average moves in a round by ``lr * sum(n b * n * sqrt(b)) / sum(n b)``
    instead of ``lr * sum(n b) / B * sqrt(B)``. The factor makes the two equal::

        factor = sum(n b)**2 / (sqrt(B) * sum(n**2 * b**1.5))

    With equal batches and ``K`` ranks that is ``sqrt(K) * K_eff / K``, where ``K_eff = sum(n)**2 /
    sum(n**2)``: ``sqrt(K)`` for equal speeds. ``B`` stays that of all ranks at the start after a
    death.

    Deterministic: no clock. The factor changes between two rounds only; it is 1 while rounds are
    sparse.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._sizes = config.batch_sizes or (config.batch_size,) * config.world_size
        self._enabled = (
            config.auto_lr
            and config.world_size > 1
            and config.policy is not ApplyPolicy.SYNC
            and not config.granted
        )
        self._optimizers: tuple[str, ...] = ()
        self._alive: list[bool] = []
        self._is_dense = True
        self.value = 1.0

    def enable(self, optimizers: Sequence[str]) -> None:
        """Record the names of the ranks' scale-invariant optimizers; without any, it is off."""
        self._optimizers = self._optimizers or tuple(optimizers)

    @property
    def current(self) -> float | None:
        """:attr:`value`; ``None`` if there is no automatic factor."""
        return self.value if self._enabled and self._optimizers else None

    def update(self, batch_counts: Sequence[int]) -> None:
        """Decide the factor that follows the next round.

        Args:
            batch_counts: Expected batches of each rank between two rounds; 0 for a dead one.
        """
        if self.current is None:
            return
        before = self._alive, self._is_dense
        self._alive = [n > 0 for n in batch_counts]
        limit = MAX_ROUND_BATCHES if self._is_dense else _RESUMED_BATCHES
        self._is_dense = sum(batch_counts) <= limit * sum(self._alive)
        is_new = before != (self._alive, self._is_dense)
        factor = self._factor(batch_counts) if self._is_dense else 1.0
        change = abs(factor / self.value - 1)
        if is_new or change > _MIN_CHANGE:
            self.value = factor
        if is_new and change > _MIN_CHANGE:
            self._announce(batch_counts)

    def _factor(self, counts: Sequence[int]) -> float:
        pairs = list(zip(counts, self._sizes, strict=True))
        samples = sum(n * size for n, size in pairs)
        moved = sum(n**2 * size**1.5 for n, size in pairs)
        return float(samples**2 / (math.sqrt(sum(self._sizes)) * moved)) if moved else 1.0

    def _announce(self, counts: Sequence[int]) -> None:
        parts = ", ".join(f"{100 * n / sum(counts):.0f} %" for n in counts if n)
        why = f"workers with {parts} of the batches"
        if not self._is_dense:
            why = f"more than {MAX_ROUND_BATCHES} batches of a worker between two averagings"
        logger.info(
            'lr_scale_ratio("auto"): the learning rate of %s is multiplied by %.3g from now on '
            "(%s)",
            ", ".join(self._optimizers),
            self.value,
            why,
        )
