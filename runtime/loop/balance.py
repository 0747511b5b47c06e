"""Shares of a batch for each device, from measured throughput.

The rule is that of flodl's balancer: equal parts while it calibrates, then parts in
proportion to a moving average of the throughputs, fitted anew every so many steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from coordinator.splitting import split_by_ratio

WARMUP_STEPS = 10
"""Steps before the first re-balance."""
REBALANCE_EVERY = 50
"""Steps from one re-balance to the next."""
SMOOTHING = 0.3
"""Weight of a new measurement in the moving average."""
MIN_SHARE = 0.05
"""No device gets less than this part of a batch (less where there are over 20 devices)."""
MIN_GAIN = 0.05
"""Ratios that would shorten a step by less than this part of it are no gain but noise."""
MIN_CHANGE = 0.25
"""Where ratios that were tried were no gain, speeds have to change by this part of them before
others are tried."""


class Balancer:
    """Chunk ratios from throughputs. No clock, no thread; not thread-safe.

    Each device has a cost for each call too, which a throughput hides: the larger its part,
    the faster a device looks, and alike ones would drift apart. So new ratios are on trial:
    unless the steps with them are shorter than those before, the old ones come back and hold.

    Args:
        world_size: Number of devices, at least 1.
        speed_hint: ``(slow rank, ratio)``: first ratios, corrected after the first step.
        fixed: Whether the first ratios never change.
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
        self._costs: list[float] = []  # of the steps since the last re-balance
        self._trial: RatioTrial | None = None
        self._rejected: Sequence[float] | None = None
        self._sizes: dict[int, tuple[int, ...]] = {}

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's part of a batch; they sum to 1."""
        return self._ratios

    @property
    def throughput(self) -> tuple[float, ...]:
        """Moving average of each device's samples/s; 0.0 where nothing was measured."""
        return tuple(self._throughput)

    def observe(self, rank: int, num_samples: int, seconds: float) -> None:
        """Take in what a device computed.

        Args:
            rank: The device.
            num_samples: Samples; 0: the time counts with the next samples.
            seconds: The time they took; one that is not finite and positive is ignored.
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
        """An optimizer step was made.

        Returns:
            Whether the ratios were fitted again.
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
        """Take ratios in proportion to speeds that were measured elsewhere."""
        if self._fixed:
            return
        self._ratios = normalized_shares(weights)
        self._sizes.clear()

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """How many samples each device gets.

        Args:
            num_samples: Samples of the batch, from 0 up.

        Returns:
            Numbers that sum to it: at least 1 for each device, but for a batch with fewer
            samples than devices, of which the first ones get one each.
        """
        found = self._sizes.get(num_samples)
        if found is None:
            if len(self._sizes) > 64:
                self._sizes.clear()
            found = self._sizes[num_samples] = apportion(num_samples, self._ratios)
        return found

    def _record_cost(self) -> None:
        """Seconds for each sample of a batch, once all devices have told their time for one."""
        if all(self._last_n):
            self._costs.append(max(self._last_s) / sum(self._last_n))
            self._last_s = [0.0] * len(self._last_s)
            self._last_n = [0] * len(self._last_n)

    def _trial_failed(self) -> bool:
        """Take ratios back that were no gain."""
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
        # A device without a measurement keeps its part; the others share what is left.
        left = sum(self._ratios[rank] for rank in measured)
        total = sum(self._throughput[rank] for rank in measured)
        weights = list(self._ratios)
        for rank in measured:
            weights[rank] = left * self._throughput[rank] / total
        fitted = normalized_shares(weights)
        equal = (1.0 / len(fitted),) * len(fitted)
        # Equal parts before others that are hardly better.
        for ratios in (equal, self._ratios):
            if self._step_s(ratios) * (1 - MIN_GAIN) <= self._step_s(fitted):
                return ratios
        return fitted

    def _speeds_unchanged(self) -> bool:
        """Whether speeds are still those with which other ratios were no gain."""
        if self._rejected is None:
            return False
        before, now = sum(self._rejected), sum(self._throughput)
        pairs = zip(self._rejected, self._throughput, strict=True)
        return all(abs(n / now - b / before) <= MIN_CHANGE * b / before for b, n in pairs)

    def _step_s(self, ratios: Sequence[float]) -> float:
        """How long a step with these parts would take, by what was measured."""
        rates = zip(ratios, self._throughput, strict=True)
        return max(ratio / rate for ratio, rate in rates if rate > 0)


class RatioTrial(NamedTuple):
    """What there was before ratios that are on trial.

    Attributes:
        ratios: The ratios.
        cost: Seconds for each sample of a batch with them.
        throughput: Of each device with them.
    """

    ratios: tuple[float, ...]
    cost: float
    throughput: tuple[float, ...]


def normalized_shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Parts in proportion to weights, none below the least one; they sum to 1.

    What the smallest are lifted by is taken from the others in proportion, again and again
    until none of those has fallen below in turn.

    Raises:
        ValueError: No weights, or one that is not finite and positive.
    """
    if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights must be finite and positive, got {list(weights)}")
    least = min(MIN_SHARE, 1.0 / len(weights))
    largest = max(weights)
    scaled = [w / largest for w in weights]  # their sum is finite
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
    """Whole numbers that sum to ``num_items``, as close to the ratios as one can come.

    Everyone gets at least 1; of fewer items than parties the first ones get one each.
    """
    world_size = len(ratios)
    if num_items < world_size:
        return tuple(1 if rank < num_items else 0 for rank in range(world_size))
    sizes = list(split_by_ratio(num_items, ratios))
    while 0 in sizes:  # who gets one takes it from the one with the most
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] = 1
    return tuple(sizes)


def unequal_devices(devices: Sequence[torch.device]) -> bool:
    """Whether CPUs and GPUs train together, or GPUs of different models: then the same gradients
    may give other bits."""
    return len({device.type for device in devices}) > 1 or unequal_gpus(devices)


def unequal_gpus(devices: Sequence[torch.device]) -> bool:
    """Whether there are GPUs of different models among the devices."""
    gpus = {device for device in devices if device.type == "cuda"}
    return len({torch.cuda.get_device_properties(gpu).name for gpu in gpus}) > 1
