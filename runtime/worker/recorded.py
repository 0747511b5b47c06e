"""A worker that notes on its lane what it does.

A run without a timeline uses :class:`~runtime.worker.worker.GpuWorker` itself, and pays nothing.

A step costs three changes of cause: to its data, to its computation, and back to the loop.
Every method here overrides one of the worker's with the same signature, which a test checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from coordinator import messages as m
from coordinator.machine import Coordinator
from coordinator.service import Service
from runtime.collective import Collective
from runtime.replica.step import TrainFn
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
    RunFacts,
)
from runtime.timeline.recorder import Lane
from runtime.timeline.timeline import Timeline
from runtime.worker.config import UserFunctions, Wake, WorkerConfig, WorkerEndpoints
from runtime.worker.protocol import WorkerState
from runtime.worker.worker import GpuWorker

# -- The user's functions, seen as they are called in a worker's thread --

P = ParamSpec("P")
R = TypeVar("R")


def watch_functions(functions: UserFunctions, lane: Lane) -> UserFunctions:
    """The user's functions, whose calls in the worker's thread are noted on its lane."""
    return replace(
        functions,
        eval_fn=_watched(functions.eval_fn, lane, Kind.EVALUATION, lambda model, epoch: epoch),
        epoch_fn=_watched(functions.epoch_fn, lane, Kind.EPOCH_FN, lambda epoch, worker: epoch),
        checkpoint_fn=_watched(
            functions.checkpoint_fn, lane, Kind.CHECKPOINT, lambda version, model: version
        ),
    )


def _watched(
    fn: Callable[P, R] | None, lane: Lane, kind: Kind, number: Callable[P, int]
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
            lane.note(kind, start, number(*args, **kwargs))

    return call


_WORK: dict[type, tuple[int, str | None]] = {
    m.SyncNow: (AVERAGING, "all-reduce"),
    m.RequestParams: (AVERAGING, "snapshot"),
    m.Update: (AVERAGING, "update"),
    m.Rollback: (AVERAGING, "rollback"),
    m.Regroup: (SYNC, None),
    m.Evaluate: (CALLBACKS, None),
    m.Checkpoint: (CALLBACKS, None),
    m.Capture: (CONTROL, None),
    m.Halt: (CONTROL, None),
    m.Resume: (CONTROL, None),
    m.SetGlobalStep: (CONTROL, None),
    m.Shutdown: (CONTROL, None),
    m.StartEpoch: (CONTROL, None),
    m.Throttle: (CONTROL, None),
}
"""What answering a message counts as, and its part in an averaging round."""


class RecordedWorker(GpuWorker):
    """Trains as :class:`~runtime.worker.worker.GpuWorker` does, and says what its time goes to.

    Args:
        lane: Where it notes that; this worker's thread is the only one that does.
        config: See :class:`~runtime.worker.worker.GpuWorker`, and so for the others.
    """

    def __init__(
        self,
        lane: Lane,
        config: WorkerConfig,
        functions: UserFunctions,
        endpoints: WorkerEndpoints,
        *,
        collective: Collective | None = None,
        **others: Any,
    ) -> None:
        self._lane: Lane = lane
        self._parked_at: float | None = None
        self._epoch_span: tuple[int, float, float] | None = None
        self._has_heard = False
        if collective is not None:
            collective.lane = lane
        watched = watch_functions(functions, lane)
        super().__init__(config, watched, endpoints, collective=collective, **others)

    def run(self) -> None:
        """Train plan after plan until ``Shutdown``, then leave."""
        try:
            super().run()
        finally:
            self._lane.enter(ENDING)
            self._end_throttle()
            self._end_epoch()

    # -- plans ------------------------------------------------------------------------

    def wait_for_epoch_plan(self) -> m.EpochPlan | None:
        """Block until there is a plan; answer everything else meanwhile."""
        lane = self._lane
        lane.enter(CONTROL)
        try:
            return super().wait_for_epoch_plan()
        finally:
            lane.enter(UNATTRIBUTED)

    def run_epoch_plan(self, plan: m.EpochPlan, train_fn: TrainFn | None = None) -> bool:
        """Train a plan to its end, answering messages between steps."""
        lane = self._lane
        lane.enter(CONTROL)
        start = lane.since
        if self._epoch_span is None or self._epoch_span[0] != plan.epoch:
            self._end_epoch()
            self._epoch_span = (plan.epoch, start, start)
        try:
            return super().run_epoch_plan(plan, train_fn)
        finally:
            lane.enter(UNATTRIBUTED)
            self._end_throttle()
            lane.note(Kind.CHUNK, start, plan.epoch, plan.num_batches)
            self._epoch_span = (plan.epoch, self._epoch_span[1], lane.since)

    def _end_epoch(self) -> None:
        if self._epoch_span is not None:
            epoch, start, end = self._epoch_span
            self._lane.note(Kind.EPOCH, start, epoch, end=end)
            self._epoch_span = None

    def _end_plan(self, plan: m.EpochPlan) -> None:
        if self._context.device.type == "cpu":
            super()._end_plan(plan)
            return
        # The report waits for the last losses: the device is still at its steps.
        before = self._lane.enter(COMPUTE)
        try:
            super()._end_plan(plan)
        finally:
            self._lane.enter(before)

    def _sync_buffers(self) -> None:
        before = self._lane.enter(AVERAGING)
        try:
            super()._sync_buffers()
        finally:
            self._lane.enter(before)

    # -- messages ------------------------------------------------------------------------

    def _next_message(self, timeout_s: float | None = None) -> Any:
        lane = self._lane
        cause = self._waits_for()
        before = lane.enter(cause)
        if cause == PARKED and self._parked_at is None:
            self._parked_at = lane.since
            lane.num_throttles += 1
        try:
            return super()._next_message(timeout_s)
        finally:
            lane.enter(before)

    def _waits_for(self) -> int:
        """What the worker blocks on, where it blocks on its inbox."""
        protocol = self._protocol
        if protocol.parked:
            return PARKED
        if self._lane.cause == DATA:
            return DATA
        if protocol.leaving:
            return ENDING
        if protocol.state is WorkerState.HALTED:
            return SYNC
        return IDLE if self._has_heard else STARTUP

    def _receive(self, message: m.ToWorker | Wake) -> None:
        if isinstance(message, Wake):
            super()._receive(message)
            return
        self._has_heard = True
        lane = self._lane
        cause, part = _WORK.get(type(message), (UNATTRIBUTED, None))
        before = lane.cause
        if cause != before:
            lane.enter(cause)
        start = lane.since
        try:
            super()._receive(message)
        finally:
            if lane.cause != before:
                lane.enter(before)
            if part is not None:
                lane.note(Kind.AVERAGING, start, getattr(message, "round", None), part)
            if self._parked_at is not None and not self._protocol.parked:
                self._end_throttle()

    def _end_throttle(self) -> None:
        if self._parked_at is not None:
            self._lane.note(Kind.THROTTLE, self._parked_at)
            self._lane.note(Kind.RESUME, self._lane.since)
            self._parked_at = None

    # -- checkpoints ---------------------------------------------------------------------

    def _capture_now(self, capture: int) -> None:
        lane = self._lane
        before = lane.enter(CALLBACKS)
        start = lane.since
        try:
            super()._capture_now(capture)
        finally:
            lane.enter(before)
            lane.note(Kind.CHECKPOINT, start, None, "state")

    def capture_state(self) -> m.Extra:
        """This rank's own part of a checkpoint, as it is between two steps; a copy."""
        lane = self._lane
        before = lane.enter(CALLBACKS)
        start = lane.since
        try:
            return super().capture_state()
        finally:
            lane.enter(before)
            if before != CALLBACKS:  # else it is a part of what is noted around it
                lane.note(Kind.CHECKPOINT, start, None, "state")

    # -- the end, and what comes before a new group ----------------------------------------

    def _halt(self) -> None:
        self._lane.enter(CONTROL)
        self._end_throttle()
        super()._halt()

    def _join(self, collective: Collective) -> None:
        collective.lane = self._lane
        super()._join(collective)

    def send_final_snapshot(self) -> None:
        """Send the last state, with the samples trained since the last round."""
        self._lane.enter(ENDING)
        super().send_final_snapshot()

    def report_exiting(self) -> None:
        """Tell the coordinator that nothing more will come."""
        self._lane.enter(ENDING)
        super().report_exiting()

    def drain_until_shutdown(self, timeout_s: float | None = None) -> bool:
        """Take messages, joining no round and training nothing, until ``Shutdown``."""
        self._lane.enter(ENDING)
        self._end_throttle()
        return super().drain_until_shutdown(timeout_s)

    def _end_graphs(self) -> None:
        self._lane.enter(ENDING)
        super()._end_graphs()


# -- What a run has to do with its timeline, if it has one --


class Recording:
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

    def worker_class(self, rank: int) -> Callable[..., GpuWorker]:
        """What to make the worker of a rank with."""
        if self._timeline is None:
            return GpuWorker
        return partial(RecordedWorker, self._timeline.lane(rank))

    def built(self, worker: GpuWorker) -> None:
        """A worker has built its replica."""
        if self._timeline is not None and worker.rank == 0:
            self._timeline.built(worker.model)

    def left(self, rank: int) -> None:
        """The thread of a rank is about to end; called in it."""
        if self._timeline is not None:
            self._timeline.lane(rank).close()

    def finish(self, *, stopped: bool, error: BaseException | None) -> None:
        """The run is over."""
        if self._timeline is not None:
            self._timeline.finish(stopped=stopped, error=error)
