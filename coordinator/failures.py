"""Going on after a death: who is left, what is trained again, who meets whom from then on.

Without lockstep a death costs what the rank trained since its last round; the others
train on and meet in a new collective. Under lockstep every rank that is left halts and
says how many steps it has made. The steps that any of them made count, whatever was
reported: ranks that made fewer take everything from one that made all of them, and the
batches of the steps that were not made go back to the pool.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import re
import sys
import tempfile
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from coordinator import messages as m
from coordinator.errors import RunStalled
from coordinator.messages import FINAL_ROUND, AbortCollective, Allowance, Average, ReportStall
from coordinator.metrics import Tally
from coordinator.pool import LockstepPlan
from coordinator.state import Core, Failure, Phase, Rank, RankState

KEPT = 8
"""Messages kept of each rank and direction."""
MAX_CHARS = 400
"""Length at which a message in the report is cut."""

# Kept as they are. What may hold tensors, or an exception whose frames do, is kept as its
# name and numbers, and so is every kind of message that is not listed here.
_LIGHT = frozenset(
    (
        m.StartEpoch,
        m.SyncNow,
        m.RequestParams,
        m.SetGlobalStep,
        m.Throttle,
        m.Resume,
        m.Evaluate,
        m.CallCheckpointFn,
        m.Shutdown,
        m.Ready,
        m.BatchReport,
        m.EpochReport,
        m.SyncAck,
        m.EvalReport,
        m.CheckpointDone,
        m.Exiting,
        m.ThreadEnded,
        m.StopRequested,
        m.AbortRequested,
        m.ShareRequested,
    )
)
_NUMBERS = ("round", "generation", "epoch", "step")


class MessageLog:
    """The last messages to and from each rank; for one thread.

    Noting one formats nothing and keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._rings: defaultdict[tuple[str, int], deque[tuple[float, object]]] = defaultdict(
            lambda: deque(maxlen=KEPT)
        )

    def received(self, event: m.Event, now: float) -> None:
        """The coordinator took an event; those of no rank are kept together."""
        if type(event) is not m.Tick:  # which says only that time has passed
            self._note(("from", getattr(event, "rank", -1)), event, now)

    def sent(self, rank: int, message: m.ToWorker, now: float) -> None:
        """The coordinator sent a message to a rank."""
        self._note(("to", rank), message, now)

    def _note(self, key: tuple[str, int], message: object, now: float) -> None:
        kind = type(message)
        if kind not in _LIGHT:
            numbers = [(name, getattr(message, name, None)) for name in _NUMBERS]
            message = (kind, [(name, n) for name, n in numbers if isinstance(n, int)])
        self._rings[key].append((now, message))

    def text(self, now: float) -> str:
        """The messages kept, oldest first, with their age in seconds."""
        lines = []
        for (way, rank), ring in sorted(self._rings.items(), key=lambda item: item[0][::-1]):
            lines.append(f"{way} rank {rank}:" if rank >= 0 else "from the service:")
            lines += [f"  {now - time:9.3f} s ago  {_text(message)}" for time, message in ring]
        return "\n".join(lines) or "none"


def _text(message: object) -> str:
    if isinstance(message, tuple):
        kind, numbers = message
        return f"{kind.__name__}({', '.join(f'{name}={n}' for name, n in numbers)})"
    text = repr(message)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."


def thread_stacks() -> str:
    """The stack of every thread of the process, with the threads' names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return _stacks_of_stopped_threads(names)
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, f'unknown to Python, {ident}')}:\n{stack}")
    return "\n".join(sorted(parts))


def _stacks_of_stopped_threads(names: Mapping[int | None, str]) -> str:
    """The same without the interpreter's lock: frames of threads that run must not be followed."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)  # stops them all meanwhile
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"no stacks, which take a temporary file: {error}"

    def named(head: re.Match[str]) -> str:
        ident = int(head[1], 16)
        return f"thread {names.get(ident, f'unknown to Python, {ident}')}, the latest call first:"

    return re.sub(r"(?m)^(?:Current thread|Thread) (0x[0-9a-f]+)\b.*$", named, text)


def stall_report(reason: str, state: str, log: MessageLog, now: float) -> str:
    """The whole report.

    Args:
        reason: What happened.
        state: The machine's state.
        log: The last messages.
        now: The time.
    """
    sections = {
        "coordinator": state,
        "last messages": log.text(now),
        "threads": thread_stacks(),
    }
    return "\n\n".join((reason, *(f"== {title} ==\n{text}" for title, text in sections.items())))


class Recovery(Enum):
    """What lockstep ranks are being brought to do; none of them steps meanwhile."""

    NONE = "none"
    HALTING = "halting"
    REGROUPING = "regrouping"


class RoundInProgress(Protocol):
    """See :class:`~coordinator.rounds.Round`, whose other fields only reports show."""

    id: int
    deadline: float | None
    num_failed: int

    @property
    def in_flight(self) -> bool:
        """Whether a round is in progress."""

    def forget_tensors(self) -> None:
        """Drop the references to the snapshots."""


class Rounds(Protocol):
    """See :class:`~coordinator.rounds.RoundKeeper`."""

    @property
    def round(self) -> RoundInProgress:
        """The round in progress, or the last one."""

    def holds(self, rank: int) -> bool:
        """Whether the round has what a rank trained since the one before."""

    def give_up(self) -> object:
        """End the round without an average."""


class SavesAtEnd(Protocol):
    """See :class:`~coordinator.checkpoint.CheckpointRounds`."""

    @property
    def wanted_at_end(self) -> bool:
        """Whether the last states of the ranks shall make a checkpoint."""

    def cancel(self) -> None:
        """The checkpoint in the making is void."""

    def freeze_end(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """All ranks have left, and the result is made of these states."""

    def emit_end(self, payload: m.Payload | None) -> None:
        """The result is there."""


class Publishes(Protocol):
    """See :class:`~coordinator.epochs.Epochs`."""

    def publish(self, *, anyway: bool = False) -> None:
        """Publish closed epochs; ``anyway``: those that wait for an answer, too."""

    def publish_cut(self) -> None:
        """Publish what was trained of the epochs within which ``max_steps`` ends the run."""


class Survival:
    """Takes ranks out of a run and brings the others together again.

    Attributes:
        recovery: What lockstep ranks are being brought to do.
        num_halts: Halts in a row, at the same step, that no death brought about.
        fault: Why the last halt came, where the transport itself had failed.
    """

    def __init__(self, core: Core, rounds: Rounds) -> None:
        self._core = core
        self._rounds = rounds
        self._halted: dict[int, m.Halted] = {}
        self._last_step = -1
        self.recovery = Recovery.NONE
        self._agreed_step = 0
        self._counts = False  # the halt in progress
        self.num_halts = 0
        self.fault: str | None = None

    @property
    def survivors(self) -> list[Rank]:
        """Ranks that can still train."""
        return [r for r in self._core.ranks if r.state in (RankState.BUILDING, RankState.LIVE)]

    def lose(self, failure: Failure) -> None:
        """Take a dead rank out; some rank is left."""
        core = self._core
        core.outcome.failures.append(failure)
        core.elche.drop(failure.rank)
        if core.lockstep:
            self.halt()
            self._counts = False  # the others may have halted because of this death
            return
        lost = not self._rounds.holds(failure.rank)
        core.pool.take_back(failure.rank, core.elche.shares, in_round=lost)
        core.choice.begin_anew()
        if core.collective is not None:
            self.regroup()

    def become_alone(self) -> None:
        """One rank is left: its replica is the result, and nothing holds it back."""
        core = self._core
        core.alone = True
        (last,) = self.survivors
        if core.config.evaluate or core.config.checkpoint_every is not None:
            core.pool.stop_looking_ahead()
        if core.lockstep:
            return
        core.pool.freeze(last.rank)
        core.global_step += core.pool.settle(last.rank)
        last.enter_round()
        last.set_limit(None)
        core.send(last.rank, m.Resume(allowance=Allowance()))

    def regroup(self) -> None:
        """Break the collective, and bring the ranks that are left together in a new one."""
        core = self._core
        core.out.append(AbortCollective(generation=core.generation))
        core.generation += 1
        self._tell_group(None, None)

    def _tell_group(self, step: int | None, donor: int | None) -> None:
        ranks = tuple(r.rank for r in self.survivors)
        backend = self._core.collective
        assert backend is not None, "nowhere to meet"
        for rank in ranks:
            self._core.send(
                rank,
                m.Regroup(
                    generation=self._core.generation,
                    ranks=ranks,
                    backend=backend,
                    step=step,
                    donor=donor,
                ),
            )

    def halt(self) -> None:
        """Break the collective and have every rank say where it stands."""
        if self.recovery is Recovery.HALTING:
            return
        core = self._core
        self.recovery = Recovery.HALTING
        self._counts = False
        self._halted = {}
        core.out.append(AbortCollective(generation=core.generation))
        for rank in self.survivors:
            core.send(rank.rank, m.Halt(generation=core.generation))

    def on_halted(self, event: m.Halted) -> None:
        """A rank has halted, because it was told or because its collective broke."""
        if event.generation != self._core.generation or not self._core.is_live(event.rank):
            return
        if self.recovery is not Recovery.HALTING:
            # As far as is known nobody died: a peer did not come in time, or had no memory.
            self.halt()
            self._counts = True
        if event.too_large:
            self._counts = False  # a peer of it may have halted, and said so, before
        self._halted[event.rank] = event

    @property
    def all_halted(self) -> bool:
        """Whether every rank that is left has said where it stands."""
        return self.recovery is Recovery.HALTING and all(
            r.rank in self._halted for r in self.survivors
        )

    def judge(self) -> None:
        """All have halted: how often they have in a row, and what was wrong with the transport, if
        one of them says so. Whoever came furthest tells whether they have gone on since."""
        halted = [self._halted[r.rank] for r in self.survivors]
        self.fault = next((h.fault for h in halted if h.fault is not None), None)
        if self._counts:
            step = max(h.step for h in halted)
            self.num_halts = self.num_halts + 1 if step == self._last_step else 1
            self._last_step = step

    def agree(self, *, regroup: bool) -> None:
        """All have halted: agree on the steps that count, and bring the ranks there.

        Args:
            regroup: Whether they go on; not when the run is to end anyway.
        """
        halted = [self._halted[r.rank] for r in self.survivors]
        donor = max(halted, key=lambda h: (h.step, h.num_syncs, -h.rank))
        self._agreed_step = donor.step
        if not regroup:
            self._go_on()
            return
        self.recovery = Recovery.REGROUPING
        self._core.generation += 1
        best = (donor.step, donor.num_syncs)
        behind = any((h.step, h.num_syncs) != best for h in halted)
        self._tell_group(donor.step, donor.rank if behind else None)

    def on_regrouped(self, event: m.Regrouped) -> None:
        """The new group has met: no death can take the agreed steps back any more."""
        if self.recovery is Recovery.REGROUPING and event.generation == self._core.generation:
            self._go_on()

    def _go_on(self) -> None:
        self.recovery = Recovery.NONE
        self.recount(self._agreed_step)
        self._core.num_windows = self._agreed_step
        for rank in self.survivors:
            rank.num_queued = 0

    def all_told(self, made: int) -> bool:
        """Whether every rank has told all batches of the steps made.

        It has not where the ranks could not meet any more at the end of its plan.
        """
        plan = self._core.plan
        return plan is None or all(
            plan.told.get(rank, 0) >= self._num_made(plan, rank, made) for rank in plan.parts
        )

    def _num_made(self, plan: LockstepPlan, rank: int, made: int) -> int:
        """Micro-batches of a rank that are in the steps made."""
        per_step = self._core.config.accumulate * plan.num_slices
        return min((made - plan.first_window) * per_step, plan.num_loads(rank))

    def recount(self, made: int) -> None:
        """Settle the batches of the plan that are in the steps made, and no others."""
        core, plan = self._core, self._core.plan
        if plan is None:
            return
        core.plan = None
        windows = made - plan.first_window
        core.global_step = plan.first_step
        epoch = core.pool.find(plan.epoch)
        for rank, spans in plan.parts.items():
            count = self._num_made(plan, rank, made)
            told = plan.told.get(rank, 0)
            counted = plan.batches_behind(rank, count)
            untold, undone = core.pool.recount(
                rank, plan.epoch, spans, told=plan.num_told(rank), made=counted
            )
            core.global_step += counted
            if plan.pieces:
                untold = plan.count_samples(rank, told, count)
                undone = plan.count_samples(rank, count, told)
            if epoch is None:
                continue
            epoch.num_retrained += undone
            if count > told:
                # A rank that could not say so had its part in these steps.
                rest = Tally(num_batches=count - told, num_samples=untold)
                epoch.tally.add(rank, rest)
                core.ranks[rank].note(rest)
        num_undone = 0 if core.alone else plan.num_windows - windows
        core.num_averagings -= num_undone
        if epoch is not None:
            epoch.num_averagings -= num_undone


class Ending:
    """Brings a run to its end, in either way.

    Attributes:
        deadline: After a failure, when ranks that have not left are given up.
    """

    def __init__(
        self,
        core: Core,
        epochs: Publishes,
        saving: SavesAtEnd,
        rounds: Rounds,
        survival: Survival,
    ) -> None:
        self._core = core
        self._epochs = epochs
        self._saving = saving
        self._rounds = rounds
        self._survival = survival
        self.deadline: float | None = None

    def dismiss(self) -> None:
        """Ask every rank to leave with its last state."""
        core = self._core
        c = core.config
        whole = core.outcome.stopped or c.max_steps is not None or c.granted
        assert whole or not core.pool.epochs, "the run is over and an epoch is still open"
        self._saving.cancel()
        capture = self._saving.wanted_at_end
        for rank in self._core.ranks:
            if rank.state in (RankState.LIVE, RankState.BUILDING):
                snapshot = rank.state is RankState.LIVE
                rank.move(RankState.LEAVING)
                self._core.send(rank.rank, m.Shutdown(snapshot=snapshot, capture=capture))
        self._core.phase = Phase.LEAVING

    def collect(self) -> None:
        """Once all have left, make the result of their last states."""
        if any(r.present for r in self._core.ranks):
            return
        sent = [r.final for r in self._core.ranks if r.final is not None]
        finals = [f for f in sent if f.fault is None]
        # After a death in a reduction some ranks may have made one step more than others.
        steps = max((f.step for f in finals), default=0)
        finals = [f for f in finals if f.step == steps]
        weights = [f.round_weight for f in finals]
        self._epochs.publish(anyway=True)
        if not finals and sent:
            fault = sent[0].fault
            assert fault is not None
            self._core.outcome.failure = Failure(
                error=fault.error, rank=fault.rank, epoch=fault.epoch, step=fault.step
            )
        elif not finals and self._core.outcome.failures:
            self._core.outcome.failure = self._core.outcome.failures[-1]
        if self._core.outcome.failure is None:
            if self._core.lockstep and (
                len(finals) < len(self._core.ranks) or not self._survival.all_told(steps)
            ):
                self._survival.recount(steps)
            self._saving.freeze_end(finals)
            limited = self._core.config.max_steps is not None and not self._core.config.granted
            if limited and not self._core.outcome.stopped:
                # Not in the checkpoint: a run that goes on tells of the whole epoch.
                self._epochs.publish_cut()
        if len(finals) <= 1 or not any(weights):
            self._core.outcome.payload = finals[0].payload if finals else None
            self._saving.emit_end(self._core.outcome.payload)
            self.finish()
            return
        self._core.phase = Phase.AVERAGING
        self._core.out.append(
            Average(
                round=FINAL_ROUND,
                ranks=tuple(f.rank for f in finals),
                payloads=tuple(f.payload for f in finals),
                weights=tuple(weights),
            )
        )

    def on_averaged(self, event: m.Averaged) -> None:
        """The average of the last states is there."""
        if self._core.phase is not Phase.AVERAGING:
            return
        self._core.outcome.payload = event.average
        if event.error is not None:
            self._core.outcome.failure = Failure(error=event.error)
        else:
            self._saving.emit_end(event.average)
        self.finish()

    def fail(self, failure: Failure, now: float) -> None:
        """End the run without a result: wake everybody, and wait for a while."""
        if self._core.outcome.failure is None:
            self._core.outcome.failure = failure
        if self._core.phase is Phase.FAILING:
            return
        self._core.phase = Phase.FAILING
        self._survival.recovery = Recovery.NONE
        self.deadline = now + self._core.config.grace_s
        if self._rounds.round.in_flight:
            self._rounds.give_up()
        self._core.out.append(AbortCollective())
        for rank in self._core.ranks:
            if rank.present:
                self._core.send(rank.rank, m.Shutdown(snapshot=False))

    def finish(self) -> None:
        """The outcome is final."""
        self._core.phase = Phase.DONE
        self.deadline = None
        self._rounds.round.deadline = None
        self._rounds.round.forget_tensors()
        for rank in self._core.ranks:
            rank.final = None


class ProgressWatch:
    """Ends a run that stands still, whatever the cause.

    Progress is: a rank became ready, trained, evaluated, handed a checkpoint over or left;
    a round was completed; an epoch was published. Rounds that fail, limits and requests are
    none, or ranks that wait for each other would look busy.
    """

    def __init__(self, core: Core, rounds: Rounds, ending: Ending) -> None:
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
        core = self._core
        if self._last is None or core.phase in (Phase.FAILING, Phase.DONE):
            return None
        if core.config.granted and core.phase is Phase.RUNNING and core.idle:
            return None  # other machines are waited for
        return self._last + self._core.config.stall_timeout_s

    def look(self, event: m.Event, now: float) -> None:
        """An event was handled: see whether it brought the run on."""
        if isinstance(event, m.Granted):
            self._last = now
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


def describe(core: Core, rounds: Rounds) -> str:
    """The machine's state in words, for a report: phase, round, ranks and pool."""
    lines = [
        f"phase {core.phase.value}, policy {core.config.policy.name} over "
        f"{core.choice.chosen.name}, global step {core.global_step}, "
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
