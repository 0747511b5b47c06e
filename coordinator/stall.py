"""Detection of a run without progress, and its report: state, last messages, stacks."""

from __future__ import annotations

import dataclasses
import faulthandler
import tempfile
import threading
from collections import defaultdict, deque
from enum import Enum
from typing import Any, assert_never

from coordinator import messages as m
from coordinator.messages import ReportStall
from coordinator.rounds import Round, RoundRunner
from coordinator.run_errors import RunStalled
from coordinator.run_state import Phase, RunState

NUM_KEPT = 8
"""Messages kept for each rank and direction."""


class StallDetector:
    """Detects a run without progress for ``stall_timeout``, whatever the cause.

    Progress means: a rank became ready, trained, evaluated, completed a checkpoint call or left;
    a round completed; an epoch was published. Failed rounds, limits and requests do not count, or
    ranks that wait for each other would look busy.
    """

    def __init__(self, run: RunState, rounds: RoundRunner) -> None:
        self._run = run
        self._rounds = rounds
        self._last: float | None = None
        self._seen = (0, 0)

    def restart(self, now: float) -> None:
        self._last = now

    @property
    def deadline(self) -> float | None:
        """Time at which the run fails unless it makes progress; ``None``: never."""
        run = self._run
        if self._last is None or run.phase in (Phase.FAILING, Phase.DONE):
            return None
        if (
            run.config.granted
            and run.phase is Phase.RUNNING
            and run.ledger.is_idle(in_order=run.lockstep)
        ):
            return None  # waiting for other machines
        return self._last + self._run.config.stall_timeout_s

    def observe(self, event: m.Event, now: float) -> None:
        """Restart the timer if a handled event made progress."""
        rnd = self._rounds.round
        completed = self._seen[0] if rnd.in_flight or rnd.num_failed else rnd.id
        seen = (completed, len(self._run.outcome.metrics))
        if self._last is None or seen != self._seen or _is_progress(event):
            self._seen = seen
            self._last = now

    def check(self, now: float) -> RunStalled | None:
        """The error to end the run with, if it has made no progress for ``stall_timeout``."""
        if self.deadline is None or now < self.deadline:
            return None
        timeout_s, run = self._run.config.stall_timeout_s, self._run
        error = RunStalled(
            f"the run made no progress for {timeout_s:g} s (phase {run.phase.value}); raise "
            "stall_timeout if a step, an evaluation, a checkpoint or the building of a model "
            "takes that long; .report holds the stack of every thread"
        )
        # Reported before the commands of a failure wake the threads.
        run.emit(ReportStall(error=error, state=describe(run, self._rounds.round)))
        return error


def _is_progress(event: m.Event) -> bool:
    match event:
        case m.BatchReport():
            return event.stats.num_batches > 0
        case m.EpochReport():
            return event.stats.num_batches > 0 or event.open_epoch is not None
        case m.ParamSnapshot() | m.SyncAck() | m.CapturedState() | m.Halted():
            return event.report is not None and event.report.stats.num_batches > 0
        case m.Ready() | m.TaskDone() | m.Evaluating():
            return True
        case m.Exiting() | m.Failed() | m.ThreadEnded():
            return True
        case m.ClusterRoundDone():
            return True
        case m.FinalSnapshot() | m.EvaluationRequested() | m.Regrouped() | m.ConnectFailed():
            return False
        case m.Averaged() | m.StopRequested() | m.SaveRequested() | m.AbortRequested() | m.Tick():
            return False
        case m.ClusterCheckpointRequested():
            return False
        case _:
            assert_never(event)


def describe(run: RunState, round: Round) -> str:
    """The coordinator's state as text: phase, round, ranks and ledger."""
    lines = [
        f"phase {run.phase.value}, policy {run.config.policy.name} over "
        f"{run.backend_choice.chosen.name}, global step {run.global_step}, "
        f"{run.num_averagings} averagings, {run.num_failed_rounds} rounds given up",
        f"round: {_fields(round)}",
    ]
    lines += [f"rank {rank.rank}: {_fields(rank)}" for rank in run.ranks]
    if not run.ledger.epochs:
        lines.append("ledger: no epoch is open")
    for epoch in run.ledger.epochs:
        lines.append(
            f"ledger: epoch {epoch.epoch}, {len(epoch.open)} batches open, {_fields(epoch)}"
        )
    for rank, ledger in enumerate(run.ledger.by_rank):
        assigned, trained, in_round = (
            sum(len(span) for _, span in spans)
            for spans in (ledger.assigned, ledger.trained, ledger.in_round)
        )
        lines.append(
            f"ledger: rank {rank} holds {assigned} batches assigned, {trained} trained, "
            f"{in_round} in the round"
        )
    return "\n".join(lines)


def _fields(record: Any) -> str:
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


class MessageLog:
    """Names, rounds and epochs of the last messages to and from each rank; not thread-safe.

    Recording a message formats nothing and keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._rings: defaultdict[tuple[str, int], deque[tuple[Any, ...]]] = defaultdict(
            lambda: deque(maxlen=NUM_KEPT)
        )

    def received(self, event: m.Event, now: float) -> None:
        """Record an event; events without a rank share one log."""
        if type(event) is not m.Tick:
            self._record(("from", getattr(event, "rank", -1)), event, now)

    def sent(self, rank: int, message: m.ToWorker, now: float) -> None:
        self._record(("to", rank), message, now)

    def _record(self, key: tuple[str, int], message: Any, now: float) -> None:
        epoch = getattr(getattr(message, "plan", message), "epoch", None)
        facts = (type(message).__name__, getattr(message, "round", None), epoch)
        self._rings[key].append((now, *facts))

    def text(self, now: float) -> str:
        """The recorded messages, oldest first, with their age in seconds."""
        lines = []
        for (way, rank), ring in sorted(self._rings.items(), key=lambda item: item[0][::-1]):
            lines.append(f"{way} rank {rank}:" if rank >= 0 else "from the service:")
            for time, name, round_id, epoch in ring:
                where = "" if round_id is None else f", round {round_id}"
                where += "" if epoch is None else f", epoch {epoch}"
                lines.append(f"  {now - time:9.3f} s ago  {name}{where}")
        return "\n".join(lines) or "none"


def stall_report(reason: str, state: str, log: MessageLog, now: float) -> str:
    """The report of a stalled run.

    Args:
        state: The coordinator's state; see :func:`describe`.
        log: The last messages.
        now: The present time.
    """
    sections = {
        "coordinator": state,
        "last messages": log.text(now),
        "threads": thread_stacks(),
    }
    return "\n\n".join((reason, *(f"== {title} ==\n{text}" for title, text in sections.items())))


def thread_stacks() -> str:
    """Names of the threads, and the stack of every thread of the process as faulthandler writes
    it, which reads no frame of a running thread without the GIL.
    """
    names = [f"{t.ident or 0:#018x} {t.name}\n" for t in threading.enumerate()]
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)  # stops them all meanwhile
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"no stacks, since no temporary file could be created: {error}"
    return f"{''.join(names)}\n{text}"
