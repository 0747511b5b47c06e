"""WorkerFlow: the control flow of a worker, which its thread and the simulation run."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

from coordinator import messages as m
from coordinator.run_errors import GpuWorkerError
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, PieceTooLarge
from runtime.data.loader import Loader
from runtime.replica.averager import ReducedState
from runtime.replica.drift import INTERVAL as DRIFT_INTERVAL
from runtime.timeline.events import COMPUTE, DATA
from runtime.timeline.rank_lane import now
from runtime.worker.lockstep import EpochStarts, WorkerProgress
from runtime.worker.operations import Flow, ReplicaOperations, StepOperations, exhaust
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.reporter import Reporter
from runtime.worker.worker_config import Wake, WorkerConfig

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Longest wait for ``Shutdown`` after a collective was aborted."""


class WorkerFlow:
    """Trains plans, handles messages between two steps, and reacts to failures.

    Its generators wait where their operations wait: those of a worker block its thread, those of
    the simulation yield.

    Args:
        replies: Replies to the messages that need the replica.

    Attributes:
        deferred: Messages received within a step, in order.
    """

    def __init__(
        self,
        config: WorkerConfig,
        protocol: WorkerProtocol,
        reporter: Reporter,
        loads: PlanLoads,
        ops: StepOperations,
        replies: ReplicaReplies,
        recorder: WorkerRecorder,
    ) -> None:
        self.protocol = protocol
        self.deferred: deque[Any] = deque()
        self._config = config
        self._reporter = reporter
        self._loads = loads
        self._ops = ops
        self._replies = replies
        self._recorder = recorder
        self._lane = recorder.lane
        self._progress, self._lockstep = ops.progress, ops.lockstep
        self._is_lockstep = ops.is_lockstep
        self._is_starved = False  # the last plan had no batch for the step in progress

    # The life of a worker.

    def run(self) -> Flow[None]:
        """Train plan after plan until ``Shutdown``, then leave."""
        config, rank = self._config, self._config.rank
        self._reporter.send(self._ops.ready())
        while True:
            try:
                yield from self._train_plans()
                break
            except PieceTooLarge as error:
                logger.warning(
                    "rank %d: %s; it gets smaller pieces from now on, and the step is repeated",
                    rank,
                    error,
                )
                self._halt(too_large=error)
                if self.protocol.leaving:
                    break
                continue
            except _EpochLeft:
                self._halt()
                if self.protocol.leaving:
                    break
                continue
            except CollectiveAborted as error:
                # Another rank failed and reports the error; if none does, this one raises.
                # The body of an own loop may leave an epoch, which halts the others.
                repeats = config.redoes or config.falls_back or self._ops.has_body
                can_continue = self._is_lockstep and repeats
                fault = str(error) if error.failed else None
                if not (can_continue or (yield from self.drain_until_shutdown(DRAIN_S))):
                    raise GpuWorkerError(
                        f"rank {rank}: a collective was aborted, and no rank has reported a "
                        f"cause within {DRAIN_S:g} s"
                    ) from error
            except CollectiveTimeout as error:
                # A peer is late, not dead: form a new group with those that wait.
                can_continue = config.survives or (config.falls_back and error.failed)
                if not (can_continue and self._is_lockstep):
                    raise
                fault = str(error) if error.failed else None
            if self.protocol.leaving:
                self._reporter.report_rest()
                break
            self._halt(fault)
        if self._must_send_state and self._ops.can_send_state(has_failed=self._has_failed):
            self._replies.send_final_snapshot()
        self.report_exiting()

    @property
    def _must_send_state(self) -> bool:
        """True if the final state was requested."""
        return self.protocol.shutdown is not None and self.protocol.shutdown.snapshot

    @property
    def _has_failed(self) -> bool:
        """True if the run has failed, so that the state is that of an interrupted step."""
        return self.protocol.shutdown is not None and self.protocol.shutdown.failed

    def answer_after_failure(self) -> Flow[bool]:
        """See :meth:`GpuWorker.answer_after_failure`.

        The coordinator aborts the collectives first, so that the reductions of launched steps end.
        The effects of a round that was completed or given up are received until then; its
        callbacks are not called.
        """
        self._loads.forget()
        while self.protocol.shutdown is None:
            message = yield from self._next_message(DRAIN_S)
            if isinstance(message, m.Update):
                message = replace(message, tasks=())
            if isinstance(message, (m.Update, m.Rollback, m.Shutdown)):
                yield from self._receive(message)
        if not (self._must_send_state and self._ops.can_send_state(has_failed=False)):
            return False
        if not self._ops.undo_failed():
            return False
        self._reporter.report_rest()
        self._replies.send_final_snapshot()
        self.report_exiting()
        return True

    def drain_until_shutdown(self, timeout_s: float | None = None) -> Flow[bool]:
        """See :meth:`GpuWorker.drain_until_shutdown`."""
        self._recorder.leaving()
        self.protocol.leave()
        clock = self._replies.now
        deadline = None if timeout_s is None else clock() + timeout_s
        while self.protocol.shutdown is None:
            left = None if deadline is None else max(0.0, deadline - clock())
            try:
                message = yield from self._next_message(left)
            except queue.Empty:
                return False
            work = None if isinstance(message, Wake) else self.protocol.receive(message)
            if isinstance(work, m.Update):
                work = replace(work, tasks=())
            if isinstance(work, (m.Update, m.Rollback)):
                yield from self._replies.handle(work)
        return True

    def report_exiting(self) -> None:
        """Send the worker's last message."""
        self._recorder.leaving()
        self.protocol.on_gone()
        self._reporter.send(m.Exiting(rank=self._config.rank))
        self._reporter.flush(wait=True)

    def _halt(self, fault: str | None = None, too_large: PieceTooLarge | None = None) -> None:
        """Leave the plan and report the position, as the group of ranks is broken."""
        self._recorder.halted()
        self._loads.forget()
        self._ops.halt()
        if not self.protocol.leaving:
            self.protocol.halt()
        self._send_halted(fault, too_large)

    def _send_halted(
        self, fault: str | None = None, too_large: PieceTooLarge | None = None
    ) -> None:
        cause = None if too_large is None else too_large.__cause__
        epoch = self._progress.epoch
        self._reporter.send(
            m.Halted(
                rank=self._config.rank,
                generation=self.protocol.generation,
                step=self._lockstep.step,
                num_syncs=self._lockstep.num_syncs,
                fault=fault,
                report=self._reporter.take_report(),
                too_large=0 if too_large is None else too_large.num_samples,
                error=cause if isinstance(cause, Exception) else None,
                left=epoch if epoch <= self._ops.left_epoch else None,
            )
        )

    def _regroup(self, message: m.Regroup) -> Flow[None]:
        """Join the group of the remaining ranks."""
        rank = self._config.rank
        try:
            yield from self._ops.connect(message)
        except (CollectiveAborted, CollectiveTimeout) as error:
            if not self._config.falls_back:
                raise GpuWorkerError(f"rank {rank} could not join its new group") from error
            self._send_unconnected(message, error)
            return
        self.protocol.on_regrouped(message.generation)
        if message.step is not None:
            yield from self._ops.catch_up(message)
            self._reporter.send(m.Regrouped(rank=rank, generation=message.generation))

    def _send_unconnected(self, message: m.Regroup, error: BaseException) -> None:
        """Report that the new group could not be connected; another one follows."""
        self._reporter.send(
            m.ConnectFailed(
                rank=self._config.rank,
                generation=message.generation,
                backend=message.backend,
                error=str(error),
            )
        )
        if message.step is None:
            self.protocol.on_regrouped(message.generation)
        else:
            self.protocol.generation = message.generation
            self._send_halted()

    # Plans and steps.

    def _train_plans(self) -> Flow[None]:
        try:
            while (plan := (yield from self.wait_for_plan())) is not None:
                if (yield from self.train_plan(plan)):
                    return
            self._ops.end_plans()
        except (CollectiveAborted, CollectiveTimeout):
            self._ops.abandon_steps()
            raise

    def wait_for_plan(self) -> Flow[m.EpochPlan | None]:
        """See :meth:`GpuWorker.wait_for_epoch_plan`."""
        with self._recorder.between_plans():
            while True:
                leaving = False
                if not (yield from self._continues_step()):
                    leaving = yield from self.handle_control()
                plan = self.protocol.begin_plan()
                if plan is not None:
                    return plan
                if leaving:
                    return None
                yield from self.receive_next()

    def _continues_step(self) -> Flow[bool]:
        """Within a step over several batches, wait for the next plan, and defer all other messages,
        as the replica must not change.

        Returns:
            False if there is no such step, or the run ends it.
        """
        if not self._ops.is_open or self._is_starved:
            return False
        deferred: list[m.ToWorker] = []
        while self._ops.is_open and not self.protocol.plans:
            if self.protocol.leaving:
                self._ops.abandon_step()
                break
            message = yield from self._next_message()
            if isinstance(message, Wake | m.StartEpoch):
                yield from self._receive(message)
                continue
            deferred.append(message)
            if self.protocol.ends_step(message):
                self._ops.abandon_step()
        self.deferred.extendleft(reversed(deferred))
        return self._ops.is_open

    def train_plan(self, plan: m.EpochPlan) -> Flow[bool]:
        """See :meth:`GpuWorker.run_epoch_plan`."""
        ops = self._ops
        with self._recorder.plan(plan), ops.plan_context():
            steps = self._begin_plan(plan)
            is_open = ops.is_open  # within a step over several batches
            last = len(steps.steps) - 1
            for index in range(last + 1):
                if not is_open:
                    if not self._is_undisturbed and (yield from self.handle_control()):
                        self._abandon(plan)
                        return self.protocol.leaving
                    if self._is_lockstep and self._lockstep.num_uncompared >= DRIFT_INTERVAL:
                        yield from ops.check_drift()
                if not (yield from ops.step(plan, steps, index)):
                    if plan.epoch <= ops.left_epoch:
                        self._leave_epoch()
                        return self.protocol.leaving
                    self._abandon(plan)
                    return True
                is_open = ops.is_open
                if index < last and not is_open:  # else the plan's own report follows
                    self._reporter.report_if_due()
            ops.confirm_steps()
            if steps.steps:
                ops.end_steps(closes=self._is_lockstep and plan.then.is_end)
            self._is_starved = ops.is_open and not plan.num_batches
            if ops.is_open or plan.then is m.AfterPlan.MORE:
                self.protocol.end_plan()
                open_epoch = self._progress.begun_epoch if ops.is_open else None
                self._reporter.report_epoch(plan.epoch, wait=False, open_epoch=open_epoch)
            else:
                yield from ops.end_epoch(is_partial=plan.then is not m.AfterPlan.EPOCH_END)
                self._end_plan(plan)
            return False

    def _begin_plan(self, plan: m.EpochPlan) -> PlanSteps:
        steps, progress = PlanSteps(plan, self._config), self._progress
        begins_epoch = plan.epoch > progress.begun_epoch
        if begins_epoch:
            self._ops.require_closed()
            progress.begun_epoch = plan.epoch
        progress.epoch = self._reporter.epoch = plan.epoch
        self._ops.begin_plan(plan, steps.position(0), begins_epoch=begins_epoch)
        self._loads.begin(plan, begins_epoch=begins_epoch)
        return steps

    @property
    def _is_undisturbed(self) -> bool:
        """True if no message is to be handled or sent before the next step: the usual case."""
        trains = self.protocol.state is WorkerState.TRAINING
        waits = self.deferred or self._reporter.held or self._ops.has_message()
        return trains and not waits

    def _abandon(self, plan: m.EpochPlan) -> None:
        self._ops.confirm_steps()
        self._loads.forget()
        self._end_plan(plan)

    def _end_plan(self, plan: m.EpochPlan) -> None:
        with self._recorder.last_report(self._config.device):
            params_norm = self._ops.final_norm(plan)
            self.protocol.end_plan()
            self._reporter.report_epoch(plan.epoch, params_norm)

    def _leave_epoch(self) -> None:
        """Give back the rest of an epoch, whose loop the body has left.

        Raises:
            _EpochLeft: In lockstep, the other ranks wait at a step.
        """
        self._ops.leave_epoch()
        if self._is_lockstep:
            raise _EpochLeft
        self._loads.forget()
        epoch = self._ops.left_epoch
        dropped = self.protocol.leave_epoch(epoch)
        for plan in self.protocol.plans:  # of later epochs: before those that are to come
            self._loads.receive(plan)
        self._reporter.leave_epoch(epoch, dropped)

    def await_batch(self, *, answer: bool) -> Flow[Any]:
        """Wait for the next batch; handle or defer messages while it is being loaded.

        Between steps a stalled loader must not delay acknowledgements; inside a step the replica
        cannot be read or written.

        Args:
            answer: Handle messages; otherwise defer them.

        Returns:
            The batch; ``None`` if the worker must leave.
        """
        while (batch := self.try_batch()) is None:
            message = yield from self._get_message()
            if not answer and not isinstance(message, Wake):
                self.deferred.append(message)
            else:
                yield from self._receive(message)
                if answer and (yield from self.handle_control()):
                    return None
        return batch

    def block_for_batch(self, *, answer: bool) -> Any:
        """:meth:`await_batch` in a thread, where a flow for each loaded batch would take time."""
        batch = self.try_batch()
        return exhaust(self.await_batch(answer=answer)) if batch is None else batch

    def try_batch(self) -> Any:
        """The next batch; ``None`` if it is being loaded."""
        loader, lane = self._loads.next_loader(), self._lane
        began = now()
        if loader.reads_inline:
            lane.enter(DATA, began)
        loaded = loader.try_next()
        if loaded is not None:
            self._reporter.meter.add_load(loaded.load_s, ahead=loader.reads_ahead)
        if lane.cause == DATA:
            if loaded is not None:
                lane.enter(COMPUTE)
        elif loaded is not None:
            lane.record_interval(DATA, began, COMPUTE)
        else:
            lane.enter(DATA, began)
        return None if loaded is None else loaded.data

    # Messages.

    def handle_control(self) -> Flow[bool]:
        """See :meth:`GpuWorker.handle_control`."""
        self._reporter.flush()
        while True:
            if not (self.deferred or self._ops.has_message()):
                if self.protocol.may_train:
                    return False
                if not self.protocol.parked:
                    return self.protocol.leaving
                if self.protocol.report_due:
                    self._reporter.report_timing()
            yield from self.receive_next()

    def receive_next(self) -> Flow[None]:
        """Wait for the next message and handle it, between two steps."""
        message = yield from self._next_message()
        yield from self._receive(message)

    def _next_message(self, timeout_s: float | None = None) -> Flow[Any]:
        """The next message, deferred or received."""
        if self.deferred:
            return self.deferred.popleft()
        return (yield from self._get_message(timeout_s))

    def _get_message(self, timeout_s: float | None = None) -> Flow[Any]:
        """Wait for a message, after sending those held for copies; one that is there does not wait
        for these copies.
        """
        if self._ops.has_message():  # this thread is the only reader
            return (yield from self._ops.get_message(None))
        with self._recorder.waiting(self.protocol):
            self._reporter.flush(wait=True)
            return (yield from self._ops.get_message(timeout_s))

    def _receive(self, message: m.ToWorker | Wake) -> Flow[None]:
        if isinstance(message, Wake):
            self._loads.submit_held()  # the last rank may have begun the epoch
            return
        with self._recorder.handling(message, self.protocol):
            if isinstance(message, m.StartEpoch) and self.protocol.accepts(message.plan):
                self._loads.receive(message.plan)
            work = self.protocol.receive(message)
            if isinstance(work, m.Regroup):
                yield from self._regroup(work)
            elif isinstance(work, m.ToWorkerReplica):
                yield from self._replies.handle(work)
            elif work is not None:
                self._reporter.send(work)


class _EpochLeft(Exception):
    """The body of an own loop has left the epoch in lockstep."""


class PlanLoads:
    """Submits plans to the loader in their order, none before ``epoch_fn`` was called for its
    epoch, which may change the data set.

    Args:
        loader: ``None``: for tools that train no plans.
        holds: True if there is an ``epoch_fn``.
        starts: In lockstep, the epochs that all ranks have begun.
    """

    def __init__(
        self,
        rank: int,
        progress: WorkerProgress,
        loader: Loader | None,
        *,
        holds: bool = False,
        starts: EpochStarts | None = None,
    ) -> None:
        self._rank = rank
        self._progress = progress
        self._loader = loader
        self._holds = holds
        self._starts = starts
        self._plan: m.EpochPlan | None = None  # the last one that was begun
        self._submitted: list[m.EpochPlan] = []  # of those that were not begun
        self._held: deque[m.EpochPlan] = deque()

    def receive(self, plan: m.EpochPlan) -> None:
        """Start to load a plan that arrived, unless ``epoch_fn`` is to be called first."""
        if self._holds and (self._held or not self._may_load(plan.epoch)):
            self._held.append(plan)
        else:
            self._submit(plan)

    def begin(self, plan: m.EpochPlan, *, begins_epoch: bool) -> None:
        """Start to load a plan that begins, unless that was done when it was received."""
        self._plan = plan
        if begins_epoch:
            self.begin_epoch(plan.epoch)
        if not any(p is plan for p in self._held):
            self._submit(plan)
            if plan.num_batches:
                assert self._submitted[0] is plan, "plans begin in the order of their loads"
            self._submitted.remove(plan)
        self.submit_held()

    def begin_epoch(self, epoch: int) -> None:
        """Record that ``epoch_fn`` was called, for the other ranks."""
        if self._starts is not None:
            self._starts.begin(self._rank, epoch)

    def _may_load(self, epoch: int) -> bool:
        """True if ``epoch_fn`` was called for an epoch, under lockstep on every rank."""
        if epoch > self._progress.begun_epoch:
            return False
        return self._starts is None or self._starts.all_begun(epoch)

    def submit_held(self) -> None:
        """Start to load held plans of epochs for which ``epoch_fn`` was called meanwhile."""
        while self._held and self._may_load(self._held[0].epoch):
            plan = self._held.popleft()
            self._submit(plan)
            if plan is self._plan:
                self._submitted.remove(plan)

    def _submit(self, plan: m.EpochPlan) -> None:
        if not any(p is plan for p in self._submitted):
            self._submitted.append(plan)
            if self._loader is not None:
                self._loader.submit(plan)

    def next_loader(self) -> Loader:
        """The loader, which has the next batch."""
        assert self._loader is not None, "a worker without a loader has no plans"
        if self._held:
            self.submit_held()
        return self._loader

    def forget(self) -> None:
        """Drop all batches not yet taken."""
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        self._held.clear()

    def close(self) -> bool:
        """Close the loader; False if its thread is alive. Idempotent."""
        loader, self._loader = self._loader, None
        return loader is None or bool(loader.close())


class ReplicaReplies:
    """Replies to the messages that :meth:`WorkerProtocol.receive` returns.

    Args:
        recorder: Records the captures.
    """

    def __init__(
        self,
        protocol: WorkerProtocol,
        reporter: Reporter,
        ops: ReplicaOperations,
        recorder: WorkerRecorder,
    ) -> None:
        self._protocol = protocol
        self._reporter = reporter
        self._ops = ops
        self._recorder = recorder
        self._rank = protocol.rank
        self._lockstep = ops.lockstep
        self.now = ops.now

    def handle(self, work: m.ToWorkerReplica) -> Flow[None]:
        """Handle a message and send the reply."""
        self._ops.confirm_steps()
        match work:
            case m.SyncNow():
                yield from self._run_sync_round(work)
            case m.RequestParams():
                self._send_snapshot(work)
            case m.Update():
                yield from self._apply_update(work)
            case m.RunTasks():
                with self._ops.holding(work.state):
                    yield from self._run_tasks(work.tasks)
            case m.Rollback():
                self._ops.undo_all_reduce()
            case m.Halt():
                raise CollectiveAborted("another rank died; this one halts")
            case m.TakeCheckpoint():
                self._capture(work.id)
            case m.ApplyDelta():
                self._ops.apply_delta(work.delta)
            case m.Regroup():
                raise AssertionError("handled by the flow")
            case _:
                assert_never(work)

    def _run_sync_round(self, message: m.SyncNow) -> Flow[None]:
        healthy = self._ops.enter_round()
        report = self._reporter.take_report(wait=message.capture)
        ok, sync_s = False, 0.0
        reduced: ReducedState | None = None
        fault: str | None = None
        extra: m.Extra | None = None
        average: m.Payload | None = None
        try:
            reduced, sync_s = yield from self._ops.all_reduce(message, healthy)
            ok = True
            if message.capture:
                extra, average = self._ops.capture_average()
        except (CollectiveAborted, CollectiveTimeout) as error:
            # The round is given up; this rank's state is that of before.
            fault = str(error) if error.failed else None
            logger.warning(
                "rank %d: averaging round %d failed: %s", self._rank, message.round, error
            )
        finally:
            self._protocol.on_synced(message, ok=ok)
            self._reporter.send(
                m.SyncAck(
                    rank=self._rank,
                    round=message.round,
                    divergence=None if reduced is None else reduced.divergence,
                    norm=None if reduced is None else reduced.norm,
                    sync_s=sync_s,
                    wait_s=0.0 if reduced is None else reduced.waited_s,
                    ok=ok,
                    fault=fault,
                    report=report,
                    extra=extra,
                    average=average,
                    done_at=self.now(),
                )
            )
        if ok:
            yield from self._run_tasks(message.tasks, message.round)
        else:
            self._ops.drop_tasks([t for t in message.tasks if t.rank == self._rank])

    def _send_snapshot(self, message: m.RequestParams) -> None:
        self._reporter.flush(wait=True)  # the reply to an earlier round uses the same memory
        snapshot, healthy = self._ops.start_snapshot()
        report = self._reporter.take_report(wait=message.capture)
        self._protocol.on_snapshot_taken(message.round)
        self._reporter.send(
            m.ParamSnapshot(
                rank=self._rank,
                round=message.round,
                payload=snapshot.payload,
                num_samples=self._protocol.samples if healthy else 0,
                weight=self._protocol.weight if healthy else 0,
                num_batches=self._protocol.batches,
                healthy=healthy,
                squares=snapshot.squares,
                report=report,
                extra=self._ops.capture_state() if message.capture else None,
            ),
            snapshot.arrival,
        )

    def _apply_update(self, message: m.Update) -> Flow[None]:
        if not self._protocol.on_updated(message):
            return
        run_tasks = partial(self._run_tasks, message.tasks, message.round)
        sync_s, arrival = yield from self._ops.apply(message, run_tasks)
        # The acknowledgement releases the average, which is overwritten two rounds later.
        done_at = self.now()
        ack = m.SyncAck(rank=self._rank, round=message.round, sync_s=sync_s, done_at=done_at)
        self._reporter.send(ack, arrival)

    def _run_tasks(self, tasks: Sequence[m.Task], round: int = 0) -> Flow[None]:
        """Do tasks, in the same order on all ranks, while the live state is an average."""
        for task in tasks:
            start = self.now()
            values = yield from self._ops.run_task(task, round)
            seconds = self.now() - start
            self._reporter.send(
                m.TaskDone(rank=self._rank, task=task, values=values, seconds=seconds)
            )

    def _capture(self, capture: int) -> None:
        """Send the complete current state."""
        with self._recorder.capture():
            self._ops.require_finite()
            report = self._reporter.take_report(wait=True)
            payload, extra = self._ops.capture()
            is_lockstep, lockstep = self._ops.is_lockstep, self._lockstep
            self._reporter.send(
                m.CapturedState(
                    rank=self._rank,
                    id=capture,
                    payload=payload,
                    num_samples=lockstep.buffer_samples if is_lockstep else 0,
                    step=lockstep.step,
                    extra=extra,
                    report=report,
                )
            )

    def send_final_snapshot(self) -> None:
        """Send the final state, with the samples trained since the last round."""
        self._recorder.leaving()
        is_lockstep, lockstep, protocol = self._ops.is_lockstep, self._lockstep, self._protocol
        fault, shutdown = self._ops.final_fault(), protocol.shutdown
        saves = shutdown is not None and shutdown.capture and fault is None
        payload, extra = self._ops.capture_final(saves=saves)
        self._reporter.send(
            m.FinalSnapshot(
                rank=self._rank,
                payload=payload,
                num_samples=lockstep.buffer_samples if is_lockstep else protocol.samples,
                weight=None if is_lockstep else protocol.weight,
                step=lockstep.step if is_lockstep or self._ops.is_single else 0,
                fault=fault,
                extra=extra,
            )
        )
