"""How a worker answers the messages that move tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

import torch
from torch import nn

from coordinator import messages as m
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, mark_failed
from runtime.core.rng import thread_generator
from runtime.device.base import PendingCopy
from runtime.replica.averager import ReducedState
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.replica import WorkerReplica
from runtime.worker.reporter import Reporter
from runtime.worker.worker_config import EvalFn, UserFunctions

logger = logging.getLogger(__name__)


class MessageHandler:
    """Does what the protocol says is to be done for a message, in the worker's thread.

    Args:
        worker: What ``current_worker()`` gives inside the user's functions.
        replica: What is trained.
        protocol: The worker's protocol.
        reporter: The way to the coordinator.
        functions: The user's functions.
        recorder: Is told of states that are sent.
        flush_weight: Tells the protocol all weights of what was trained.
        conclude: Waits until it is known that every step counts; see :class:`WorkerSteps`.
        falls_back: Whether another transport may serve where a collective fails.
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
        conclude: Callable[[], None] = lambda: None,
        *,
        falls_back: bool = False,
    ) -> None:
        self._worker = worker
        self._replica = replica
        self._averager = replica.averager
        self._finite_check = replica.finite_check
        self._clock = replica.context
        self._lockstep = replica.lockstep
        self._protocol = protocol
        self._reporter = reporter
        self._functions = functions
        self._recorder = recorder
        self._tell_weight = flush_weight
        self._conclude = conclude
        self._falls_back = falls_back
        self._rank = protocol.rank
        self._snapshot_s = 0.0

    def answer(self, work: m.ToWorker) -> None:
        """Answer a message that :meth:`WorkerProtocol.receive` returned."""
        self._conclude()
        match work:
            case m.SyncNow():
                self._run_sync_round(work)
            case m.RequestParams():
                self._send_snapshot(work)
            case m.Update():
                self._take_update(work)
            case m.Evaluate():
                self._finite_check.require_finite()
                with self._averager.holding(work.state):
                    self._per_epoch(work.epoch, None, work.eval_at)
            case m.CallCheckpointFn():
                self._finite_check.require_finite()
                with self._averager.holding(work.state):
                    self._per_epoch(None, work.version)
            case m.Rollback():
                self._averager.undo_all_reduce()
            case m.Halt():
                raise CollectiveAborted("a rank died; this one halts")
            case m.TakeCheckpoint():
                self._take_state(work.id)
            case m.ApplyDelta():
                self._take_delta(work)
            case m.Regroup():
                raise AssertionError("the worker itself joins its new group")
            case m.StartEpoch() | m.Throttle() | m.Resume() | m.SetGlobalStep() | m.Shutdown():
                raise AssertionError("the protocol handles these itself")
            case _:
                assert_never(work)

    def _run_sync_round(self, message: m.SyncNow) -> None:
        healthy = self._finite_check.enter_round(self._protocol.samples)
        self._tell_weight()
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
                self._finite_check.require_finite()  # nobody had a state that could be used
                self._finite_check.healed()
            ok = True
            if message.capture:
                extra = self._replica.capture_state()
                if self._averager.leads:
                    average = self._averager.snapshot(reuse=False)
        except (CollectiveAborted, CollectiveTimeout) as error:
            # The round is given up; this rank's state is the one before it.
            fault = str(error) if error.failed else None
            logger.warning(
                "rank %d: averaging round %d failed: %s", self._rank, message.round, error
            )
        finally:
            self._protocol.synced(message, ok=ok)
            self._reporter.put(
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
            self._per_epoch(message.evaluate, message.checkpoint, message.eval_at)

    def _all_reduce(self, healthy: bool) -> ReducedState:
        """See :meth:`ReplicaAverager.all_reduce`."""
        if self._averager.collective is None:
            raise CollectiveAborted("the ranks are not connected")
        try:
            return self._averager.all_reduce(
                self._protocol.weight, healthy=healthy if self._finite_check.can_heal else None
            )
        except (CollectiveAborted, CollectiveTimeout):
            raise
        except RuntimeError as error:
            if not self._falls_back:
                raise
            told = CollectiveAborted(f"{type(error).__name__}: {error}")
            raise mark_failed(told) from error

    def _send_snapshot(self, message: m.RequestParams) -> None:
        self._reporter.flush(wait=True)  # an answer to a round of before uses the same memory
        start = self._clock.now()
        payload, arrival, squares = self._averager.start_snapshot()
        self._snapshot_s = self._clock.now() - start
        healthy = self._finite_check.enter_round(self._protocol.samples, squares)
        self._tell_weight()
        report = self._reporter.take_report(wait=message.capture)
        self._protocol.snapshot_taken(message.round)
        self._reporter.put(
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

    def _take_update(self, message: m.Update) -> None:
        if not self._protocol.updated(message):
            return
        start, aside = self._clock.now(), 0.0

        def per_epoch() -> None:
            nonlocal aside
            before = self._clock.now()
            self._per_epoch(message.evaluate, message.checkpoint, message.eval_at)
            aside = self._clock.now() - before

        wanted = message.evaluate is not None or message.checkpoint is not None
        arrival: PendingCopy | None = None
        if self._finite_check.is_bad:
            arrival = self._replace(message)
            per_epoch()
        elif message.num_samples > 0 or wanted:
            # If nobody trained anything the average is what all replicas are, and what the
            # lead has trained since is not shown to the user's functions.
            arrival = self._averager.apply(message.average, per_epoch if wanted else None)
        sync_s = self._snapshot_s + self._clock.now() - start - aside
        # With it the rank gives the average back, which is overwritten two rounds later.
        done_at = time.monotonic()
        ack = m.SyncAck(rank=self._rank, round=message.round, sync_s=sync_s, done_at=done_at)
        self._reporter.put(ack, arrival)

    def _replace(self, message: m.Update) -> PendingCopy | None:
        """The replica was not finite: take the average alone.

        Adding to it what was trained since the snapshot would spoil it again.

        Raises:
            NonFiniteError: No rank had a state that could be used.
        """
        if message.num_samples == 0:
            self._finite_check.require_finite()
        arrival = self._averager.replace(message.average)
        self._finite_check.healed(self._protocol.discard_samples())
        return arrival

    def _per_epoch(
        self, evaluate: int | None, checkpoint: int | None, eval_at: int | None = None
    ) -> None:
        """What is to be done while the live state is an average."""
        if evaluate is None and checkpoint is None:
            return
        f = self._functions
        # What they draw must not change what the worker draws after.
        with worker_context(self._worker), thread_generator(None):
            if evaluate is not None and f.eval_fn is not None:
                values = evaluate_model(f.eval_fn, self._replica.model, evaluate)
                self._reporter.put(
                    m.EvalReport(rank=self._rank, epoch=evaluate, eval_at=eval_at, values=values)
                )
            if checkpoint is not None and f.checkpoint_fn is not None:
                hand_over(f.checkpoint_fn, checkpoint, self._replica.model, self._rank)
                self._reporter.put(m.CheckpointDone(rank=self._rank, version=checkpoint))

    def _take_state(self, capture: int) -> None:
        """Send the state; under lockstep, name the step before which all ranks take theirs.

        A rank with a plan has not joined the reduction of its next step, so all others hear
        of it in time. One that has none stands where every other will stand without it.
        """
        if not self._replica.is_lockstep:
            self._capture_now(capture)
        elif capture > self._lockstep.num_captured:  # else a peer heard first, and named the step
            if self._protocol.plan is not None or self._protocol.plans:
                self._lockstep.propose_capture(capture)
            else:
                self._capture_now(capture)

    def _take_delta(self, message: m.ApplyDelta) -> None:
        """Take what other machines have trained; under lockstep where all ranks take it."""
        lockstep = self._lockstep
        if not self._replica.is_lockstep:
            self._averager.apply_delta(message.delta)
        elif message.id > lockstep.num_deltas:
            stands = self._protocol.plan is None and not self._protocol.plans
            if stands and not self._halted and message.id == lockstep.num_deltas + 1:
                self._apply_delta(message)
            else:
                lockstep.propose_delta(message)

    @property
    def _halted(self) -> bool:
        return self._protocol.state is WorkerState.HALTED

    def _apply_delta(self, message: m.ApplyDelta) -> None:
        self._averager.apply_delta(message.delta)
        self._lockstep.delta_applied(message)

    def apply_agreed(self) -> None:
        """Under lockstep, apply a delta and send the state where the ranks have agreed to."""
        while self._replica.is_lockstep and (delta := self._lockstep.delta_reached) is not None:
            self._apply_delta(delta)
        if self._replica.is_lockstep and (capture := self._lockstep.capture_reached) is not None:
            self._capture_now(capture)

    def _capture_now(self, capture: int) -> None:
        """Send the whole state as it is, all of which is in the result."""
        self._conclude()
        is_lockstep, lockstep = self._replica.is_lockstep, self._lockstep
        lockstep.num_captured = capture
        with self._recorder.capture():
            self._finite_check.require_finite()
            report = self._reporter.take_report(wait=True)
            params = not is_lockstep or self._averager.leads
            payload = self._averager.snapshot(reuse=False, params=params)
            self._reporter.put(
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
        """Send the last state, with the samples trained since the last round."""
        is_lockstep, lockstep, protocol = self._replica.is_lockstep, self._lockstep, self._protocol
        fault = self._finite_check.final_fault(self._replica.progress.epoch)
        payload = self._averager.last_snapshot()
        self._tell_weight()
        shutdown = protocol.shutdown
        extra = shutdown is not None and shutdown.capture and fault is None
        self._reporter.put(
            m.FinalSnapshot(
                rank=self._rank,
                payload=payload,
                num_samples=lockstep.buffer_samples if is_lockstep else protocol.samples,
                weight=None if is_lockstep else protocol.weight,
                step=lockstep.step if is_lockstep or self._replica.alone else 0,
                fault=fault,
                extra=self._replica.capture_state() if extra else None,
            )
        )


def evaluate_model(eval_fn: EvalFn, model: nn.Module, epoch: int) -> tuple[tuple[str, float], ...]:
    """Call the evaluation function in eval mode, without gradients.

    Returns:
        Name and value of each result.

    Raises:
        TypeError: It did not return a dict of numbers.
    """
    modes = [(sub, sub.training) for sub in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            values = eval_fn(model, epoch)
    finally:
        for sub, training in modes:
            sub.training = training
    try:
        return tuple((str(name), float(value)) for name, value in values.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"eval_fn returned {values!r:.200}: return a dict of floats, for instance "
            "{'accuracy': 0.98}"
        ) from error


def hand_over(
    checkpoint_fn: Callable[[int, nn.Module], object], version: int, model: nn.Module, rank: int
) -> None:
    """Call the checkpoint function; its failure is logged and stops nothing."""
    try:
        checkpoint_fn(version, model)
    except Exception:
        logger.exception("rank %d: checkpoint_fn failed for version %d", rank, version)
