"""Handling of the coordinator's messages that require work on tensors."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from torch import nn

from coordinator import messages as m
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, mark_failed
from runtime.core.rng import thread_generator
from runtime.device.base import PendingCopy
from runtime.evaluation.pending_means import evaluating, keeping_modes
from runtime.replica.averager import ReducedState
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.replica import WorkerReplica
from runtime.worker.reporter import Reporter
from runtime.worker.task_evaluation import TaskEvaluation
from runtime.worker.worker_config import EvalFn, UserFunctions

logger = logging.getLogger(__name__)


class MessageHandler:
    """Handles the messages that :meth:`WorkerProtocol.receive` returns, in the worker's thread.

    Args:
        worker: The owner of this handler, the result of ``current_worker()`` in user functions.
        reporter: Sends the replies.
        flush_weight: Adds weights still on the device to the protocol's.
        evaluation: Evaluates batches together with the other ranks.
        confirm_steps: Waits until no step can fail any more; see :class:`WorkerSteps`.
        falls_back: True if another transport may replace a collective that fails.
    """

    def __init__(
        self,
        worker: object,
        replica: WorkerReplica,
        protocol: WorkerProtocol,
        reporter: Reporter,
        functions: UserFunctions,
        recorder: WorkerRecorder,
        flush_weight: Callable[[], None],
        evaluation: TaskEvaluation,
        confirm_steps: Callable[[], None] = lambda: None,
        *,
        falls_back: bool = False,
    ) -> None:
        self._worker = weakref.ref(worker)  # else a cycle of references
        self._replica = replica
        self._averager = replica.averager
        self._finite_check = replica.finite_check
        self._clock = replica.context
        self._lockstep = replica.lockstep
        self._protocol = protocol
        self._reporter = reporter
        self._functions = functions
        self._recorder = recorder
        self._flush_weight = flush_weight
        self._confirm_steps = confirm_steps
        self._evaluation = evaluation
        self._falls_back = falls_back
        self._rank = protocol.rank
        self._snapshot_s = 0.0

    def handle(self, work: m.ToWorkerReplica) -> None:
        """Handle a message and send the reply."""
        self._confirm_steps()
        match work:
            case m.SyncNow():
                self._run_sync_round(work)
            case m.RequestParams():
                self._send_snapshot(work)
            case m.Update():
                self._apply_update(work)
            case m.RunTasks():
                self._finite_check.require_finite()
                with self._averager.holding(work.state):
                    self._run_tasks(work.tasks)
            case m.Rollback():
                self._averager.undo_all_reduce()
            case m.Halt():
                raise CollectiveAborted("another rank died; this one halts")
            case m.TakeCheckpoint():
                self._capture(work.id)
            case m.ApplyDelta():
                self._averager.apply_delta(work.delta)
            case m.Regroup():
                raise AssertionError("handled by the worker")
            case _:
                assert_never(work)

    def _run_sync_round(self, message: m.SyncNow) -> None:
        healthy = self._finite_check.enter_round(self._protocol.samples)
        self._flush_weight()
        report = self._reporter.take_report(wait=message.capture)
        ok, sync_s = False, 0.0
        reduced: ReducedState | None = None
        fault: str | None = None
        extra: m.Extra | None = None
        average: m.Payload | None = None
        try:
            start = self._clock.now()
            reduced = self._all_reduce(healthy)
            sync_s = max(0.0, self._clock.now() - start - reduced.waited_s)
            if not healthy:
                self._finite_check.require_finite()  # no rank had a finite state
                self._finite_check.healed()
            ok = True
            if message.capture:
                extra = self._replica.capture_state()
                if self._averager.leads:
                    average = self._averager.snapshot(reuse=False)
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
                    done_at=time.monotonic(),
                )
            )
        if ok:
            self._run_tasks(message.tasks, message.round)
        else:
            self._evaluation.shared.drop([t for t in message.tasks if t.rank == self._rank])

    def _all_reduce(self, healthy: bool) -> ReducedState:
        """See :meth:`ReplicaAverager.all_reduce`."""
        if self._averager.collective is None:
            raise CollectiveAborted("the ranks are not connected")
        try:
            return self._averager.all_reduce(
                self._protocol.weight,
                healthy=healthy if self._finite_check.can_heal else None,
                num_batches=self._protocol.batches,
            )
        except (CollectiveAborted, CollectiveTimeout):
            raise
        except RuntimeError as error:
            if not self._falls_back:
                raise
            aborted = CollectiveAborted(f"{type(error).__name__}: {error}")
            raise mark_failed(aborted) from error

    def _send_snapshot(self, message: m.RequestParams) -> None:
        self._reporter.flush(wait=True)  # the reply to an earlier round uses the same memory
        start = self._clock.now()
        payload, arrival, squares = self._averager.start_snapshot()
        self._snapshot_s = self._clock.now() - start
        healthy = self._finite_check.enter_round(self._protocol.samples, squares)
        self._flush_weight()
        report = self._reporter.take_report(wait=message.capture)
        self._averager.note_batches(self._protocol.batches)
        self._protocol.on_snapshot_taken(message.round)
        self._reporter.send(
            m.ParamSnapshot(
                rank=self._rank,
                round=message.round,
                payload=payload,
                num_samples=self._protocol.samples if healthy else 0,
                weight=self._protocol.weight if healthy else 0,
                num_batches=self._protocol.batches,
                healthy=healthy,
                squares=squares,
                report=report,
                extra=self._replica.capture_state() if message.capture else None,
            ),
            arrival,
        )

    def _apply_update(self, message: m.Update) -> None:
        if not self._protocol.on_updated(message):
            return
        start, callbacks_s = self._clock.now(), 0.0

        def callbacks() -> None:
            nonlocal callbacks_s
            before = self._clock.now()
            self._run_tasks(message.tasks, message.round)
            callbacks_s = self._clock.now() - before

        arrival: PendingCopy | None = None
        if self._finite_check.is_bad:
            arrival = self._replace(message)
            callbacks()
        elif message.num_samples > 0 or message.tasks:
            # Without samples the average equals all replicas. Tasks must not see the training since
            # the snapshot.
            at_average = callbacks if message.tasks else None
            arrival = self._averager.apply(message.average, at_average, message.mean_batches)
        sync_s = self._snapshot_s + self._clock.now() - start - callbacks_s
        # The acknowledgement releases the average, which is overwritten two rounds later.
        done_at = time.monotonic()
        ack = m.SyncAck(rank=self._rank, round=message.round, sync_s=sync_s, done_at=done_at)
        self._reporter.send(ack, arrival)

    def _replace(self, message: m.Update) -> PendingCopy | None:
        """Replace a replica that is not finite by the average, without the training since then.

        Raises:
            NonFiniteError: No rank had a finite state.
        """
        if message.num_samples == 0:
            self._finite_check.require_finite()
        arrival = self._averager.replace(message.average, message.mean_batches)
        self._finite_check.healed(self._protocol.discard_samples())
        return arrival

    def _run_tasks(self, tasks: Sequence[m.Task], round: int = 0) -> None:
        """Do tasks while the live state is an average; their random draws do not change those of
        the worker.

        Args:
            tasks: The tasks, in the same order on all ranks.
        """
        for task in tasks:
            start = self._clock.now()
            with worker_context(self._worker()), thread_generator(None):
                values = self._run_task(task, round)
            seconds = self._clock.now() - start
            self._reporter.send(
                m.TaskDone(rank=self._rank, task=task, values=values, seconds=seconds)
            )

    def _run_task(self, task: m.Task, round: int) -> tuple[tuple[str, float], ...] | None:
        """Do a task; returns its results on the rank that ends it."""
        f, model, log = self._functions, self._replica.model, self._replica.stepper.log
        match task.kind:
            case m.TaskKind.EVALUATE if f.eval_fn is not None:
                with self._replica.at_eval_point(), log.closed("eval_fn"):
                    return evaluate_model(f.eval_fn, model, task.epoch)
            case m.TaskKind.HAND_OVER if f.checkpoint_fn is not None:
                with self._replica.at_eval_point(), log.closed("checkpoint_fn"):
                    call_checkpoint_fn(f.checkpoint_fn, task.epoch + 1, model, self._rank)
            case m.TaskKind.VALIDATE:
                with self._recorder.validation(task.epoch):
                    return self._evaluation.validate(task, round)
            case m.TaskKind.REQUESTED:
                with self._recorder.validation(self._replica.progress.epoch):
                    return self._evaluation.answer(task, round)
        return ()

    def _capture(self, capture: int) -> None:
        """Send the complete current state."""
        is_lockstep, lockstep = self._replica.is_lockstep, self._lockstep
        with self._recorder.capture(), self._replica.at_eval_point():
            self._finite_check.require_finite()
            report = self._reporter.take_report(wait=True)
            params = not is_lockstep or self._averager.leads
            payload = self._averager.snapshot(reuse=False, params=params)
            self._reporter.send(
                m.CapturedState(
                    rank=self._rank,
                    id=capture,
                    payload=payload,
                    num_samples=lockstep.buffer_samples if is_lockstep else 0,
                    step=lockstep.step,
                    extra=self._replica.capture_state(),
                    report=report,
                )
            )

    def send_final_snapshot(self) -> None:
        """Send the final state, with the samples trained since the last round."""
        is_lockstep, lockstep, protocol = self._replica.is_lockstep, self._lockstep, self._protocol
        fault = self._finite_check.final_fault(self._replica.progress.epoch)
        self._flush_weight()
        shutdown = protocol.shutdown
        saves = shutdown is not None and shutdown.capture and fault is None
        self._averager.note_batches(protocol.batches)
        with self._replica.at_eval_point():
            payload = self._averager.last_snapshot()
            extra = self._replica.capture_state() if saves else None
        self._reporter.send(
            m.FinalSnapshot(
                rank=self._rank,
                payload=payload,
                num_samples=lockstep.buffer_samples if is_lockstep else protocol.samples,
                weight=None if is_lockstep else protocol.weight,
                step=lockstep.step if is_lockstep or self._replica.is_single else 0,
                fault=fault,
                extra=extra,
            )
        )


def evaluate_model(eval_fn: EvalFn, model: nn.Module, epoch: int) -> tuple[tuple[str, float], ...]:
    """Call the evaluation function in evaluation mode, without gradients.

    Returns:
        Name and value of each result.

    Raises:
        TypeError: It did not return a dict of numbers.
    """
    with evaluating(model):
        values = eval_fn(model, epoch)
    return check_eval_values(values)


def check_eval_values(values: Any) -> tuple[tuple[str, float], ...]:
    """Name and value of each result of the evaluation function.

    Raises:
        TypeError: It is not a dict of numbers.
    """
    try:
        return tuple((str(name), float(value)) for name, value in values.items())
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"eval_fn returned {values!r:.200}: return a dict of floats, for instance end it with "
            "return {'accuracy': accuracy}, which is recorded as 'eval/accuracy'"
        ) from None


def call_checkpoint_fn(
    checkpoint_fn: Callable[[int, nn.Module], object], version: int, model: nn.Module, rank: int
) -> None:
    """Call the checkpoint function; a failure is logged only."""
    try:
        with keeping_modes(model):
            checkpoint_fn(version, model)
    except Exception:
        logger.exception("rank %d: checkpoint_fn failed for version %d", rank, version)
