"""The coordinator's part of a checkpoint: capture, check, restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.config import AverageBackend
from coordinator.ledger import Epoch
from coordinator.metrics import (
    EpochAccumulator,
    EpochMetrics,
    MachineMetrics,
    RankMetrics,
    Sums,
    metrics_from_state,
    metrics_state,
)
from coordinator.run_state import RankState, RunState
from coordinator.schema import (
    Check,
    entries,
    fail,
    integer,
    items,
    mapping,
    number,
    of_type,
    one_of,
    optional,
    record,
)
from coordinator.splitting import BatchSet, count_batches

_TOTALS = ("num_batches", "num_samples", "compute_s", "sync_s", "num_throttles")


@dataclass(frozen=True, slots=True)
class RankCut:
    """A rank's reported totals at its cut of a checkpoint.

    Attributes:
        sums: Its sums of each open epoch.
    """

    sums: dict[int, Sums]
    totals: dict[str, Any]

    @classmethod
    def of(cls, run: RunState, epochs: Iterable[Epoch], rank: int) -> RankCut:
        """The cut of a rank at present."""
        info = run.ranks[rank]
        return cls(
            {epoch.epoch: epoch.stats.ranks[rank] for epoch in epochs},
            {name: getattr(info, name) for name in _TOTALS},
        )


def capture_run(
    run: RunState,
    closing: Sequence[tuple[Epoch, float]],
    elapsed_s: float,
    cuts: Mapping[int, RankCut],
) -> dict[str, Any]:
    """The coordinator's state, with settled batches as consumed and all others as open.

    Args:
        closing: Closed epochs that are not published, and their durations.
        elapsed_s: Time since the last epoch closed.
        cuts: The cut of each surviving rank.

    Returns:
        Numbers, strings, ``None``, lists and dictionaries.
    """
    totals = [
        cuts[r.rank].totals if r.rank in cuts else {n: getattr(r, n) for n in _TOTALS}
        for r in run.ranks
    ]
    epochs = [_epoch_state(run, epoch, cuts, epoch_s=s) for epoch, s in closing]
    epochs += [_epoch_state(run, epoch, cuts) for epoch in run.ledger.epochs]
    return {
        "world_size": len(run.ranks),
        "per_global": run.per_global,
        "saved_ranks": sorted(cuts),
        "global_step": run.global_step,
        "num_windows": run.ledger.queue.num_steps,
        "num_averagings": run.num_averagings,
        "num_failed_rounds": run.num_failed_rounds,
        "next_epoch": run.ledger.next_epoch,
        "elapsed_s": elapsed_s,
        "elche": run.elche.state_dict(),
        "data_waits": run.data_waits.state_dict(),
        "guard": run.guard.state_dict(),
        "transport": run.backend_choice.state_dict(),
        "ranks": totals,
        "epochs": epochs,
        "metrics": [metrics_state(metrics) for metrics in run.outcome.metrics],
    }


def _epoch_state(
    run: RunState, epoch: Epoch, cuts: Mapping[int, RankCut], *, epoch_s: float | None = None
) -> dict[str, Any]:
    available = [range(epoch.num_batches)] if epoch.granted is None else epoch.granted.spans
    consumed = BatchSet(available)
    consumed.remove((*epoch.open.spans, *run.ledger.unsettled(epoch)))
    sums = [
        cuts[rank].sums.get(epoch.epoch, Sums()) if rank in cuts else now
        for rank, now in enumerate(epoch.stats.ranks)
    ]
    quotas = epoch.quotas
    if quotas is not None:
        held = [ledger.of_epoch(epoch.epoch) for ledger in run.ledger.by_rank]
        quotas = [n + sum(map(len, spans)) for n, spans in zip(quotas, held, strict=True)]
    return {
        "epoch": epoch.epoch,
        "epoch_s": epoch_s,
        "consumed": _pairs(consumed),
        "num_samples": epoch.num_samples,
        "num_retrained": epoch.num_retrained - _lost_since(run, epoch, cuts, sums),
        "num_averagings": epoch.num_averagings,
        "divergence": epoch.divergence,
        "norm": epoch.norm,
        "tally": {"ranks": [each.state_dict() for each in sums]},
        "quotas": quotas,
    }


def _lost_since(
    run: RunState, epoch: Epoch, cuts: Mapping[int, RankCut], sums: Sequence[Sums]
) -> int:
    """Samples trained after the cut by ranks that died since."""
    died = [rank for rank in cuts if run.ranks[rank].state is RankState.DEAD]
    return sum(epoch.stats.ranks[rank].num_samples - sums[rank].num_samples for rank in died)


_MOST_RANKS = 2**16
_BACKEND = one_of(*(backend.value for backend in AverageBackend))
_TRANSPORT = record(
    {
        "candidates": items(_BACKEND),
        "chosen": _BACKEND,
        "decided": of_type(bool),
        "costs": mapping(_BACKEND, items(number(0.0), 3)),
        "anchor": integer(),
    }
)


def _check_weight(value: Any, where: str) -> None:
    """A sum of weights: a number, or a list of its parts."""
    (items(number()) if isinstance(value, list) else number(0.0))(value, where)


_COUNTS = {"num_batches": integer(), "num_samples": integer(), "compute_s": number(0.0)}
_SUMS = record(
    {
        **_COUNTS,
        "num_skipped": integer(),
        "loss_sum": items(number()),
        "loss_samples": _check_weight,
        "scalars": mapping(of_type(str), entries(items(number()), _check_weight)),
    },
    may={"learning_rate": number()},
)
_RANK_TOTALS = record({**_COUNTS, "sync_s": number(0.0), "num_throttles": integer()})
_RANK_METRICS = record(
    {**_COUNTS, "rank": integer(), "avg_loss": number(), "throughput": number(0.0)}
)
_MACHINE_METRICS = record(
    {
        **_COUNTS,
        "machine": of_type(str),
        "num_ranks": integer(1),
        "avg_loss": number(),
        "throughput": number(0.0),
    }
)


def check_run(
    state: Any, *, num_samples: int, batch_size: int, drop_last: bool, num_rank_states: int
) -> None:
    """Validate a state of :func:`capture_run`.

    Args:
        num_samples: Length of the data set of the checkpoint.

    Raises:
        ValueError: A field is missing, of the wrong type, out of range or contradicts another
            one; names the first such field.
    """
    num_batches = count_batches(num_samples, batch_size, drop_last=drop_last)
    record({"world_size": integer(1)})(state, "run")
    world = state["world_size"]
    elche = {
        "anchor": integer(1),
        "floor": integer(1),
        "growth_held": of_type(bool),
        "seconds": items(number(0.0), world),
        "suspects": items(integer(-1), world),
    }
    record(
        {
            "global_step": integer(),
            "num_windows": integer(),
            "num_averagings": integer(),
            "num_failed_rounds": integer(),
            "next_epoch": integer(),
            "elapsed_s": number(0.0),
            "elche": record(elche),
            "guard": record({"row": items(number())}, may={"rates": items(number(0.0))}),
            "ranks": items(_RANK_TOTALS, world),
            "metrics": items(_metrics_check(num_samples)),
            "epochs": items(_epoch_check(world, num_samples, num_batches)),
        },
        may={
            "per_global": integer(1, _MOST_RANKS),
            "saved_ranks": items(integer(high=world - 1), num_rank_states),
            "transport": _TRANSPORT,
            "data_waits": items(items(number(0.0)), world),
        },
    )(state, "run")
    if not 1 <= num_rank_states <= world:
        raise ValueError(f"it holds the states of {num_rank_states} ranks of {world}")
    closed, next_epoch = len(state["metrics"]), state["next_epoch"]
    for epoch, metrics in enumerate(state["metrics"]):
        if metrics["epoch"] != epoch:
            fail(f"run['metrics'][{epoch}]['epoch']", metrics["epoch"], str(epoch))
    opened = [epoch["epoch"] for epoch in state["epochs"]]
    if opened != [closed + i for i in range(len(opened))] or closed + len(opened) != next_epoch:
        raise ValueError(
            f"run['epochs'] are {opened}, expected all from {closed}, the number of closed, to "
            f"run['next_epoch'] = {next_epoch}"
        )
    if state["global_step"] > num_batches * next_epoch:
        most = num_batches * next_epoch
        fail("run['global_step']", state["global_step"], f"at most {most}")


def _metrics_check(num_samples: int) -> Check:
    fields = {
        "epoch": integer(),
        "avg_loss": number(),
        "scalars": mapping(of_type(str), number()),
        "per_rank": items(_RANK_METRICS),
        "epoch_s": number(0.0),
        "num_samples": integer(high=num_samples),
        "num_retrained": integer(),
        "num_skipped": integer(),
        "num_averagings": integer(),
        "per_rank_throughput": items(number(0.0)),
        "per_rank_batch_share": items(number(0.0)),
        "devices": items(of_type(str)),
    }
    may = {
        "divergence": number(),
        "param_norm": number(),
        "learning_rate": number(),
        "lr_factor": number(0.0),
        "machines": items(_MACHINE_METRICS),
        "partial": of_type(bool),
    }

    def check(value: Any, where: str) -> None:
        record(fields, may=may)(value, where)
        _only_fields(EpochMetrics, value, where)
        for i, rank in enumerate(value["per_rank"]):
            _only_fields(RankMetrics, rank, f"{where}['per_rank'][{i}]")
        for i, machine in enumerate(value.get("machines", ())):
            _only_fields(MachineMetrics, machine, f"{where}['machines'][{i}]")

    return check


def _only_fields(kind: type, value: Mapping[str, Any], where: str) -> None:
    unknown = set(value) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{where} has {sorted(map(str, unknown))}, which {kind.__name__} has not")


def _epoch_check(world: int, num_samples: int, num_batches: int) -> Check:
    batch = integer(high=num_batches)
    fields = {
        "epoch": integer(),
        "epoch_s": optional(number(0.0)),
        "consumed": items(items(batch, 2)),
        "num_samples": integer(high=num_samples),
        "num_retrained": integer(),
        "num_averagings": integer(),
        "tally": record({"ranks": items(_SUMS, world)}),
        "quotas": optional(items(integer(), world)),
    }

    def check(value: Any, where: str) -> None:
        record(fields, may={"divergence": optional(number()), "norm": optional(number())})(
            value, where
        )
        end = 0
        for i, (start, stop) in enumerate(value["consumed"]):
            if not end <= start < stop:
                fail(f"{where}['consumed'][{i}]", [start, stop], "a range after the last one")
            end = stop

    return check


def restore_run(run: RunState, state: Mapping[str, Any]) -> None:
    """Restore a state of :func:`capture_run` into a new coordinator.

    Open batches are assigned again, under ``SYNC`` in global batches of the same size. Fixed shares
    of an epoch are kept at the same world size.

    Args:
        run: The state of a coordinator that has not started.
        state: The captured state.
    """
    run.load_counters(state)
    if run.steps is not None:
        run.steps.step = run.position
    run.elche.load_state_dict(state["elche"])
    run.data_waits.load_state_dict(state.get("data_waits", ()))
    run.guard.load_state_dict(state["guard"])
    if "transport" in state and state["world_size"] == len(run.ranks):
        run.backend_choice.load_state_dict(state["transport"])
    for rank, totals in enumerate(state["ranks"]):
        info = run.ranks[rank % len(run.ranks)]
        for name in _TOTALS:
            setattr(info, name, getattr(info, name) + totals[name])
    run.outcome.restore(metrics_from_state(saved) for saved in state["metrics"])
    # Epochs opened ahead may exceed a smaller num_epochs.
    last = run.config.num_epochs
    run.ledger.restore(
        [_epoch_of(run, saved) for saved in state["epochs"] if saved["epoch"] < last],
        next_epoch=min(int(state["next_epoch"]), last),
        num_spent=run.global_step,
    )


def _epoch_of(run: RunState, saved: Mapping[str, Any]) -> Epoch:
    total = run.ledger.batches_per_epoch
    consumed = _ranges(saved["consumed"])
    num_consumed = sum(map(len, consumed))
    left = BatchSet([range(total)])
    left.remove(consumed)
    world = len(run.ranks)
    same = len(saved["tally"]["ranks"]) == world
    stats = EpochAccumulator(world)
    stats.load_state_dict(saved["tally"])
    if run.config.granted:
        left = BatchSet()  # all its batches are granted
    quotas = run.ledger.quotas(len(left), run.elche.shares)
    if same and quotas is not None and saved["quotas"] is not None:
        quotas = [int(q) for q in saved["quotas"]] if sum(saved["quotas"]) == len(left) else quotas
    epoch = Epoch(
        epoch=int(saved["epoch"]),
        num_batches=total,
        stats=stats,
        open=left,
        quotas=quotas,
        num_settled=0 if run.config.granted else num_consumed,
        num_elsewhere=num_consumed if run.config.granted else 0,
        granted=BatchSet() if run.config.granted else None,
        complete=not run.config.granted,
        num_samples=int(saved["num_samples"]),
        num_retrained=int(saved["num_retrained"]),
        num_averagings=int(saved["num_averagings"]),
        divergence=saved.get("divergence"),
        norm=saved.get("norm"),
    )
    if epoch.settled:
        epoch.notified = set(range(world))  # no batch of it is left
    return epoch


def _pairs(batches: BatchSet) -> list[list[int]]:
    return [[span.start, span.stop] for span in batches.spans]


def _ranges(pairs: Iterable[Sequence[int]]) -> list[range]:
    return [range(*pair) for pair in pairs]
