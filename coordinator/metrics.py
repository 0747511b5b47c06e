"""Metrics of epochs, ranks, machines and steps, and their accumulation from reports."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """Results of one epoch.

    Attributes:
        epoch: Epoch, counted from 0.
        avg_loss: Mean loss over all samples trained, weighted by the weights of ``train_fn`` if
            it returns any; NaN if there is no loss, and NaN or infinite if a loss was.
        scalars: Recorded scalars, each a mean weighted like the losses of its batches, and the
            values of the evaluation under ``eval/``.
        per_rank: One entry for each rank of this machine.
        machines: One entry for each machine of a cluster that trained in the epoch, by name;
            means and counts of the epoch are over all of them. Empty without a cluster.
        epoch_s: Duration in seconds: the time since the last epoch closed. Epochs that close
            together share it in equal parts.
        num_samples: Distinct samples trained.
        num_retrained: Samples trained again after the death of a rank.
        num_skipped: Samples trained whose effect was dropped because a loss, a gradient or
            a parameter was not finite.
        num_averagings: Averagings completed in the epoch.
        per_rank_throughput: Each rank's samples per second of computing.
        per_rank_batch_share: Each rank's share of the batches; they sum to 1 unless there was
            no batch.
        devices: Device of each rank.
        divergence: The largest ``||replica - mean|| / ||mean||`` of a rank in a round of the
            epoch, over the parameters; the divergence guard checks it. NaN if none was
            measured, as under ``SYNC``, or a replica was not finite.
        param_norm: Norm of the parameters after the epoch's last averaging; under ``SYNC`` and
            with one rank, at the epoch's end. NaN if it was not measured.
        learning_rate: Learning rate of the optimizer's first group, as last reported in the
            epoch by the lowest rank that trained, without ``lr_factor``; NaN if unknown.
        lr_factor: Factor by which ``lr_scale_ratio("auto")`` multiplies the learning rate at the
            epoch's end, of optimizers whose steps ignore the scale of the gradient.
        partial: True if ``max_steps`` ended the run within the epoch: all values then cover the
            trained part, without evaluation.
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
    learning_rate: float = math.nan
    lr_factor: float = 1.0
    machines: tuple[MachineMetrics, ...] = ()
    partial: bool = False

    def value(self, name: str) -> float | None:
        """Return the scalar, or else the field, of that name; ``None`` if there is none."""
        value = self.scalars.get(name, getattr(self, name, None))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scalars and fields that :meth:`value` returns, scalars first."""
        numbers = [each.name for each in fields(self) if self.value(each.name) is not None]
        return tuple(dict.fromkeys((*sorted(self.scalars), *numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """Results of one rank in an epoch.

    Attributes:
        rank: The rank.
        num_batches: Batches it trained.
        num_samples: Samples in them.
        compute_s: Seconds in training steps, waits excluded.
        avg_loss: Mean loss over its samples, weighted as for the epoch; NaN if there is none.
        throughput: Samples per second of ``compute_s``; 0.0 if that is 0.
    """

    rank: int
    num_batches: int
    num_samples: int
    compute_s: float
    avg_loss: float
    throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMetrics:
    """Results of one machine of a cluster in an epoch.

    Attributes:
        machine: Its name.
        num_ranks: Ranks that trained on it.
        num_batches: Batches it trained.
        num_samples: Samples in them.
        compute_s: Seconds in training steps, waits excluded, summed over its ranks.
        avg_loss: Mean loss over its samples, weighted as for the epoch; NaN if there is none.
        throughput: Samples per second of all its ranks together, while they compute; 0.0 without
            any.
    """

    machine: str
    num_ranks: int
    num_batches: int
    num_samples: int
    compute_s: float
    avg_loss: float
    throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Results of some batches of all ranks within an epoch (``metrics_every``), or of an
    evaluation within it (``eval_every``), which has ``num_batches=0`` and only ``scalars``.

    Attributes:
        step: Batches of all ranks since the run began. A resumed run continues the count of its
            checkpoint; batches trained again after a death count again.
        epoch: The epoch that was reported last.
        num_batches: Batches covered, at least ``n`` of ``metrics_every(n)``; 0: an evaluation.
        avg_loss: Their mean loss, weighted as for the epoch; NaN if there is none.
        scalars: Means of the scalars reported since the last step metrics, the same for step
            metrics published together; or the values of the evaluation under ``eval/``.
        learning_rate: Learning rate of the optimizer's first group in the step of the last of these
            batches, on the lowest rank that trained any, without ``lr_factor``; NaN: unknown.
        throughput: Samples per second of all ranks since the last step metrics.
    """

    step: int
    epoch: int
    num_batches: int
    avg_loss: float
    scalars: dict[str, float]
    learning_rate: float
    throughput: float


def metrics_state(metrics: EpochMetrics) -> dict[str, Any]:
    """Metrics as plain numbers, strings, lists and dictionaries."""
    return dataclasses.asdict(metrics)


def metrics_from_state(state: Mapping[str, Any]) -> EpochMetrics:
    """Restore metrics from :func:`metrics_state`."""
    values = dict(state)
    values["per_rank"] = tuple(RankMetrics(**rank) for rank in state["per_rank"])
    values["machines"] = tuple(MachineMetrics(**found) for found in state.get("machines", ()))
    for name in ("per_rank_throughput", "per_rank_batch_share", "devices"):
        values[name] = tuple(state[name])
    return EpochMetrics(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStats:
    """Counts and sums of a rank since its last report.

    Attributes:
        num_skipped: Samples whose effect was dropped because a value was not finite.
        compute_s: Time spent in training steps, waits for data and peers excluded.
        num_timed: Micro-batches covered by ``compute_s``; ``None``: all. Fewer while the times of
            the last ones have not been read from the device.
        data_wait_s: Time that reading the data adds to the steps: all of it where batches are read
            between steps, and what exceeds the compute time where they are read ahead. Independent
            of other waits, which hide a part of it. ``None``: not measured.
        loss_sum: Sum over batches of mean loss times weight, in step order.
        loss_samples: Total weight in ``loss_sum``: samples, or the weights of ``train_fn``.
            Fewer than ``num_samples`` while losses have not been read from the device; these
            come with a later report.
        scalars: ``(name, weighted sum, weight)`` for each recorded scalar.
        losses: With ``metrics_every``, mean loss, weight and learning rate (``None``: not known)
            of each batch whose loss has been read, in step order; weight 0 without a loss.
        learning_rate: Learning rate of the optimizer's first group; ``None``: not known.
        most_samples: Most samples of a micro-batch that fit the device's measured memory;
            ``None``: not known, or not bounded.
    """

    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    compute_s: float = 0.0
    num_timed: int | None = None
    data_wait_s: float | None = None
    loss_sum: float = 0.0
    loss_samples: float = 0
    scalars: tuple[tuple[str, float, float], ...] = ()
    losses: tuple[tuple[float, float, float | None], ...] = ()
    learning_rate: float | None = None
    most_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStats:
    """Another machine's report of an epoch.

    Attributes:
        ranks: Partial sums of each of its ranks; see :meth:`EpochAccumulator.rank_state`.
        num_retrained: Samples trained again after the death of a rank.
    """

    machine: str
    ranks: tuple[Mapping[str, Any], ...]
    num_retrained: int = 0


class EpochAccumulator:
    """Accumulates the ranks' reports of one epoch.

    Sums are exact and rounded once at the end, so that no bit depends on the order or the
    boundaries of reports.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = [_RankSums() for _ in range(world_size)]

    def add(self, rank: int, stats: ReportStats) -> None:
        """Add a report."""
        self._ranks[rank].add(stats)

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
        lr_factor: float = 1.0,
        machine: str = "",
        others: Sequence[MachineStats] = (),
        partial: bool = False,
    ) -> EpochMetrics:
        """Compute the metrics of the epoch; can be called again.

        Args:
            epoch: Epoch, counted from 0.
            epoch_s: Its duration in seconds.
            num_samples: Distinct samples trained; the sums here hold repeats as well.
            devices: Device of each rank.
            num_retrained: Samples trained again because a rank died.
            extra_scalars: Additional scalars, such as those of the evaluation.
            divergence: Largest divergence in its rounds; ``None``: not measured.
            param_norm: Norm of the parameters at its end; ``None``: not measured.
            others: Sums of the other machines, included in all values except those of ranks.
            partial: The run ends within the epoch.

        Returns:
            The metrics, losses that are not finite included.
        """
        own = MachineStats(machine=machine, ranks=tuple(r.state_dict() for r in self._ranks))
        every = (own, *others)
        whole = _RankSums()
        for stats in every:
            for state in stats.ranks:
                whole.add_state(state)
        means = whole.means() | dict(extra_scalars or {})
        per_rank = tuple(sums.metrics(rank) for rank, sums in enumerate(self._ranks))
        num_batches = sum(r.num_batches for r in per_rank)
        return EpochMetrics(
            epoch=epoch,
            avg_loss=_mean(whole.loss_sum.value(), whole.loss_weight.value()),
            scalars=means,
            per_rank=per_rank,
            epoch_s=epoch_s,
            num_samples=num_samples,
            num_retrained=num_retrained + sum(stats.num_retrained for stats in others),
            num_skipped=whole.num_skipped,
            num_averagings=num_averagings,
            per_rank_throughput=tuple(r.throughput for r in per_rank),
            per_rank_batch_share=tuple(
                r.num_batches / num_batches if num_batches else 0.0 for r in per_rank
            ),
            devices=tuple(devices),
            divergence=_or_nan(divergence),
            param_norm=_or_nan(param_norm),
            learning_rate=_or_nan(whole.learning_rate),
            lr_factor=lr_factor,
            machines=_machines(every) if machine else (),
            partial=partial,
        )

    @property
    def num_samples(self) -> int:
        """Samples trained by this machine's ranks, including repeats."""
        return sum(sums.num_samples for sums in self._ranks)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """The present partial sums of one rank, as plain numbers and lists."""
        return self._ranks[rank].state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The partial sums as plain numbers, lists and dictionaries."""
        return {"ranks": [sums.state_dict() for sums in self._ranks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums from :meth:`state_dict`.

        At another world size the sums of saved rank ``r`` are added to rank ``r % world_size``, so
        that the totals of the epoch are preserved.
        """
        self._ranks = [_RankSums() for _ in self._ranks]
        for rank, saved in enumerate(state["ranks"]):
            self._ranks[rank % len(self._ranks)].add_state(saved)


class StepAccumulator:
    """Computes metrics of at least ``every`` batches from the ranks' reports.

    A report covers several steps of one rank. Under lockstep metrics cover the same steps of all
    ranks, otherwise all that was reported.

    Deterministic and not thread-safe.

    Args:
        every: Least batches of all ranks in each metrics.
        equal: All ranks train equal numbers of batches.
    """

    def __init__(self, every: int, world_size: int, *, equal: bool) -> None:
        self._every = every
        self._equal = equal
        self._waiting: list[deque[_Loss]] = [deque() for _ in range(world_size)]
        self._taken: list[list[_Loss]] = [[] for _ in range(world_size)]
        self._num_taken: Fraction | int = 0
        self._live = [True] * world_size
        self._sums = _RankSums()
        self._throughput = math.nan
        self._since = self._now = 0.0
        self._epoch = 0
        self.step = 0

    def begin(self, now: float) -> None:
        """Start the clock: all ranks begin to train."""
        self._since = self._now = now

    def add(
        self, rank: int, epoch: int, stats: ReportStats, now: float, part: Fraction | int = 1
    ) -> list[StepMetrics]:
        """Add a report; returns the metrics that it completes.

        Args:
            part: Size of each of its micro-batches, in batches.
        """
        self._now, self._epoch = now, max(epoch, self._epoch)
        self._sums.add(stats)
        self._waiting[rank].extend((*loss, part) for loss in stats.losses)
        return self._complete(aligned=self._equal)

    def exclude(self, seconds: float) -> None:
        """Exclude a pause of all ranks from throughput."""
        self._since += seconds

    def drop(self, rank: int) -> None:
        """Remove a rank; its reports still count."""
        self._live[rank] = False

    def flush(self) -> list[StepMetrics]:
        """The metrics of all that was reported, if there are enough batches."""
        return self._complete(aligned=False)

    def _complete(self, *, aligned: bool) -> list[StepMetrics]:
        windows = []
        while any(self._waiting) and not (aligned and self._lacks_reports()):
            for taken, waiting in zip(self._taken, self._waiting, strict=True):
                for _ in range(min(1, len(waiting)) if aligned else len(waiting)):
                    taken.append(waiting.popleft())
                    self._num_taken += taken[-1][3]
            if self._num_taken >= self._every:
                num_batches = int(self._num_taken)
                windows.append((self._taken, num_batches))
                self._taken = [[] for _ in self._waiting]
                self._num_taken -= num_batches
        if not windows:
            return []
        sums, self._sums = self._sums, _RankSums()
        elapsed_s, self._since = self._now - self._since, self._now
        if elapsed_s > 0 and sums.num_samples:
            self._throughput = sums.num_samples / elapsed_s
        means, found = sums.means(), []
        for by_rank, num_batches in windows:
            self.step += num_batches
            losses = [loss for own in by_rank for loss in own]
            total = math.fsum(x * n for x, n, *_ in losses if n)
            rates = [loss[2] for own in by_rank for loss in reversed(own) if loss[2] is not None]
            found.append(
                StepMetrics(
                    step=self.step,
                    epoch=self._epoch,
                    num_batches=num_batches,
                    avg_loss=_mean(total, math.fsum(n for _, n, *_ in losses)),
                    scalars=means.copy(),
                    learning_rate=rates[0] if rates else math.nan,
                    throughput=self._throughput,
                )
            )
        return found

    def _lacks_reports(self) -> bool:
        """True if a live rank has not reported its next batch."""
        return not all(w for w, live in zip(self._waiting, self._live, strict=True) if live)


_Loss = tuple[float, float, float | None, Fraction | int]
"""Loss of a micro-batch, its weight, the learning rate of its step, and its size in batches."""


# Reports are sent by time, so the losses of an epoch are summed in pieces that differ from run to
# run. Each piece carries its rounding errors, and the sum of all pieces is the exact sum of the
# values, rounded once (:func:`math.fsum`).


class RoundedSum(float):
    """A rounded sum with the exact one attached.

    Attributes:
        parts: Numbers that add up to the exact sum; empty: this number is exact.
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
    """Exact sum of weights; integers stay integers."""

    __slots__ = ("_rest", "_whole")

    def __init__(self) -> None:
        self._whole = 0
        self._rest: ExactSum | None = None

    def add(self, weight: float) -> None:
        """Add a weight, or a :meth:`value` or item of :attr:`parts` of another sum."""
        if isinstance(weight, int):
            self._whole += weight
        elif weight.is_integer() and not getattr(weight, "parts", ()):
            self._whole += int(weight)
        else:
            self._rest = self._rest or ExactSum()
            self._rest.add(weight)

    def add_all(self, weights: Sequence[float]) -> None:
        """Add many weights."""
        if set(map(type, weights)) <= {int}:
            self._whole += int(sum(weights))
            return
        for weight in weights:
            self.add(weight)

    def value(self) -> float:
        """The sum: an ``int``, or a :class:`RoundedSum` if a weight was not an integer."""
        return self._whole if self._rest is None else self._sum(self._rest).value()

    @property
    def parts(self) -> int | list[float]:
        """Number or list of numbers that restore the sum by :meth:`add`."""
        return self._whole if self._rest is None else list(self._sum(self._rest).parts)

    def _sum(self, rest: ExactSum) -> ExactSum:
        rounded = float(self._whole)
        return ExactSum((*rest.parts, rounded, float(self._whole - int(rounded))))


class ExactSum:
    """Exact sum of floats; NaN and infinities are preserved."""

    __slots__ = ("_parts", "_special")

    def __init__(self, parts: Iterable[float] = ()) -> None:
        self._parts: list[float] = []  # non-overlapping, in ascending magnitude
        self._special = 0.0
        self.add_all(parts)

    def add(self, value: float) -> None:
        """Add a number, or a :class:`RoundedSum` with its parts."""
        self.add_all(getattr(value, "parts", ()) or (float(value),))

    def add_all(self, values: Iterable[float]) -> None:
        """Add many numbers; no :class:`RoundedSum` with parts among them."""
        left = [*self._parts, *values]
        parts: list[float] = []
        try:
            # Each sum is rounded once, and its rounding error is summed next.
            while (rounded := math.fsum(left)) and rounded - rounded == 0.0:
                parts.append(rounded)
                left.append(-rounded)
        except OverflowError:
            rounded = math.copysign(math.inf, sum(left))
        except ValueError:  # opposite infinities
            rounded = math.nan
        self._special += rounded
        self._parts = parts[::-1] if rounded == 0.0 else []

    @property
    def parts(self) -> tuple[float, ...]:
        """Numbers from which :class:`ExactSum` can be restored."""
        if self._special or math.isnan(self._special):
            return (self._special,)
        return tuple(self._parts)

    def value(self) -> RoundedSum:
        if self._special or math.isnan(self._special):
            return RoundedSum(self._special)
        return RoundedSum(math.fsum(self._parts), self._parts if len(self._parts) > 1 else ())


OPTIONAL_METRICS = ("divergence", "param_norm", "learning_rate")
"""Fields of :class:`EpochMetrics` that are NaN if not measured."""


@dataclass(slots=True, kw_only=True)
class _RankSums:
    num_batches: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    compute_s: float = 0.0
    loss_sum: ExactSum = field(default_factory=ExactSum)
    loss_weight: WeightSum = field(default_factory=WeightSum)
    scalars: dict[str, tuple[ExactSum, WeightSum]] = field(default_factory=dict)
    learning_rate: float | None = None

    def add(self, stats: ReportStats) -> None:
        self.num_batches += stats.num_batches
        self.num_samples += stats.num_samples
        self.num_skipped += stats.num_skipped
        self.compute_s += stats.compute_s
        self.loss_sum.add(stats.loss_sum)
        self.loss_weight.add(stats.loss_samples)
        for name, total, weight in stats.scalars:
            self._add_scalar(name, (total,), (weight,))
        if stats.num_batches and stats.learning_rate is not None:
            self.learning_rate = stats.learning_rate

    def _add_scalar(self, name: str, parts: Iterable[float], weights: Sequence[float]) -> None:
        total, weight = self.scalars.setdefault(name, (ExactSum(), WeightSum()))
        for part in parts:
            total.add(part)
        weight.add_all(weights)

    def means(self) -> dict[str, float]:
        """Mean of each scalar."""
        pairs = ((name, sum_.value(), n.value()) for name, (sum_, n) in self.scalars.items())
        return {name: _mean(total, weight) for name, total, weight in pairs}

    def state_dict(self) -> dict[str, Any]:
        known = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        return known | {
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
        self.loss_sum.add_all(map(float, state["loss_sum"]))
        for name, (parts, weight) in state["scalars"].items():
            self._add_scalar(name, map(float, parts), _weights(weight))
        if self.learning_rate is None and "learning_rate" in state:
            self.learning_rate = float(state["learning_rate"])

    def metrics(self, rank: int) -> RankMetrics:
        return RankMetrics(
            rank=rank,
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            compute_s=self.compute_s,
            avg_loss=_mean(self.loss_sum.value(), self.loss_weight.value()),
            throughput=self.num_samples / self.compute_s if self.compute_s > 0 else 0.0,
        )


def _machines(tallies: Iterable[MachineStats]) -> tuple[MachineMetrics, ...]:
    ranks: dict[str, list[Mapping[str, Any]]] = {}
    for stats in sorted(tallies, key=lambda stats: stats.machine):
        ranks.setdefault(stats.machine, []).extend(stats.ranks)
    found = []
    for machine, states in ranks.items():
        whole, throughput = _RankSums(), 0.0
        for state in states:
            whole.add_state(state)
            seconds = float(state["compute_s"])
            throughput += int(state["num_samples"]) / seconds if seconds > 0 else 0.0
        found.append(
            MachineMetrics(
                machine=machine,
                num_ranks=len(states),
                num_batches=whole.num_batches,
                num_samples=whole.num_samples,
                compute_s=whole.compute_s,
                avg_loss=_mean(whole.loss_sum.value(), whole.loss_weight.value()),
                throughput=throughput,
            )
        )
    return tuple(found)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(total: float, weight: float) -> float:
    return float(total) / weight if weight else math.nan


def _weights(saved: Any) -> Sequence[float]:
    return [float(part) for part in saved] if isinstance(saved, list) else [int(saved)]
