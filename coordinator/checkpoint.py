"""Checkpoints of the whole run: when one is due, and what goes into it.

A checkpoint is a cut through the run: each rank's own state between two steps, the
average that these steps are in, and the machine's state with exactly their batches
counted. Where replicas are averaged by rounds, the cut is a round, whose answers carry
the ranks' own states. Under ``SYNC`` all ranks answer at the same step, a single rank at
its next. What a rank tells after its part of the cut is not in it: the sums that a later
report would change are noted when the rank's part arrives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator import messages as m
from coordinator.config import AverageBackend
from coordinator.dispatch import BatchSet, compress, count_batches
from coordinator.messages import SAVE_ROUND, Average, Payload, SaveCheckpoint, SaveFailed
from coordinator.metrics import EpochMetrics, EpochTally, MachineMetrics, RankMetrics
from coordinator.pool import Epoch
from coordinator.state import Core, RankState

_TOTALS = ("num_batches", "num_samples", "compute_s", "sync_s", "num_throttles")


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank had told when its part of a checkpoint came.

    Attributes:
        sums: Its partial sums of each open epoch.
        totals: Its totals of the run.
        told: Under ``SYNC``, the micro-batches of the plan that it had told.
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
        "per_global": core.per_global,
        "saved_ranks": sorted(notes),
        "global_step": core.global_step - num_late,
        "num_windows": core.num_windows if step is None else step,
        "num_averagings": core.num_averagings - undone,
        "num_failed_rounds": core.num_failed_rounds,
        "next_epoch": core.pool.next_epoch,
        "elapsed_s": elapsed_s,
        "elche": core.elche.state_dict(),
        "guard": core.guard.state_dict(),
        "transport": core.choice.state_dict(),
        "ranks": totals,
        "epochs": epochs,
        "metrics": [metrics_state(metrics) for metrics in core.outcome.metrics],
    }


def _told_later(core: Core, notes: Mapping[int, Note]) -> dict[int, list[int]]:
    """Batches that ranks have told since their notes, all of them of the present plan."""
    plan = core.plan
    if plan is None:
        return {}
    late = {}
    for rank, spans in plan.parts.items():
        if rank in notes:
            first = plan.batches_behind(rank, notes[rank].told)
            late[rank] = _order(spans)[first : plan.num_told(rank)]
    return late


def _parts_left(core: Core, notes: Mapping[int, Note]) -> dict[int, list[list[int]]] | None:
    """What each rank has yet to train of the present plan, in order."""
    plan = core.plan
    if plan is None or plan.pieces or set(plan.parts) != set(notes):
        return None  # global batches that are cut belong to nobody
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
    known = [range(epoch.num_batches)] if epoch.granted is None else epoch.granted.spans
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
        "consumed": _pairs(b for span in known for b in span if b not in rest),
        "num_samples": epoch.num_samples,
        "num_retrained": epoch.num_retrained - _lost_since(core, epoch, notes, sums),
        "num_averagings": epoch.num_averagings,
        "divergence": epoch.divergence,
        "norm": epoch.norm,
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


Check = Callable[[Any, str], None]
"""Raises ``ValueError`` unless a value is as it must be; the second argument names its place."""


def refuse(where: str, value: object, wanted: str) -> None:
    """Raise the error that names a place, what stands there and what belongs there."""
    raise ValueError(f"{where} is {value!r:.80}, where {wanted} belongs")


_MOST = 2**62
_MOST_RANKS = 2**16


def whole(low: int = 0, high: int | None = None) -> Check:
    """A whole number from ``low`` to ``high``."""

    def check(value: Any, where: str) -> None:
        most = _MOST if high is None else high
        fits = type(value) is int and low <= value <= most
        if not fits:
            end = "up" if high is None else f"to {high}"
            refuse(where, value, f"a whole number from {low} {end}")

    return check


def real(low: float | None = None) -> Check:
    """A number; finite and from ``low`` up where a lowest one is given."""

    def check(value: Any, where: str) -> None:
        if type(value) not in (int, float):
            refuse(where, value, "a number")
        if low is not None and not (math.isfinite(value) and value >= low):
            refuse(where, value, f"a finite number from {low:g} up")

    return check


def of_type(kind: type) -> Check:
    """A value of exactly this type."""

    def check(value: Any, where: str) -> None:
        if type(value) is not kind:
            refuse(where, value, f"a value of type {kind.__name__}")

    return check


def one_of(*allowed: str) -> Check:
    """One of these texts."""

    def check(value: Any, where: str) -> None:
        if value not in allowed:
            refuse(where, value, f"one of {', '.join(allowed)}")

    return check


def either(check: Check) -> Check:
    """``None``, or what another check allows."""
    return lambda value, where: None if value is None else check(value, where)


def items(check: Check, length: int | None = None) -> Check:
    """A list or tuple, of that length where one is given."""

    def check_all(values: Any, where: str) -> None:
        if not isinstance(values, (list, tuple)):
            refuse(where, values, "a list")
        if length is not None and len(values) != length:
            raise ValueError(f"{where} has {len(values)} entries, where {length} belong")
        for i, value in enumerate(values):
            check(value, f"{where}[{i}]")

    return check_all


def mapping(key: Check, value: Check) -> Check:
    """A dictionary, each key and value of which is as it must be."""

    def check_all(values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            refuse(where, values, "a dictionary")
        for name, found in values.items():
            key(name, f"a key of {where}")
            value(found, f"{where}[{name!r}]")

    return check_all


def record(fields: Mapping[str, Check], *, may: Mapping[str, Check] | None = None) -> Check:
    """A dictionary with these fields, and perhaps some others.

    Args:
        fields: What must be there.
        may: What may be there. Fields that neither names are let alone.
    """

    def check_all(values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            refuse(where, values, "a dictionary")
        for name, check in fields.items():
            if name not in values:
                raise ValueError(f"{where} has no {name!r}")
            check(values[name], f"{where}[{name!r}]")
        for name, check in (may or {}).items():
            if name in values:
                check(values[name], f"{where}[{name!r}]")

    return check_all


_BACKEND = one_of(*(backend.value for backend in AverageBackend))
_TRANSPORT = record(
    {
        "candidates": items(_BACKEND),
        "chosen": _BACKEND,
        "decided": of_type(bool),
        "costs": mapping(_BACKEND, items(real(0.0), 3)),
        "anchor": whole(),
        "look_after": whole(1),
    }
)
_COUNTS = {"num_batches": whole(), "num_samples": whole(), "compute_s": real(0.0)}
_SUMS = record(
    {
        **_COUNTS,
        "num_skipped": whole(),
        "loss_sum": items(real()),
        "loss_samples": lambda v, w: _check_weight(v, w),
        "scalars": mapping(of_type(str), lambda v, w: _check_scalar(v, w)),
    },
    may={"learning_rate": real()},
)
_RANK_TOTALS = record({**_COUNTS, "sync_s": real(0.0), "num_throttles": whole()})
_RANK_METRICS = record({**_COUNTS, "rank": whole(), "avg_loss": real(), "throughput": real(0.0)})
_MACHINE_METRICS = record(
    {
        **_COUNTS,
        "machine": of_type(str),
        "num_ranks": whole(1),
        "avg_loss": real(),
        "throughput": real(0.0),
    }
)


def _check_scalar(value: Any, where: str) -> None:
    items(lambda _, __: None, 2)(value, where)
    items(real())(value[0], f"{where}[0]")
    _check_weight(value[1], f"{where}[1]")


def _check_weight(value: Any, where: str) -> None:
    """A sum of weights: a number, or the parts whose sum it is."""
    (items(real()) if isinstance(value, list) else real(0.0))(value, where)


def check_run(
    state: Any, *, num_samples: int, batch_size: int, drop_last: bool, num_rank_states: int
) -> None:
    """Refuse a state that :func:`capture_run` cannot have given.

    Args:
        state: What was read.
        num_samples: Length of the data set that it was written with.
        batch_size: Samples in a batch.
        drop_last: Whether an epoch's short batch was left out.
        num_rank_states: How many ranks' own states the checkpoint holds.

    Raises:
        ValueError: Names the first field that is missing, of another type or out of range, or
            that contradicts another one.
    """
    num_batches = count_batches(num_samples, batch_size, drop_last=drop_last)
    record({"world_size": whole(1)})(state, "run")
    world = state["world_size"]
    elche = {
        "anchor": whole(1),
        "floor": whole(1),
        "growth_held": of_type(bool),
        "seconds": items(real(0.0), world),
        "suspects": items(whole(-1), world),
    }
    record(
        {
            "global_step": whole(),
            "num_windows": whole(),
            "num_averagings": whole(),
            "num_failed_rounds": whole(),
            "next_epoch": whole(),
            "elapsed_s": real(0.0),
            "elche": record(elche),
            "guard": record({"row": items(real())}),
            "ranks": items(_RANK_TOTALS, world),
            "metrics": items(_metrics_check(num_samples)),
            "epochs": items(_epoch_check(world, num_samples, num_batches)),
        },
        may={
            "per_global": whole(1, _MOST_RANKS),
            "saved_ranks": items(whole(high=world - 1), num_rank_states),
            "transport": _TRANSPORT,
        },
    )(state, "run")
    if not 1 <= num_rank_states <= world:
        raise ValueError(f"it holds the states of {num_rank_states} ranks of {world}")
    closed, next_epoch = len(state["metrics"]), state["next_epoch"]
    for number, metrics in enumerate(state["metrics"]):
        if metrics["epoch"] != number:
            refuse(f"run['metrics'][{number}]['epoch']", metrics["epoch"], str(number))
    opened = [epoch["epoch"] for epoch in state["epochs"]]
    if opened != [closed + i for i in range(len(opened))] or closed + len(opened) != next_epoch:
        raise ValueError(
            f"run['epochs'] are {opened}, where all from {closed}, the number of closed ones, to "
            f"run['next_epoch'] = {next_epoch} belong"
        )
    if state["global_step"] > num_batches * next_epoch:
        most = num_batches * next_epoch
        refuse("run['global_step']", state["global_step"], f"at most {most}")


def _metrics_check(num_samples: int) -> Check:
    fields = {
        "epoch": whole(),
        "avg_loss": real(),
        "scalars": mapping(of_type(str), real()),
        "per_rank": items(_RANK_METRICS),
        "epoch_s": real(0.0),
        "num_samples": whole(high=num_samples),
        "num_retrained": whole(),
        "num_skipped": whole(),
        "num_averagings": whole(),
        "per_rank_throughput": items(real(0.0)),
        "per_rank_batch_share": items(real(0.0)),
        "devices": items(of_type(str)),
    }
    may = {
        "divergence": real(),
        "param_norm": real(),
        "learning_rate": real(),
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
    batch = whole(high=num_batches)
    fields = {
        "epoch": whole(),
        "epoch_s": either(real(0.0)),
        "consumed": items(items(batch, 2)),
        "num_samples": whole(high=num_samples),
        "num_retrained": whole(),
        "num_averagings": whole(),
        "tally": record({"ranks": items(_SUMS, world)}),
        "quotas": either(items(whole(), world)),
        "parts": either(mapping(whole(high=world - 1), items(items(batch, 3)))),
    }

    def check(value: Any, where: str) -> None:
        record(fields, may={"divergence": either(real()), "norm": either(real())})(value, where)
        end = 0
        for i, (start, stop) in enumerate(value["consumed"]):
            if not end <= start < stop:
                refuse(f"{where}['consumed'][{i}]", [start, stop], "a range behind the last one")
            end = stop
        taken = set(_expand(value["consumed"]))
        for rank, spans in (value["parts"] or {}).items():
            if not all(step >= 1 for _, _, step in spans):
                refuse(f"{where}['parts'][{rank}]", spans, "ranges with steps of 1 or more")
            for b in _order(range(*span) for span in spans):
                if b in taken:
                    raise ValueError(f"{where}['parts'][{rank}] holds batch {b}, which is taken")
                taken.add(b)

    return check


def restore_run(core: Core, state: Mapping[str, Any]) -> None:
    """Make a new machine go on from what :func:`capture_run` gave.

    At the same world size every rank keeps its share of an epoch; at another one what is
    open is dealt anew, under ``SYNC`` in global batches of the same size.

    Args:
        core: A machine's state, in which nothing has happened yet.
        state: What was captured.
    """
    core.global_step = int(state["global_step"])
    if core.steps is not None:
        core.steps.step = core.position
    core.per_global = int(state.get("per_global", state["world_size"]))
    core.num_windows = int(state["num_windows"])
    core.num_averagings = int(state["num_averagings"])
    core.num_failed_rounds = int(state["num_failed_rounds"])
    core.elche.load_state_dict(state["elche"])
    core.guard.load_state_dict(state["guard"])
    if "transport" in state and state["world_size"] == len(core.ranks):
        core.choice.load_state_dict(state["transport"])
    for rank, totals in enumerate(state["ranks"]):
        info = core.ranks[rank % len(core.ranks)]
        for name in _TOTALS:
            setattr(info, name, getattr(info, name) + totals[name])
    core.outcome.metrics = [metrics_of(saved) for saved in state["metrics"]]
    # Some may have been opened ahead of which nothing is trained, and that are too many now.
    last = core.config.num_epochs
    core.pool.resume(
        [_epoch_of(core, saved) for saved in state["epochs"] if saved["epoch"] < last],
        next_epoch=min(int(state["next_epoch"]), last),
        num_spent=core.global_step,
    )


def _epoch_of(core: Core, saved: Mapping[str, Any]) -> Epoch:
    total = core.pool.batches_per_epoch
    consumed = set(_expand(saved["consumed"]))
    left = BatchSet(compress(b for b in range(total) if b not in consumed))
    world = len(core.ranks)
    same = len(saved["tally"]["ranks"]) == world
    tally = EpochTally(world)
    tally.load_state_dict(saved["tally"])
    if core.config.granted:
        left = BatchSet()  # what this machine may train of it, it is granted
    quotas = core.pool.quotas(len(left), core.elche.shares)
    if same and quotas is not None and saved["quotas"] is not None:
        quotas = [int(q) for q in saved["quotas"]] if sum(saved["quotas"]) == len(left) else quotas
    epoch = Epoch(
        epoch=int(saved["epoch"]),
        num_batches=total,
        tally=tally,
        open=left,
        quotas=quotas,
        num_settled=0 if core.config.granted else len(consumed),
        num_elsewhere=len(consumed) if core.config.granted else 0,
        granted=BatchSet() if core.config.granted else None,
        complete=not core.config.granted,
        num_samples=int(saved["num_samples"]),
        num_retrained=int(saved["num_retrained"]),
        num_averagings=int(saved["num_averagings"]),
        divergence=saved.get("divergence"),
        norm=saved.get("norm"),
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
    values["machines"] = tuple(MachineMetrics(**found) for found in state.get("machines", ()))
    for name in ("per_rank_throughput", "per_rank_batch_share", "devices"):
        values[name] = tuple(state[name])
    return EpochMetrics(**values)


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


@dataclass(slots=True)
class ConsistentCut:
    """A checkpoint in the making; ``run`` is set once every rank's part is there."""

    id: int
    ranks: tuple[int, ...]
    scheduled: bool
    within: bool
    num_periods: int
    began_at: float
    began_step: int
    tickets: tuple[int, ...]
    notes: dict[int, Note] = field(default_factory=dict)
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    parts: dict[int, m.Captured] = field(default_factory=dict)
    lead_payload: Payload | None = None
    step: int | None = None
    run: dict[str, Any] | None = None
    error: Exception | None = None
    epoch: int = 0
    global_step: int = 0


class UnpublishedEpochs(Protocol):
    """What a checkpoint holds of the epochs; see :class:`~coordinator.epochs.Epochs`."""

    @property
    def elapsed_s(self) -> float:
        """Time since the last epoch closed."""

    def closing(self) -> list[tuple[Epoch, float]]:
        """Epochs that wait to be published, and how long they took."""

    def all_open(self) -> list[Epoch]:
        """Every epoch that is not published."""


class CheckpointRounds:
    """Makes cuts and turns each into one :class:`~coordinator.messages.SaveCheckpoint`."""

    def __init__(self, core: Core, epochs: UnpublishedEpochs) -> None:
        self._core = core
        self._epochs = epochs
        self._tickets: list[int] = []
        self._cut: ConsistentCut | None = None
        self._num_cuts = 0
        self._periods_saved = self._periods
        self._saved_at: float | None = None
        self._saved_step = 0
        self._reserve_s = 0.0

    @property
    def _periods(self) -> int:
        every = self._core.config.save_every
        return 0 if every is None else len(self._core.outcome.metrics) // every

    @property
    def _due_within(self) -> bool:
        """Whether the time or the batches between two saves within an epoch are over."""
        c, core = self._core.config, self._core
        oldest = core.pool.oldest
        if self._saved_at is None or oldest is None or core.pool.fully_trained(oldest):
            return False  # the end of an epoch is near
        if c.save_every_s is not None and core.now - self._saved_at >= c.save_every_s:
            return True
        every = c.save_every_steps
        return every is not None and core.num_trained - self._saved_step >= every

    @property
    def due(self) -> bool:
        """Whether a cut is to be made at the next opportunity."""
        return self._cut is None and (
            self._periods > self._periods_saved or bool(self._tickets) or self._due_within
        )

    def begin(self, now: float) -> None:
        """Training begins: the time and the batches until the next save count from here."""
        self._saved_at, self._saved_step = now, self._core.num_trained

    @property
    def asking(self) -> bool:
        """Whether the ranks are on their way to a cut."""
        return self._cut is not None and self._cut.run is None

    @property
    def wanted_at_end(self) -> bool:
        """Whether the last states of the ranks shall make a checkpoint."""
        config = self._core.config
        return config.save_every is not None or config.granted or bool(self._tickets)

    def resumed(self) -> None:
        """The machine goes on from a checkpoint: its periods are saved."""
        self._periods_saved = self._periods

    def request(self, ticket: int) -> None:
        """Somebody asked for a checkpoint."""
        self._tickets.append(ticket)

    def request_share(self, reserve_s: float) -> None:
        """The cluster asks for this machine's part of a round."""
        self._reserve_s = reserve_s
        self.request(m.CLUSTER_TICKET)

    @property
    def _reserve(self) -> int:
        """Batches that all ranks together train in the time that was asked for, and two more
        for each, so that none waits for the next grant."""
        seconds = self._core.elche.seconds_per_batch or ()
        live = [rank.rank for rank in self._core.live]
        speed = sum(1 / seconds[rank] for rank in live if seconds and seconds[rank] > 0)
        return math.ceil(speed * self._reserve_s) + 2 * len(live)

    def cancel(self) -> None:
        """The cut in the making is void; what it was made for stays due."""
        self._cut = None

    def _begin(self, ranks: Sequence[int]) -> ConsistentCut:
        self._num_cuts += 1
        closes = self._periods > self._periods_saved
        self._cut = ConsistentCut(
            id=self._num_cuts,
            ranks=tuple(ranks),
            scheduled=closes or self._due_within,
            within=not closes,
            num_periods=self._periods,
            began_at=self._core.now,
            began_step=self._core.num_trained,
            tickets=tuple(self._tickets),
        )
        return self._cut

    def begin_round(self, ranks: Sequence[int]) -> None:
        """A round begins whose answers carry the ranks' own states."""
        self._begin(ranks)

    def note(self, rank: int, extra: m.Extra | None, payload: Payload | None = None) -> None:
        """A rank's part has come, with everything told that is in it.

        Args:
            rank: The rank.
            extra: Its own state.
            payload: The average, if this rank is the one that sends it.
        """
        cut = self._cut
        if cut is None or extra is None:
            return
        cut.notes[rank] = Note.of(self._core, self._epochs.all_open(), rank)
        if isinstance(extra, Exception):
            cut.error = extra
        else:
            cut.extras[rank] = extra
        if payload is not None:
            cut.lead_payload = payload

    def commit(self, payload: Payload | None) -> None:
        """The round has settled what is in it.

        Args:
            payload: A copy of the average; ``None``: the lead has sent it.
        """
        cut = self._cut
        if cut is None:
            return
        self._freeze(cut)
        self._emit(cut, cut.lead_payload if payload is None else payload)
        self._cut = None

    def ask(self) -> None:
        """Have every rank send its state, at the same step."""
        ranks = [rank.rank for rank in self._core.live]
        cut = self._begin(ranks)
        for rank in ranks:
            self._core.send(rank, m.TakeCheckpoint(id=cut.id))

    def on_captured(self, event: m.Captured) -> None:
        """A rank has sent its state; its report was taken in before."""
        cut = self._cut
        if cut is None or event.id != cut.id or event.rank not in cut.ranks:
            return
        self.note(event.rank, event.extra)
        cut.parts[event.rank] = event
        if len(cut.parts) < len(cut.ranks):
            return
        cut.step = event.step
        assert len({part.step for part in cut.parts.values()}) == 1, "ranks captured other steps"
        self._freeze(cut)
        parts = [cut.parts[rank] for rank in cut.ranks]
        weights = tuple(part.num_samples for part in parts)
        lead = parts[0].payload
        if len(parts) == 1 or not any(weights) or not (lead.buffers or lead.taken):
            self._emit(cut, lead)
            self._cut = None
            return
        # The replicas' parameters are the same; their buffers are not.
        buffers = [
            Payload(params=(), buffers=part.payload.buffers, taken=part.payload.taken)
            for part in parts
        ]
        self._core.out.append(
            Average(
                round=SAVE_ROUND,
                ranks=cut.ranks,
                payloads=tuple(buffers),
                weights=weights,
                keep=True,
            )
        )

    def on_averaged(self, event: m.Averaged) -> None:
        """The average of the buffers is there, or could not be computed."""
        cut = self._cut
        if cut is not None and cut.run is not None:
            kept, lead = event.kept, cut.parts[cut.ranks[0]].payload
            whole = None
            if kept is not None:
                whole = Payload(params=lead.params, buffers=kept.buffers, taken=kept.taken)
            self._emit(cut, whole)
        self._cut = None

    def freeze_end(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """All ranks have left, and the result is made of these states."""
        self._cut = None
        core = self._core
        if not finals or any(final.extra is None for final in finals):
            return
        if core.config.granted and m.CLUSTER_TICKET not in self._tickets:
            self._tickets.append(m.CLUSTER_TICKET)  # the cluster wants to know what was trained
        used = {final.rank for final in finals}
        cut = self._begin(sorted(used))
        cut.scheduled = core.config.save_every is not None
        for rank in core.ranks:
            if rank.rank in used:
                core.pool.freeze(rank.rank)
                num_batches = core.pool.settle(rank.rank)
                if not (core.alone or core.lockstep):
                    core.global_step += num_batches
            elif not core.lockstep:
                core.pool.take_back(rank.rank, core.elche.shares)
        for final in finals:
            self.note(final.rank, final.extra)
        cut.step = finals[0].step if core.lockstep else None
        self._freeze(cut)

    def emit_end(self, payload: Payload | None) -> None:
        """The result is there."""
        cut = self._cut
        if cut is not None and cut.run is not None and payload is not None:
            self._emit(cut, payload, final=True)
        self._cut = None

    def _freeze(self, cut: ConsistentCut) -> None:
        """The machine's state at the cut; nothing that comes later shows in it."""
        core = self._core
        cut.run = capture_run(
            core, self._epochs.closing(), self._epochs.elapsed_s, cut.notes, cut.step
        )
        cut.epoch = len(core.outcome.metrics)
        cut.global_step = cut.run["global_step"]

    def _emit(self, cut: ConsistentCut, payload: Payload | None, *, final: bool = False) -> None:
        assert cut.run is not None
        self._tickets = [t for t in self._tickets if t not in cut.tickets]
        self._periods_saved = cut.num_periods
        self._saved_at, self._saved_step = cut.began_at, cut.began_step
        returned: tuple[tuple[int, tuple[range, ...]], ...] = ()
        if m.CLUSTER_TICKET in cut.tickets:
            returned = self._core.pool.give_back(self._reserve, self._core.elche.shares)
        if cut.error is not None or payload is None:
            error = cut.error or RuntimeError("there was no memory for a copy of the average")
            self._core.out.append(SaveFailed(error=error, tickets=cut.tickets))
            return
        self._core.out.append(
            SaveCheckpoint(
                payload=payload,
                ranks=tuple(cut.extras[rank] for rank in sorted(cut.extras)),
                run=cut.run,
                epoch=cut.epoch,
                global_step=cut.global_step,
                scheduled=cut.scheduled,
                tickets=cut.tickets,
                within=cut.within and not final,
                final=final,
                returned=returned,
            )
        )
