"""The end of a run: with the average of the ranks' last states, or with a failure.

After a failure the ranks that still answer send their last states, too. Each is that between two
steps, and only ranks with the largest number of steps count in lockstep, so that their average and
the batches in it are consistent: it is the state from which a later run can resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator import messages as m
from coordinator.epochs import EpochScheduler
from coordinator.failure_recovery import FailureRecovery, RecoveryPhase
from coordinator.messages import FINAL_ROUND, AbortCollective, Average, Payload
from coordinator.rounds import Checkpoints, RoundRunner
from coordinator.run_state import Phase, RankState, RunState

MAX_COLLECT_S = 30.0
"""Longest time to wait for the ranks' last states after a failure, and for their average."""


class RunFinalizer:
    """Ends a run, with its result or with a failure.

    Attributes:
        deadline: After a failure, the time at which ranks that have not left are abandoned, and
            then that at which their average is.
    """

    def __init__(
        self,
        run: RunState,
        epochs: EpochScheduler,
        saving: Checkpoints,
        recovery: FailureRecovery,
        rounds: RoundRunner,
    ) -> None:
        self._run = run
        self._epochs = epochs
        self._saving = saving
        self._recovery = recovery
        self._rounds = rounds
        self._collects = False
        self._trained_before = run.num_trained  # by the run that this one resumes
        self._is_averaging = False
        self._lead: Payload | None = None
        self.deadline: float | None = None

    def shut_down_ranks(self) -> None:
        """Shut every rank down, and request its last state."""
        run = self._run
        c = run.config
        whole = run.outcome.stopped or c.max_steps is not None or c.granted
        assert whole or not run.ledger.epochs, "the run is over and an epoch is still open"
        self._saving.cancel()
        capture = self._saving.final_checkpoint_due
        for rank in self._run.ranks:
            if rank.state in (RankState.LIVE, RankState.BUILDING):
                snapshot = rank.state is RankState.LIVE
                rank.move(RankState.LEAVING)
                self._run.send(rank.rank, m.Shutdown(snapshot=snapshot, capture=capture))
        self._run.enter(Phase.LEAVING)

    def collect(self, now: float) -> None:
        """Make the result of the last states, once no rank is awaited; after a failure, a state to
        resume from.
        """
        if self._is_averaging:
            return
        run = self._run
        has_failed = run.phase is Phase.FAILING
        sent = [r.final for r in run.ranks if r.final is not None]
        usable = [f for f in sent if f.fault is None]
        if has_failed:
            usable = list(_captured(usable)) if self._collects else []
        finals = _newest(usable)
        if has_failed and finals:
            self._freeze(finals)
        if has_failed and (not finals or run.num_trained == self._trained_before):
            self.finish()  # there is nothing to save
            return
        if not has_failed:
            self._end(finals, sent)
        self._is_averaging = self._average(finals)
        if not self._is_averaging:
            self.finish()
        elif has_failed:
            self.deadline = now + MAX_COLLECT_S
        else:
            run.enter(Phase.AVERAGING)

    def _end(self, finals: Sequence[m.FinalSnapshot], sent: Sequence[m.FinalSnapshot]) -> None:
        """Publish the last epochs, and capture the run with these of the states that were sent."""
        run, outcome = self._run, self._run.outcome
        self._epochs.publish(anyway=True)
        if not finals and sent:
            fault = sent[0].fault
            assert fault is not None
            outcome.fail(
                m.WorkerFailure(
                    error=fault.error, rank=fault.rank, epoch=fault.epoch, step=fault.step
                )
            )
        elif not finals and outcome.failures:
            outcome.fail(outcome.failures[-1])
        if outcome.failure is None:
            self._freeze(finals)
            limited = run.config.max_steps is not None and not run.config.granted
            if limited and not outcome.stopped:
                # Not in the checkpoint: a resumed run publishes the whole epoch.
                self._epochs.publish_partial()

    def _freeze(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """Count exactly the batches in the last states, and capture the run with them."""
        if self._run.lockstep:
            self._recovery.return_to(finals[0].step if finals else 0)
        self._saving.freeze_final(finals)

    def _average(self, finals: Sequence[m.FinalSnapshot]) -> bool:
        """Average the last states, or take one of them as the result; True if an average is to be
        awaited.

        In lockstep the replicas' parameters are equal, so that their average could only round
        them.
        """
        lead = finals[0].payload if finals else None
        payloads = [f.payload for f in finals]
        averages = len(finals) > 1 and any(f.round_weight for f in finals)
        if self._run.lockstep and lead is not None:
            self._lead = lead
            payloads = [_with_buffers(None, payload) for payload in payloads]
            averages = averages and bool(lead.buffers or lead.other_buffers)
        if not averages:
            self._run.outcome.payload = lead
            self._saving.emit_final(lead)
            return False
        self._run.emit(
            Average(
                round=FINAL_ROUND,
                ranks=tuple(f.rank for f in finals),
                payloads=tuple(payloads),
                weights=tuple(f.round_weight for f in finals),
            )
        )
        return True

    def on_averaged(self, event: m.Averaged) -> None:
        """Take the average of the last states as the result."""
        outcome, average = self._run.outcome, event.average
        if self._run.phase not in (Phase.FAILING, Phase.AVERAGING):
            return
        if average is not None and self._lead is not None:
            average = _with_buffers(self._lead, average)
        if self._run.phase is Phase.AVERAGING and event.error is not None:
            outcome.fail(m.WorkerFailure(error=event.error))
        outcome.payload = average
        self._saving.emit_final(average)
        self.finish()

    def collects(self, *, saves: bool = True) -> bool:
        """True if the last states of the ranks are requested after a failure.

        Args:
            saves: False if the failure makes these states unusable.
        """
        run = self._run
        if run.phase is Phase.FAILING:
            return self._collects and saves
        in_training = run.phase in (Phase.RUNNING, Phase.STOPPING, Phase.LEAVING)
        return in_training and saves and not run.config.granted

    def fail(self, failure: m.WorkerFailure, now: float, *, saves: bool = True) -> None:
        """End the run with a failure: wake all ranks, collect their last states, and wait for
        them for at most ``grace_s``, or three steps.

        Args:
            failure: The failure; the first one counts.
            now: The present time.
            saves: False if the ranks' states must not be used.
        """
        run, rnd = self._run, self._rounds.round
        self._collects = self.collects(saves=saves)
        run.outcome.fail(failure)
        if run.phase is Phase.FAILING:
            return
        run.enter(Phase.FAILING)
        self._is_averaging = False  # the result is not awaited
        self._recovery.phase = RecoveryPhase.NONE
        self._saving.cancel()
        self.deadline = now + (self._collect_s if self._collects else run.config.grace_s)
        if rnd.in_flight:
            ranks = rnd.ranks
            self._rounds.give_up()
            for rank in ranks:
                # All of them: acknowledgements may be in flight. Others ignore it.
                if run.ranks[rank].present:
                    run.send(rank, m.Rollback(round=rnd.id))
        run.emit(AbortCollective())
        capture = self._collects and self._saving.final_checkpoint_due
        for info in run.ranks:
            if not info.present:
                continue
            if self._collects and info.state is RankState.LIVE:
                info.move(RankState.LEAVING)
            run.send(info.rank, m.Shutdown(snapshot=self._collects, capture=capture, failed=True))

    @property
    def _collect_s(self) -> float:
        c = self._run.config
        slowest = max(self._run.elche.seconds_per_batch or (0.0,)) * c.accumulate
        return min(MAX_COLLECT_S, max(c.grace_s, 3 * slowest))

    def expire(self, now: float) -> None:
        """After a failure, continue without the ranks that have not left, or without their
        average.
        """
        if self._is_averaging:
            self.finish()
            return
        self._run.outcome.missing = tuple(r.rank for r in self._run.ranks if r.present)
        self.collect(now)

    def finish(self) -> None:
        """Make the outcome final and release tensors."""
        self._run.enter(Phase.DONE)
        self.deadline = None
        self._rounds.round.deadline = None
        self._rounds.round.snapshots = {}
        for rank in self._run.ranks:
            rank.final = None


def _newest(finals: Sequence[m.FinalSnapshot]) -> list[m.FinalSnapshot]:
    """Snapshots with the most steps: after a death in a reduction some may have one more."""
    steps = max((f.step for f in finals), default=0)
    return [f for f in finals if f.step == steps]


def _captured(finals: Sequence[m.FinalSnapshot]) -> Sequence[m.FinalSnapshot]:
    """Snapshots with the rank's own state; all of them if none has it."""
    return [f for f in finals if not isinstance(f.extra, Exception | None)] or finals


def _with_buffers(lead: Payload | None, average: Payload) -> Payload:
    """A payload with the buffers of ``average``, and the parameters of ``lead``, if any."""
    return Payload(
        params=() if lead is None else lead.params,
        buffers=average.buffers,
        other_buffers=average.other_buffers,
    )
