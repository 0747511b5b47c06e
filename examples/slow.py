"""Slows one worker down, to show how the data is divided."""

from __future__ import annotations

import statistics
import time
from collections import deque

from gpuworker import current_worker


class Slowdown:
    """Call it first in ``train_fn``: the steps of ``rank`` then take ``factor`` times as long.

    A full step is what passes between the end of one call's sleep and the next call, so
    forward, backward and optimizer are in it and the sleep itself is not. The median of the
    last steps forgives the odd long one, as at the start of an epoch; what a sleep took too
    long is taken off the next.
    """

    def __init__(self, rank: int, factor: float) -> None:
        self.rank, self.factor = rank, factor
        self._steps_s: deque[float] = deque(maxlen=31)
        self._last_end_s: float | None = None
        self._owed_s = 0.0

    def __call__(self) -> None:
        if current_worker().rank != self.rank:
            return
        now_s = time.perf_counter()
        if self._last_end_s is not None:
            self._steps_s.append(now_s - self._last_end_s)
            self._owed_s += (self.factor - 1) * statistics.median(self._steps_s)
            time.sleep(max(0.0, self._owed_s))
        self._last_end_s = time.perf_counter()
        self._owed_s -= self._last_end_s - now_s
