"""From the reports of the ranks to the metrics of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.contents import Tally
from coordinator.exact_sum import ExactSum, WeightSum


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
