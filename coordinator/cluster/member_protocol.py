"""MemberProtocol: one machine's state machine in the rounds of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, assert_never

from coordinator.cluster.cluster_ledger import (
    ClosedEpoch,
    ClusterLedger,
    RoundOutcome,
    evaluate_round,
)
from coordinator.cluster.grant import Grant
from coordinator.cluster.machine_report import EpochRanges, LedgerError, MachineReport, normalize
from coordinator.messages import Tick

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Time from the start of a failed round to the next one, doubled with each failure in a row, and
its maximum; at least the first pause from the end of the failed round. An engine waits longer for
a quorum, so that machines that retry at different times still meet."""
FIRST_RESERVE_S = 1.0
"""Work kept for the first round, whose duration is unknown."""
MAX_FAILED_CAPTURES = 5
"""Failed captures in a row before the machine gives up."""
MAX_FINAL_ROUNDS = 3
"""Failed rounds after the last commit before the machine finishes."""


class MemberProtocol:
    """One machine's part in a cluster.

    Args:
        ledger: The initial ledger: new, or restored from a checkpoint.
        leave_s: Seconds for which a machine that stops tries to hand over what it has trained,
            longer than a period. A round that has started is always completed.
        linger_s: Seconds for which a machine waits, after the end, for machines that may have
            missed the last commit.

    Attributes:
        ledger: The ledger after the last commit. Replaced at each commit, never changed.
    """

    def __init__(
        self,
        machine: str,
        ledger: ClusterLedger,
        *,
        leave_s: float = 30.0,
        linger_s: float = 10.0,
    ) -> None:
        self.machine = machine
        self.ledger = ledger
        self.state = MemberState.BUILDING
        self._leave_s = leave_s
        self._linger_s = linger_s
        self._commands: list[MemberCommand] = []
        self._now = 0.0
        self._round = _RoundInProgress(members=(), started=0.0)
        self._run = 0
        self._due: float | None = None
        self._finish_by: float | None = None
        self._num_failed = 0
        self._num_failed_captures = 0
        self._num_final_rounds = 0
        self._healed = False  # and in no committed round since
        self._engine_step = 0  # as set by this side: 0 after a reset
        self._stop: Stop | None = None
        self._round_s: float | None = None
        self._seconds_per_batch: float | None = None
        self._next_closed: int | None = None if ledger.step == 0 else ledger.first_open

    @property
    def step(self) -> int:
        """Rounds committed."""
        return self.ledger.step

    @property
    def healing(self) -> bool:
        """True from the adoption of another machine's state to the next committed round."""
        return self._healed

    @property
    def deadline(self) -> float | None:
        """Time at which a :class:`~coordinator.messages.Tick` is due if no event comes before."""
        due = self._due if self.state is _S.TRAINING else None
        finish_by = self._finish_by if self.state in _BETWEEN_ROUNDS else None
        return min((t for t in (due, finish_by) if t is not None), default=None)

    @property
    def _out_of_time(self) -> bool:
        if self._finish_by is None or self.state not in _BETWEEN_ROUNDS:
            return False
        return self._now >= self._finish_by

    def transition(self, state: MemberState) -> None:
        """Enter ``state``.

        Raises:
            LedgerError: There is no such transition from the present state.
        """
        if state not in _TRANSITIONS[self.state]:
            raise LedgerError(f"machine {self.machine}: {self.state} -> {state}")
        self.state = state

    def handle(self, event: MemberEvent, now: float) -> list[MemberCommand]:
        """Handle one event and return the commands to execute, in order.

        Args:
            now: Monotonic time in seconds.

        Raises:
            LedgerError: The event is not valid in this state.
        """
        self._commands, self._now = [], now
        if self.state is not _S.OUT:
            self._dispatch(event)
        if self._out_of_time:
            self._finish()
        return self._commands

    def _dispatch(self, event: MemberEvent) -> None:
        match event:
            case RunReady():
                self._on_ready()
            case Idle():
                # After a failure the pause is waited out. A machine with nothing to contribute
                # waits for the others, which would lose their work to a round without them.
                if (
                    self.state is _S.TRAINING
                    and self._num_failed == 0
                    and not self._nothing_to_capture
                ):
                    self._form_quorum()
            case Tick():
                if self.state is _S.TRAINING and self._due is not None and self._now >= self._due:
                    self._form_quorum()
            case Stop():
                self._on_stop(event)
            case QuorumFormed():
                self._on_quorum(event)
            case QuorumFailed():
                self._expect(_S.QUORUM, event)
                self._fail(event.error)
            case CaptureDone():
                self._on_capture(event)
            case CaptureFailed():
                self._on_capture_failed(event)
            case Gathered():
                self._on_gathered(event)
            case GatherFailed():
                self._expect(_S.GATHER, event)
                self._fail(event.error)
            case ReduceDone():
                self._expect(_S.REDUCE, event)
                self._commit(event.ok)
            case Committed():
                self._on_committed(event)
            case _:
                assert_never(event)

    def _expect(self, state: MemberState, event: MemberEvent) -> None:
        if self.state is not state:
            raise LedgerError(f"machine {self.machine}: {event} in state {self.state}")

    # -- between rounds -----------------------------------------------------------------

    def _on_ready(self) -> None:
        self._expect(_S.BUILDING, RunReady())
        if self._stop is not None and not self._stop.everywhere:
            self._finish()
            return
        if self.ledger.step:
            self._reset_engine(self.ledger.step)
        self._form_quorum()

    def _on_stop(self, event: Stop) -> None:
        if self._stop is None:
            self._finish_by = self._now + self._leave_s
        if self._stop is None or event.everywhere:
            self._stop = event
        if self.state is _S.TRAINING:
            self._form_quorum()

    def _form_quorum(self) -> None:
        self.transition(_S.QUORUM)
        self._due = None
        self._round = _RoundInProgress(members=(), started=self._now)
        self._commands.append(FormQuorum())

    def _fail(self, reason: str) -> None:
        """The round failed and has changed nothing; retry after a pause."""
        self.transition(_S.TRAINING)
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failed, 10))
        self._num_failed += 1
        self._due = max(self._now + FIRST_PAUSE_S, self._round.started + pause_s)
        self._commands.append(ResumeGrant(reason=reason))
        if self.ledger.ended:
            self._num_final_rounds += 1
        nothing_to_hand_over = self._stop is not None and self._healed
        if self._num_final_rounds >= MAX_FINAL_ROUNDS or nothing_to_hand_over:
            self._finish()

    def _finish(self) -> None:
        self.transition(_S.OUT)
        self._commands.append(Finish(stopped=not self.ledger.complete))

    def _reject(self, reason: str) -> None:
        self.transition(_S.OUT)
        self._commands.append(Reject(reason=reason))

    def _reset_engine(self, step: int) -> None:
        self._engine_step = step
        self._commands.append(ResetEngine(step=step))

    # -- a round ------------------------------------------------------------------------

    def _on_quorum(self, event: QuorumFormed) -> None:
        self._expect(_S.QUORUM, event)
        self._round.members = event.members
        if event.healed is not None:
            self._adopt(event.healed)
        elif self._engine_step != self.ledger.step:
            self._reset_engine(self.ledger.step)  # no machine was there to heal from
        self._round.leaving = self._stop is not None
        if self._nothing_to_capture:
            self._gather(self._report())
        else:
            self.transition(_S.CAPTURE)
            self._commands.append(RequestCapture(reserve_s=self._reserve_s()))

    @property
    def _nothing_to_capture(self) -> bool:
        return self._healed or self.ledger.ended or not self.ledger.grants.get(self.machine)

    def _reserve_s(self) -> float:
        if self._round.leaving:
            return 0.0
        guess = FIRST_RESERVE_S if self._round_s is None else 2 * self._round_s
        return min(guess, self.ledger.period_s)

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Adopt another machine's state unless this machine's history is the greater."""
        ledger = self.ledger.copy()
        try:
            ledger.load_state_dict(state)
        except ValueError:
            self._reset_engine(self.ledger.step)
            return
        if ledger.history < self.ledger.history:
            self._reset_engine(self.ledger.step)
            return
        self.ledger = ledger
        self._engine_step = ledger.step
        self._healed = True
        self._commands.append(AdoptState())

    def _report(self, capture: CaptureDone | None = None, void: str = "") -> MachineReport:
        ledger = self.ledger
        bare = MachineReport(
            machine=self.machine,
            run=self._run,
            step=ledger.step,
            lineage=ledger.lineage,
            consumed=ledger.consumed,
            settings=ledger.settings,
            seconds_per_batch=self._seconds_per_batch,
            leaving=self._round.leaving,
            stop=self._stop is not None and self._stop.everywhere,
            void=void,
        )
        if capture is None:
            return bare
        return replace(
            bare,
            done=normalize(capture.done),
            kept=normalize(capture.kept),
            weight=capture.weight,
            num_samples=capture.num_samples,
            tallies=capture.tallies,
        )

    def _gather(self, report: MachineReport) -> None:
        self.transition(_S.GATHER)
        self._round.report = report
        self._commands.append(GatherReports(report=report))

    def _on_capture(self, event: CaptureDone) -> None:
        self._expect(_S.CAPTURE, event)
        self._num_failed_captures = 0
        if event.seconds_per_batch is not None:
            self._seconds_per_batch = event.seconds_per_batch
        self._gather(self._report(event))

    def _on_capture_failed(self, event: CaptureFailed) -> None:
        """Record the failure in the report, so that the others do not wait for this machine."""
        self._expect(_S.CAPTURE, event)
        self._num_failed_captures += 1
        self._gather(self._report(void=event.error or "the capture failed"))

    def _on_gathered(self, event: Gathered) -> None:
        self._expect(_S.GATHER, event)
        void = self._evaluate(event.reports)
        if self.state is _S.OUT:
            return
        if void:
            self._fail(void)
        elif self.ledger.ended:
            self._finish_ended()
        elif any(peer.weight for peer in event.reports):
            self.transition(_S.REDUCE)
            self._round.reduced = True
            weights = tuple(peer.weight for peer in event.reports)
            samples = tuple(peer.num_samples for peer in event.reports)
            self._commands.append(ReduceChanges(weights=weights, samples=samples))
        else:
            self._commit(True)

    def _evaluate(self, reports: tuple[MachineReport, ...]) -> str:
        """Record the outcome of the round; return why it is void, empty if it is not."""
        round_ = self._round
        if (
            tuple(peer.machine for peer in reports) != round_.members
            or round_.report not in reports
        ):
            return "the reports are not those of the members"
        outcome = self.evaluate(reports)
        if self.machine in outcome.rejected:
            self._reject(f"machine {self.machine} {outcome.rejected[self.machine]}")
        elif self.machine in outcome.superseded:
            self._reset_engine(0)
        elif self._num_failed_captures >= MAX_FAILED_CAPTURES:
            self._reject(f"{self._num_failed_captures} captures in a row failed: {outcome.void}")
        round_.outcome = outcome
        return outcome.void

    def evaluate(self, reports: tuple[MachineReport, ...]) -> RoundOutcome:
        """:func:`evaluate_round`; a simulation computes it once for all machines."""
        return evaluate_round(self.ledger, reports)

    def _commit(self, ok: bool) -> None:
        self.transition(_S.COMMIT)
        self._commands.append(Commit(ok=ok))

    def _on_committed(self, event: Committed) -> None:
        self._expect(_S.COMMIT, event)
        if not event.ok:
            self._fail("the round was not committed")
            return
        outcome = self._round.outcome
        assert outcome is not None, "a round was committed before its reports were evaluated"
        self.transition(_S.TRAINING)
        before, self.ledger = self.ledger, outcome.ledger
        self._engine_step = self.ledger.step
        self._round_s = self._now - self._round.started
        self._num_failed = 0
        self._due = self._now + outcome.interval_s
        self._commands.append(
            ApplyRound(
                grant=self.ledger.grants[self.machine],
                closed=self._newly_closed(before, outcome.closed),
                restart=self._healed,
                reduced=self._round.reduced,
            )
        )
        self._run += self._healed
        self._healed = False
        if self.ledger.ended:
            self._finish_by = self._now + self._linger_s
            self._form_quorum()
        elif self._round.leaving:
            self._finish()
        elif self._stop is not None:
            self._form_quorum()

    def _newly_closed(
        self, before: ClusterLedger, closed: tuple[ClosedEpoch, ...]
    ) -> tuple[ClosedEpoch, ...]:
        """Epochs closed since the last one reported, as far as the ledger still has them."""
        first = before.first_open if self._next_closed is None else self._next_closed
        self._next_closed = max(first, self.ledger.first_open)
        available = self.ledger.recent if self._healed else closed
        return tuple(epoch for epoch in available if epoch.epoch >= first)

    def _finish_ended(self) -> None:
        """All members have the last commit."""
        if self._healed:
            closed = self._newly_closed(self.ledger, ())
            self._commands.append(ApplyRound(grant=Grant(), closed=closed, restart=True))
        self._finish()


class MemberState(Enum):
    """States of the state machine."""

    BUILDING = "building"
    TRAINING = "training"
    QUORUM = "quorum"
    CAPTURE = "capture"
    GATHER = "gather"
    REDUCE = "reduce"
    COMMIT = "commit"
    OUT = "out"


_S = MemberState
_TRANSITIONS = {
    _S.BUILDING: {_S.QUORUM, _S.OUT},
    _S.TRAINING: {_S.QUORUM, _S.OUT},
    _S.QUORUM: {_S.TRAINING, _S.CAPTURE, _S.GATHER, _S.OUT},
    _S.CAPTURE: {_S.GATHER, _S.OUT},
    _S.GATHER: {_S.TRAINING, _S.REDUCE, _S.COMMIT, _S.OUT},
    _S.REDUCE: {_S.COMMIT, _S.OUT},
    _S.COMMIT: {_S.TRAINING, _S.OUT},
    _S.OUT: set(),
}

_BETWEEN_ROUNDS = {_S.BUILDING, _S.TRAINING, _S.QUORUM}
"""States in which a machine whose time is up may finish at once."""


@dataclass(slots=True)
class _RoundInProgress:
    """The round that a machine is in."""

    members: tuple[str, ...]
    started: float
    leaving: bool = False
    report: MachineReport | None = None
    outcome: RoundOutcome | None = None
    reduced: bool = False


# -- events -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReady:
    """The inner run is idle with its initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """All granted batches are trained. Sent once after each :class:`ApplyRound` and
    :class:`ResumeGrant`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumFormed:
    """The engine has determined the members of the round.

    Attributes:
        members: The machines, in the order in which reports are gathered.
        healed: The ledger state received if the engine has healed this machine; else ``None``.
    """

    members: tuple[str, ...]
    healed: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumFailed:
    """There is no quorum; the engine's step is unchanged."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureDone:
    """The inner run's average is available; the fields are those of :class:`MachineReport`."""

    done: EpochRanges
    kept: EpochRanges
    weight: float
    num_samples: int
    seconds_per_batch: float | None
    tallies: tuple[tuple[int, dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFailed:
    """The inner run could not average."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The reports of all members, in their order."""

    reports: tuple[MachineReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherFailed:
    """Reports are missing."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceDone:
    """The all-reduce completed or failed."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The engine's decision for this machine; if positive, its step has grown by one."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The inner run is to stop: the machine takes part in one more round, then leaves.

    Attributes:
        everywhere: True if all machines are to stop.
    """

    everywhere: bool = False


MemberEvent = (
    RunReady
    | Idle
    | QuorumFormed
    | QuorumFailed
    | CaptureDone
    | CaptureFailed
    | Gathered
    | GatherFailed
    | ReduceDone
    | Committed
    | Stop
    | Tick
)


# -- commands ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuorum:
    """Request a quorum of the engine; answered by :class:`QuorumFormed` or ``QuorumFailed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptState:
    """Replace this machine's global parameters, buffers and outer optimizer by those received
    with the quorum, also for machines healed from it. The inner run's own training is void.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetEngine:
    """Set the engine's step. A state received with the quorum is discarded.

    Attributes:
        step: 0: the next quorum heals the machine. Its state stays its own until then, and
            remains so if no other machine is left.
    """

    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCapture:
    """Have the inner run average; answered by :class:`CaptureDone` or ``CaptureFailed``.

    From the capture on the run trains only the batches it keeps.

    Attributes:
        reserve_s: Seconds of work to keep; 0: none, the machine leaves.
    """

    reserve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherReports:
    """Exchange reports; answered by :class:`Gathered` or ``GatherFailed``."""

    report: MachineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceChanges:
    """Sum ``weight / sum(weights) * (global - snapshot)`` over machines, and buffers likewise;
    answered by :class:`ReduceDone`. Skipped where no machine has a weight: the global parameters
    then stay unchanged.

    Attributes:
        weights: The weight of each member, in their order.
        samples: The samples of each member; integer buffers come from the first with the most.
    """

    weights: tuple[float, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Pass this machine's vote to the engine; answered by :class:`Committed`."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRound:
    """The round is committed.

    Attributes:
        grant: Batches to train from now on, in place of the previous grant; those trained since
            the capture are already done.
        restart: True if the machine was healed: its inner run restarts from the global
            parameters.
        reduced: True if there was an all-reduce, so that the outer optimizer makes a step.
    """

    grant: Grant
    closed: tuple[ClosedEpoch, ...] = ()
    restart: bool = False
    reduced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeGrant:
    """The round failed and has changed nothing: the previous grant continues, including the
    batches returned at a capture.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """This machine cannot take part and must end with this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """This machine's part is over, even if an engine call is in progress.

    Attributes:
        stopped: True if batches are left.
    """

    stopped: bool


MemberCommand = (
    FormQuorum
    | AdoptState
    | ResetEngine
    | RequestCapture
    | GatherReports
    | ReduceChanges
    | Commit
    | ApplyRound
    | ResumeGrant
    | Reject
    | Finish
)
