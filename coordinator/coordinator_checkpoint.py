"""The coordinator's part of a checkpoint: capture and restore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.ledger import Epoch
from coordinator.metrics import EpochAccumulator, Sums
from coordinator.run_state import RankState, RunState
from coordinator.saved_run import RankTotals, SavedEpoch, SavedRun
from coordinator.splitting import BatchSet


@dataclass(frozen=True, slots=True)
class RankCut:
    """A rank's reported totals at its cut of a checkpoint.

    Attributes:
        sums: Its sums of each open epoch.
    """

    sums: dict[int, Sums]
    totals: RankTotals

    @classmethod
    def of(cls, run: RunState, epochs: Iterable[Epoch], rank: int) -> RankCut:
        sums = {epoch.epoch: epoch.stats.ranks[rank] for epoch in epochs}
        return cls(sums, run.ranks[rank].totals)


def capture_run(
    run: RunState,
    closing: Sequence[tuple[Epoch, float]],
    elapsed_s: float,
    cuts: Mapping[int, RankCut],
) -> SavedRun:
    """Return the coordinator's state.

    Args:
        closing: Closed epochs that are not published, and their durations.
        elapsed_s: Time since the last epoch closed.
        cuts: The cut of each surviving rank.
    """
    epochs = [_saved_epoch(run, epoch, cuts, epoch_s=s) for epoch, s in closing]
    epochs += [_saved_epoch(run, epoch, cuts) for epoch in run.ledger.epochs]
    return SavedRun(
        per_global=run.per_global,
        saved_ranks=tuple(sorted(cuts)),
        global_step=run.global_step,
        num_windows=run.ledger.queue.num_steps,
        num_averagings=run.num_averagings,
        num_failed_rounds=run.num_failed_rounds,
        next_epoch=run.ledger.next_epoch,
        elapsed_s=elapsed_s,
        elche=run.elche.state,
        data_waits=run.data_waits.last,
        guard=run.guard.state,
        backend=run.backend_choice.state,
        ranks=tuple(cuts[r.rank].totals if r.rank in cuts else r.totals for r in run.ranks),
        epochs=tuple(epochs),
        metrics=tuple(run.outcome.metrics),
    )


def _saved_epoch(
    run: RunState, epoch: Epoch, cuts: Mapping[int, RankCut], *, epoch_s: float | None = None
) -> SavedEpoch:
    available = [range(epoch.num_batches)] if epoch.granted is None else epoch.granted.spans
    consumed = BatchSet(available)
    consumed.remove((*epoch.open.spans, *run.ledger.unsettled(epoch)))
    sums = [
        cuts[rank].sums.get(epoch.epoch, Sums()) if rank in cuts else now
        for rank, now in enumerate(epoch.stats.ranks)
    ]
    quotas = None
    if epoch.quotas is not None:
        held = [ledger.of_epoch(epoch.epoch) for ledger in run.ledger.by_rank]
        pairs = zip(epoch.quotas, held, strict=True)
        quotas = tuple(quota + sum(map(len, spans)) for quota, spans in pairs)
    return SavedEpoch(
        epoch=epoch.epoch,
        epoch_s=epoch_s,
        consumed=consumed.spans,
        num_samples=epoch.num_samples,
        num_retrained=epoch.num_retrained - _lost_since(run, epoch, cuts, sums),
        num_averagings=epoch.num_averagings,
        divergence=epoch.divergence,
        norm=epoch.norm,
        sums=tuple(sums),
        quotas=quotas,
    )


def _lost_since(
    run: RunState, epoch: Epoch, cuts: Mapping[int, RankCut], sums: Sequence[Sums]
) -> int:
    """Samples trained after the cut by ranks that died since."""
    died = [rank for rank in cuts if run.ranks[rank].state is RankState.DEAD]
    return sum(epoch.stats.ranks[rank].num_samples - sums[rank].num_samples for rank in died)


def restore_run(run: RunState, saved: SavedRun) -> None:
    """Restore a state of :func:`capture_run` into a new coordinator.

    Open batches are assigned again, under ``SYNC`` in global batches of the same size. Fixed shares
    of an epoch are kept at the same world size.

    Args:
        run: The state of a coordinator that has not started.
    """
    run.load_counters(saved)
    if run.steps is not None:
        run.steps.step = run.position
    run.elche.restore(saved.elche)
    run.data_waits.restore(saved.data_waits)
    run.guard.state = saved.guard
    if len(saved.ranks) == len(run.ranks):
        run.backend_choice.restore(saved.backend)
    for rank, totals in enumerate(saved.ranks):
        run.ranks[rank % len(run.ranks)].totals += totals
    run.outcome.metrics = list(saved.metrics)
    # Epochs opened ahead may exceed a smaller num_epochs.
    last = run.config.num_epochs
    run.ledger.restore(
        [_open_epoch(run, epoch) for epoch in saved.epochs if epoch.epoch < last],
        next_epoch=min(saved.next_epoch, last),
        num_spent=run.global_step,
    )


def _open_epoch(run: RunState, saved: SavedEpoch) -> Epoch:
    total, world = run.ledger.batches_per_epoch, len(run.ranks)
    granted = run.config.granted
    num_consumed = sum(map(len, saved.consumed))
    left = BatchSet()  # in a cluster all its batches are granted
    if not granted:
        left.put_back([range(total)])
        left.remove(saved.consumed)
    quotas = run.ledger.quotas(len(left), run.elche.shares)
    kept = saved.quotas
    is_same = kept is not None and len(saved.sums) == len(kept) == world
    if quotas is not None and kept is not None and is_same and sum(kept) == len(left):
        quotas = list(kept)
    epoch = Epoch(
        epoch=saved.epoch,
        num_batches=total,
        stats=EpochAccumulator(world, saved.sums),
        open=left,
        quotas=quotas,
        num_settled=0 if granted else num_consumed,
        num_elsewhere=num_consumed if granted else 0,
        granted=BatchSet() if granted else None,
        complete=not granted,
        num_samples=saved.num_samples,
        num_retrained=saved.num_retrained,
        num_averagings=saved.num_averagings,
        divergence=saved.divergence,
        norm=saved.norm,
    )
    if epoch.settled:
        epoch.notified = set(range(world))  # no batch of it is left
    return epoch
