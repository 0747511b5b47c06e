"""The worker's side of the control protocol, without tensors, queues or a clock.

:class:`WorkerProtocol` receives messages, and returns those that require work on the replica, which
:class:`~runtime.worker.flow.ReplicaReplies` answers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from coordinator import messages as m
from coordinator.metrics import ReportStats


class WorkerState(Enum):
    """State of a worker in the control protocol."""

    BUILDING = "building"
    IDLE = "idle"
    TRAINING = "training"
    PARKED = "parked"
    SYNCING = "syncing"
    HALTED = "halted"
    LEAVING = "leaving"
    GONE = "gone"


_S = WorkerState
_NEXT = {
    _S.BUILDING: {_S.IDLE, _S.PARKED, _S.LEAVING},
    _S.IDLE: {_S.TRAINING, _S.PARKED, _S.SYNCING, _S.HALTED, _S.LEAVING},
    _S.TRAINING: {_S.IDLE, _S.PARKED, _S.SYNCING, _S.HALTED, _S.LEAVING},
    _S.PARKED: {_S.IDLE, _S.TRAINING, _S.SYNCING, _S.HALTED, _S.LEAVING},
    _S.SYNCING: {_S.IDLE, _S.TRAINING, _S.PARKED, _S.LEAVING},
    _S.HALTED: {_S.IDLE, _S.LEAVING},
    _S.LEAVING: {_S.GONE},
    _S.GONE: set(),
}


class IllegalTransition(AssertionError):
    """A transition that the protocol does not allow: a bug."""


@dataclass(slots=True)
class _Counts:
    """Counts at a snapshot, which an update subtracts, and the factor at that time."""

    round: int
    batches: int
    samples: int
    weight: float
    lr_factor: float


@dataclass(slots=True)
class WorkerProtocol:
    """State of one worker between messages and steps.

    Attributes:
        plans: Plans received and not begun, in order.
        plan: The plan in progress.
        batches: Batches trained since the last round.
        samples: Samples in them, without those of dropped steps.
        weight: The sum of their weights, by default the samples: the worker's weight in the next
            round.
        unreported: Batches trained since the last report.
        global_step: Batches of all ranks up to the last round.
        alone: No other rank is left, and no round follows.
        lr_factor: Factor of the learning rate of scale-invariant optimizers.
        shutdown: The ``Shutdown`` message, once received.
    """

    rank: int
    state: WorkerState = WorkerState.BUILDING
    plans: deque[m.EpochPlan] = field(default_factory=deque)
    plan: m.EpochPlan | None = None
    batches: int = 0
    samples: int = 0
    weight: float = 0
    unreported: int = 0
    global_step: int = 0
    generation: int = 0
    alone: bool = False
    lr_factor: float = 1.0
    shutdown: m.Shutdown | None = None
    _budget: m.BatchBudget = field(default_factory=m.BatchBudget)
    _left_epoch: int = -1
    _reported_at: int = 0
    _mark: _Counts | None = None
    _weight_since: float = 0  # since the mark: a difference of float sums would not be 0
    _last_sync: _Counts | None = None

    def transition(self, state: WorkerState) -> None:
        """Change to ``state``.

        Raises:
            IllegalTransition: The current state does not allow it.
        """
        if state is self.state:
            return
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"worker {self.rank}: {self.state} -> {state}")
        self.state = state

    def _update_state(self) -> None:
        """Derive the state from limit and plan, unless the worker is leaving or in a round."""
        if self.state in (_S.LEAVING, _S.GONE, _S.SYNCING, _S.HALTED, _S.BUILDING):
            return
        limit = self._budget.limit
        if limit is not None and self.batches >= limit:
            self.transition(_S.PARKED)
        else:
            self.transition(_S.IDLE if self.plan is None else _S.TRAINING)

    @property
    def may_train(self) -> bool:
        """True if the next step of the plan in progress may begin."""
        return self.state is _S.TRAINING

    @property
    def parked(self) -> bool:
        """True if the worker has reached its limit and waits for a higher one."""
        return self.state is _S.PARKED

    @property
    def leaving(self) -> bool:
        """True if the worker ignores all messages but ``Shutdown``."""
        return self.state in (_S.LEAVING, _S.GONE)

    def accepts(self, plan: m.EpochPlan) -> bool:
        """True if a plan received now is trained.

        Plans sent before a halt are void. Those of an epoch that the worker has left are
        returned to the coordinator.
        """
        is_void = self.leaving or self.state is _S.HALTED
        return not is_void and plan.epoch > self._left_epoch

    def on_built(self) -> None:
        self.transition(_S.IDLE)
        self._update_state()

    def leave(self) -> None:
        """Leave the run: from now on requests are ignored."""
        if not self.leaving:
            self.transition(_S.LEAVING)

    def on_gone(self) -> None:
        """The worker has sent its last message."""
        self.leave()
        self.transition(_S.GONE)

    def receive(self, message: m.ToWorker) -> m.ToWorkerReplica | m.FromWorker | None:
        """Receive a message.

        Returns:
            The message if it requires work on the replica now, or the reply if it needs none, else
            ``None``. A worker that is leaving joins no round, since its peers may be gone. Its
            final state is part of the result: until ``Shutdown`` it receives the average of a round
            that it took part in, and undoes one that its peers did not complete.
        """
        if isinstance(message, m.Shutdown):
            self.shutdown = message
            self.leave()
            return None
        if isinstance(message, m.Rollback):
            return message if self.on_rolled_back(message.round) else None
        if self.leaving and (self.shutdown or not isinstance(message, m.Update)):
            return None
        match message:
            case m.StartEpoch():
                if self.accepts(message.plan):
                    self.plans.append(message.plan)
                elif self.state is not _S.HALTED:
                    return self.returned(message.plan)
            case m.Throttle():
                self._budget = m.BatchBudget(
                    limit=message.limit, report_after=self._budget.report_after
                )
            case m.Resume():
                self._set_budget(message.budget)
                self.alone = self.alone or message.alone
            case m.SetGlobalStep():
                self.global_step = message.step
            case m.SyncNow():
                self.transition(_S.SYNCING)
                return message
            case m.Halt():
                # A worker that has halted in this group, or joined a later one, has replied.
                has_replied = self.state is _S.HALTED or message.generation != self.generation
                return None if has_replied else message
            case _ if isinstance(message, m.ToWorkerReplica):
                return message
            case _:
                assert_never(message)
        self._update_state()
        return None

    @staticmethod
    def ends_step(message: m.ToWorker) -> bool:
        """True if no plan follows in which a step over several batches may continue."""
        return isinstance(message, m.Shutdown | m.Halt)

    def begin_plan(self) -> m.EpochPlan | None:
        """Begin the next plan, if there is one, and return the plan in progress."""
        if self.state is _S.HALTED:
            return None
        if self.plan is None and self.plans and not self.leaving:
            self.plan = self.plans.popleft()
            self._update_state()
        return self.plan

    def end_plan(self) -> None:
        """End the plan in progress, completed or not."""
        self.plan = None
        self._update_state()

    def leave_epoch(self, epoch: int) -> list[m.EpochPlan]:
        """Drop the plan in progress, and all of this and earlier epochs, now and from now on.

        Returns:
            The plans received and not begun.
        """
        self._left_epoch = max(self._left_epoch, epoch)
        dropped = [plan for plan in self.plans if plan.epoch <= self._left_epoch]
        self.plans = deque(plan for plan in self.plans if plan.epoch > self._left_epoch)
        self.end_plan()
        return dropped

    def returned(self, plan: m.EpochPlan) -> m.EpochReport:
        """The report of a plan that was not begun, of an epoch that the worker has left."""
        return m.EpochReport(rank=self.rank, epoch=plan.epoch, stats=ReportStats(), left=True)

    def on_trained(self, batches: int, samples: int, weight: float | None = None) -> None:
        """Count a step.

        Args:
            weight: The weight of their losses; ``None``: the samples.
        """
        self.batches += batches
        self.samples += samples
        self.add_weight(samples if weight is None else weight)
        self.unreported += batches
        limit = self._budget.limit
        if limit is not None and self.batches >= limit:  # otherwise the state does not change
            self._update_state()

    def add_weight(self, weight: float) -> None:
        """Add to the weight of the steps that were counted."""
        self.weight += weight
        self._weight_since += weight

    def on_step_reduced(self, batches: int) -> None:
        """Count a step with reduced gradients, which no averaging round follows."""
        self.unreported += batches

    @property
    def report_due(self) -> bool:
        """True if a report is due because of the batches trained, regardless of time."""
        if not self.unreported:
            return False
        if self.state is _S.PARKED:
            return True
        after = self._budget.report_after
        return after is not None and self._reported_at < after <= self.batches

    def on_reported(self) -> None:
        self.unreported = 0
        self._reported_at = self.batches

    def _counts(self, round_id: int) -> _Counts:
        return _Counts(round_id, self.batches, self.samples, self.weight, self.lr_factor)

    def on_snapshot_taken(self, round_id: int) -> None:
        """Mark the counts of a snapshot for a round."""
        self._mark = self._counts(round_id)
        self._weight_since = 0

    @property
    def pending_snapshot(self) -> int:
        """Round of a snapshot whose average may still arrive; 0: there is none."""
        return 0 if self._mark is None else self._mark.round

    def on_updated(self, update: m.Update) -> bool:
        """Subtract the counts of the snapshot from which an average was made.

        Returns:
            True if the update belongs to this worker's latest snapshot. If False, its round was
            given up, and it must not be applied.
        """
        if self._mark is None or self._mark.round != update.round:
            return False
        self.batches -= self._mark.batches
        self.samples -= self._mark.samples
        self.weight = self._weight_since
        self._mark = None
        self._new_round(update.budget)
        return True

    def discard_samples(self) -> int:
        """Remove the samples since the last round from the weight of the next one.

        Returns:
            Their number.
        """
        samples, self.samples = self.samples, 0
        self.weight = self._weight_since = 0
        return samples

    def on_synced(self, message: m.SyncNow, *, ok: bool) -> None:
        """End the collective of a round; if it failed, the counts stay."""
        self._last_sync = None
        if ok:
            self._last_sync = self._counts(message.round)
            self.batches = self.samples = 0
            self.weight = self._weight_since = 0
            self._mark = None  # this average contains the earlier snapshot
            self._new_round(message.budget)
        if self.state is _S.SYNCING:
            self.state = _S.IDLE
        self._update_state()

    def _new_round(self, budget: m.BatchBudget) -> None:
        self._set_budget(budget)
        self._reported_at = self.batches - self.unreported
        self._update_state()

    def _set_budget(self, budget: m.BatchBudget) -> None:
        self._budget = budget
        if budget.lr_factor is not None:
            self.lr_factor = budget.lr_factor

    def on_rolled_back(self, round_id: int) -> bool:
        """Undo a round over a collective: its counts become part of the next round.

        Returns:
            True if this worker had applied the round's average.
        """
        mark, self._last_sync = self._last_sync, None
        if mark is None or mark.round != round_id:
            return False
        self.batches += mark.batches
        self.samples += mark.samples
        self.weight += mark.weight
        self.lr_factor = mark.lr_factor
        self._reported_at += mark.batches
        self._update_state()
        return True

    def halt(self) -> None:
        """Drop all plans and wait for a new group, as this one is broken."""
        self.plan = None
        self.plans.clear()
        self.transition(_S.HALTED)

    def on_regrouped(self, generation: int) -> None:
        self.generation = generation
        if self.state is _S.HALTED:
            self.transition(_S.IDLE)
        self._update_state()
