"""What a worker tells of its time: nothing, or the causes and events of its lane.

A step costs three changes of cause: to its data, to its computation, and back to the loop.
These are written by the step itself, to :attr:`WorkerRecorder.lane`, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from coordinator import messages as m
from coordinator.machine import Coordinator
from coordinator.service import Service
from runtime.collective import Collective
from runtime.timeline.events import (
    AVERAGING,
    CALLBACKS,
    COMPUTE,
    CONTROL,
    DATA,
    ENDING,
    IDLE,
    PARKED,
    STARTUP,
    SYNC,
    UNATTRIBUTED,
    Kind,
)
from runtime.timeline.rank_lane import RankLane
from runtime.timeline.summary import RunFacts
from runtime.timeline.timeline import Timeline
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.worker_config import UserFunctions

_NOTHING: AbstractContextManager[None] = nullcontext()


class WorkerRecorder:
    """Is told by one worker, in its thread, what its time goes to; this one notes nothing.

    Between two steps that no message parts, the worker calls none of these methods.

    Attributes:
        lane: Where each step and the wait for its data are noted; ``None``: nowhere.
    """

    lane: RankLane | None = None

    def watch(self, functions: UserFunctions) -> UserFunctions:
        """The user's functions, to be called by the worker in their place."""
        return functions

    def joins(self, collective: Collective) -> None:
        """The worker meets the other ranks there from now on."""

    def between_plans(self) -> AbstractContextManager[None]:
        """The worker waits for a plan."""
        return _NOTHING

    def plan(self, plan: m.EpochPlan) -> AbstractContextManager[None]:
        """The worker trains a plan."""
        return _NOTHING

    def last_report(self, device: torch.device) -> AbstractContextManager[None]:
        """The worker reports a plan that is over."""
        return _NOTHING

    def averaging(self) -> AbstractContextManager[None]:
        """The worker averages its buffers with those of the others."""
        return _NOTHING

    def waiting(self, protocol: WorkerProtocol) -> AbstractContextManager[None]:
        """The worker blocks on its inbox."""
        return _NOTHING

    def answering(
        self, message: m.ToWorker, protocol: WorkerProtocol
    ) -> AbstractContextManager[None]:
        """The worker takes a message and does what it asks for."""
        return _NOTHING

    def capture(self) -> AbstractContextManager[None]:
        """The worker copies its state for a checkpoint."""
        return _NOTHING

    def halts(self) -> None:
        """The worker's group of ranks is broken."""

    def leaves(self) -> None:
        """The worker trains no more, and ends."""

    def ended(self) -> None:
        """The worker's loop is over, whatever the reason."""


P = ParamSpec("P")
R = TypeVar("R")


def _watched(
    fn: Callable[P, R] | None, lane: RankLane, kind: Kind, number: Callable[P, int]
) -> Callable[P, R] | None:
    if fn is None:
        return None
    inner = fn

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = lane.enter(CALLBACKS)
        start = lane.since
        try:
            return inner(*args, **kwargs)
        finally:
            lane.enter(before)
            lane.record(kind, start, number(*args, **kwargs))

    return call


_WORK: dict[type, tuple[int, str | None]] = {
    m.SyncNow: (AVERAGING, "all-reduce"),
    m.RequestParams: (AVERAGING, "snapshot"),
    m.Update: (AVERAGING, "update"),
    m.Rollback: (AVERAGING, "rollback"),
    m.Regroup: (SYNC, None),
    m.Evaluate: (CALLBACKS, None),
    m.CallCheckpointFn: (CALLBACKS, None),
    m.TakeCheckpoint: (CONTROL, None),
    m.Halt: (CONTROL, None),
    m.Resume: (CONTROL, None),
    m.SetGlobalStep: (CONTROL, None),
    m.ApplyDelta: (AVERAGING, "shift"),
    m.Shutdown: (CONTROL, None),
    m.StartEpoch: (CONTROL, None),
    m.Throttle: (CONTROL, None),
}
"""What answering a message counts as, and its part in an averaging round."""


class LaneRecorder(WorkerRecorder):
    """Notes on a rank's lane what its worker's time goes to.

    Args:
        lane: The worker's thread is the only one that writes to it.
    """

    def __init__(self, lane: RankLane) -> None:
        self.lane: RankLane = lane
        self._parked_at: float | None = None
        self._epoch_span: tuple[int, float, float] | None = None
        self._has_heard = False

    def watch(self, functions: UserFunctions) -> UserFunctions:
        """The user's functions, whose calls in the worker's thread are noted."""
        lane, f = self.lane, functions
        return replace(
            f,
            eval_fn=_watched(f.eval_fn, lane, Kind.EVALUATION, lambda model, epoch: epoch),
            epoch_fn=_watched(f.epoch_fn, lane, Kind.EPOCH_FN, lambda epoch, worker: epoch),
            checkpoint_fn=_watched(
                f.checkpoint_fn, lane, Kind.CHECKPOINT, lambda version, model: version
            ),
        )

    def joins(self, collective: Collective) -> None:
        """The worker meets the other ranks there from now on."""
        collective.lane = self.lane

    @contextmanager
    def between_plans(self) -> Iterator[None]:
        """The worker waits for a plan."""
        self.lane.enter(CONTROL)
        try:
            yield
        finally:
            self.lane.enter(UNATTRIBUTED)

    @contextmanager
    def plan(self, plan: m.EpochPlan) -> Iterator[None]:
        """The worker trains a plan."""
        lane = self.lane
        lane.enter(CONTROL)
        start = lane.since
        if self._epoch_span is None or self._epoch_span[0] != plan.epoch:
            self._end_epoch()
            self._epoch_span = (plan.epoch, start, start)
        try:
            yield
        finally:
            lane.enter(UNATTRIBUTED)
            self._end_throttle()
            lane.record(Kind.CHUNK, start, plan.epoch, plan.num_batches)
            self._epoch_span = (plan.epoch, self._epoch_span[1], lane.since)

    def _end_epoch(self) -> None:
        if self._epoch_span is not None:
            epoch, start, end = self._epoch_span
            self.lane.record(Kind.EPOCH, start, epoch, end=end)
            self._epoch_span = None

    @contextmanager
    def _during(self, cause: int) -> Iterator[None]:
        before = self.lane.enter(cause)
        try:
            yield
        finally:
            self.lane.enter(before)

    def last_report(self, device: torch.device) -> AbstractContextManager[None]:
        """The worker reports a plan that is over."""
        # The report waits for the last losses: a device may still be at its steps.
        return _NOTHING if device.type == "cpu" else self._during(COMPUTE)

    def averaging(self) -> AbstractContextManager[None]:
        """The worker averages its buffers with those of the others."""
        return self._during(AVERAGING)

    @contextmanager
    def waiting(self, protocol: WorkerProtocol) -> Iterator[None]:
        """The worker blocks on its inbox."""
        lane = self.lane
        cause = self._waits_for(protocol)
        before = lane.enter(cause)
        if cause == PARKED and self._parked_at is None:
            self._parked_at = lane.since
            lane.num_throttles += 1
        try:
            yield
        finally:
            lane.enter(before)

    def _waits_for(self, protocol: WorkerProtocol) -> int:
        """What the worker blocks on, where it blocks on its inbox."""
        if protocol.parked:
            return PARKED
        if self.lane.cause == DATA:
            return DATA
        if protocol.leaving:
            return ENDING
        if protocol.state is WorkerState.HALTED:
            return SYNC
        return IDLE if self._has_heard else STARTUP

    @contextmanager
    def answering(self, message: m.ToWorker, protocol: WorkerProtocol) -> Iterator[None]:
        """The worker takes a message and does what it asks for."""
        self._has_heard = True
        lane = self.lane
        cause, part = _WORK.get(type(message), (UNATTRIBUTED, None))
        before = lane.cause
        if cause != before:
            lane.enter(cause)
        start = lane.since
        try:
            yield
        finally:
            if lane.cause != before:
                lane.enter(before)
            if part is not None:
                lane.record(Kind.AVERAGING, start, getattr(message, "round", None), part)
            if not protocol.parked:
                self._end_throttle()

    def _end_throttle(self) -> None:
        if self._parked_at is not None:
            self.lane.record(Kind.THROTTLE, self._parked_at)
            self.lane.record(Kind.RESUME, self.lane.since)
            self._parked_at = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """The worker copies its state for a checkpoint."""
        lane = self.lane
        before = lane.enter(CALLBACKS)
        start = lane.since
        try:
            yield
        finally:
            lane.enter(before)
            if before != CALLBACKS:  # else it is a part of what is noted around it
                lane.record(Kind.CHECKPOINT, start, None, "state")

    def halts(self) -> None:
        """The worker's group of ranks is broken."""
        self.lane.enter(CONTROL)
        self._end_throttle()

    def leaves(self) -> None:
        """The worker trains no more, and ends."""
        self.lane.enter(ENDING)
        self._end_throttle()

    def ended(self) -> None:
        """The worker's loop is over, whatever the reason."""
        self.leaves()
        self._end_epoch()


class RunRecorder:
    """Ties a run to its timeline; without one, every call does nothing.

    Args:
        timeline: Where the run is recorded, if it is.

    Raises:
        ValueError: The timeline has recorded another run.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        if self._timeline is not None:
            self._timeline.require_unused()

    def begin(
        self,
        facts: RunFacts,
        devices: Sequence[torch.device],
        machine: Coordinator,
        service: Service,
    ) -> None:
        """The run begins; its threads have not started.

        Args:
            facts: What is known of the run.
            devices: Of each rank.
            machine: The coordinator.
            service: Shows the timeline what the coordinator does.
        """
        if self._timeline is not None:
            service.observe(self._timeline.begin(facts, devices, machine).observe)

    def recorder(self, rank: int) -> WorkerRecorder:
        """What the worker of a rank tells of its time."""
        return (
            WorkerRecorder() if self._timeline is None else LaneRecorder(self._timeline.lane(rank))
        )

    def built(self, rank: int, model: torch.nn.Module) -> None:
        """A worker has built its replica."""
        if self._timeline is not None and rank == 0:
            self._timeline.built(model)

    def left(self, rank: int) -> None:
        """The thread of a rank is about to end; called in it."""
        if self._timeline is not None:
            self._timeline.lane(rank).close()

    def finish(self, *, stopped: bool, error: BaseException | None) -> None:
        """The run is over."""
        if self._timeline is not None:
            self._timeline.finish(stopped=stopped, error=error)
