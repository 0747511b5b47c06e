"""The end of a run: with the average of the ranks' last states, or with a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator import messages as m
from coordinator.epochs import EpochScheduler
from coordinator.failure_recovery import FailureRecovery, RecoveryPhase
from coordinator.messages import FINAL_ROUND, AbortCollective, Average
from coordinator.run_state import Failure, Phase, RankState, RunState
from coordinator.transports import Round


class RunFinalizer:
    """Ends a run, with its result or with a failure.

    Attributes:
        deadline: After a failure, the time at which ranks that have not left are abandoned.
    """

    def __init__(
        self,
        run: RunState,
        epochs: EpochScheduler,
        saving: FinalCheckpoints,
        recovery: FailureRecovery,
        round: Round,
        give_up_round: Callable[[], object],
    ) -> None:
        self._run = run
        self._epochs = epochs
        self._saving = saving
        self._recovery = recovery
        self._round = round
        self._give_up_round = give_up_round
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
        self._run.phase = Phase.LEAVING

    def collect(self) -> None:
        """Make the result from the last states, once all ranks have left."""
        if any(r.present for r in self._run.ranks):
            return
        sent = [r.final for r in self._run.ranks if r.final is not None]
        finals = [f for f in sent if f.fault is None]
        # After a death in a reduction some ranks may have made one step more than others.
        steps = max((f.step for f in finals), default=0)
        finals = [f for f in finals if f.step == steps]
        weights = [f.round_weight for f in finals]
        self._epochs.publish(anyway=True)
        if not finals and sent:
            fault = sent[0].fault
            assert fault is not None
            self._run.outcome.failure = Failure(
                error=fault.error, rank=fault.rank, epoch=fault.epoch, step=fault.step
            )
        elif not finals and self._run.outcome.failures:
            self._run.outcome.failure = self._run.outcome.failures[-1]
        if self._run.outcome.failure is None:
            if self._run.lockstep and (
                len(finals) < len(self._run.ranks) or not self._recovery.all_reported(steps)
            ):
                self._recovery.recount(steps)
            self._saving.freeze_final(finals)
            limited = self._run.config.max_steps is not None and not self._run.config.granted
            if limited and not self._run.outcome.stopped:
                # Not in the checkpoint: a resumed run publishes the whole epoch.
                self._epochs.publish_partial()
        if len(finals) <= 1 or not any(weights):
            self._run.outcome.payload = finals[0].payload if finals else None
            self._saving.emit_final(self._run.outcome.payload)
            self.finish()
            return
        self._run.phase = Phase.AVERAGING
        self._run.out.append(
            Average(
                round=FINAL_ROUND,
                ranks=tuple(f.rank for f in finals),
                payloads=tuple(f.payload for f in finals),
                weights=tuple(weights),
            )
        )

    def on_averaged(self, event: m.Averaged) -> None:
        """Take the average of the last states as the result."""
        if self._run.phase is not Phase.AVERAGING:
            return
        self._run.outcome.payload = event.average
        if event.error is not None:
            self._run.outcome.failure = Failure(error=event.error)
        else:
            self._saving.emit_final(event.average)
        self.finish()

    def fail(self, failure: Failure, now: float) -> None:
        """End the run without a result: wake all ranks, and wait for at most ``grace_s``."""
        if self._run.outcome.failure is None:
            self._run.outcome.failure = failure
        if self._run.phase is Phase.FAILING:
            return
        self._run.phase = Phase.FAILING
        self._recovery.phase = RecoveryPhase.NONE
        self.deadline = now + self._run.config.grace_s
        if self._round.in_flight:
            self._give_up_round()
        self._run.out.append(AbortCollective())
        for rank in self._run.ranks:
            if rank.present:
                self._run.send(rank.rank, m.Shutdown(snapshot=False))

    def finish(self) -> None:
        """Make the outcome final and release tensors."""
        self._run.phase = Phase.DONE
        self.deadline = None
        self._round.deadline = None
        self._round.drop_snapshots()
        for rank in self._run.ranks:
            rank.final = None


class FinalCheckpoints(Protocol):
    """The end of :class:`~coordinator.saving.RunCheckpointer`."""

    @property
    def final_checkpoint_due(self) -> bool:
        """True if the ranks' last states are saved as a checkpoint."""

    def cancel(self) -> None:
        """Discard the checkpoint in progress."""

    def freeze_final(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """Capture the run at its end, with these last states."""

    def emit_final(self, payload: m.Payload | None) -> None:
        """Save the final checkpoint with the result."""
