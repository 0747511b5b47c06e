"""The part of a worker that makes optimizer steps, eagerly or as graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.device.base import DeviceContext, ValueLog
from runtime.replica.build import BuildOrder
from runtime.replica.graph_fallback import Fallbacks
from runtime.replica.graph_optimizer import CapturableOptimizer
from runtime.replica.graphs import GraphedSteps, Window
from runtime.replica.step import StepEnd, TrainFn
from runtime.timeline.causes import COMPUTE, CONTROL
from runtime.worker.config import StepResult, UserFunctions, WorkerConfig, WorkerEndpoints
from runtime.worker.lockstep import Lockstep
from runtime.worker.peers import Peers
from runtime.worker.replica_worker import ReplicaWorker
from runtime.worker.windows import count_samples

if TYPE_CHECKING:
    from runtime.timeline.recorder import Lane


class StepWorker(ReplicaWorker):
    """Makes the steps of :class:`~runtime.worker.worker.GpuWorker`."""

    _lane: Lane | None = None
    """Where the time of each step goes, if that is recorded: written here and not around it,
    where every call costs as much as the notes."""

    def __init__(
        self,
        config: WorkerConfig,
        functions: UserFunctions,
        endpoints: WorkerEndpoints,
        collective: Collective | None,
        order: BuildOrder,
        device: DeviceContext,
        lockstep: Lockstep,
        peers: Peers | None,
        fallbacks: Fallbacks | None,
        resume: ResumePoint | None = None,
    ) -> None:
        super().__init__(
            config, functions, endpoints, collective, order, device, lockstep, peers, resume
        )
        self._graphs: GraphedSteps | None = None
        if self._capturable is not None:
            self._graphs = self._make_graphs(self._capturable, fallbacks or Fallbacks())

    def _make_graphs(self, optimizer: CapturableOptimizer, fallbacks: Fallbacks) -> GraphedSteps:
        c = self.config
        obstacle = None
        if c.precision == "fp16":
            obstacle = "fp16's gradient scaler reads the device in each step; use bf16"
        return GraphedSteps(
            self.rank,
            self._context,
            self.model,
            self._stepper,
            optimizer,
            micro_step=self._micro_step,
            redirect=self._redirected,
            log=self._log,
            full=[c.batch_size] * c.accumulate,
            fallbacks=fallbacks,
            generator=self.generator,
            obstacle=obstacle,
        )

    def forget_graphs(self) -> None:
        """Capture the step anew, after some eager ones.

        With ``cuda_graphs``, for a change that Python code makes while the run goes on and
        that a captured step cannot see: another rate of dropout, or another loss.
        """
        if self._graphs is not None:
            self._graphs.forget()

    def _end_graphs(self) -> None:
        """Let go of them while their stream is this worker's alone."""
        if self._graphs is not None:
            self._graphs.forget()

    def _verify_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.verify()

    @contextmanager
    def _redirected(self, log: ValueLog) -> Iterator[None]:
        before, self._log = self._log, log
        try:
            yield
        finally:
            self._log = before

    def train_step(self, batch: Any, train_fn: TrainFn | None = None) -> StepResult:
        """One optimizer step on one batch, eagerly, in the calling thread.

        Args:
            batch: A tuple, list or dict of tensors on the worker's device.
            train_fn: Instead of the worker's own.

        Returns:
            Device-side handles; nothing is synchronised.
        """
        samples = count_samples(batch)
        self._advance_schedule()
        self._timer.start()
        self._stepper.begin()
        with worker_context(self):
            loss = self._micro_step(train_fn or self._functions.train_fn, batch, samples, 1.0)
        end = self._stepper.finish(samples)
        time = self._timer.stop(1)
        self._count(1, samples, dropped=end.dropped)
        weight = self._stepper.weight
        return StepResult(loss, time, samples if weight is None else weight)

    def _micro_step(self, train_fn: TrainFn, batch: Any, samples: int, fraction: float) -> Tensor:
        self._batch_samples = samples
        num_scalars = self._log.num_scalars
        loss = self._stepper.micro_step(train_fn, batch, fraction, samples)
        weight = self._stepper.weight
        if weight is None:
            self._log.push_loss(loss, samples)
        else:
            self._log.weigh_scalars(num_scalars, weight)
            self._log.push_loss(loss, weight)
        return loss

    def _count(self, batches: int, samples: int, *, dropped: bool) -> None:
        self.local_step += batches
        kept = 0 if dropped else samples
        self._reporter.meter.add(batches, samples, num_skipped=samples - kept)
        if self._lockstep:
            self._protocol.lockstep(batches)
            return
        window = None if dropped else self._stepper.window
        if window is None:
            self._protocol.trained(batches, kept)
            return
        weight = window.total
        if isinstance(weight, Tensor):
            late = self._late_weight
            self._late_weight = weight if late is None else late + weight
            weight = 0
        self._protocol.trained(batches, kept, weight)

    def _advance_schedule(self, position: int | None = None) -> None:
        if position is None:
            position = self._protocol.global_step + self._protocol.batches
        self._schedule.advance(position)
        if self._capturable is not None:
            self._capturable.refresh()

    @abstractmethod
    def _await_batch(self, *, answer: bool, then: int = COMPUTE) -> Any:
        """The next batch of the plan in progress."""

    def _run_window(self, sizes: Sequence[int], position: int | None, train_fn: TrainFn) -> bool:
        """One optimizer step.

        Args:
            sizes: Samples of each batch; empty where this rank only receives.
            position: Where the schedule stands; ``None``: this rank knows.
            train_fn: Gives a batch's mean loss, and its weight.

        Returns:
            ``False`` if ``Shutdown`` came while data was awaited.
        """
        lane = self._lane
        first: Any = None
        # With graphs the worker may have to wait below while another one captures.
        then = COMPUTE if self._capturable is None else CONTROL
        if sizes:
            first = self._await_batch(answer=not self._protocol.leaving, then=then)
            if first is None:
                return False
        elif lane is not None:
            lane.enter(then)
        if self._context.has_graphs:
            self._context.pause_point()
        if self._schedule.scheduler is not None or self._capturable is not None:
            self._advance_schedule(position)
        if lane is None:
            self._train_window(sizes, first, train_fn)
            return True
        if lane.cause != COMPUTE:
            lane.enter(COMPUTE)
        start = lane.since
        self._train_window(sizes, first, train_fn)
        lane.end_step(CONTROL, start, sizes)
        return True

    def _train_window(self, sizes: Sequence[int], first: Any, train_fn: TrainFn) -> None:
        """One optimizer step.

        Args:
            sizes: Samples of each batch; empty where this rank only receives.
            first: The first batch; the others are awaited here.
            train_fn: Gives a batch's mean loss, and its weight.
        """
        total = sum(sizes)
        self._timer.start()
        if self._lockstep:
            end = self._make_undoable_step(sizes, first, train_fn, total)
        else:
            end = self._make_step(sizes, first, train_fn, total)
        self._timer.stop(len(sizes))
        self._together.stepped(0 if end.dropped else total)
        self._count(len(sizes), total, dropped=end.dropped)

    def _make_undoable_step(
        self, sizes: Sequence[int], first: Any, train_fn: TrainFn, total: int
    ) -> StepEnd:
        """A step that is trained again, as if it had not been, where the reduction fails."""
        mark = self._log.mark()
        kept = self._keep_buffers()
        try:
            return self._make_step(sizes, first, train_fn, total)
        except (CollectiveAborted, CollectiveTimeout):
            self._log.retract(mark)
            if kept is not None:
                self._state.buffers.write_from(*kept)
            raise

    def _make_step(
        self, sizes: Sequence[int], batch: Any, train_fn: TrainFn, total: int
    ) -> StepEnd:
        window = self._graphs.window(sizes) if self._graphs is not None else None
        if window is None:
            self._stepper.begin()
        else:
            self._stepper.open()
        for i, size in enumerate(sizes):
            if i:
                self._timer.pause()
                batch = self._await_batch(answer=False)
                self._timer.resume()
            if window is not None:
                if window.hold(batch):
                    continue
                self._make_held(window, train_fn, total)
                window = None
            self._micro_step(train_fn, batch, size, size / total)
            batch = None  # the loader may use its memory again
        if window is None:
            return self._stepper.finish(total)
        assert self._graphs is not None
        return self._graphs.step(window, train_fn)

    def _make_held(self, window: Window, train_fn: TrainFn, total: int) -> None:
        """The batches so far, when the window turns out to be none for a graph."""
        assert self._graphs is not None
        self._graphs.pass_by()
        self._graphs.eagerly(window, train_fn, total)

    # -- epochs and checkpoints ---------------------------------------------------------

    def _begin_epoch(self, epoch: int) -> None:
        self.current_epoch = self._reporter.epoch = epoch
        if epoch > self._begun_epoch:
            self._begun_epoch = epoch
            self._own.before_epoch_fn()
            self._key_generator(epoch)
            if self._functions.epoch_fn is not None:
                with self._context.apart():
                    self._functions.epoch_fn(epoch, self)
            self._own.after_epoch_fn(epoch)

    def _sync_buffers(self) -> None:
        """Under lockstep, average the buffers: every rank is between the same two steps."""
        if self._lockstep:
            self._averager.sync_buffers(self._together.buffer_samples)
            self._together.synced()

    def _capture_together(self, capture: int) -> None:
        """Under lockstep: name the step before which all ranks take their states.

        A rank with a plan has not joined the reduction of its next step, so all others hear
        of it in time. One that has none stands where every other will stand without it.
        """
        if capture <= self._together.num_captured:
            return  # a peer heard of it first, and named the step
        if self._protocol.plan is not None or self._protocol.plans:
            self._together.propose_capture(capture)
        else:
            self._capture_now(capture)

    def _capture_if_reached(self) -> None:
        if self._lockstep and (capture := self._together.capture_reached) is not None:
            self._capture_now(capture)

    def _capture_now(self, capture: int) -> None:
        together = self._together
        together.num_captured = capture
        self._answers.send_capture(
            capture,
            params=not self._lockstep or self._averager.leads,
            num_samples=together.buffer_samples if self._lockstep else 0,
            step=together.step,
        )
