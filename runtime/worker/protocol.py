"""The worker's half of the control protocol, without tensors, queues or a clock.

:class:`WorkerProtocol` takes messages and says which of them need work on tensors;
:class:`~runtime.worker.worker.GpuWorker` does that work. The simulation runs the same object.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from coordinator import messages as m


class WorkerState(Enum):
    """What a worker is doing."""

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
    """The protocol was driven into a state that it cannot reach; a bug."""


@dataclass(slots=True)
class _Mark:
    """What a snapshot holds, so that an update subtracts just that."""

    round: int
    batches: int
    samples: int
    weight: float


@dataclass(slots=True)
class WorkerProtocol:
    """State of one worker between messages and steps.

    Attributes:
        rank: The worker's rank.
        state: What it is doing.
        plans: Plans received and not yet begun, in order.
        plan: The plan in progress.
        batches: Batches trained since the last round.
        samples: Samples in them whose effect was kept.
        weight: The sum of their weights, which are samples unless ``train_fn`` gave others: the
            worker's weight in the next round.
        unreported: Batches trained since the last report.
        global_step: Batches of all ranks up to the last round.
        generation: The group of ranks that this one meets in collectives.
        shutdown: The message that ends the worker, once it came.
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
    shutdown: m.Shutdown | None = None
    _allowance: m.Allowance = field(default_factory=m.Allowance)
    _reported_at: int = 0
    _mark: _Mark | None = None
    _weight_since: float = 0  # since the mark: what is left of floats by subtraction is no 0
    _last_sync: _Mark | None = None

    def transition(self, state: WorkerState) -> None:
        """Go to ``state``.

        Raises:
            IllegalTransition: The present state does not lead there.
        """
        if state is self.state:
            return
        if state not in _NEXT[self.state]:
            raise IllegalTransition(f"worker {self.rank}: {self.state} -> {state}")
        self.state = state

    def _settle(self) -> None:
        """The state that follows from limit and plan, unless it is leaving or in a round."""
        if self.state in (_S.LEAVING, _S.GONE, _S.SYNCING, _S.HALTED, _S.BUILDING):
            return
        limit = self._allowance.limit
        if limit is not None and self.batches >= limit:
            self.transition(_S.PARKED)
        else:
            self.transition(_S.IDLE if self.plan is None else _S.TRAINING)

    @property
    def may_train(self) -> bool:
        """Whether the next step of the plan in progress may begin."""
        return self.state is _S.TRAINING

    @property
    def parked(self) -> bool:
        """Whether the worker waits to be released."""
        return self.state is _S.PARKED

    @property
    def leaving(self) -> bool:
        """Whether nothing but ``Shutdown`` matters any more."""
        return self.state in (_S.LEAVING, _S.GONE)

    @property
    def accepts_plans(self) -> bool:
        """Whether a plan that comes now is to be trained; one sent before a halt is void."""
        return not self.leaving and self.state is not _S.HALTED

    def built(self) -> None:
        """The replica exists."""
        self.transition(_S.IDLE)
        self._settle()

    def leave(self) -> None:
        """Stop taking part: from here on every request is skipped."""
        if not self.leaving:
            self.transition(_S.LEAVING)

    def gone(self) -> None:
        """Everything is said."""
        self.leave()
        self.transition(_S.GONE)

    def receive(self, message: m.ToWorker) -> m.ToWorker | None:
        """Take a message.

        Returns:
            The message if tensors are to be moved for it now, else ``None``. A worker
            that is leaving joins no round: its peers may be gone.
        """
        if isinstance(message, m.Shutdown):
            self.shutdown = message
            self.leave()
            return None
        if self.leaving:
            return None
        match message:
            case m.StartEpoch():
                if self.accepts_plans:
                    self.plans.append(message.plan)
            case m.Throttle():
                self._allowance = m.Allowance(
                    limit=message.limit, report_after=self._allowance.report_after
                )
            case m.Resume():
                self._allowance = message.allowance
            case m.SetGlobalStep():
                self.global_step = message.step
            case m.SyncNow():
                self.transition(_S.SYNCING)
                return message
            case m.Halt():
                # One that has halted for this group, or is in a later one, has answered.
                known = self.state is _S.HALTED or message.generation != self.generation
                return None if known else message
            case m.Regroup():
                return message
            case m.Rollback():
                return message if self.rolled_back(message.round) else None
            case m.RequestParams() | m.Update() | m.Evaluate() | m.CallCheckpointFn():
                return message
            case m.TakeCheckpoint() | m.Shift():
                return message
            case _:
                assert_never(message)
        self._settle()
        return None

    def begin_plan(self, *, leaving_too: bool = False) -> m.EpochPlan | None:
        """Take the next plan, if there is one.

        Args:
            leaving_too: Also take it while leaving, as lockstep ranks must where their
                peers may have begun it.
        """
        if self.state is _S.HALTED:
            return None
        if self.plan is None and self.plans and (leaving_too or not self.leaving):
            self.plan = self.plans.popleft()
            self._settle()
        return self.plan

    def end_plan(self) -> None:
        """The plan in progress is done or abandoned."""
        self.plan = None
        self._settle()

    def drop_plans(self) -> None:
        """No rank of a lockstep run begins the plans that wait: all have agreed to stop."""
        self.plans.clear()

    def trained(self, batches: int, samples: int, weight: float | None = None) -> None:
        """A step is done; ``batches`` micro-batches went into it.

        Args:
            batches: Micro-batches that went into it.
            samples: Samples in them.
            weight: Of their losses; ``None``: the samples.
        """
        self.batches += batches
        self.samples += samples
        self.weigh(samples if weight is None else weight)
        self.unreported += batches
        limit = self._allowance.limit
        if limit is not None and self.batches >= limit:  # else the state is as it was
            self._settle()

    def weigh(self, weight: float) -> None:
        """What was trained has this weight beside that which was told with it."""
        self.weight += weight
        self._weight_since += weight

    def step_reduced(self, batches: int) -> None:
        """A step whose gradients were averaged is done: nothing waits for a round."""
        self.unreported += batches

    @property
    def report_due(self) -> bool:
        """Whether the coordinator must hear of the batches trained, apart from time."""
        if not self.unreported:
            return False
        if self.state is _S.PARKED:
            return True
        after = self._allowance.report_after
        return after is not None and self._reported_at < after <= self.batches

    def reported(self) -> None:
        """All batches trained have been told."""
        self.unreported = 0
        self._reported_at = self.batches

    def snapshot_taken(self, round_id: int) -> None:
        """A snapshot for this round holds everything trained so far."""
        self._mark = _Mark(round_id, self.batches, self.samples, self.weight)
        self._weight_since = 0

    def updated(self, update: m.Update) -> bool:
        """An average was taken: subtract what its snapshot held, keep what came after.

        Returns:
            Whether the update answers this worker's latest snapshot. If not, it belongs
            to a round that was given up and must change nothing.
        """
        if self._mark is None or self._mark.round != update.round:
            return False
        self.batches -= self._mark.batches
        self.samples -= self._mark.samples
        self.weight = self._weight_since
        self._mark = None
        self._new_round(update.allowance)
        return True

    def discard_samples(self) -> int:
        """What was trained since the last round has no effect, and so no weight in the next.

        Returns:
            The samples.
        """
        samples, self.samples = self.samples, 0
        self.weight = self._weight_since = 0
        return samples

    def synced(self, message: m.SyncNow, *, ok: bool) -> None:
        """The collective of a round has ended; if it failed, the counters stay."""
        self._last_sync = None
        if ok:
            self._last_sync = _Mark(message.round, self.batches, self.samples, self.weight)
            self.batches = self.samples = 0
            self.weight = self._weight_since = 0
            self._mark = None  # what an earlier snapshot held is in this average
            self._new_round(message.allowance)
        if self.state is _S.SYNCING:
            self.state = _S.IDLE
        self._settle()

    def _new_round(self, allowance: m.Allowance) -> None:
        self._allowance = allowance
        self._reported_at = self.batches - self.unreported
        self._settle()

    def rolled_back(self, round_id: int) -> bool:
        """A round over a collective is undone: what went into it waits for the next.

        Returns:
            Whether this worker had taken the round's average.
        """
        mark, self._last_sync = self._last_sync, None
        if mark is None or mark.round != round_id:
            return False
        self.batches += mark.batches
        self.samples += mark.samples
        self.weight += mark.weight
        self._reported_at += mark.batches
        self._settle()
        return True

    def halt(self) -> None:
        """The group of ranks is broken: forget all plans until there is a new one."""
        self.plan = None
        self.plans.clear()
        self.transition(_S.HALTED)

    def regrouped(self, generation: int) -> None:
        """The worker has joined a new group of ranks."""
        self.generation = generation
        if self.state is _S.HALTED:
            self.transition(_S.IDLE)
        self._settle()
