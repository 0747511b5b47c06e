"""When a run last got anywhere, and when it has been too long ago."""

from __future__ import annotations

import dataclasses
from collections import deque
from enum import Enum
from typing import Any

from coordinator import messages as m
from coordinator.commands import ReportStall
from coordinator.ending import Ending
from coordinator.errors import RunStalled
from coordinator.outcome import Failure, Phase
from coordinator.round_keeper import RoundKeeper
from coordinator.state import Core


class ProgressWatch:
    """Ends a run that stands still, whatever the cause.

    Progress is: a rank became ready, trained, evaluated, handed a checkpoint over or left;
    a round was completed; an epoch was published. Rounds that fail, limits and requests are
    none, or ranks that wait for each other would look busy.
    """

    def __init__(self, core: Core, rounds: RoundKeeper, ending: Ending) -> None:
        self._core = core
        self._rounds = rounds
        self._ending = ending
        self._last: float | None = None
        self._seen = (0, 0)

    def restart(self, now: float) -> None:
        """Count from here."""
        self._last = now

    @property
    def deadline(self) -> float | None:
        """When the run is given up if there is no progress until then."""
        if self._last is None or self._core.phase in (Phase.FAILING, Phase.DONE):
            return None
        return self._last + self._core.config.stall_timeout_s

    def look(self, event: m.Event, now: float) -> None:
        """An event was handled: see whether it brought the run on."""
        rnd = self._rounds.round
        completed = self._seen[0] if rnd.in_flight or rnd.num_failed else rnd.id
        seen = (completed, len(self._core.outcome.metrics))
        if self._last is None or seen != self._seen or _is_progress(event):
            self._seen = seen
            self._last = now

    def fail_if_due(self, now: float) -> None:
        """End the run if it has stood still for too long."""
        if self.deadline is None or now < self.deadline:
            return
        timeout_s, core = self._core.config.stall_timeout_s, self._core
        error = RunStalled(
            f"the run made no progress for {timeout_s:g} s (phase {core.phase.value}); raise "
            "stall_timeout if a step, an evaluation, a checkpoint or the building of a model "
            "takes that long; .report tells what every thread was doing"
        )
        # The first command: what follows wakes the threads that it is to show.
        core.out.append(ReportStall(error=error, state=describe(core, self._rounds)))
        self._ending.fail(Failure(error=error), now)


def _is_progress(event: m.Event) -> bool:
    match event:
        case m.BatchReport() | m.EpochReport():
            return event.tally.num_batches > 0
        case m.ParamSnapshot() | m.SyncAck() | m.Captured() | m.Halted():
            return event.report is not None and event.report.tally.num_batches > 0
        case m.Ready() | m.EvalReport() | m.CheckpointDone():
            return True
        case m.Exiting() | m.Failed() | m.ThreadEnded():
            return True
        case _:
            return False


def describe(core: Core, rounds: RoundKeeper) -> str:
    """The machine's state in words, for a report: phase, round, ranks and pool."""
    lines = [
        f"phase {core.phase.value}, policy {core.config.policy.name} over "
        f"{core.config.backend.name}, global step {core.global_step}, "
        f"{core.num_averagings} averagings, {core.num_failed_rounds} rounds given up",
        f"round: {_fields(rounds.round)}",
    ]
    lines += [f"rank {rank.rank}: {_fields(rank)}" for rank in core.ranks]
    if not core.pool.epochs:
        lines.append("pool: no epoch is open")
    for epoch in core.pool.epochs:
        lines.append(f"pool: epoch {epoch.epoch}, {len(epoch.open)} batches open, {_fields(epoch)}")
    for rank, ledger in enumerate(core.pool.ledgers):
        assigned, trained, in_round = (
            sum(len(span) for _, span in spans)
            for spans in (ledger.assigned, ledger.trained, ledger.in_round)
        )
        lines.append(
            f"pool: rank {rank} holds {assigned} batches assigned, {trained} trained, "
            f"{in_round} in the round"
        )
    return "\n".join(lines)


def _fields(record: Any) -> str:
    """A record's plain values; of a collection its keys or its length, never a tensor."""
    fields = dataclasses.fields(record)
    return ", ".join(f"{field.name}={_brief(getattr(record, field.name))}" for field in fields)


def _brief(value: object) -> str:
    match value:
        case Enum():
            return str(value.value)
        case None | bool() | int() | float() | str():
            return str(value)
        case tuple() | set() if all(isinstance(item, int) for item in value):
            return str(sorted(value))
        case dict():
            return str(sorted(value))
        case deque() | list() | tuple() | set():
            return f"{len(value)} items"
        case _:
            return type(value).__name__
