"""The machine's state as plain numbers, and a machine that goes on from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.dispatch import BatchSet, compress
from coordinator.ledger import Epoch
from coordinator.metrics import EpochMetrics, EpochTally, RankMetrics
from coordinator.ranks import RankState
from coordinator.state import Core

_TOTALS = ("num_batches", "num_samples", "compute_s", "sync_s", "num_throttles")


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank had told when its part of a checkpoint came.

    Attributes:
        sums: Its partial sums of each open epoch.
        totals: Its totals of the run.
        told: Under ``SYNC``, the batches of the plan that it had told.
    """

    sums: dict[int, dict[str, Any]]
    totals: dict[str, Any]
    told: int

    @classmethod
    def of(cls, core: Core, epochs: Iterable[Epoch], rank: int) -> Note:
        """The note of a rank, as everything stands now."""
        info = core.ranks[rank]
        return cls(
            {epoch.epoch: epoch.tally.rank_state(rank) for epoch in epochs},
            {name: getattr(info, name) for name in _TOTALS},
            0 if core.plan is None else core.plan.told.get(rank, 0),
        )


def capture_run(
    core: Core,
    closing: Sequence[tuple[Epoch, float]],
    elapsed_s: float,
    notes: Mapping[int, Note],
    step: int | None,
) -> dict[str, Any]:
    """The state of a machine, with what is settled as consumed and all the rest as open.

    Args:
        core: The machine's state.
        closing: Epochs that wait to be published, and how long they took.
        elapsed_s: Time since the last epoch closed.
        notes: What each rank that is left had told.
        step: Under ``SYNC``, the optimizer steps made.

    Returns:
        Numbers, strings, ``None``, lists and dictionaries.
    """
    plan = core.plan
    late = _told_later(core, notes)  # Under SYNC others may have gone on meanwhile.
    num_late = sum(len(batches) for batches in late.values())
    undone = 0
    if plan is not None and step is not None and not core.alone:
        undone = plan.num_windows - (step - plan.first_window)
    totals = [
        notes[r.rank].totals if r.rank in notes else {n: getattr(r, n) for n in _TOTALS}
        for r in core.ranks
    ]
    epochs = [_epoch_state(core, epoch, notes, epoch_s=s) for epoch, s in closing]
    for epoch in core.pool.epochs:
        state = _epoch_state(core, epoch, notes)
        if plan is not None and plan.epoch == epoch.epoch:
            batches = sorted(b for found in late.values() for b in found)
            state["consumed"] = _pairs(_without(_expand(state["consumed"]), batches))
            state["num_samples"] -= core.pool.count_samples(batches)
            state["num_averagings"] -= undone
            state["parts"] = _parts_left(core, notes)
        epochs.append(state)
    return {
        "world_size": len(core.ranks),
        "global_step": core.global_step - num_late,
        "num_windows": core.num_windows if step is None else step,
        "num_averagings": core.num_averagings - undone,
        "num_failed_rounds": core.num_failed_rounds,
        "next_epoch": core.pool.next_epoch,
        "elapsed_s": elapsed_s,
        "elche": core.elche.state_dict(),
        "guard": core.guard.state_dict(),
        "ranks": totals,
        "epochs": epochs,
        "metrics": [metrics_state(metrics) for metrics in core.outcome.metrics],
    }


def _told_later(core: Core, notes: Mapping[int, Note]) -> dict[int, list[int]]:
    """Batches that ranks have told since their notes, all of them of the present plan."""
    plan = core.plan
    if plan is None:
        return {}
    return {
        rank: _order(spans)[notes[rank].told : plan.told.get(rank, 0)]
        for rank, spans in plan.parts.items()
        if rank in notes
    }


def _parts_left(core: Core, notes: Mapping[int, Note]) -> dict[int, list[list[int]]] | None:
    """What each rank has yet to train of the present plan, in order."""
    plan = core.plan
    if plan is None or set(plan.parts) != set(notes):
        return None
    left = {rank: _order(spans)[notes[rank].told :] for rank, spans in plan.parts.items()}
    if not any(left.values()):
        return None
    return {rank: [[s.start, s.stop, s.step] for s in _spans(part)] for rank, part in left.items()}


def _epoch_state(
    core: Core, epoch: Epoch, notes: Mapping[int, Note], *, epoch_s: float | None = None
) -> dict[str, Any]:
    unsettled: list[list[range]] = [
        [
            span
            for number, span in (*ledger.assigned, *ledger.trained, *ledger.in_round)
            if number == epoch.epoch
        ]
        for ledger in core.pool.ledgers
    ]
    rest = {b for spans in (epoch.open.spans, *unsettled) for span in spans for b in span}
    nothing = EpochTally(1).rank_state(0)
    sums = [
        notes[rank].sums.get(epoch.epoch, nothing)
        if rank in notes
        else epoch.tally.rank_state(rank)
        for rank in range(len(core.ranks))
    ]
    quotas = epoch.quotas
    if quotas is not None:
        mine = [sum(len(span) for span in spans) for spans in unsettled]
        quotas = [quota + count for quota, count in zip(quotas, mine, strict=True)]
    return {
        "epoch": epoch.epoch,
        "epoch_s": epoch_s,
        "consumed": _pairs(b for b in range(epoch.num_batches) if b not in rest),
        "num_samples": epoch.num_samples,
        "num_retrained": epoch.num_retrained - _lost_since(core, epoch, notes, sums),
        "num_averagings": epoch.num_averagings,
        "tally": {"ranks": sums},
        "quotas": quotas,
        "parts": None,
    }


def _lost_since(
    core: Core, epoch: Epoch, notes: Mapping[int, Note], sums: Sequence[Mapping[str, Any]]
) -> int:
    """Samples that ranks trained after their part of the cut, and that died with them since."""
    died = [rank for rank in notes if core.ranks[rank].state is RankState.DEAD]
    return sum(
        int(epoch.tally.rank_state(rank)["num_samples"]) - int(sums[rank]["num_samples"])
        for rank in died
    )


# -- going on ------------------------------------------------------------------------


def restore_run(core: Core, state: Mapping[str, Any], now: float = 0.0) -> None:
    """Make a new machine go on from what :func:`capture_run` gave.

    At the same world size every rank keeps its share of an epoch; at another one what is
    open is dealt anew.

    Args:
        core: A machine's state, in which nothing has happened yet.
        state: What was captured.
        now: The time.
    """
    core.global_step = int(state["global_step"])
    core.num_windows = int(state["num_windows"])
    core.num_averagings = int(state["num_averagings"])
    core.num_failed_rounds = int(state["num_failed_rounds"])
    core.elche.load_state_dict(state["elche"])
    core.guard.load_state_dict(state["guard"])
    for rank, totals in enumerate(state["ranks"]):
        info = core.ranks[rank % len(core.ranks)]
        for name in _TOTALS:
            setattr(info, name, getattr(info, name) + totals[name])
    core.outcome.metrics = [metrics_of(saved) for saved in state["metrics"]]
    # Some may have been opened ahead of which nothing is trained, and that are too many now.
    last = core.config.num_epochs
    core.pool.resume(
        [_epoch_of(core, saved, now) for saved in state["epochs"] if saved["epoch"] < last],
        next_epoch=min(int(state["next_epoch"]), last),
        num_spent=core.global_step,
    )


def _epoch_of(core: Core, saved: Mapping[str, Any], now: float) -> Epoch:
    total = core.pool.batches_per_epoch
    consumed = set(_expand(saved["consumed"]))
    left = BatchSet(compress(b for b in range(total) if b not in consumed))
    world = len(core.ranks)
    same = len(saved["tally"]["ranks"]) == world
    tally = EpochTally(world)
    tally.load_state_dict(saved["tally"])
    quotas = core.pool.quotas(len(left), core.elche.shares)
    if same and quotas is not None and saved["quotas"] is not None:
        quotas = [int(q) for q in saved["quotas"]] if sum(saved["quotas"]) == len(left) else quotas
    epoch = Epoch(
        epoch=int(saved["epoch"]),
        num_batches=total,
        started_at=now,
        tally=tally,
        open=left,
        quotas=quotas,
        num_settled=len(consumed),
        num_samples=int(saved["num_samples"]),
        num_retrained=int(saved["num_retrained"]),
        num_averagings=int(saved["num_averagings"]),
    )
    if same and saved["parts"] is not None:
        epoch.parts = {
            int(rank): tuple(range(*span) for span in spans)
            for rank, spans in saved["parts"].items()
        }
    if epoch.settled:
        epoch.told = set(range(world))  # nobody has anything to train in it
    return epoch


def metrics_state(metrics: EpochMetrics) -> dict[str, Any]:
    """Metrics as plain numbers, strings, lists and dictionaries."""
    return dataclasses.asdict(metrics)


def metrics_of(state: Mapping[str, Any]) -> EpochMetrics:
    """Metrics from what :func:`metrics_state` gave."""
    values = dict(state)
    values["per_rank"] = tuple(RankMetrics(**rank) for rank in state["per_rank"])
    for name in ("per_rank_throughput", "per_rank_batch_share", "devices"):
        values[name] = tuple(state[name])
    return EpochMetrics(**values)


# -- ranges of batches ---------------------------------------------------------------


def _order(spans: Iterable[range]) -> list[int]:
    return [batch for span in spans for batch in span]


def _pairs(batches: Iterable[int]) -> list[list[int]]:
    """Rising batches as ``[start, stop]`` of ranges."""
    return [[span.start, span.stop] for span in compress(batches)]


def _expand(pairs: Iterable[Sequence[int]]) -> list[int]:
    return [batch for start, stop in pairs for batch in range(start, stop)]


def _without(batches: Iterable[int], gone: Iterable[int]) -> list[int]:
    missing = set(gone)
    return [batch for batch in batches if batch not in missing]


def _spans(order: Sequence[int]) -> list[range]:
    """Batches in any order as rising ranges with steps."""
    spans: list[range] = []
    i = 0
    while i < len(order):
        step = order[i + 1] - order[i] if i + 1 < len(order) else 1
        if step < 1:
            step = 1
        j = i + 1
        while j < len(order) and order[j] - order[j - 1] == step:
            j += 1
        spans.append(range(order[i], order[j - 1] + 1, step))
        i = j
    return spans
