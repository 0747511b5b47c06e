"""RecentProgress: loss, speed and time left of a run, from its counters."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from coordinator.run_state import Statistics

WINDOW_S = 10.0
"""Loss and samples/s are means over about this time."""


class RecentProgress:
    """Means of loss and speed over the last seconds, from the coordinator's counters.

    Nothing is read from a device. Used by one thread.

    Args:
        statistics: Returns the counters.
        total: Batches in the whole run.
        num_epochs: Epochs in the whole run.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        statistics: Callable[[], Statistics],
        total: int,
        num_epochs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._statistics = statistics
        self._total = total
        self._num_epochs = num_epochs
        self._clock = clock
        self._past: deque[_Reading] = deque([self._reading(statistics())])
        self._loss = math.nan
        self._rate = self._speed = 0.0

    def read(self) -> CurrentProgress:
        """Read the counters."""
        statistics = self._statistics()
        now = self._reading(statistics)
        past = self._past
        past.append(now)
        while len(past) > 2 and past[1].at <= now.at - WINDOW_S:
            past.popleft()
        first = past[0]
        lasted, weight = now.at - first.at, now.loss_weight - first.loss_weight
        if now.num_trained <= first.num_trained:
            past.clear()  # start-up, or a long evaluation: the last values stay
            past.append(now)
        elif lasted > 0:
            self._loss = (now.loss_sum - first.loss_sum) / weight if weight > 0 else math.nan
            self._rate = (now.num_samples - first.num_samples) / lasted
            self._speed = (now.num_trained - first.num_trained) / lasted
        return CurrentProgress(
            num_trained=now.num_trained,
            epoch=min(statistics.epoch, self._num_epochs - 1),
            loss=self._loss,
            rate=self._rate,
            left_s=(self._total - now.num_trained) / self._speed if self._speed > 0 else None,
        )

    def _reading(self, statistics: Statistics) -> _Reading:
        return _Reading(
            self._clock(),
            statistics.num_trained,
            sum(rank.num_samples for rank in statistics.ranks),
            statistics.loss_sum,
            statistics.loss_weight,
        )


class CurrentProgress(NamedTuple):
    """The present progress of a run.

    Attributes:
        num_trained: Batches trained.
        epoch: The epoch being trained.
        loss: Mean of the losses reported lately; NaN: none, or not finite.
        rate: Samples per second lately.
        left_s: Estimated seconds left; ``None``: unknown.
    """

    num_trained: int
    epoch: int
    loss: float
    rate: float
    left_s: float | None


class _Reading(NamedTuple):
    at: float
    num_trained: int
    num_samples: int
    loss_sum: float
    loss_weight: float
