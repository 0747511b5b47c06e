"""The automatic factor of the learning rate while replicas average their parameters."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.config import ApplyPolicy, CoordinatorConfig

logger = logging.getLogger(__name__)

MAX_ROUND_BATCHES = 200
"""Batches of a rank between two rounds, on average, above which the factor is 1: the factor was
checked up to there."""
_RESUMED_BATCHES = 160
"""The factor returns after rounds of at most this many batches."""
_WINDOW_BATCHES = 20
"""Batches of a rank, on average, in a measurement of the shares."""
_MAX_CHANGE = 0.05
"""Relative change between two measurements up to which speeds are stable."""
_MAX_WINDOWS = 8
"""Measurements after which the factor is fixed in any case."""
_MIN_ANNOUNCED = 0.05
"""Relative change that is logged."""


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

    Deterministic: no clock. The factor changes between two rounds only. It is fixed once two
    measurements of the shares agree, until the live ranks change; it is 1 while rounds are sparse.

    Args:
        config: Settings of the run.

    Attributes:
        value: The factor of the following rounds.
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
        self._shares: dict[int, float] = {}
        self._fixed = False
        self._dense = True
        self._counts: Counter[int] = Counter()
        self._num_rounds = self._num_windows = 0
        self._announced = 1.0
        self.value = 1.0

    def enable(self, optimizers: Sequence[str]) -> None:
        """Record the names of the ranks' scale-invariant optimizers; without any, it is off."""
        self._optimizers = self._optimizers or tuple(optimizers)

    @property
    def current(self) -> float | None:
        """:attr:`value`; ``None`` if there is no automatic factor."""
        return self.value if self._enabled and self._optimizers else None

    def update(self, live: Sequence[int], batch_counts: Sequence[int]) -> None:
        """Decide the factor that follows the next round.

        Args:
            live: The live ranks.
            batch_counts: Expected batches of each rank between two rounds.
        """
        if self.current is None:
            return
        if set(live) != set(self._shares):
            self._restart({rank: batch_counts[rank] for rank in live})
        self.value = self._factor() if self._dense else 1.0
        if abs(self.value / self._announced - 1) > _MIN_ANNOUNCED:
            self._announce()

    def record_round(self, batches: Mapping[int, int]) -> None:
        """Record the batches of each rank that a completed round has averaged."""
        if set(batches) != set(self._shares):
            return
        self._counts.update(batches)
        self._num_rounds += 1
        per_rank = self._counts.total() / len(batches)
        if per_rank < _WINDOW_BATCHES:
            return
        length = per_rank / self._num_rounds
        self._dense = length <= (MAX_ROUND_BATCHES if self._dense else _RESUMED_BATCHES)
        if not self._fixed:
            before = self._factor()
            self._shares = _normalized(self._counts)
            self._num_windows += 1
            is_stable = abs(self._factor() / before - 1) <= _MAX_CHANGE
            # The first measurement has no other to agree with.
            self._fixed = (is_stable and self._num_windows > 1) or self._num_windows >= _MAX_WINDOWS
        self._counts.clear()
        self._num_rounds = 0

    def _restart(self, counts: Mapping[int, int]) -> None:
        """Begin with expected counts: at the start, and after a change of the live ranks."""
        self._shares, self._fixed = _normalized(counts), False
        self._counts.clear()
        self._num_rounds = self._num_windows = 0
        self._dense = sum(counts.values()) <= MAX_ROUND_BATCHES * len(counts)

    def _factor(self) -> float:
        sizes, shares = self._sizes, self._shares.items()
        samples = sum(n * sizes[rank] for rank, n in shares)
        moved = sum(n**2 * sizes[rank] ** 1.5 for rank, n in shares)
        return float(samples**2 / (math.sqrt(sum(sizes)) * moved)) if moved else 1.0

    def _announce(self) -> None:
        self._announced = self.value
        parts = [f"{100 * self._shares[rank]:.0f} %" for rank in sorted(self._shares)]
        why = f"workers with {', '.join(parts)} of the batches"
        if not self._dense:
            why = f"more than {MAX_ROUND_BATCHES} batches of a worker between two averagings"
        logger.info(
            'lr_scale_ratio("auto"): the learning rate of %s is multiplied by %.3g from now on '
            "(%s)",
            ", ".join(self._optimizers),
            self.value,
            why,
        )

    def state_dict(self) -> dict[str, Any]:
        """The shares and the state of their measurement as plain numbers and lists."""
        return {
            "shares": dict(self._shares),
            "fixed": self._fixed,
            "dense": self._dense,
            "num_windows": self._num_windows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; for other live ranks the factor is decided again."""
        self._shares = dict(state["shares"])
        self._fixed, self._dense = state["fixed"], state["dense"]
        self._num_windows = state["num_windows"]


def _normalized(counts: Mapping[int, int]) -> dict[int, float]:
    total = sum(counts.values())
    if not total:
        return {rank: 1 / len(counts) for rank in counts}
    return {rank: count / total for rank, count in counts.items()}
