"""Member: one machine's part in the rounds of a cluster, as a generator of actions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.cluster.cluster_ledger import (
    ClosedEpoch,
    ClusterLedger,
    LedgerState,
    RoundOutcome,
    evaluate_round,
)
from coordinator.cluster.grant import Grant
from coordinator.cluster.machine_report import EpochRanges, MachineReport, normalize
from coordinator.codec import decode
from coordinator.metrics import MachineStats
from coordinator.run_errors import ClusterError, GpuWorkerError

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


class Member:
    """One machine's part in a cluster.

    A driver executes the actions that :meth:`run` yields, and sends each one's result, or throws
    :class:`RoundFailed`.

    Args:
        ledger: The initial ledger: new, or restored from a checkpoint.
        now: Returns monotonic time in seconds.
        leave_s: Seconds for which a machine that stops tries to hand over what it has trained,
            longer than a period. A round that has started is always completed.
        linger_s: Seconds for which a machine waits, after the end, for machines that may have
            missed the last commit.

    Attributes:
        ledger: The ledger after the last commit. Replaced at each commit, never changed.
        healing: True from the adoption of another machine's state to the next committed round.
        leaving: True if the machine leaves after the round in progress.
        finish_by: Time after which no round begins; ``None``: no limit.
    """

    def __init__(
        self,
        machine: str,
        ledger: ClusterLedger,
        now: Callable[[], float],
        *,
        leave_s: float = 30.0,
        linger_s: float = 10.0,
    ) -> None:
        self.machine = machine
        self.ledger = ledger
        self.healing = False
        self.leaving = False
        self.finish_by: float | None = None
        self._now = now
        self._leave_s = leave_s
        self._linger_s = linger_s
        self._num_restarts = 0
        self._started = 0.0  # the round in progress
        self._due = 0.0
        self._num_failed = 0
        self._num_failed_captures = 0
        self._num_final_rounds = 0
        self._engine_step = 0  # as set by this side: 0 after a reset
        self._stopping = False
        self._stops_all = False
        self._round_s: float | None = None
        self._seconds_per_batch: float | None = None
        self._next_closed: int | None = None if ledger.step == 0 else ledger.first_open

    @property
    def run_name(self) -> str:
        return f"{self.machine}/{self._num_restarts}"

    def stop(self, *, everywhere: bool = False) -> None:
        """Take part in one more round, then leave; the driver ends a :class:`Wait` in progress.

        Args:
            everywhere: True if all machines are to stop.
        """
        if not self._stopping:
            self.finish_by = self._now() + self._leave_s
        self._stopping = True
        self._stops_all = self._stops_all or everywhere

    def run(self) -> Generator[MemberAction, Any, None]:
        """Take part in rounds, from the start of the inner run until this machine is done.

        Raises:
            ClusterError: This machine cannot take part.
        """
        if self._stopping and not self._stops_all:
            return  # it has trained nothing
        if self.ledger.step:
            yield self._reset_engine(self.ledger.step)
        while not self._out_of_time:
            self._started = self._now()
            try:
                is_over = yield from self._round()
            except RoundFailed as error:
                is_over = yield from self._retry(error)
            if is_over:
                return
            yield from self._train()

    @property
    def _out_of_time(self) -> bool:
        return self.finish_by is not None and self._now() >= self.finish_by

    @property
    def _nothing_to_capture(self) -> bool:
        return self.healing or self.ledger.ended or not self.ledger.grants.get(self.machine)

    def _reset_engine(self, step: int) -> ResetEngine:
        self._engine_step = step
        return ResetEngine(step=step)

    # -- between rounds -----------------------------------------------------------------

    def _train(self) -> Generator[MemberAction, Any, None]:
        """Train until the next round is due, or the machine is idle or stopped.

        After a failure the pause is waited out. A machine with nothing to contribute waits for
        the others, which would lose their work to a round without them.
        """
        was_stopping = self._stopping
        while self._now() < self._due and not self._out_of_time:
            until = self._due if self.finish_by is None else min(self._due, self.finish_by)
            is_idle = yield Wait(until=until)
            if self._stopping and not was_stopping:
                return
            if is_idle and not self._num_failed and not self._nothing_to_capture:
                return

    def _retry(self, error: RoundFailed) -> Generator[MemberAction, Any, bool]:
        """Continue after a failed round, and pause; returns True if this machine is done."""
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failed, 10))
        self._num_failed += 1
        self._due = max(self._now() + FIRST_PAUSE_S, self._started + pause_s)
        self._num_final_rounds += self.ledger.ended
        yield ResumeGrant(reason=str(error))
        nothing_to_hand_over = self._stopping and self.healing
        return self._num_final_rounds >= MAX_FINAL_ROUNDS or nothing_to_hand_over

    # -- a round ------------------------------------------------------------------------

    def _round(self) -> Generator[MemberAction, Any, bool]:
        """Take part in a round; returns True if this machine is done.

        Raises:
            RoundFailed: The round has changed nothing.
        """
        members, healed = yield FormQuorum()
        if healed is not None:
            yield from self._adopt(healed)
        elif self._engine_step != self.ledger.step:
            yield self._reset_engine(self.ledger.step)  # no machine was there to heal from
        self.leaving = self._stopping
        report = yield from self._report()
        reports = yield Gather(report=report)
        if tuple(peer.machine for peer in reports) != members or report not in reports:
            raise RoundFailed("the reports are not those of the members")
        outcome = self.evaluate(reports)
        if self.machine in outcome.rejected:
            raise ClusterError(f"machine {self.machine} {outcome.rejected[self.machine]}")
        if self.machine in outcome.superseded:
            yield self._reset_engine(0)
        elif self._num_failed_captures >= MAX_FAILED_CAPTURES:
            raise ClusterError(
                f"{self._num_failed_captures} captures in a row failed: {outcome.void}"
            )
        if outcome.void:
            raise RoundFailed(outcome.void)
        if self.ledger.ended:  # all members have the last commit
            if self.healing:
                closed = self._newly_closed(self.ledger, self.ledger.recent)
                yield ApplyRound(grant=Grant(), closed=closed, restart=True)
            return True
        reduced = yield from self._commit(reports)
        yield from self._apply(outcome, reduced=reduced)
        return self.leaving and not self.ledger.ended

    def _adopt(self, state: Mapping[str, Any]) -> Generator[MemberAction, Any, None]:
        """Adopt another machine's state unless this machine's history is the greater."""
        ledger = self.ledger.copy()
        try:
            ledger.restore(decode(LedgerState, state, "the ledger"))
            is_ahead = ledger.history >= self.ledger.history
        except ValueError:
            is_ahead = False
        if not is_ahead:
            yield self._reset_engine(self.ledger.step)
            return
        self.ledger = ledger
        self._engine_step = ledger.step
        self.healing = True
        yield AdoptState()

    def _report(self) -> Generator[MemberAction, Any, MachineReport]:
        """This machine's report, with a capture if it has trained.

        A failed capture is in the report, so that the others do not wait for this machine.
        """
        capture, void = Captured(), ""
        if not self._nothing_to_capture:
            try:
                capture = yield Capture(reserve_s=self._reserve_s())
                self._num_failed_captures = 0
            except RoundFailed as error:
                void = str(error) or "the capture failed"
                self._num_failed_captures += 1
        if capture.seconds_per_batch is not None:
            self._seconds_per_batch = capture.seconds_per_batch
        ledger = self.ledger
        return MachineReport(
            machine=self.machine,
            run=self._num_restarts,
            step=ledger.step,
            lineage=ledger.lineage,
            consumed=ledger.consumed,
            settings=ledger.settings,
            done=normalize(capture.done),
            kept=() if self.leaving else normalize(capture.kept),
            weight=capture.weight,
            num_samples=capture.num_samples,
            seconds_per_batch=self._seconds_per_batch,
            tallies=capture.tallies,
            leaving=self.leaving,
            stop=self._stops_all,
            void=void,
        )

    def _reserve_s(self) -> float:
        if self.leaving:
            return 0.0
        guess = FIRST_RESERVE_S if self._round_s is None else 2 * self._round_s
        return min(guess, self.ledger.period_s)

    def evaluate(self, reports: tuple[MachineReport, ...]) -> RoundOutcome:
        """:func:`evaluate_round`; a simulation computes it once for all machines."""
        return evaluate_round(self.ledger, reports)

    def _commit(self, reports: tuple[MachineReport, ...]) -> Generator[MemberAction, Any, bool]:
        """Sum the changes and commit the round; returns True if there was anything to sum."""
        weights = tuple(peer.weight for peer in reports)
        if any(weights):
            try:
                yield Reduce(weights=weights, samples=tuple(peer.num_samples for peer in reports))
            except RoundFailed:
                yield Commit(ok=False)
                raise
        is_committed = yield Commit(ok=True)
        if not is_committed:
            raise RoundFailed("the round was not committed")
        return any(weights)

    def _apply(self, outcome: RoundOutcome, *, reduced: bool) -> Generator[MemberAction, Any, None]:
        """Apply a committed round, and set the time of the next one."""
        before, self.ledger = self.ledger, outcome.ledger
        self._engine_step = self.ledger.step
        now = self._now()
        self._round_s = now - self._started
        self._num_failed = 0
        restart, self.healing = self.healing, False
        closed = self.ledger.recent if restart else outcome.closed
        self._num_restarts += restart
        yield ApplyRound(
            grant=self.ledger.grants[self.machine],
            closed=self._newly_closed(before, closed),
            restart=restart,
            reduced=reduced,
        )
        self._due = now + outcome.interval_s
        if self.ledger.ended:
            self.finish_by = now + self._linger_s
        if self.ledger.ended or self._stopping:
            self._due = now

    def _newly_closed(
        self, before: ClusterLedger, available: tuple[ClosedEpoch, ...]
    ) -> tuple[ClosedEpoch, ...]:
        """Epochs closed since the last one reported, as far as the ledger still has them."""
        first = before.first_open if self._next_closed is None else self._next_closed
        self._next_closed = max(first, self.ledger.first_open)
        return tuple(epoch for epoch in available if epoch.epoch >= first)


class RoundFailed(GpuWorkerError):
    """A step of a round failed: the round has changed nothing, and the next one may be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuorum:
    """Form a quorum. The result are the machines, in the order in which reports are gathered, and
    the ledger's state received if the engine has healed this machine; else ``None``.
    """


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
class Capture:
    """Have the inner run average; the result is a :class:`Captured`.

    From the capture on the run trains only the batches it keeps.

    Attributes:
        reserve_s: Seconds of work to keep; 0: none, the machine leaves.
    """

    reserve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """An average of the inner run; the fields are those of :class:`MachineReport`."""

    done: EpochRanges = ()
    kept: EpochRanges = ()
    weight: float = 0.0
    num_samples: int = 0
    seconds_per_batch: float | None = None
    tallies: tuple[tuple[int, MachineStats], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Exchange reports; the result are those of all members, in their order."""

    report: MachineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """Sum ``weight / sum(weights) * (global - snapshot)`` over machines, and buffers likewise.

    Skipped where no machine has a weight: the global parameters then stay unchanged.

    Attributes:
        weights: The weight of each member, in their order.
        samples: The samples of each member; integer buffers come from the first with the most.
    """

    weights: tuple[float, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Pass this machine's vote to the engine. The result is the engine's decision for this
    machine; if positive, its step has grown by one.
    """

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
class Wait:
    """Train until this time, or until all granted batches are trained, or a stop. The result is
    True if they are; it is so once after each :class:`ApplyRound` and :class:`ResumeGrant`.
    """

    until: float


MemberAction = (
    FormQuorum
    | AdoptState
    | ResetEngine
    | Capture
    | Gather
    | Reduce
    | Commit
    | ApplyRound
    | ResumeGrant
    | Wait
)
