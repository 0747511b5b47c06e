"""Recording of a worker's time by cause on its lane.

A step changes the lane's cause three times: to data, to compute, and back to the loop. The step
itself writes these changes to :attr:`WorkerRecorder.lane`.
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
from runtime.timeline.rank_lane import RankLane, now
from runtime.timeline.summary import RunFacts
from runtime.timeline.timeline import Timeline
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.worker_config import UserFunctions

_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


P = ParamSpec("P")
R = TypeVar("R")


def _recorded(
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


_MESSAGE_CAUSES: dict[type, tuple[int, str | None]] = {
    m.SyncNow: (AVERAGING, "all-reduce"),
    m.RequestParams: (AVERAGING, "snapshot"),
    m.Update: (AVERAGING, "update"),
    m.Rollback: (AVERAGING, "rollback"),
    m.Regroup: (SYNC, None),
    m.RunTasks: (CALLBACKS, None),
    m.ApplyDelta: (AVERAGING, "shift"),
}
"""For messages, the cause of time spent handling them, and the part in an averaging round.

Of all others it is ``CONTROL``.
"""


class WorkerRecorder:
    """Records a worker's time on the lane of its rank, in its thread.

    The worker calls none of these methods between two steps without a message in between.

    Args:
        lane: The lane; only the worker's thread writes to it. ``None``: a new one that keeps the
            seconds by cause alone.
    """

    def __init__(self, lane: RankLane | None = None) -> None:
        self.lane = lane or RankLane.without_events(0, now())
        self._parked_at: float | None = None
        self._epoch_span: tuple[int, float, float] | None = None
        self._has_received = False

    def wrap(self, functions: UserFunctions) -> UserFunctions:
        """Return wrappers of the user's functions that record their calls on the lane."""
        lane, f = self.lane, functions
        return replace(
            f,
            eval_fn=_recorded(f.eval_fn, lane, Kind.EVALUATION, lambda model, epoch: epoch),
            epoch_fn=_recorded(f.epoch_fn, lane, Kind.EPOCH_FN, lambda epoch, worker: epoch),
            checkpoint_fn=_recorded(
                f.checkpoint_fn, lane, Kind.CHECKPOINT, lambda version, model: version
            ),
        )

    def collective_changed(self, collective: Collective) -> None:
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
            lane.record(Kind.CHUNK, start, plan.epoch, plan.num_loads(lane.rank))
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
        # The report waits for the last losses: a device may still run its steps.
        return _NO_CONTEXT if device.type == "cpu" else self._during(COMPUTE)

    def averaging(self) -> AbstractContextManager[None]:
        """The worker averages its buffers with those of its peers."""
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
        """The cause of waiting for a message."""
        if self.lane.cause == CALLBACKS:
            return CALLBACKS  # an evaluation in a body, which waits for its round
        if protocol.parked:
            return PARKED
        if self.lane.cause == DATA:
            return DATA
        if protocol.leaving:
            return ENDING
        if protocol.state is WorkerState.HALTED:
            return SYNC
        return IDLE if self._has_received else STARTUP

    @contextmanager
    def handling(self, message: m.ToWorker, protocol: WorkerProtocol) -> Iterator[None]:
        """The worker handles a message."""
        self._has_received = True
        lane = self.lane
        cause, part = _MESSAGE_CAUSES.get(type(message), (CONTROL, None))
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
            if before != CALLBACKS:  # else it is part of an event that is being recorded
                lane.record(Kind.CHECKPOINT, start, None, "state")

    @contextmanager
    def validation(self, epoch: int) -> Iterator[None]:
        """The worker evaluates its part of the validation set."""
        before = self.lane.enter(CALLBACKS)
        start = self.lane.since
        try:
            yield
        finally:
            self.lane.enter(before)
            self.lane.record(Kind.EVALUATION, start, epoch)

    def halted(self) -> None:
        self.lane.enter(CONTROL)
        self._end_throttle()

    def leaving(self) -> None:
        """The worker has stopped training and is about to end."""
        self.lane.enter(ENDING)
        self._end_throttle()

    def ended(self) -> None:
        """The worker's loop has ended, for any reason."""
        self.leaving()
        self._end_epoch()


class RunRecorder:
    """Records the time of a run's ranks by cause, and its events on its timeline, if any.

    Args:
        timeline: The timeline; ``None``: only the seconds by cause are kept.

    Attributes:
        lanes: The lane of each rank; empty before :meth:`begin`.

    Raises:
        ValueError: The timeline has recorded another run.
    """

    def __init__(self, timeline: Timeline | None, world_size: int) -> None:
        self._timeline = timeline
        self._world_size = world_size
        self.lanes: tuple[RankLane, ...] = ()
        self._end: float | None = None
        if self._timeline is not None:
            self._timeline.require_unused()

    def begin(
        self,
        facts: RunFacts,
        devices: Sequence[torch.device],
        machine: Coordinator,
        service: Service,
    ) -> None:
        """Begin the recording, before the run's threads start.

        Args:
            devices: The device of each rank.
            service: The service that reports the coordinator's events to the timeline.
        """
        ranks = range(self._world_size)
        if self._timeline is None:
            start = now()
            self.lanes = tuple(RankLane.without_events(rank, start) for rank in ranks)
        else:
            service.observe(self._timeline.begin(facts, devices, machine).observe)
            self.lanes = tuple(self._timeline.lane(rank) for rank in ranks)

    def recorder(self, rank: int) -> WorkerRecorder:
        """The recorder of a rank's worker."""
        return WorkerRecorder(self.lanes[rank])

    def built(self, rank: int, model: torch.nn.Module) -> None:
        if self._timeline is not None and rank == 0:
            self._timeline.built(model)

    def left(self, rank: int) -> None:
        """Close a rank's lane; called at the end of its thread."""
        self.lanes[rank].close()

    def seconds(self) -> list[list[float]]:
        """Seconds of each rank by cause, up to now or to the end; empty before :meth:`begin`."""
        return [lane.seconds(self._end) for lane in self.lanes]

    def finish(self, *, stopped: bool, error: BaseException | None) -> None:
        self._end = now()
        if self._timeline is not None:
            self._timeline.finish(stopped=stopped, error=error)
