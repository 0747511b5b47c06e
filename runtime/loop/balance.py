"""Splits the batches of a loop of one's own by measured speed."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from coordinator.shares import Shares
from coordinator.splitting import seconds, split_like

WARMUP_STEPS = 10
"""Steps before the first rebalance."""
TRIAL_STEPS = 10
"""Steps after a rebalance that changed the sizes until the next one."""
REBALANCE_EVERY = 50
"""Steps after any other rebalance until the next one."""
_DISCARDED_STEPS = 2
"""First steps, in which libraries load and allocators grow."""
_LATE_STEPS = 3
"""Steps after a change of sizes in which a GPU may still report earlier ones."""
_EQUAL = 0.15
"""Devices whose times differ by at most this fraction keep the first shares."""
_MAX_CACHED_SIZES = 64


class Balancer:
    """Splits batches of any size by :class:`~coordinator.shares.Shares`, fitted every some steps.

    Uses no clock and no thread; not thread-safe.

    Args:
        world_size: Number of devices, at least 1.
        speed_hint: ``(slow rank, ratio)``: sets the first shares; ``None``: equal ones.
        fixed: Keep the first shares.
    """

    def __init__(
        self,
        world_size: int,
        speed_hint: tuple[int, float] | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        weights = [1.0] * world_size
        if speed_hint is not None:
            slow, ratio = speed_hint
            weights = [1.0 if rank == slow else ratio for rank in range(world_size)]
        self._shares = Shares(world_size, weights, fixed=fixed, may_idle=False)
        self._first: Sequence[float] = weights
        self._weights: Sequence[float] = weights
        self._is_fixed = fixed
        self._times = [_StepTimes() for _ in weights]
        self._num_steps = 0
        self._measures_from = 0
        self._next_fit = _DISCARDED_STEPS
        self._sizes: dict[int, tuple[int, ...]] = {}

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's share of a batch; they sum to 1."""
        total = sum(self._weights)
        return tuple(weight / total for weight in self._weights)

    def observe(self, rank: int, num_samples: int, compute_s: float) -> None:
        """Record a device's measurement.

        Args:
            num_samples: Number of samples; 0: the time is added to that of the next samples.
            compute_s: Their compute time in seconds.
        """
        self._times[rank].add(num_samples, compute_s)

    def step(self) -> None:
        """Record an optimizer step, and rebalance when due."""
        self._num_steps += 1
        if self._num_steps <= self._measures_from:
            self._clear_times()
        if self._is_fixed or self._num_steps < self._next_fit:
            return
        changes = self._rebalance(self._num_steps - self._measures_from)
        self._clear_times()
        self._measures_from = self._num_steps + (_LATE_STEPS if changes else 0)
        if self._num_steps == _DISCARDED_STEPS:
            self._next_fit = WARMUP_STEPS
        else:
            self._next_fit = self._num_steps + (TRIAL_STEPS if changes else REBALANCE_EVERY)

    def adopt(self, weights: Sequence[float]) -> None:
        """Set shares in proportion to ``weights``."""
        if not self._is_fixed:
            self._weights = weights
            self._sizes.clear()
            self._clear_times()
            self._measures_from = self._num_steps

    def sizes(self, num_samples: int, min_piece: int = 1) -> tuple[int, ...]:
        """Number of samples of each device.

        Args:
            num_samples: Size of the batch, 0 or more.
            min_piece: Least samples of a device that receives any, if the batch has as many.

        Returns:
            Sizes that sum to ``num_samples``. The first devices receive samples if not all can.
        """
        if min_piece != self._shares.min_piece:
            self._shares.min_piece = min_piece
            self._sizes.clear()
        found = self._sizes.get(num_samples)
        if found is None:
            if len(self._sizes) > _MAX_CACHED_SIZES:
                self._sizes.clear()
            num = min(len(self._weights), max(1, num_samples // min_piece))
            least = min(min_piece, num_samples)
            some = split_like(num_samples, self._weights[:num], least)
            found = self._sizes[num_samples] = (*some, *[0] * (len(self._weights) - num))
        return found

    def _rebalance(self, num_steps: int) -> bool:
        """Fit the devices' costs, and return true if that changed the sizes."""
        mean_size = 0.0
        for rank, times in enumerate(self._times):
            num_samples = times.num_samples / num_steps
            self._shares.observe(rank, num_samples, num_samples * times.per_sample_s)
            mean_size += num_samples
        ranks = range(len(self._times))
        costs = [cost for rank in ranks if (cost := self._shares.cost(rank)) is not None]
        total = round(mean_size)
        if len(costs) < len(ranks) or total < self._shares.min_piece * len(ranks):
            return False
        sizes = self.sizes(total, self._shares.min_piece)
        step_s = [seconds(cost, n) for cost, n in zip(costs, sizes, strict=True)]
        if self._weights is self._first and max(step_s) * (1 - _EQUAL) <= min(step_s):
            return False
        fitted = self._shares.sizes(total, ranks)
        if fitted == sizes:
            return False
        self.adopt(fitted)
        return True

    def _clear_times(self) -> None:
        self._times = [_StepTimes() for _ in self._times]


class _StepTimes:
    """Compute times of a device in the last steps."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._pending_s = 0.0
        self._per_sample_s: deque[float] = deque(maxlen=REBALANCE_EVERY)

    def add(self, num_samples: int, compute_s: float) -> None:
        if math.isfinite(compute_s) and compute_s > 0:
            self._pending_s += compute_s
        if num_samples > 0 and self._pending_s:
            self._per_sample_s.append(self._pending_s / num_samples)
            self.num_samples += num_samples
            self._pending_s = 0.0

    @property
    def per_sample_s(self) -> float:
        """Median seconds per sample; 0.0 if not measured."""
        return statistics.median(self._per_sample_s) if self._per_sample_s else 0.0
