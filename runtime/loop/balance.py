"""The settings of a loop of the user's own, and how a batch is shared out by measured throughput.

The rule is that of flodl's balancer: equal parts while it calibrates, then parts in
proportion to a moving average of the throughputs, fitted anew every so many steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import torch

from coordinator.cadence import ElChe
from coordinator.dispatch import split_by_ratio
from runtime.core.checks import check_callable, check_flag, check_float, check_int
from runtime.core.weight import LossWeightFn
from runtime.timeline.timeline import Timeline

DEFAULT_ANCHOR = 10
"""Batches of the slowest device between two reductions, at the start."""
DEFAULT_MAX_ANCHOR = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Settings of :meth:`Trainer.setup_with <runtime.Trainer.setup_with>`.

    Attributes:
        speed_hint: ``(slow rank, ratio)``: all other devices are ``ratio`` (at least 1) times
            faster. Sets the devices' shares until the first reduction; then measured speeds do.
        balance: Whether measured speeds set the devices' shares. If not, shares stay equal, or
            those of the hint: for models that need pieces of a certain size.
        overhead_target: Share of the computing time that reductions may cost, 0.01 to 0.50,
            if ElChe spaces them; ``None``: 0.10.
        max_anchor: Most batches that the slowest device runs between two reductions.
            ``None``: ElChe chooses; 0: ElChe is off, every device runs one. Several batches are
            passed by ``model.rounds`` and ``model.accumulate``. In a loop of
            ``loss.backward()`` and ``step()``, a value of 2 or more lets several steps share a
            reduction, see :meth:`step() <runtime.ReplicatedModule.step>`.
        max_grad_norm: Clip gradients to this L2 norm. After ``model.accumulate(...)`` each
            device's accumulated gradient is clipped separately, before it is divided by its
            number of batches; after ``loss.backward()`` the gradient of the whole batch.
        timeline: A :class:`runtime.Timeline`, which records the loop from ``Trainer.setup_with``
            until the model is closed: forward, backward, reductions and steps of each replica,
            and what they wait for. Times are those of the host. On one device, work of the loop
            outside the model (the loss) counts as idle.
        loss_weight: ``f(inputs, output)`` returns the count that the model's own loss is a mean
            over, for one device's piece of the batch: tokens, or a sum of class weights, a
            number or a scalar tensor. ``inputs`` is the tuple of positional inputs, or the dict
            of keyword ones; with both, a dict under the names of ``forward``'s parameters.
            Called in the replica's thread, on its device. See
            :class:`~runtime.ReplicatedModule` for the weights without it.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    speed_hint: tuple[int, float] | None = None
    balance: bool = True
    overhead_target: float | None = None
    max_anchor: int | None = None
    max_grad_norm: float | None = None
    timeline: Timeline | None = None
    loss_weight: LossWeightFn | None = None

    def __post_init__(self) -> None:
        if self.speed_hint is not None:
            object.__setattr__(self, "speed_hint", _checked_hint(self.speed_hint))
        check_flag("balance", self.balance)
        if self.loss_weight is not None:
            check_callable("loss_weight", self.loss_weight, "f(inputs, output) -> weight")
        if self.overhead_target is not None:
            check_float("overhead_target", self.overhead_target, 0.01, 0.50)
        if self.max_anchor is not None:
            check_int("max_anchor", self.max_anchor, 0)
        if self.max_grad_norm is not None:
            check_float("max_grad_norm", self.max_grad_norm, 0.0, above=True)
        if self.timeline is not None:
            if not isinstance(self.timeline, Timeline):
                raise TypeError(f"timeline({self.timeline!r}): pass a runtime.Timeline()")
            self.timeline.require_unused()

    def check(self, world_size: int) -> None:
        """What can only be judged once the number of devices is known.

        Raises:
            ValueError: The hint names a rank that does not exist.
        """
        if self.speed_hint is not None and self.speed_hint[0] >= world_size:
            raise ValueError(
                f"speed_hint: there is no rank {self.speed_hint[0]} of {world_size}; name one from "
                f"0 to {world_size - 1}, or leave the hint out"
            )


def _checked_hint(hint: object) -> tuple[int, float]:
    if not isinstance(hint, Sequence) or isinstance(hint, str) or len(hint) != 2:
        raise TypeError(f"speed_hint({hint!r}): pass (slow rank, ratio), for instance (1, 2.3)")
    return check_int("speed_hint rank", hint[0], 0), check_float("speed_hint ratio", hint[1], 1.0)


BatchT = TypeVar("BatchT")


class Cadence:
    """Batch counts by ElChe, or one batch for each device.

    Args:
        world_size: Number of devices.
        el_che: ``None``: one batch for each.

    Attributes:
        spaces_steps: Whether several calls of ``step()`` share a reduction, because the caller
            has set a ``max_anchor`` above 1.
    """

    def __init__(
        self, world_size: int, el_che: ElChe | None = None, *, spaces_steps: bool = False
    ) -> None:
        self._world_size = world_size
        self._el_che = el_che
        self.spaces_steps = spaces_steps

    @classmethod
    def of(cls, world_size: int, config: DdpConfig, *, spaced: bool) -> Cadence:
        """The cadence of a configuration.

        Args:
            world_size: Number of devices; one alone has nothing to reduce.
            config: Where ``max_anchor`` is 0 ElChe is off.
            spaced: Whether ElChe is on otherwise.
        """
        if world_size == 1 or not spaced or config.max_anchor == 0:
            return cls(world_size)
        most = DEFAULT_MAX_ANCHOR if config.max_anchor is None else config.max_anchor
        target = 0.10 if config.overhead_target is None else config.overhead_target
        el_che = ElChe(
            world_size,
            min(DEFAULT_ANCHOR, most),
            max_anchor=most,
            overhead_target=target,
            speed_hint=config.speed_hint,
        )
        return cls(world_size, el_che, spaces_steps=(config.max_anchor or 0) > 1)

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Batches of each device until the next reduction."""
        return (1,) * self._world_size if self._el_che is None else self._el_che.batch_counts

    def report(self, times: Sequence[tuple[float, int]], sync_s: float) -> tuple[float, ...] | None:
        """Take in a round.

        Args:
            times: For each device seconds of computing, and the batches in them.
            sync_s: Seconds that the reduction took; not finite if that is not known yet.

        Returns:
            Each device's part of the throughput once all were measured; ``None`` before.
        """
        if self._el_che is None:
            return None
        seconds, counts = [t[0] for t in times], [t[1] for t in times]
        self._el_che.report_timing(seconds, counts, sync_s)
        return None if self._el_che.seconds_per_batch is None else self._el_che.shares


def rounds(
    batches: Iterable[BatchT], batch_counts: Callable[[], Sequence[int]]
) -> Iterator[list[BatchT]]:
    """Lists of as many batches as the devices run until their next reduction.

    Args:
        batches: Of one epoch, say. The last list may be short.
        batch_counts: Called again for each list.
    """
    source = iter(batches)
    while given := list(islice(source, sum(batch_counts()))):
        yield given


def sync_seconds(measured: Sequence[tuple[float, int]]) -> float:
    """What a reduction cost: that of the rank which waited least; NaN if not known yet."""
    known = [seconds for seconds, number in measured if number]
    return min(known) if known else math.nan


def unequal_devices(devices: Sequence[torch.device]) -> bool:
    """Whether CPUs and GPUs train together, or GPUs of different models: then the same gradients
    may give other bits."""
    return len({device.type for device in devices}) > 1 or unequal_gpus(devices)


def unequal_gpus(devices: Sequence[torch.device]) -> bool:
    """Whether there are GPUs of different models among the devices."""
    gpus = {device for device in devices if device.type == "cuda"}
    return len({torch.cuda.get_device_properties(gpu).name for gpu in gpus}) > 1


CALIBRATION_STEPS = 10
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
        self._ratios = shares_of(weights)
        self._throughput = [0.0] * world_size
        self._pending_s = [0.0] * world_size
        self._num_steps = 0
        self._last_s = [0.0] * world_size
        self._last_n = [0] * world_size
        self._costs: list[float] = []  # of the steps since the last re-balance
        self._trial: RatioTrial | None = None
        self._held: Sequence[float] | None = None
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
        self._note_cost()
        since = self._num_steps - CALIBRATION_STEPS
        first_guess = self._hinted and self._num_steps == 1
        if self._fixed or (not first_guess and (since < 0 or since % REBALANCE_EVERY)):
            return False
        if since >= 0 and self._fails_trial():
            return True
        return self._rebalance(on_trial=since >= 0)

    def adopt(self, weights: Sequence[float]) -> None:
        """Take ratios in proportion to speeds that were measured elsewhere."""
        if self._fixed:
            return
        self._ratios = shares_of(weights)
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
            found = self._sizes[num_samples] = share_out(num_samples, self._ratios)
        return found

    def _note_cost(self) -> None:
        """Seconds for each sample of a batch, once all devices have told their time for one."""
        if all(self._last_n):
            self._costs.append(max(self._last_s) / sum(self._last_n))
            self._last_s = [0.0] * len(self._last_s)
            self._last_n = [0] * len(self._last_n)

    def _fails_trial(self) -> bool:
        """Take ratios back that were no gain."""
        trial, self._trial = self._trial, None
        if trial is None or not self._costs:
            return False
        if statistics.median(self._costs) <= trial.cost * (1 - MIN_GAIN / 2):
            return False
        self._held = trial.throughput
        self._costs = []
        self.adopt(trial.ratios)
        return True

    def _rebalance(self, *, on_trial: bool) -> bool:
        measured = [rank for rank, rate in enumerate(self._throughput) if rate > 0]
        if len(measured) < 2:
            return False
        costs, self._costs = self._costs, []
        fitted = self._fitted(measured)
        if fitted == self._ratios or self._holds():
            return True
        self._held = None
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
        fitted = shares_of(weights)
        equal = (1.0 / len(fitted),) * len(fitted)
        # Equal parts before others that are hardly better.
        for ratios in (equal, self._ratios):
            if self._step_s(ratios) * (1 - MIN_GAIN) <= self._step_s(fitted):
                return ratios
        return fitted

    def _holds(self) -> bool:
        """Whether speeds are still those with which other ratios were no gain."""
        if self._held is None:
            return False
        before, now = sum(self._held), sum(self._throughput)
        pairs = zip(self._held, self._throughput, strict=True)
        return all(abs(n / now - b / before) <= MIN_CHANGE * b / before for b, n in pairs)

    def _step_s(self, ratios: Sequence[float]) -> float:
        """How long a step with these parts would take, by what was measured."""
        rates = zip(ratios, self._throughput, strict=True)
        return max(ratio / rate for ratio, rate in rates if rate > 0)


def shares_of(weights: Sequence[float]) -> tuple[float, ...]:
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


def share_out(num_items: int, ratios: Sequence[float]) -> tuple[int, ...]:
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
