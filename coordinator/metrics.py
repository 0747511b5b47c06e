"""From the reports of the ranks to the metrics of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a rank trained since its last report.

    Attributes:
        num_batches: Micro-batches trained.
        num_samples: Samples in them.
        num_skipped: Samples whose effect was dropped because a value was not finite.
        compute_s: Time spent in training steps, waits for data and peers excluded.
        num_timed: Micro-batches behind ``compute_s``, where they are not ``num_batches``
            because the times of the last ones are still in flight on the device.
        loss_sum: Sum over batches of mean loss times weight, in step order.
        loss_samples: Weight behind ``loss_sum``: samples, or what ``train_fn`` gave. Samples
            are less than ``num_samples`` where losses are still in flight on the device; they
            come with a later report.
        scalars: ``(name, weighted sum, weight)`` for each recorded scalar.
    """

    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    compute_s: float = 0.0
    num_timed: int | None = None
    loss_sum: float = 0.0
    loss_samples: float = 0
    scalars: tuple[tuple[str, float, float], ...] = ()


# A report is sent when its time has come, so the losses of an epoch are summed in pieces
# that differ from run to run. Each piece carries what rounding left out of it, and the sum
# of all pieces is the exact sum of the values, rounded once. The method is that of
# Shewchuk, "Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric
# Predicates" (1997), as in ``math.fsum``.


class RoundedSum(float):
    """A sum, rounded, that knows the rest.

    Attributes:
        parts: Numbers whose exact sum is the exact sum; empty: the sum is this number.
    """

    __slots__ = ("parts",)
    parts: tuple[float, ...]

    def __new__(cls, value: float, parts: Iterable[float] = ()) -> RoundedSum:
        """A sum from its rounded value and its parts."""
        made = super().__new__(cls, value)
        made.parts = tuple(parts)
        return made

    def __reduce__(self) -> tuple[type[RoundedSum], tuple[float, tuple[float, ...]]]:
        return type(self), (float(self), self.parts)


class WeightSum:
    """Adds weights without losing anything: whole numbers stay whole numbers."""

    __slots__ = ("_rest", "_whole")

    def __init__(self) -> None:
        self._whole = 0
        self._rest: ExactSum | None = None

    def add(self, weight: float) -> None:
        """Add a weight, or what :meth:`value` or :attr:`parts` gave of others."""
        if isinstance(weight, int):
            self._whole += weight
        elif weight.is_integer() and not getattr(weight, "parts", ()):
            self._whole += int(weight)
        else:
            self._rest = self._rest or ExactSum()
            self._rest.add(weight)

    def add_all(self, weights: Sequence[float]) -> None:
        """Add many weights."""
        for weight in weights:
            self.add(weight)

    def value(self) -> float:
        """The sum: an ``int``, or a :class:`RoundedSum` where a weight was no whole number."""
        return self._whole if self._rest is None else self._sum(self._rest).value()

    @property
    def parts(self) -> int | list[float]:
        """What :meth:`add` makes the same sum of, piece by piece where it is a list."""
        return self._whole if self._rest is None else list(self._sum(self._rest).parts)

    def _sum(self, rest: ExactSum) -> ExactSum:
        rounded = float(self._whole)
        return ExactSum((*rest.parts, rounded, float(self._whole - int(rounded))))


class ExactSum:
    """Adds numbers without losing anything; NaN and infinities stay what they are."""

    __slots__ = ("_parts", "_special")

    def __init__(self, parts: Sequence[float] = ()) -> None:
        self._parts: list[float] = []  # they do not overlap, and rise in size
        self._special = 0.0
        for x in parts:
            self._add(x)

    def add(self, value: float) -> None:
        """Add a number, or a :class:`RoundedSum` with all that is in it."""
        if isinstance(value, RoundedSum) and value.parts:
            for x in value.parts:
                self._add(x)
        else:
            self._add(float(value))

    def add_all(self, values: Sequence[float]) -> None:
        """Add many numbers, faster than one by one; no :class:`RoundedSum` among them."""
        left = [*self._parts, *values]
        parts: list[float] = []
        try:
            # Each sum is rounded once, and what rounding left out is summed next.
            while (rounded := math.fsum(left)) and rounded - rounded == 0.0:
                parts.append(rounded)
                left.append(-rounded)
        except (OverflowError, ValueError):  # on the way to it, or opposite infinities
            rounded = math.nan
        if rounded == 0.0:
            self._parts = parts[::-1]
        else:
            for x in values:
                self._add(x)

    def _add(self, x: float) -> None:
        parts, kept = self._parts, 0
        for y in parts:
            high = x + y
            # Knuth's two-sum: no comparison, exact unless it overflows.
            z = high - x
            low = (x - (high - z)) + (y - z)
            if low:
                parts[kept] = low
                kept += 1
            x = high
        if x - x != 0.0:  # not finite
            self._special += x
            parts.clear()
        else:
            parts[kept:] = [x]

    @property
    def parts(self) -> tuple[float, ...]:
        """What :class:`ExactSum` can be made from again."""
        if self._special or math.isnan(self._special):
            return (self._special,)
        return tuple(self._parts)

    def value(self) -> RoundedSum:
        """The sum."""
        if self._special or math.isnan(self._special):
            return RoundedSum(self._special)
        return RoundedSum(math.fsum(self._parts), self._parts if len(self._parts) > 1 else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """What one rank did in an epoch.

    Attributes:
        rank: The rank.
        num_batches: Batches it trained.
        num_samples: Samples in them.
        compute_s: Seconds in training steps, waits excluded.
        avg_loss: Mean loss over its samples, weighted as for the epoch; NaN if there is none.
        throughput: Samples for each second of ``compute_s``; 0.0 without any.
    """

    rank: int
    num_batches: int
    num_samples: int
    compute_s: float
    avg_loss: float
    throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """What an epoch gave.

    Attributes:
        epoch: Epoch, counted from 0.
        avg_loss: Mean loss over all samples trained, or over what the weights count that
            ``train_fn`` gave with its losses; NaN if there is none, and NaN or infinite where
            a loss was.
        scalars: Recorded scalars, each the mean weighted as the losses of their batches, and
            the values of the evaluation under ``eval/``.
        per_rank: One entry for each rank.
        epoch_s: Duration in seconds: the time since the last epoch closed, in equal parts for
            those that closed together.
        num_samples: Distinct samples trained.
        num_retrained: Samples that were trained again after the death of a rank.
        num_skipped: Samples trained whose effect was dropped because a loss, a gradient or
            a parameter was not finite.
        num_averagings: Averagings completed in the epoch.
        per_rank_throughput: Samples for each second of computing.
        per_rank_batch_share: Each rank's part of the batches; they sum to 1 unless
            there was no batch.
        devices: Device of each rank.
        divergence: The largest ``||replica - mean|| / ||mean||`` of a rank in a round of the
            epoch, over the parameters: what the divergence guard judges. NaN where none was
            measured, as under ``SYNC``, or a replica was not finite.
        param_norm: Norm of the parameters after the epoch's last averaging, under ``SYNC`` and
            with one rank at its end; NaN where it was not measured.
    """

    epoch: int
    avg_loss: float
    scalars: dict[str, float]
    per_rank: tuple[RankMetrics, ...]
    epoch_s: float
    num_samples: int
    num_retrained: int
    num_skipped: int
    num_averagings: int
    per_rank_throughput: tuple[float, ...]
    per_rank_batch_share: tuple[float, ...]
    devices: tuple[str, ...]
    divergence: float = math.nan
    param_norm: float = math.nan


@dataclass(slots=True, kw_only=True)
class _RankSums:
    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    compute_s: float = 0.0
    loss_sum: ExactSum = field(default_factory=ExactSum)
    loss_weight: WeightSum = field(default_factory=WeightSum)
    scalars: dict[str, tuple[ExactSum, WeightSum]] = field(default_factory=dict)

    def add(self, tally: Tally) -> None:
        self.num_batches += tally.num_batches
        self.num_samples += tally.num_samples
        self.num_skipped += tally.num_skipped
        self.compute_s += tally.compute_s
        self.loss_sum.add(tally.loss_sum)
        self.loss_weight.add(tally.loss_samples)
        for name, total, weight in tally.scalars:
            self._add_scalar(name, (total,), (weight,))

    def _add_scalar(self, name: str, parts: Iterable[float], weights: Sequence[float]) -> None:
        total, weight = self.scalars.setdefault(name, (ExactSum(), WeightSum()))
        for part in parts:
            total.add(part)
        weight.add_all(weights)

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_batches": self.num_batches,
            "num_samples": self.num_samples,
            "num_skipped": self.num_skipped,
            "compute_s": self.compute_s,
            "loss_sum": list(self.loss_sum.parts),
            "loss_samples": self.loss_weight.parts,
            "scalars": {
                name: [list(total.parts), weight.parts]
                for name, (total, weight) in self.scalars.items()
            },
        }

    def add_state(self, state: Mapping[str, Any]) -> None:
        self.num_batches += int(state["num_batches"])
        self.num_samples += int(state["num_samples"])
        self.num_skipped += int(state["num_skipped"])
        self.compute_s += float(state["compute_s"])
        self.loss_weight.add_all(_weights(state["loss_samples"]))
        for part in state["loss_sum"]:
            self.loss_sum.add(float(part))
        for name, (parts, weight) in state["scalars"].items():
            self._add_scalar(name, map(float, parts), _weights(weight))

    def metrics(self, rank: int) -> RankMetrics:
        return RankMetrics(
            rank=rank,
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            compute_s=self.compute_s,
            avg_loss=_mean(self.loss_sum.value(), self.loss_weight.value()),
            throughput=self.num_samples / self.compute_s if self.compute_s > 0 else 0.0,
        )


class EpochTally:
    """Sums up what the ranks report of one epoch.

    Sums are exact until they are rounded at the end, so that neither the order of the
    reports nor where one ends and the next begins shows in any bit.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = [_RankSums() for _ in range(world_size)]

    def add(self, rank: int, tally: Tally) -> None:
        """Add a report."""
        self._ranks[rank].add(tally)

    def close(
        self,
        *,
        epoch: int,
        epoch_s: float,
        num_samples: int,
        devices: Sequence[str],
        num_averagings: int = 0,
        num_retrained: int = 0,
        extra_scalars: Mapping[str, float] | None = None,
        divergence: float | None = None,
        param_norm: float | None = None,
    ) -> EpochMetrics:
        """Make the metrics of the epoch; changes nothing, so it can be called again.

        Args:
            epoch: Epoch, counted from 0.
            epoch_s: Its duration in seconds.
            num_samples: Distinct samples trained; the sums here hold repeats as well.
            devices: Device of each rank.
            num_averagings: Averagings completed in the epoch.
            num_retrained: Samples trained again because a rank died.
            extra_scalars: Values that no rank recorded, as those of the evaluation.
            divergence: The largest in its rounds; ``None``: not measured.
            param_norm: Norm of the parameters at its end; ``None``: not measured.

        Returns:
            The metrics, losses that are not finite included.
        """
        whole = _RankSums()
        for sums in self._ranks:
            whole.add_state(sums.state_dict())
        means = {
            name: _mean(total.value(), weight.value())
            for name, (total, weight) in whole.scalars.items()
        }
        means.update(extra_scalars or {})
        per_rank = tuple(sums.metrics(rank) for rank, sums in enumerate(self._ranks))
        num_batches = sum(r.num_batches for r in per_rank)
        return EpochMetrics(
            epoch=epoch,
            avg_loss=_mean(whole.loss_sum.value(), whole.loss_weight.value()),
            scalars=means,
            per_rank=per_rank,
            epoch_s=epoch_s,
            num_samples=num_samples,
            num_retrained=num_retrained,
            num_skipped=sum(sums.num_skipped for sums in self._ranks),
            num_averagings=num_averagings,
            per_rank_throughput=tuple(r.throughput for r in per_rank),
            per_rank_batch_share=tuple(
                r.num_batches / num_batches if num_batches else 0.0 for r in per_rank
            ),
            devices=tuple(devices),
            divergence=math.nan if divergence is None else divergence,
            param_norm=math.nan if param_norm is None else param_norm,
        )

    def rank_state(self, rank: int) -> dict[str, Any]:
        """The partial sums of one rank as they are now, as plain numbers and lists."""
        return self._ranks[rank].state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The partial sums as plain numbers, lists and dictionaries."""
        return {"ranks": [sums.state_dict() for sums in self._ranks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by those of :meth:`state_dict`.

        At another world size the sums of saved rank ``r`` go to rank
        ``r mod world_size``, so that the totals of the epoch stay whole.
        """
        self._ranks = [_RankSums() for _ in self._ranks]
        for rank, saved in enumerate(state["ranks"]):
            self._ranks[rank % len(self._ranks)].add_state(saved)


def _mean(total: float, weight: float) -> float:
    return float(total) / weight if weight else math.nan


def _weights(saved: Any) -> Sequence[float]:
    """What :attr:`WeightSum.parts` gave, also where it is a single number."""
    return [float(part) for part in saved] if isinstance(saved, list) else [int(saved)]
