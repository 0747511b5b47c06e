"""The end of a run: with the average of the ranks' last states, or with a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator import messages as m
from coordinator.epochs import EpochScheduler
from coordinator.messages import FINAL_ROUND, AbortCollective, Average
from coordinator.state import Core, Failure, Phase, RankState
from coordinator.survival import Recovery, Survival
from coordinator.transports import Round


class Ending:
    """Ends a run, with its result or with a failure.

    Attributes:
        deadline: After a failure, the time at which ranks that have not left are abandoned.
    """

    def __init__(
        self,
        core: Core,
        epochs: EpochScheduler,
        saving: FinalCheckpoints,
        survival: Survival,
        round: Round,
        give_up_round: Callable[[], object],
    ) -> None:
        self._core = core
        self._epochs = epochs
        self._saving = saving
        self._survival = survival
        self._round = round
        self._give_up_round = give_up_round
        self.deadline: float | None = None

    def dismiss(self) -> None:
        """Shut every rank down, and request its last state."""
        core = self._core
        c = core.config
        whole = core.outcome.stopped or c.max_steps is not None or c.granted
        assert whole or not core.ledger.epochs, "the run is over and an epoch is still open"
        self._saving.cancel()
        capture = self._saving.final_checkpoint_due
        for rank in self._core.ranks:
            if rank.state in (RankState.LIVE, RankState.BUILDING):
                snapshot = rank.state is RankState.LIVE
                rank.move(RankState.LEAVING)
                self._core.send(rank.rank, m.Shutdown(snapshot=snapshot, capture=capture))
        self._core.phase = Phase.LEAVING

    def collect(self) -> None:
        """Make the result from the last states, once all ranks have left."""
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
                len(finals) < len(self._core.ranks) or not self._survival.all_reported(steps)
            ):
                self._survival.recount(steps)
            self._saving.freeze_end(finals)
            limited = self._core.config.max_steps is not None and not self._core.config.granted
            if limited and not self._core.outcome.stopped:
                # Not in the checkpoint: a resumed run publishes the whole epoch.
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
        """Take the average of the last states as the result."""
        if self._core.phase is not Phase.AVERAGING:
            return
        self._core.outcome.payload = event.average
        if event.error is not None:
            self._core.outcome.failure = Failure(error=event.error)
        else:
            self._saving.emit_end(event.average)
        self.finish()

    def fail(self, failure: Failure, now: float) -> None:
        """End the run without a result: wake all ranks, and wait for at most ``grace_s``."""
        if self._core.outcome.failure is None:
            self._core.outcome.failure = failure
        if self._core.phase is Phase.FAILING:
            return
        self._core.phase = Phase.FAILING
        self._survival.recovery = Recovery.NONE
        self.deadline = now + self._core.config.grace_s
        if self._round.in_flight:
            self._give_up_round()
        self._core.out.append(AbortCollective())
        for rank in self._core.ranks:
            if rank.present:
                self._core.send(rank.rank, m.Shutdown(snapshot=False))

    def finish(self) -> None:
        """Make the outcome final and release tensors."""
        self._core.phase = Phase.DONE
        self.deadline = None
        self._round.deadline = None
        self._round.drop_snapshots()
        for rank in self._core.ranks:
            rank.final = None


class FinalCheckpoints(Protocol):
    """The end of :class:`~coordinator.saving.RunCheckpointer`."""

    @property
    def final_checkpoint_due(self) -> bool:
        """True if the ranks' last states are saved as a checkpoint."""

    def cancel(self) -> None:
        """Discard the checkpoint in progress."""

    def freeze_end(self, finals: Sequence[m.FinalSnapshot]) -> None:
        """Capture the run at its end, with these last states."""

    def emit_end(self, payload: m.Payload | None) -> None:
        """Save the final checkpoint with the result."""
