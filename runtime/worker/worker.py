"""GpuWorker: the training loop of one device, in one thread.

The worker blocks on nothing but its inbox, where the coordinator's messages and the
loader's wake-ups arrive, and on the collectives that it is told to join. Between two
steps it answers every message; inside a step it answers none.
"""

from __future__ import annotations

import logging
import queue
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from coordinator.errors import GpuWorkerError
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.errors import (
    CheckpointError,
    CollectiveAborted,
    CollectiveTimeout,
    without_frames,
)
from runtime.core.threads import resolve_vector_math
from runtime.data.loader import Loader
from runtime.device.base import Device
from runtime.device.cuda import open_device
from runtime.device.values import StepMeter, ValueLog
from runtime.replica.averaging import ReplicaAverager
from runtime.replica.build import BuildOrder, build_replica
from runtime.replica.flat import FlatState
from runtime.replica.graphs import CapturableOptimizer, Fallbacks, GraphedSteps, GraphWindow
from runtime.replica.non_finite import ReplicaJudge, StepJudge
from runtime.replica.schedule import SchedulerFactory
from runtime.replica.step import GradientReducer, StepEnd, Stepper, TrainFn
from runtime.timeline.events import COMPUTE, CONTROL, DATA
from runtime.worker.config import (
    WAKE,
    StepResult,
    UserFunctions,
    Wake,
    WorkerChannels,
    WorkerConfig,
    WorkerEndpoints,
)
from runtime.worker.group import Groups, Lockstep, StopAgreement
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.reporter import Reporter
from runtime.worker.rounds import Answers
from runtime.worker.state import RankCheckpoint
from runtime.worker.windows import Windows, count_samples

if TYPE_CHECKING:
    from runtime.timeline.recorder import Lane

logger = logging.getLogger(__name__)


# -- A worker's replica and what can be asked of it, without the loop that trains it --


@dataclass(slots=True)
class Peers:
    """Shared by the workers of a run in which ranks may die.

    Attributes:
        groups: Where the ranks that are left meet.
        replicas: The worker of each rank, once it is built. A rank reads another's state
            only while that one waits for it in the first meeting of a new group.
    """

    groups: Groups
    replicas: dict[int, ReplicaWorker] = field(default_factory=dict)


class ReplicaWorker:
    """The part of :class:`~runtime.worker.worker.GpuWorker` that users and tools ask.

    Attributes:
        model: The replica, in train mode.
        optimizer: Its optimizer.
        generator: On the device, keyed by (seed, rank, epoch); for draws in ``train_fn``.
        local_step: Batches trained by this worker.
        current_epoch: Epoch of the plan in progress or the last one.
    """

    @staticmethod
    def channels() -> tuple[WorkerEndpoints, WorkerChannels]:
        """The two ends of a worker's queues, for a worker on its own."""
        control: queue.SimpleQueue[Any] = queue.SimpleQueue()
        reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        return WorkerEndpoints(control, reports), WorkerChannels(control, reports)

    def __init__(
        self,
        config: WorkerConfig,
        functions: UserFunctions,
        endpoints: WorkerEndpoints,
        collective: Collective | None,
        order: BuildOrder,
        device: Device,
        lockstep: Lockstep,
        peers: Peers | None,
        resume: ResumePoint | None = None,
    ) -> None:
        self.config = config
        self.rank = config.rank
        self.world_size = config.world_size
        self.device = config.device
        self.generator = torch.Generator(config.device)
        self.local_step = 0
        self.current_epoch = 0
        self._functions = functions
        self._context = device
        self._together = lockstep
        self._peers = peers
        self._lockstep = collective is not None and config.policy is ApplyPolicy.SYNC
        self._protocol = WorkerProtocol(config.rank)
        self._timer = device.new_timer()
        self._reporter = Reporter(
            self._protocol,
            endpoints.outbox,
            self._context,
            config.report_interval_s,
            StepMeter(device.new_log(), self._timer),
        )
        self._log = self._reporter.meter.log
        self._batch_samples = 1
        self._late_weight: Tensor | None = None  # of steps since it was last told
        self._begun_epoch = -1
        self._key_generator(0)
        self._build(order, collective, resume)

    def _build(
        self, order: BuildOrder, collective: Collective | None, resume: ResumePoint | None
    ) -> None:
        f, c = self._functions, self.config
        with worker_context(self):
            replica = build_replica(
                order,
                c.rank,
                c.device,
                f.model_factory,
                f.optim_factory,
                param_groups=f.param_groups,
                scheduler=f.scheduler,
                total_steps=c.total_steps,
                finish=self._context.finish,
                load=None if resume is None else resume.load_weights,
            )
        self.model = replica.model
        self.optimizer = replica.optimizer
        self._state = replica.state
        self._schedule = replica.schedule
        if c.lr_scale != 1.0:
            if f.scheduler is None:
                self.scale_lr(c.lr_scale)
            else:
                self.set_lr_scale(c.lr_scale)
        params = self._state.params
        self._context.pin_accumulators(params.params)
        self._capturable = None
        if c.cuda_graphs and self._context.has_graphs:
            self._capturable = CapturableOptimizer(self.optimizer, c.device)
        lockstep = collective if self._lockstep else None
        step_judge = self._step_judge()
        self._reducer = None
        if lockstep is not None:
            self._reducer = GradientReducer(params, lockstep, step_judge, self._context.comm)
        self._stepper = Stepper(
            self.model,
            params,
            self.optimizer,
            device=c.device,
            precision=c.precision,
            max_grad_norm=c.max_grad_norm,
            reducer=self._reducer,
            judge=step_judge,
            timer=self._timer,
            rates=None if self._capturable is None else self._capturable.rates,
            is_prompt=self._context.is_prompt,
        )
        self._judge = ReplicaJudge(
            c.on_non_finite,
            c.rank,
            params,
            self.optimizer,
            self._reporter.meter,
            lambda: self.local_step,
            averaged=c.world_size > 1 and not self._lockstep,
        )
        self._averager = ReplicaAverager(self._state, self._context, collective)
        self._own = self._make_own(resume)
        self._answers = self._make_answers()

    def _make_own(self, resume: ResumePoint | None) -> RankCheckpoint:
        c = self.config
        own = RankCheckpoint(
            rank=c.rank,
            model=self.model,
            state=self._state,
            stepper=self._stepper,
            schedule=self._schedule,
            averager=self._averager,
            generator=self.generator,
            context=self._context,
            together=self._together,
            log=self._log,
            lr_scale=c.lr_scale,
            lockstep=self._lockstep,
        )
        if resume is not None:
            saved = resume.rank(c.rank)
            own.restore(saved)
            self.local_step, self.current_epoch = saved["local_step"], saved["epoch"]
        return own

    def _make_answers(self) -> Answers:
        return Answers(
            self,
            self.model,
            self._protocol,
            self._averager,
            self._judge,
            self._reporter,
            self._functions,
            self._context,
            self.capture_state,
            self._tell_weight,
        )

    def _tell_weight(self) -> None:
        """Tell the protocol the weights that were summed on the device; waits for it."""
        late, self._late_weight = self._late_weight, None
        if late is not None:
            self._protocol.weigh(float(late))

    def capture_state(self) -> m.Extra:
        """This rank's own part of a checkpoint, as it is between two steps; a copy.

        Returns:
            The state, or why it cannot be saved, which stops no training.
        """
        try:
            return self._own.capture(
                local_step=self.local_step, epoch=self.current_epoch, begun_epoch=self._begun_epoch
            )
        except CheckpointError as error:
            failure = error
        except Exception as error:  # in the user's optimizer, scheduler or module
            logger.exception("rank %d: its state could not be taken", self.rank)
            failure = CheckpointError(
                f"the state of rank {self.rank} could not be taken: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
        without_frames(failure)
        return failure

    def _step_judge(self) -> StepJudge | None:
        """Who judges each step, where that is done before it is made."""
        c = self.config
        if c.on_non_finite == "ignore" or (c.on_non_finite == "raise" and not self._lockstep):
            return None
        return StepJudge(
            c.on_non_finite,
            c.rank,
            self._state,
            self._reporter.meter.log,
            c.device,
            losses_only=c.precision == "fp16",
        )

    def _join(self, collective: Collective) -> None:
        """Meet the other ranks there from now on, and leave the collective of before."""
        before, self._averager.collective = self._averager.collective, collective
        if self._reducer is not None:
            self._reducer.collective = collective
        if before is not None:
            before.close()

    def copy_from(self, donor: ReplicaWorker) -> None:
        """Take over everything that training has changed in another rank's replica.

        Parameters, buffers, optimizer, schedule and gradient scaler. The donor must stand
        still meanwhile.
        """
        self._state.copy_from(donor._state)
        self._stepper.copy_from(donor._stepper)
        self._schedule.copy_from(donor._schedule)

    def _regroup(self, message: m.Regroup) -> None:
        """Join the collective of the ranks that are left.

        Raises:
            CollectiveAborted, CollectiveTimeout: Under lockstep, another of them is gone.
            GpuWorkerError: The group could not be connected.
        """
        assert self._peers is not None, "a worker on its own has no group"
        try:
            collective = self._peers.groups.end(message.generation, message.ranks, self.rank)
        except (CollectiveAborted, CollectiveTimeout) as error:
            raise GpuWorkerError(f"rank {self.rank} could not meet its new group") from error
        self._join(collective)
        self._protocol.regrouped(message.generation)
        if message.step is None:
            return
        if message.donor is not None and message.donor != self.rank:
            donor = self._peers.replicas.get(message.donor)
            if donor is None:
                raise CollectiveAborted(f"rank {message.donor} died before it was copied from")
            self._copy_if_behind(donor)
        collective.barrier()  # no donor trains on before all have copied
        self._reporter.put(m.Regrouped(rank=self.rank, generation=message.generation))

    def _copy_if_behind(self, donor: ReplicaWorker) -> None:
        if self._together.standing < donor._together.standing:
            self.copy_from(donor)
            self._context.finish()  # the donor trains on as soon as this is told
            self._together.copy_from(donor._together)

    def _keep_buffers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """A copy of the buffers where a step under lockstep may have to be undone."""
        buffers = self._state.buffers
        if not (buffers and self.config.survives):
            return None
        kept = buffers.empty()
        buffers.read_into(*kept)
        return kept

    def _let_go(self) -> None:
        """Break the cycles of references, or only the collector of cycles frees the replica."""
        self._reporter.meter.log.on_bad_loss = None
        self.__dict__.pop("_graphs", None)
        self.__dict__.pop("_answers", None)
        self.__dict__.pop("_judge", None)

    # -- for the user ----------------------------------------------------------

    @property
    def current_lr(self) -> float:
        """Learning rate of the optimizer's first group."""
        return self._schedule.current

    @property
    def flat_state(self) -> FlatState:
        """The parameters and buffers that are averaged."""
        return self._state

    @property
    def current_version(self) -> int:
        """Averaging rounds taken."""
        return self._averager.version

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; a scheduler overwrites it with its next step."""
        self._schedule.set_lr(lr)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate once; a scheduler overwrites it."""
        self._schedule.scale_lr(factor)

    def set_lr_scale(self, scale: float) -> None:
        """Multiply what the scheduler gives, at every step from here on.

        Without a scheduler nothing changes; :meth:`scale_lr` multiplies the rate itself.
        """
        self._schedule.set_scale(scale)

    def set_scheduler(self, factory: SchedulerFactory) -> None:
        """Drive the learning rate by ``factory(optimizer)``, one step for each batch."""
        self._schedule.attach(factory)

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`runtime.record_scalar`."""
        if isinstance(value, Tensor):
            value = value.data.clone()  # read later, when a parameter has moved on
        self._log.push_scalar(name, value, self._batch_samples)

    def _key_generator(self, epoch: int) -> None:
        state = np.random.SeedSequence([self.config.seed, self.rank, epoch])
        self.generator.manual_seed(int(state.generate_state(1, np.uint64)[0] >> 1))

    # -- averaging, for tools and tests ----------------------------------------------

    def snapshot_params(self, round_id: int = 0) -> m.ParamSnapshot:
        """The live state as CPU tensors that alias nothing, with its weight."""
        payload = self._averager.snapshot(reuse=False)
        self._tell_weight()
        return m.ParamSnapshot(
            rank=self.rank,
            round=round_id,
            payload=payload,
            num_samples=self._protocol.samples,
            num_batches=self._protocol.batches,
            weight=self._protocol.weight,
        )

    def load_averaged(self, average: m.Payload | m.Update) -> None:
        """Replace the live state by an average.

        Raises:
            ValueError: The tensors' number, sizes or dtypes are not this model's. The
                live state is then as it was.
        """
        self._averager.replace(average.average if isinstance(average, m.Update) else average)

    # -- reports -----------------------------------------------------------------------

    def report_timing(self) -> None:
        """Tell the coordinator what was trained since the last report."""
        self._reporter.report_timing()

    def report_epoch(self, epoch: int) -> None:
        """Tell the coordinator that a plan is done, with what no report has told yet."""
        self._reporter.report_epoch(epoch)

    def send_final_snapshot(self) -> None:
        """Send the last state, with the samples trained since the last round."""
        fault = self._judge.final_fault(self.current_epoch)
        payload = self._averager.last_snapshot()
        self._tell_weight()
        together = self._together
        shutdown = self._protocol.shutdown
        extra = shutdown is not None and shutdown.capture and fault is None
        self._reporter.put(
            m.FinalSnapshot(
                rank=self.rank,
                payload=payload,
                num_samples=together.buffer_samples if self._lockstep else self._protocol.samples,
                weight=None if self._lockstep else self._protocol.weight,
                step=together.step if self._lockstep or self.world_size == 1 else 0,
                fault=fault,
                extra=self.capture_state() if extra else None,
            )
        )


# -- The part of a worker that makes optimizer steps, eagerly or as graphs --


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
        device: Device,
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

    def _make_held(self, window: GraphWindow, train_fn: TrainFn, total: int) -> None:
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


DRAIN_S = 30.0
"""How long a rank whose collective was broken waits to hear of the end of the run."""


class GpuWorker(StepWorker):
    """Trains one replica on one device. Build and use it in one thread.

    Args:
        config: Settings.
        functions: The user's functions.
        endpoints: Queues from :meth:`channels`.
        make_loader: Gives the worker's loader; it is told the worker and a function
            that wakes the worker. ``None``: for tools that only call :meth:`train_step`.
        collective: Under ``SYNC`` reduces gradients, else serves ``SyncNow``.
        build_order: Shared by all workers of a run; ``None``: a worker on its own.
        agreement: Shared by all workers of a lockstep run.
        peers: Shared by all workers of a run that meet in collectives; without it the
            worker cannot join a new group after a death.
        device: Where it trains; ``None``: made from the settings.
        fallbacks: Shared by all workers of a run; tells what is not captured.
        resume: Where an earlier run stood, of which this one goes on.

    Raises:
        TypeError, ValueError: What a factory gives cannot be trained.
    """

    def __init__(
        self,
        config: WorkerConfig,
        functions: UserFunctions,
        endpoints: WorkerEndpoints,
        *,
        make_loader: Callable[[GpuWorker, Callable[[], None]], Loader] | None = None,
        collective: Collective | None = None,
        build_order: BuildOrder | None = None,
        agreement: StopAgreement | None = None,
        peers: Peers | None = None,
        device: Device | None = None,
        fallbacks: Fallbacks | None = None,
        resume: ResumePoint | None = None,
    ) -> None:
        resolve_vector_math()  # where no run did it
        super().__init__(
            config,
            functions,
            endpoints,
            collective,
            build_order or BuildOrder(alone=True),
            device or open_device(config.device, config.num_cpu_workers),
            Lockstep(agreement),
            peers,
            fallbacks,
            resume,
        )
        self._inbox = endpoints.inbox
        self._deferred: deque[Any] = deque()
        self._submitted: list[m.EpochPlan] = []
        self._loader = make_loader(self, lambda: self._inbox.put(WAKE)) if make_loader else None
        self._protocol.built()
        if peers is not None:
            peers.replicas[self.rank] = self

    # -- plans -------------------------------------------------------------------

    def wait_for_epoch_plan(self) -> m.EpochPlan | None:
        """Block until there is a plan; answer everything else meanwhile.

        Returns:
            The next plan, or ``None`` once ``Shutdown`` came.
        """
        while True:
            leaving = self.handle_control()
            # Under lockstep a peer may have begun a plan that came before an orderly end:
            # every rank then begins it, and all of them stop after its first step.
            all_begin = self._lockstep and self._wants_snapshot()
            plan = self._protocol.begin_plan(
                leaving_too=all_begin and not self._together.stop_reached
            )
            if plan is not None:
                return plan
            if leaving:
                return None
            self._receive(self._next_message())

    def run_epoch_plan(self, plan: m.EpochPlan, train_fn: TrainFn | None = None) -> bool:
        """Train a plan to its end, answering messages between steps.

        Args:
            plan: From :meth:`wait_for_epoch_plan`, or one of your own.
            train_fn: Instead of the worker's own.

        Returns:
            Whether ``Shutdown`` came before the end.
        """
        fn = train_fn or self._functions.train_fn
        if self._protocol.plan is not plan:
            self._protocol.plans.appendleft(plan)
            self._protocol.begin_plan()
        with worker_context(self):
            self._begin_epoch(plan.epoch)
            self._verify_graphs()
            self._submit(plan)
            self._submitted.remove(plan)
            windows = Windows(plan, self.config)
            last = len(windows.steps) - 1
            for index, sizes in enumerate(windows.steps):
                if not self._may_step():
                    self._abandon(plan)
                    return self._protocol.leaving
                position = windows.position(index) if self._lockstep else None
                if not self._run_window(sizes, position, fn):
                    self._abandon(plan)
                    return True
                if index < last:  # else the plan's own report follows
                    self._reporter.report_if_due()
            self._sync_buffers()
            self._capture_if_reached()
        self._end_plan(plan)
        return False

    def _may_step(self) -> bool:
        """Answer messages; whether the next step may begin."""
        trains = not self._lockstep and self._protocol.state is WorkerState.TRAINING
        if trains and self._inbox.empty() and not (self._deferred or self._reporter.held):
            return True  # as most steps find it
        if self.handle_control() and not self._finish_together():
            return False
        if not self._lockstep:
            return True
        self._capture_if_reached()
        return not self._together.stop_reached

    def _finish_together(self) -> bool:
        """Under lockstep a stop is agreed: this step is still made, by all ranks."""
        if self._lockstep and self._wants_snapshot():
            self._together.propose_stop()
            return True
        return False

    def _wants_snapshot(self) -> bool:
        shutdown = self._protocol.shutdown
        return shutdown is not None and shutdown.snapshot

    def _await_batch(self, *, answer: bool, then: int = COMPUTE) -> Any:
        """The next batch; while it is being loaded, messages are answered or put aside.

        Between steps a stalled loader must not delay an acknowledgement (D8); inside a
        step the replica is in no state to answer.

        Args:
            answer: Whether messages are answered.
            then: What the time goes to from there on.
        """
        assert self._loader is not None, "a worker without a loader has no plans"
        lane = self._lane
        asked = 0.0 if lane is None else time.monotonic()
        if lane is not None and self._loader.reads_inline:
            lane.enter(DATA, asked)
        loaded = self._loader.try_next()
        if lane is not None and lane.cause != DATA:
            if loaded is not None:
                lane.enter_past(DATA, asked, then)
                return loaded.data
            lane.enter(DATA, asked)
        while loaded is None:
            message = self._next_message()
            if isinstance(message, Wake):
                pass
            elif not answer:
                self._deferred.append(message)
            else:
                self._receive(message)
                if self.handle_control():
                    if not self._finish_together():
                        return None
                    answer = False
            loaded = self._loader.try_next()
        if lane is not None:
            lane.enter(then)
        return loaded.data

    def _submit(self, plan: m.EpochPlan) -> None:
        """Start loading a plan, unless it was when it arrived."""
        if not any(p is plan for p in self._submitted):
            self._submitted.append(plan)
            if self._loader is not None:
                self._loader.submit(plan)

    def _abandon(self, plan: m.EpochPlan) -> None:
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        if self._together.stop_reached:
            self._own.keep_buffers()
            self._sync_buffers()
        self._end_plan(plan)

    def _end_plan(self, plan: m.EpochPlan) -> None:
        if self._lockstep or self.world_size == 1:
            self._judge.require_finite()  # no round follows: the report closes the epoch
        self._protocol.end_plan()
        self.report_epoch(plan.epoch)

    # -- messages ------------------------------------------------------------------

    def handle_control(self) -> bool:
        """Answer every message that has arrived; while parked, wait for the release.

        Returns:
            Whether ``Shutdown`` came.
        """
        self._reporter.flush()
        while True:
            while self._deferred:
                self._receive(self._deferred.popleft())
            if not self._inbox.empty():
                # This thread is the only reader.
                self._receive(self._inbox.get_nowait())
                continue
            if self._protocol.may_train:
                return False
            if not self._protocol.parked:
                return self._protocol.leaving
            if self._protocol.report_due:
                self.report_timing()
            self._receive(self._next_message())

    def _next_message(self, timeout_s: float | None = None) -> Any:
        """Block for a message; what still waits for copies is sent first.

        Raises:
            queue.Empty: None came in time.
        """
        self._reporter.flush(wait=True)
        with self._context.idle():
            return self._inbox.get(timeout=timeout_s)

    def _receive(self, message: m.ToWorker | Wake) -> None:
        if isinstance(message, Wake):
            return
        if isinstance(message, m.StartEpoch) and self._protocol.takes_plans:
            self._submit(message.plan)
        work = self._protocol.receive(message)
        if isinstance(work, m.Regroup):
            self._regroup(work)
        elif isinstance(work, m.Capture):
            (self._capture_together if self._lockstep else self._capture_now)(work.id)
        elif work is not None:
            self._answers.answer(work)

    # -- the thread's life ---------------------------------------------------------------

    def run(self) -> None:
        """Train plan after plan until ``Shutdown``, then leave."""
        try:
            self._live()
        finally:
            self._end_graphs()

    def _live(self) -> None:
        self._reporter.put(m.Ready(rank=self.rank))
        while True:
            try:
                self._train_plans()
                break
            except CollectiveAborted as error:
                # Another rank failed, which is told by that rank; if by none, by this one.
                survives = self.config.survives and self._lockstep
                if not survives and not self.drain_until_shutdown(DRAIN_S):
                    raise GpuWorkerError(
                        f"rank {self.rank}: a collective was broken, and no rank has told why "
                        f"within {DRAIN_S:g} s"
                    ) from error
            except CollectiveTimeout:
                # A peer is late, not dead: with others that wait, meet it anew.
                if not (self.config.survives and self._lockstep):
                    raise
            if self._protocol.leaving:
                break
            self._halt()
        if self._wants_snapshot():
            self.send_final_snapshot()
        self.report_exiting()

    def _train_plans(self) -> None:
        while (plan := self.wait_for_epoch_plan()) is not None:
            if self.run_epoch_plan(plan):
                return

    def _halt(self) -> None:
        """The group of ranks is broken: leave the plan, say where, and wait for the new one."""
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        self._context.finish()  # a peer may copy from this replica as soon as it is told
        self._protocol.halt()
        self._reporter.put(
            m.Halted(
                rank=self.rank,
                generation=self._protocol.generation,
                step=self._together.step,
                num_syncs=self._together.num_syncs,
                report=self._reporter.take_report(),
            )
        )

    def report_exiting(self) -> None:
        """Tell the coordinator that nothing more will come."""
        self._protocol.gone()
        self._reporter.put(m.Exiting(rank=self.rank))
        self._reporter.flush(wait=True)

    def drain_until_shutdown(self, timeout_s: float | None = None) -> bool:
        """Take messages, joining no round and training nothing, until ``Shutdown`` (D2).

        Args:
            timeout_s: How long to wait for it; ``None``: as long as it takes.

        Returns:
            Whether it came.
        """
        self._protocol.leave()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._protocol.shutdown is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._deferred.popleft() if self._deferred else self._next_message(left)
            except queue.Empty:
                return False
            if not isinstance(message, Wake):
                self._protocol.receive(message)
        return True

    def close(self) -> bool:
        """End the loader and the worker; returns whether its thread has ended. Idempotent."""
        ended = True if self._loader is None else bool(self._loader.close())
        self._loader = None
        self._let_go()
        return ended
