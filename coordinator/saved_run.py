"""The coordinator's state in a checkpoint: its form, and the rules that its fields keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coordinator.backend_choice import BackendState
from coordinator.cadence import ElCheState, GuardState
from coordinator.codec import Count, Seconds, fail
from coordinator.metrics import EpochMetrics, Sums
from coordinator.splitting import count_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The coordinator's state, with settled batches as consumed and all others as open.

    Attributes:
        per_global: Batches in a global batch.
        saved_ranks: The ranks whose own states are in the checkpoint, ascending.
        next_epoch: The number of the epoch that is opened next.
        elapsed_s: Time since the last epoch closed.
        data_waits: The last waits of each rank.
        ranks: The totals of each rank, dead ones included.
        epochs: Epochs that are not published, the oldest first.
        metrics: One entry for each published epoch.
    """

    per_global: Annotated[int, 1]
    saved_ranks: tuple[Count, ...]
    global_step: Count
    num_windows: Count
    num_averagings: Count
    num_failed_rounds: Count
    next_epoch: Count
    elapsed_s: Seconds
    elche: ElCheState
    data_waits: tuple[tuple[Seconds, ...], ...]
    guard: GuardState
    backend: BackendState
    ranks: tuple[RankTotals, ...]
    epochs: tuple[SavedEpoch, ...]
    metrics: tuple[EpochMetrics, ...]

    @property
    def num_closed(self) -> int:
        """Number of published epochs."""
        return len(self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEpoch:
    """An open epoch, or a closed one that is not published.

    Attributes:
        epoch_s: Its duration, if it is closed.
        consumed: Its settled batches, as ascending ranges.
        num_retrained: Samples trained again after a death.
        sums: The sums of each rank.
        quotas: Open batches reserved for each rank; ``None``: not reserved.
    """

    epoch: Count
    epoch_s: Seconds | None = None
    consumed: tuple[range, ...]
    num_samples: Count = 0
    num_retrained: Count = 0
    num_averagings: Count = 0
    divergence: float | None = None
    norm: float | None = None
    sums: tuple[Sums, ...]
    quotas: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTotals:
    """Counts of a rank since the start of training.

    Attributes:
        sync_s: Seconds spent in averaging.
        num_throttles: Number of times it was parked because it was too far ahead.
    """

    num_batches: Count = 0
    num_samples: Count = 0
    compute_s: Seconds = 0.0
    sync_s: Seconds = 0.0
    num_throttles: Count = 0

    def __add__(self, more: RankTotals) -> RankTotals:
        """The sums of both."""
        return RankTotals(
            num_batches=self.num_batches + more.num_batches,
            num_samples=self.num_samples + more.num_samples,
            compute_s=self.compute_s + more.compute_s,
            sync_s=self.sync_s + more.sync_s,
            num_throttles=self.num_throttles + more.num_throttles,
        )

    @property
    def throughput(self) -> float:
        """Samples per second of ``compute_s``; 0.0 if that is 0."""
        return self.num_samples / self.compute_s if self.compute_s > 0 else 0.0


def check_run(
    run: SavedRun, *, num_samples: int, batch_size: int, drop_last: bool, num_rank_states: int
) -> None:
    """Check that the fields agree, so that a run can be restored from them.

    Args:
        num_samples: Length of the data set of the checkpoint.
        num_rank_states: Ranks whose own states are in the checkpoint.

    Raises:
        ValueError: They do not; names the first such field.
    """
    num_batches = count_batches(num_samples, batch_size, drop_last=drop_last)
    if not 1 <= num_rank_states == len(run.saved_ranks) <= len(run.ranks):
        raise ValueError(
            f"it holds the states of {num_rank_states} ranks of {len(run.ranks)}, expected those "
            f"of ranks {list(run.saved_ranks)}"
        )
    closed, next_epoch = len(run.metrics), run.next_epoch
    for epoch, metrics in enumerate(run.metrics):
        if metrics.epoch != epoch:
            fail(f"run['metrics'][{epoch}]['epoch']", metrics.epoch, str(epoch))
    opened = [epoch.epoch for epoch in run.epochs]
    if opened != [closed + i for i in range(len(opened))] or closed + len(opened) != next_epoch:
        raise ValueError(
            f"run['epochs'] are {opened}, expected all from {closed}, the number of closed, to "
            f"run['next_epoch'] = {next_epoch}"
        )
    if run.global_step > num_batches * next_epoch:
        fail("run['global_step']", run.global_step, f"at most {num_batches * next_epoch}")
    for number, saved in enumerate(run.epochs):
        end = 0
        for i, span in enumerate(saved.consumed):
            if not end <= span.start < span.stop <= num_batches:
                where = f"run['epochs'][{number}]['consumed'][{i}]"
                fail(
                    where,
                    [span.start, span.stop],
                    f"a later range of {num_batches} batches",
                )
            end = span.stop
