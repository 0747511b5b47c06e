"""Metrics of epochs, ranks, machines and steps, and their accumulation from reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

from coordinator.codec import Count, Seconds


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


Exact = Fraction | float
"""A number without rounding error: a sum of floats, or a float, which may be NaN or infinite."""


def exact_sum(values: Iterable[Exact]) -> Exact:
    """The sum without rounding, the same in any order; a float if it is NaN or infinite."""
    numerator, num_bits, special = 0, 0, 0.0
    for value in values:
        try:
            number, denominator = value.as_integer_ratio()
        except (OverflowError, ValueError):  # infinite or NaN
            special += float(value)
            continue
        bits = denominator.bit_length() - 1  # a power of 2
        if bits > num_bits:
            numerator, num_bits = numerator << (bits - num_bits), bits
        numerator += number << (num_bits - bits)
    return special or Fraction(numerator, 1 << num_bits)


def rounded(number: Exact) -> float:
    """The nearest float; infinite beyond the range of floats."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Counts and exact sums of a rank: of a report, or of all its reports of an epoch.

    Reports are sent by time, so the losses of an epoch are summed in pieces that differ from run
    to run. Sums are rounded where a mean is computed, so that no bit depends on the pieces.

    Attributes:
        num_skipped: Samples whose effect was dropped because a value was not finite.
        compute_s: Time spent in training steps, waits for data and peers excluded.
        loss_sum: Sum over batches of mean loss times weight.
        loss_samples: Total weight in ``loss_sum``: samples, or the weights of ``train_fn``.
            Fewer than ``num_samples`` while losses have not been read from the device; these
            come with a later report.
        scalars: ``(weighted sum, weight)`` of each recorded scalar.
        learning_rate: Learning rate of the optimizer's first group; ``None``: not known.
    """

    num_batches: Count = 0
    num_samples: Count = 0
    num_skipped: Count = 0
    compute_s: Seconds = 0.0
    loss_sum: Exact = Fraction()
    loss_samples: Exact = Fraction()
    scalars: Mapping[str, tuple[Exact, Exact]] = field(default_factory=dict)
    learning_rate: float | None = None

    def __add__(self, later: Sums) -> Sums:
        """Both together, with the learning rate of the last one that trained."""
        scalars = dict(self.scalars)
        for name, added in later.scalars.items():
            total, weight = zip(scalars.get(name, (0.0, 0.0)), added, strict=True)
            scalars[name] = exact_sum(total), exact_sum(weight)
        trained = later.num_batches and later.learning_rate is not None
        return Sums(
            num_batches=self.num_batches + later.num_batches,
            num_samples=self.num_samples + later.num_samples,
            num_skipped=self.num_skipped + later.num_skipped,
            compute_s=self.compute_s + later.compute_s,
            loss_sum=exact_sum((self.loss_sum, later.loss_sum)),
            loss_samples=exact_sum((self.loss_samples, later.loss_samples)),
            scalars=scalars,
            learning_rate=later.learning_rate if trained else self.learning_rate,
        )

    @classmethod
    def of_ranks(cls, ranks: Iterable[Sums]) -> Sums:
        """The sums of several ranks, with the learning rate of the lowest one that trained."""
        ranks = tuple(ranks)
        rates = (sums.learning_rate for sums in ranks if sums.learning_rate is not None)
        return replace(sum(ranks, cls()), learning_rate=next(rates, None))

    @property
    def avg_loss(self) -> float:
        """Weighted mean of the losses; NaN without a loss."""
        return _mean(self.loss_sum, self.loss_samples)

    @property
    def throughput(self) -> float:
        """Samples per second of ``compute_s``; 0.0 if that is 0."""
        return self.num_samples / self.compute_s if self.compute_s > 0 else 0.0

    def means(self) -> dict[str, float]:
        """Weighted mean of each scalar."""
        return {name: _mean(*pair) for name, pair in self.scalars.items()}


def _mean(total: Exact, weight: Exact) -> float:
    return rounded(total) / rounded(weight) if weight else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStats(Sums):
    """Counts and sums of a rank since its last report.

    Attributes:
        num_timed: Micro-batches covered by ``compute_s``; ``None``: all. Fewer while the times of
            the last ones have not been read from the device.
        data_wait_s: Time that reading the data adds to the steps: all of it where batches are read
            between steps, and what exceeds the compute time where they are read ahead. Independent
            of other waits, which hide a part of it. ``None``: not measured.
        losses: With ``metrics_every``, mean loss, weight and learning rate (``None``: not known)
            of each batch whose loss has been read, in step order; weight 0 without a loss.
        most_samples: Most samples of a micro-batch that fit the device's measured memory;
            ``None``: not known, or not bounded.
    """

    num_timed: int | None = None
    data_wait_s: float | None = None
    losses: tuple[tuple[float, float, float | None], ...] = ()
    most_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStats:
    """Another machine's report of an epoch.

    Attributes:
        ranks: The sums of each of its ranks.
        num_retrained: Samples trained again after the death of a rank.
    """

    machine: str
    ranks: tuple[Sums, ...]
    num_retrained: Count = 0


class EpochAccumulator:
    """Accumulates the ranks' reports of one epoch.

    Args:
        saved: The sums of each rank in a checkpoint. At another world size those of saved rank
            ``r`` are added to rank ``r % world_size``, so that the totals are preserved.

    Attributes:
        ranks: The sums of each rank.
    """

    def __init__(self, world_size: int, saved: Sequence[Sums] = ()) -> None:
        self.ranks = [Sums.of_ranks(saved[rank::world_size]) for rank in range(world_size)]

    def add(self, rank: int, stats: Sums) -> None:
        self.ranks[rank] += stats

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
        every = (MachineStats(machine=machine, ranks=tuple(self.ranks)), *others)
        whole = Sums.of_ranks(sums for stats in every for sums in stats.ranks)
        per_rank = tuple(
            RankMetrics(
                rank=rank,
                num_batches=sums.num_batches,
                num_samples=sums.num_samples,
                compute_s=sums.compute_s,
                avg_loss=sums.avg_loss,
                throughput=sums.throughput,
            )
            for rank, sums in enumerate(self.ranks)
        )
        num_batches = sum(r.num_batches for r in per_rank)
        return EpochMetrics(
            epoch=epoch,
            avg_loss=whole.avg_loss,
            scalars=whole.means() | dict(extra_scalars or {}),
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
        return sum(sums.num_samples for sums in self.ranks)


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
        self._sums = Sums()
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
        self._sums += stats
        self._waiting[rank].extend((*loss, part) for loss in stats.losses)
        return self._complete(aligned=self._equal)

    def exclude(self, seconds: float) -> None:
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
        sums, self._sums = self._sums, Sums()
        elapsed_s, self._since = self._now - self._since, self._now
        if elapsed_s > 0 and sums.num_samples:
            self._throughput = sums.num_samples / elapsed_s
        means, found = sums.means(), []
        for by_rank, num_batches in windows:
            self.step += num_batches
            losses = [loss for own in by_rank for loss in own]
            total = exact_sum(x * n for x, n, *_ in losses if n)
            rates = [loss[2] for own in by_rank for loss in reversed(own) if loss[2] is not None]
            found.append(
                StepMetrics(
                    step=self.step,
                    epoch=self._epoch,
                    num_batches=num_batches,
                    avg_loss=_mean(total, exact_sum(n for _, n, *_ in losses)),
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


OPTIONAL_METRICS = ("divergence", "param_norm", "learning_rate")
"""Fields of :class:`EpochMetrics` that are NaN if not measured."""


def _machines(tallies: Iterable[MachineStats]) -> tuple[MachineMetrics, ...]:
    ranks: dict[str, list[Sums]] = {}
    for stats in sorted(tallies, key=lambda stats: stats.machine):
        ranks.setdefault(stats.machine, []).extend(stats.ranks)
    found = []
    for machine, each in ranks.items():
        whole = Sums.of_ranks(each)
        found.append(
            MachineMetrics(
                machine=machine,
                num_ranks=len(each),
                num_batches=whole.num_batches,
                num_samples=whole.num_samples,
                compute_s=whole.compute_s,
                avg_loss=whole.avg_loss,
                throughput=sum((sums.throughput for sums in each), 0.0),
            )
        )
    return tuple(found)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
