"""Each device's share of a batch, from measured throughput.

The rule is that of flodl's balancer: equal shares during calibration, then shares in proportion to
a moving average of the throughputs, refitted every ``REBALANCE_EVERY`` steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.splitting import split_by_ratio

WARMUP_STEPS = 10
"""Steps before the first rebalance."""
REBALANCE_EVERY = 50
"""Steps between two rebalances."""
SMOOTHING = 0.3
"""Weight of a new measurement in the moving average."""
MIN_SHARE = 0.05
"""Smallest share of a batch (smaller with more than 20 devices)."""
MIN_GAIN = 0.05
"""Ratios that would shorten a step by a smaller fraction are not adopted: they are noise."""
MIN_CHANGE = 0.25
"""After rejected ratios, speeds must change by this fraction before others are tried."""


class Balancer:
    """Computes chunk ratios from throughputs. Uses no clock and no thread; not thread-safe.

    A throughput also contains a fixed cost per call: the larger its share, the faster a device
    appears, and the shares of equal devices would drift apart. So new ratios are on trial: unless
    they shorten the steps, the old ratios are restored and kept.

    Args:
        world_size: Number of devices, at least 1.
        speed_hint: ``(slow rank, ratio)``: initial ratios, corrected after the first step.
        fixed: Keep the initial ratios.
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
        self._hinted = speed_hint is not None
        self._fixed = fixed
        self._ratios = normalized_shares(weights)
        self._throughput = [0.0] * world_size
        self._pending_s = [0.0] * world_size
        self._num_steps = 0
        self._last_s = [0.0] * world_size
        self._last_n = [0] * world_size
        self._costs: list[float] = []  # per step since the last rebalance
        self._trial: RatioTrial | None = None
        self._rejected: Sequence[float] | None = None
        self._sizes: dict[int, tuple[int, ...]] = {}

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's share of a batch; they sum to 1."""
        return self._ratios

    @property
    def throughput(self) -> tuple[float, ...]:
        """Moving average of each device's samples/s; 0.0 if not measured."""
        return tuple(self._throughput)

    def observe(self, rank: int, num_samples: int, seconds: float) -> None:
        """Record a device's measurement.

        Args:
            rank: The device's rank.
            num_samples: Number of samples; 0: the time is added to that of the next samples.
            seconds: Their compute time; ignored unless finite and positive.
        """
        if math.isfinite(seconds) and seconds > 0:
            self._pending_s[rank] += seconds
        if num_samples <= 0 or not self._pending_s[rank]:
            return
        measured = num_samples / self._pending_s[rank]
        self._last_s[rank] += self._pending_s[rank]
        self._last_n[rank] += num_samples
        self._pending_s[rank] = 0.0
        old = self._throughput[rank]
        self._throughput[rank] = old + SMOOTHING * (measured - old) if old else measured

    def step(self) -> bool:
        """Record an optimizer step, and rebalance when due.

        Returns:
            True if the ratios were refitted.
        """
        self._num_steps += 1
        self._record_cost()
        since = self._num_steps - WARMUP_STEPS
        first_guess = self._hinted and self._num_steps == 1
        if self._fixed or (not first_guess and (since < 0 or since % REBALANCE_EVERY)):
            return False
        if since >= 0 and self._trial_failed():
            return True
        return self._rebalance(on_trial=since >= 0)

    def adopt(self, weights: Sequence[float]) -> None:
        """Set ratios in proportion to ``weights``."""
        if self._fixed:
            return
        self._ratios = normalized_shares(weights)
        self._sizes.clear()

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Number of samples of each device.

        Args:
            num_samples: Size of the batch, 0 or more.

        Returns:
            Sizes that sum to ``num_samples``: at least 1 each, unless the batch has fewer samples
            than devices; then the first devices get one each.
        """
        found = self._sizes.get(num_samples)
        if found is None:
            if len(self._sizes) > 64:
                self._sizes.clear()
            found = self._sizes[num_samples] = apportion(num_samples, self._ratios)
        return found

    def _record_cost(self) -> None:
        """Record the seconds per sample of a batch, once all devices are measured."""
        if all(self._last_n):
            self._costs.append(max(self._last_s) / sum(self._last_n))
            self._last_s = [0.0] * len(self._last_s)
            self._last_n = [0] * len(self._last_n)

    def _trial_failed(self) -> bool:
        """Restore the old ratios if the ratios on trial did not shorten the steps."""
        trial, self._trial = self._trial, None
        if trial is None or not self._costs:
            return False
        if statistics.median(self._costs) <= trial.cost * (1 - MIN_GAIN / 2):
            return False
        self._rejected = trial.throughput
        self._costs = []
        self.adopt(trial.ratios)
        return True

    def _rebalance(self, *, on_trial: bool) -> bool:
        measured = [rank for rank, rate in enumerate(self._throughput) if rate > 0]
        if len(measured) < 2:
            return False
        costs, self._costs = self._costs, []
        fitted = self._fitted(measured)
        if fitted == self._ratios or self._speeds_unchanged():
            return True
        self._rejected = None
        if on_trial and costs:
            self._trial = RatioTrial(self._ratios, statistics.median(costs), self.throughput)
        self.adopt(fitted)
        return True

    def _fitted(self, measured: Sequence[int]) -> tuple[float, ...]:
        # A device without a measurement keeps its share; the others divide the rest.
        rest = sum(self._ratios[rank] for rank in measured)
        total = sum(self._throughput[rank] for rank in measured)
        weights = list(self._ratios)
        for rank in measured:
            weights[rank] = rest * self._throughput[rank] / total
        fitted = normalized_shares(weights)
        equal = (1.0 / len(fitted),) * len(fitted)
        # Equal shares are preferred to others that are hardly better.
        for ratios in (equal, self._ratios):
            if self._step_s(ratios) * (1 - MIN_GAIN) <= self._step_s(fitted):
                return ratios
        return fitted

    def _speeds_unchanged(self) -> bool:
        """True if speeds are still close to those at which ratios were rejected."""
        if self._rejected is None:
            return False
        before, now = sum(self._rejected), sum(self._throughput)
        pairs = zip(self._rejected, self._throughput, strict=True)
        return all(abs(n / now - b / before) <= MIN_CHANGE * b / before for b, n in pairs)

    def _step_s(self, ratios: Sequence[float]) -> float:
        """Estimated seconds of a step with these shares, per sample of the batch."""
        rates = zip(ratios, self._throughput, strict=True)
        return max(ratio / rate for ratio, rate in rates if rate > 0)


class RatioTrial(NamedTuple):
    """The state before the ratios on trial.

    Attributes:
        ratios: The old ratios.
        cost: Seconds per sample of a batch with them.
        throughput: Each device's throughput with them.
    """

    ratios: tuple[float, ...]
    cost: float
    throughput: tuple[float, ...]


def normalized_shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Shares in proportion to weights, at least ``MIN_SHARE`` each; they sum to 1.

    Raising the smallest shares lowers the others in proportion; repeated until none of those
    falls below the minimum.

    Raises:
        ValueError: There are no weights, or one is not finite and positive.
    """
    if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights must be finite and positive, got {list(weights)}")
    least = min(MIN_SHARE, 1.0 / len(weights))
    largest = max(weights)
    scaled = [w / largest for w in weights]  # so that the sum is finite
    lifted: set[int] = set()
    while True:
        rest = 1.0 - least * len(lifted)
        total = sum(w for rank, w in enumerate(scaled) if rank not in lifted)
        shares = [least if r in lifted else rest * w / total for r, w in enumerate(scaled)]
        below = {r for r, share in enumerate(shares) if share < least and r not in lifted}
        if not below or len(lifted) + len(below) == len(weights):
            break
        lifted |= below
    total = math.fsum(shares)
    return tuple(share / total for share in shares)


def apportion(num_items: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Integers that sum to ``num_items``, as close to the ratios as possible.

    Each is at least 1; with fewer items than ratios, the first get one each.
    """
    world_size = len(ratios)
    if num_items < world_size:
        return tuple(1 if rank < num_items else 0 for rank in range(world_size))
    sizes = list(split_by_ratio(num_items, ratios))
    while 0 in sizes:  # taken from the largest
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] = 1
    return tuple(sizes)
