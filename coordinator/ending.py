"""How a run ends: dismissal, last states, their average; or a failure and its grace."""

from __future__ import annotations

from coordinator import messages as m
from coordinator.checkpoint import Saving
from coordinator.commands import FINAL_ROUND, AbortCollective, Average
from coordinator.epochs import Epochs
from coordinator.failures import Recovery, Survival
from coordinator.outcome import Failure, Phase
from coordinator.ranks import RankState
from coordinator.round_keeper import RoundKeeper
from coordinator.state import Core


class Ending:
    """Brings a run to its end, in either way.

    Attributes:
        deadline: After a failure, when ranks that have not left are given up.
    """

    def __init__(
        self,
        core: Core,
        epochs: Epochs,
        saving: Saving,
        rounds: RoundKeeper,
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
        whole = core.outcome.stopped or core.config.max_steps is not None
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
            if self._core.lockstep and len(finals) < len(self._core.ranks):
                self._survival.recount(steps)  # a rank may not have told its last ones
            self._saving.freeze_end(finals)
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
