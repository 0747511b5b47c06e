"""GpuWorker: the training loop of one device, in one thread.

The worker blocks on its inbox, where the coordinator's messages and the loader's wake-ups arrive,
and on collectives, and on nothing else. It handles messages between two steps, never inside one.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from coordinator import messages as m
from coordinator.run_errors import GpuWorkerError
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, PieceTooLarge
from runtime.core.rng import install_thread_generators, thread_generator
from runtime.core.shared_objects import SharedObjects
from runtime.core.threads import prepare_threads
from runtime.data.loader import Loader
from runtime.device.base import Device
from runtime.device.cuda import open_device
from runtime.device.launch_load import LaunchLoad
from runtime.device.metering import StepMeter
from runtime.device.timing import StepTimer
from runtime.evaluation.pending_means import EvaluationView, drawing
from runtime.evaluation.predict import call_for_output
from runtime.evaluation.shared_evaluation import SharedEvaluations
from runtime.evaluation.validation_data import ValidationData
from runtime.replica.batch_log import BatchLog
from runtime.replica.batch_norm import uses_own_statistics
from runtime.replica.build import BuildOrder, FactoryDraws
from runtime.replica.drift import INTERVAL as DRIFT_INTERVAL
from runtime.replica.error_notes import add_note_once
from runtime.replica.flat import FlatState, norm
from runtime.replica.graphs import GraphFallbacks
from runtime.replica.schedule import SchedulerFactories
from runtime.replica.stepper import TrainFns
from runtime.timeline.events import COMPUTE, DATA
from runtime.worker.lockstep import EpochStarts, LockstepProgress
from runtime.worker.meetings import Meetings
from runtime.worker.message_handler import MessageHandler
from runtime.worker.own_loop import Loop, LoopPeers, OwnLoop
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.replica import RunPeers, WorkerProgress, WorkerReplica, seed_generator
from runtime.worker.reporter import Reporter
from runtime.worker.step import WorkerSteps
from runtime.worker.task_evaluation import TaskEvaluation, losses_of
from runtime.worker.worker_config import (
    WAKE,
    StepResult,
    UserFunctions,
    Wake,
    WorkerChannels,
    WorkerConfig,
    WorkerEndpoints,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
COMPARED_STEPS = 2
"""First steps after each of which the objects that workers share are compared."""
DRAIN_S = 30.0
"""Longest wait for ``Shutdown`` after a collective was aborted."""


class GpuWorker:
    """Trains one replica on one device. Build and use it in one thread.

    Args:
        config: Settings.
        functions: The user's functions.
        endpoints: Queues from :meth:`channels`.
        make_loader: Makes the worker's loader from the worker and a function that wakes it;
            ``None``: for tools that only call :meth:`train_step`.
        collective: Under ``SYNC`` reduces gradients, otherwise serves ``SyncNow``.
        build_order: Shared by all workers of a run; ``None``: a standalone worker.
        epoch_starts: Shared by all workers of a lockstep run.
        peers: Shared by all workers of a run with collectives; required to join a new group
            after a death.
        device: The worker's device; ``None``: made from the settings.
        fallbacks: Shared by all workers of a run; records what is not captured.
        launch_load: Shared by all workers of a run; receives samples of their launch times.
        resume: The state of an earlier run, which this one continues.
        recorder: Records the worker's time; ``None``: not recorded.
        evaluations: Evaluations that the workers of a run do together.
        validation: The validation set, shared by all workers of a run; ``None``: there is none.
        loop_peers: Shared by all workers of a run with an own loop.

    Attributes:
        model: The replica's model, in the modes that the user has set.
        optimizer: Its optimizer.
        generator: Random generator on the device, seeded by (seed, rank, epoch); for draws in
            ``train_fn``.
        protocol: The worker's state and counts in the control protocol.
        replica: The replica.
        steps: Makes the optimizer steps.

    Raises:
        TypeError, ValueError: A factory's result cannot be trained.
    """

    @staticmethod
    def channels() -> tuple[WorkerEndpoints, WorkerChannels]:
        """Create the two ends of a worker's queues, for a standalone worker."""
        control: queue.SimpleQueue[Any] = queue.SimpleQueue()
        reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        return WorkerEndpoints(control, reports), WorkerChannels(control, reports)

    def __init__(
        self,
        config: WorkerConfig,
        functions: UserFunctions,
        endpoints: WorkerEndpoints,
        *,
        make_loader: Callable[[GpuWorker, Callable[[], None]], Loader] | None = None,
        first_batch: Callable[[GpuWorker], Any] | None = None,
        collective: Collective | None = None,
        build_order: BuildOrder | None = None,
        epoch_starts: EpochStarts | None = None,
        peers: RunPeers | None = None,
        device: Device | None = None,
        fallbacks: GraphFallbacks | None = None,
        launch_load: LaunchLoad | None = None,
        resume: ResumePoint | None = None,
        recorder: WorkerRecorder | None = None,
        evaluations: SharedEvaluations | None = None,
        validation: ValidationData | None = None,
        loop_peers: LoopPeers | None = None,
    ) -> None:
        prepare_threads()  # unless a run has done so
        install_thread_generators()
        self.config = config
        self.rank = config.rank
        self.world_size = config.world_size
        self.device = config.device
        self.generator = torch.Generator(config.device)
        seed_generator(self.generator, config.seed, config.rank, 0)
        self.protocol = WorkerProtocol(config.rank)
        self._progress = WorkerProgress()
        self._recorder = recorder or WorkerRecorder()
        self._lane = self._recorder.lane
        self._functions = self._recorder.wrap(functions)
        self._context = device or open_device(config.device, config.num_cpu_workers)
        self._lockstep, self._epoch_starts = LockstepProgress(), epoch_starts or EpochStarts()
        self._peers = peers
        timer = self._context.new_timer(launch_load)
        meter = StepMeter(self._context.new_log(), timer)
        meter.log.each = [] if config.metrics_every else None
        # A model factory may run a forward pass that records scalars.
        self._log = BatchLog(meter.log)
        self._reporter = Reporter(
            self.protocol, endpoints.outbox, self._context, config.report_interval_s, meter
        )
        self._first_batch = first_batch
        self.replica = self._make_replica(collective, build_order, timer, meter, resume)
        self.model = self.replica.model
        self.optimizer = self.replica.optimizer
        self._schedule = self.replica.schedule
        self._reporter.schedule = self._schedule
        meter.log.rate = lambda: self._schedule.host_lr
        self._is_lockstep = self.replica.is_lockstep
        self._checks_state = config.saves  # before the first step, and after it
        self._shared = self._join_shared(build_order, functions)
        self.steps = WorkerSteps(
            config,
            self.replica,
            self.protocol,
            meter,
            timer,
            await_batch=self._await_batch,
            lane=self._lane,
            fallbacks=fallbacks,
        )
        self._evaluation = self._make_evaluation(evaluations or SharedEvaluations(), validation)
        self._loop = self._make_loop(functions.loop, timer, meter, loop_peers)
        self._handler = self._make_handler()
        self._inbox, self._outbox = endpoints.inbox, endpoints.outbox
        self._deferred: deque[Any] = deque()
        self._submitted: list[m.EpochPlan] = []
        self._held: deque[m.EpochPlan] = deque()  # not to be loaded before their epoch begins
        self._holds = functions.epoch_fn is not None
        self._is_starved = False  # the last plan had no batch for the step in progress
        if self._holds and self._is_lockstep:
            self._epoch_starts.join(self.rank, lambda: self._inbox.put(WAKE))
        self._loader = make_loader(self, lambda: self._inbox.put(WAKE)) if make_loader else None
        self.protocol.on_built()
        if peers is not None:
            peers.replicas[self.rank] = self.replica

    def _make_replica(
        self,
        collective: Collective | None,
        order: BuildOrder | None,
        timer: StepTimer,
        meter: StepMeter,
        resume: ResumePoint | None,
    ) -> WorkerReplica:
        with worker_context(self):
            return WorkerReplica(
                self.config,
                self._functions,
                self._context,
                collective,
                order or BuildOrder(standalone=True),
                generator=self.generator,
                progress=self._progress,
                lockstep=self._lockstep,
                timer=timer,
                meter=meter,
                log=self._log,
                recorder=self._recorder,
                resume=resume,
                first_pass=None if self._first_batch is None else self._first_pass,
            )

    def _first_pass(self, model: nn.Module) -> None:
        """Run a forward pass of a model on the first batch; random generators stay as they are."""
        assert self._first_batch is not None, "checked by the caller"
        batch = self._first_batch(self)
        f = self._functions
        fn = call_for_output if f.loop is not None else losses_of(f.train_fn)
        with (
            FactoryDraws(self.device).repeated(self.device),
            drawing(self.device, 0) as generator,
            worker_context(
                EvaluationView(model, self.device, generator, self.rank, self.world_size, self)
            ),
        ):
            fn(model, batch)

    def _join_shared(
        self, order: BuildOrder | None, functions: UserFunctions
    ) -> SharedObjects | None:
        """The objects that workers share, compared until one of them ends its first epoch."""
        shared = None if order is None else order.shared
        if shared is not None:
            f = functions
            called = (f.train_fn, f.loop, f.val_fn, f.epoch_fn)
            shared.add(self.rank, called, self.model, self.optimizer)
            self.replica.stepper.compare_shared(shared)
        self._num_compared = 0  # steps
        return shared

    def _end_shared(self) -> None:
        if self._shared is not None:
            self._shared.compare()
            self._shared.close()
            self._shared = None
            self.replica.stepper.compare_shared(None)

    def _make_loop(
        self, function: Loop | None, timer: StepTimer, meter: StepMeter, peers: LoopPeers | None
    ) -> OwnLoop | None:
        if function is None:
            return None
        return OwnLoop(
            function,
            self,
            self.config,
            self.steps,
            self.replica,
            self.protocol,
            timer,
            meter,
            self._evaluation,
            peers or LoopPeers(1, Meetings(self.config.collective_timeout_s)),
            self._lane,
            self._receive_next,
        )

    def _make_evaluation(
        self, shared: SharedEvaluations, data: ValidationData | None
    ) -> TaskEvaluation:
        send, functions = self._reporter.send, self._functions
        return TaskEvaluation(self.replica, self.config, functions, send, shared, data)

    def _make_handler(self) -> MessageHandler:
        return MessageHandler(
            self,
            self.replica,
            self.protocol,
            self._reporter,
            self._functions,
            self._recorder,
            self.steps.flush_weight,
            self._evaluation,
            self.steps.confirm_steps,
            falls_back=self.config.falls_back,
        )

    @property
    def _cpu_generator(self) -> torch.Generator | None:
        """The generator of all draws of a CPU worker, dropout included."""
        return self.generator if self.device.type == "cpu" else None

    @property
    def local_step(self) -> int:
        """Batches trained by this worker."""
        return self._progress.local_step

    @property
    def global_step(self) -> int:
        """Batches of all ranks before the present step: the position of the schedule.

        Equal on all ranks under ``SYNC``, where a rank may have steps without samples, in which it
        calls no ``train_fn``. Otherwise those of other ranks are included after each averaging
        round. With ``global_batch_size`` it counts global batches.
        """
        return self.steps.global_step

    @property
    def current_epoch(self) -> int:
        """Epoch of the plan in progress, or of the last one."""
        return self._progress.epoch

    @property
    def current_lr(self) -> float:
        """Learning rate of the optimizer's first group."""
        return self._schedule.current

    @property
    def flat_state(self) -> FlatState:
        """The averaged parameters and buffers."""
        return self.replica.state

    @property
    def current_version(self) -> int:
        """Number of averages applied."""
        return self.replica.averager.version

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; a scheduler overwrites it with its next step."""
        self._schedule.set_lr(lr)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate once; a scheduler overwrites it."""
        self._schedule.scale_lr(factor)

    def set_lr_scale(self, scale: float) -> None:
        """Multiply the scheduler's rates by ``scale`` from now on.

        No effect without a scheduler; :meth:`scale_lr` multiplies the rate itself.
        """
        self._schedule.set_scale(scale)

    def set_scheduler(self, factory: SchedulerFactories) -> None:
        """Attach the scheduler ``factory(optimizer)``, which makes one step for each batch.

        As in a plain loop it begins with the next step at its own first step, or where its
        ``last_epoch`` says. With ``factory(optimizer, total)``, ``total`` is that of the whole
        run. A run that resumes from a later checkpoint calls ``epoch_fn`` for the epoch in which
        this was called, to attach it again.
        """
        self._schedule.attach(factory, at_next=True)
        self._schedule.attached_in = self.current_epoch

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`gpuworker.record_scalar`."""
        self._log.record_scalar(name, value)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """See :func:`gpuworker.all_gather`."""
        return self.steps.all_gather(tensor)

    def forget_graphs(self) -> None:
        """Drop the captured graphs; steps are captured again after some eager ones.

        With ``cuda_graphs``, for changes made in Python during the run that a captured step does
        not contain, such as another dropout rate or another loss.
        """
        self.steps.forget_graphs()

    def train_step(self, batch: Any, train_fn: TrainFns | None = None) -> StepResult:
        """One optimizer step on one batch, eagerly, in the calling thread.

        Args:
            batch: A tuple, list or dict of tensors on the worker's device.
            train_fn: The function to use instead of the worker's own.

        Returns:
            Device-side handles; nothing is synchronised.
        """
        with worker_context(self), thread_generator(self._cpu_generator):
            return self.steps.train_step(batch, train_fn or self._functions.train_fn)

    def snapshot_params(self, round_id: int = 0) -> m.ParamSnapshot:
        """Copy the live state to new CPU tensors, with its weight."""
        payload = self.replica.averager.snapshot(reuse=False)
        self.steps.flush_weight()
        return m.ParamSnapshot(
            rank=self.rank,
            round=round_id,
            payload=payload,
            num_samples=self.protocol.samples,
            num_batches=self.protocol.batches,
            weight=self.protocol.weight,
        )

    def load_averaged(self, average: m.Payload | m.Update) -> None:
        """Replace the live state by an average.

        Raises:
            ValueError: The tensors' number, sizes or dtypes differ from this model's. The live
                state is then unchanged.
        """
        self.replica.averager.replace(average.average if isinstance(average, m.Update) else average)

    def report_timing(self) -> None:
        """Report the training since the last report to the coordinator."""
        self._reporter.report_timing()

    def report_epoch(self, epoch: int) -> None:
        """Report a completed plan to the coordinator, with all training not reported yet."""
        self._reporter.report_epoch(epoch)

    def send_final_snapshot(self) -> None:
        """Send the final state, with the samples trained since the last round."""
        self._recorder.leaving()
        self._handler.send_final_snapshot()

    def wait_for_epoch_plan(self) -> m.EpochPlan | None:
        """Block until there is a plan, and handle all other messages meanwhile.

        Returns:
            The next plan, or ``None`` after ``Shutdown``.
        """
        with self._recorder.between_plans():
            while True:
                leaving = not self._continues_step() and self.handle_control()
                plan = self.protocol.begin_plan()
                if plan is not None:
                    return plan
                if leaving:
                    return None
                self._receive_next()

    def _continues_step(self) -> bool:
        """Within a step over several batches, wait for the next plan, and defer all other messages,
        as the replica must not change.

        Returns:
            False if there is no such step, or the run ends it.
        """
        loop = self._loop
        if loop is None or not loop.is_open or self._is_starved:
            return False
        deferred: list[m.ToWorker] = []
        while loop.is_open and not self.protocol.plans:
            if self.protocol.leaving:
                loop.abandon_step()
                break
            message = self._deferred.popleft() if self._deferred else self._next_message()
            if isinstance(message, Wake | m.StartEpoch):
                self._receive(message)
                continue
            deferred.append(message)
            if self.protocol.ends_step(message):
                loop.abandon_step()
        self._deferred.extendleft(reversed(deferred))
        return loop.is_open

    def run_epoch_plan(self, plan: m.EpochPlan, train_fn: TrainFns | None = None) -> bool:
        """Train a plan to its end, and handle messages between steps.

        Args:
            plan: The plan, for instance from :meth:`wait_for_epoch_plan`.
            train_fn: The function to use instead of the worker's own.

        Returns:
            True if ``Shutdown`` was received before the end.
        """
        return _exhaust(self._train_plan(plan, train_fn or self._functions.train_fn, None))

    def _train_plan(
        self, plan: m.EpochPlan, train_fn: TrainFns, loop: OwnLoop | None
    ) -> Generator[Any, None, bool]:
        """Train a plan; with an own loop, yield each batch to its body."""
        with self._recorder.plan(plan):
            if self.protocol.plan is not plan:
                self.protocol.plans.appendleft(plan)
                self.protocol.begin_plan()
            in_context = loop is not None  # entered in run(): the body needs it, too
            with (
                nullcontext() if in_context else worker_context(self),
                nullcontext() if in_context else thread_generator(self._cpu_generator),
            ):
                left = yield from self._make_steps(plan, train_fn, loop)
                if left is not None:
                    return left
            is_open = loop is not None and loop.is_open
            self._is_starved = is_open and not plan.num_batches
            if plan.more or is_open:
                self.protocol.end_plan()
                open_epoch = self._progress.begun_epoch if is_open else None
                self._reporter.report_epoch(plan.epoch, wait=False, open_epoch=open_epoch)
            else:
                self._end_plan(plan)
            return False

    def _make_steps(
        self, plan: m.EpochPlan, train_fn: TrainFns, loop: OwnLoop | None
    ) -> Generator[Any, None, bool | None]:
        """Make the steps of a plan.

        Returns:
            ``None`` at its end; if it was abandoned, the result of :meth:`run_epoch_plan`.
        """
        self.replica.checkpoint.return_buffers()
        self._schedule.step_by_metrics(plan.metrics)
        plan_steps = PlanSteps(plan, self.config)
        self._schedule.advance(self.steps.position_of(plan_steps.position(0)))  # for epoch_fn
        self._begin_epoch(plan.epoch)
        if self._shared is not None and not self._num_compared:
            self._shared.compare()
        self.steps.check_graphs()
        if not any(p is plan for p in self._held):
            self._submit(plan)
            self._submitted.remove(plan)
        self._submit_held()
        if self._checks_state:
            self.replica.checkpoint.check(has_stepped=False)
        last = len(plan_steps.steps) - 1
        for index, sizes in enumerate(plan_steps.steps):
            is_open = loop is not None and loop.is_open  # a step over several batches
            if not is_open:
                if not self._may_step():
                    self._abandon(plan)
                    return self.protocol.leaving
                if self._is_lockstep and self._lockstep.num_uncompared >= DRIFT_INTERVAL:
                    self._check_drift()
            position = plan_steps.position(index)
            if loop is None:
                is_made = self.steps.run(sizes, position, train_fn)
            else:
                is_made = yield from loop.train_step(
                    sizes, position, plan_steps.ranks(index), plan_steps.num_empty.get(index, 0)
                )
                is_open = loop.is_open
            if not is_made:
                if loop is not None and loop.has_left(plan.epoch):
                    self._leave_epoch(loop)
                    return self.protocol.leaving
                self._abandon(plan)
                return True
            if self._shared is not None and self._num_compared < COMPARED_STEPS:
                self._num_compared += 1
                self._shared.compare()
            if self._checks_state and not is_open:
                self._checks_state = False
                self.steps.confirm_steps()
                self.replica.checkpoint.check(has_stepped=True)
            if plan_steps.num_empty and loop is None:
                self.steps.count_empty(plan_steps.num_empty.get(index, 0))
            if index < last and not is_open:  # else the plan's own report follows
                self._reporter.report_if_due()
        self.steps.confirm_steps()
        if loop is not None and plan_steps.steps:
            loop.end_plan(closes=self._is_lockstep and not (plan.more or plan.pauses))
        if loop is not None and loop.is_open:
            return None
        if not plan.more:
            self.replica.check_structure()
            self._check_drift(frozen=True)
            if plan.is_partial:
                self.replica.checkpoint.keep_buffers()
            self.replica.sync_buffers()
        return None

    def _leave_epoch(self, loop: OwnLoop) -> None:
        """Give back the rest of an epoch, whose loop the body has left.

        Raises:
            _EpochLeft: In lockstep, the other ranks wait at a step.
        """
        self.steps.confirm_steps()
        if self.replica.is_sharded:
            raise RuntimeError(
                "sharded(...): the body has left an epoch, after which the ranks would form a new "
                "group: use continue to skip batches, or worker.stop()"
            )
        if self._is_lockstep:
            raise _EpochLeft
        loop.halted()
        self._forget_loads()
        epoch = loop.left_epoch
        self._reporter.leave_epoch(epoch, self.protocol.leave_epoch(epoch))

    def _check_drift(self, *, frozen: bool = False) -> None:
        """In lockstep, compare the replicas; see :meth:`WorkerReplica.check_drift`."""
        self.steps.confirm_steps()
        self.replica.check_drift(self._peers, frozen=frozen)

    def _begin_epoch(self, epoch: int) -> None:
        self._resume_epochs()  # of a worker that is not run
        begins = epoch > self._progress.begun_epoch
        if begins and self._loop is not None:
            self._loop.require_closed()
        self._progress.epoch = self._reporter.epoch = epoch
        if begins:
            if self._num_compared:
                self._end_shared()
            self._progress.begun_epoch = epoch
            checkpoint = self.replica.checkpoint
            checkpoint.before_epoch_fn()
            seed_generator(self.generator, self.config.seed, self.rank, epoch)
            if self._functions.epoch_fn is not None:
                self._functions.epoch_fn(epoch, self)
                self.flat_state.params.adopt_groups()
            self.replica.check_structure()
            checkpoint.after_epoch_fn(epoch)
            if self._holds and self._is_lockstep:
                self._epoch_starts.begin(self.rank, epoch)

    def _resume_epochs(self) -> None:
        """Call ``epoch_fn`` for the epochs that the checkpoint had begun, for its effect outside of
        the replica, and restore the replica after it.
        """
        replica, call = self.replica, self._functions.epoch_fn
        if not replica.resumed_epochs:
            return
        assert call is not None
        with worker_context(self), thread_generator(self._cpu_generator), replica.resuming() as at:
            for epoch in at:
                self._progress.epoch = epoch
                seed_generator(self.generator, self.config.seed, self.rank, epoch)
                call(epoch, self)
                self.flat_state.params.adopt_groups()
        if self._holds and self._is_lockstep:
            self._epoch_starts.begin(self.rank, self._progress.begun_epoch)

    def _may_step(self) -> bool:
        """Handle messages; returns True if the next step may begin."""
        trains = self.protocol.state is WorkerState.TRAINING
        if trains and self._inbox.empty() and not (self._deferred or self._reporter.held):
            return True  # the usual case
        return not self.handle_control()

    def _snapshot_requested(self) -> bool:
        shutdown = self.protocol.shutdown
        return shutdown is not None and shutdown.snapshot

    def _await_batch(self, *, answer: bool) -> Any:
        """Return the next batch; handle or defer messages while it is being loaded.

        Between steps a stalled loader must not delay acknowledgements; inside a step the replica
        cannot be read or written.

        Args:
            answer: Handle messages; otherwise defer them.
        """
        assert self._loader is not None, "a worker without a loader has no plans"
        if self._held:
            self._submit_held()
        lane = self._lane
        began = 0.0 if lane is None else time.monotonic()
        if lane is not None and self._loader.reads_inline:
            lane.enter(DATA, began)
        loaded = self._loader.try_next()
        if lane is not None and lane.cause != DATA:
            if loaded is not None:
                lane.record_interval(DATA, began, COMPUTE)
                self._reporter.meter.add_load(loaded.load_s, ahead=self._loader.reads_ahead)
                return loaded.data
            lane.enter(DATA, began)
        while loaded is None:
            message = self._next_message()
            if not answer and not isinstance(message, Wake):
                self._deferred.append(message)
            else:
                self._receive(message)
                if answer and self.handle_control():
                    return None
            loaded = self._loader.try_next()
        if lane is not None:
            lane.enter(COMPUTE)
        self._reporter.meter.add_load(loaded.load_s, ahead=self._loader.reads_ahead)
        return loaded.data

    def _submit_early(self, plan: m.EpochPlan) -> None:
        """Start loading a plan that arrived, unless ``epoch_fn`` is to be called first.

        It may change the data set, and plans are loaded in the order of their arrival.
        """
        if self._holds and (self._held or not self._may_load(plan.epoch)):
            self._held.append(plan)
        else:
            self._submit(plan)

    def _may_load(self, epoch: int) -> bool:
        """True if ``epoch_fn`` was called for an epoch, under lockstep on every rank."""
        if epoch > self._progress.begun_epoch:
            return False
        return not self._is_lockstep or self._epoch_starts.all_begun(epoch)

    def _submit_held(self) -> None:
        while self._held and self._may_load(self._held[0].epoch):
            plan = self._held.popleft()
            self._submit(plan)
            if plan is self.protocol.plan:
                self._submitted.remove(plan)

    def _submit(self, plan: m.EpochPlan) -> None:
        """Start to load a plan, unless that was done when it was received."""
        if not any(p is plan for p in self._submitted):
            self._submitted.append(plan)
            if self._loader is not None:
                self._loader.submit(plan)

    def _forget_loads(self) -> None:
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        self._held.clear()

    def _abandon(self, plan: m.EpochPlan) -> None:
        self.steps.confirm_steps()
        self._forget_loads()
        self._end_plan(plan)

    def _end_plan(self, plan: m.EpochPlan) -> None:
        with self._recorder.last_report(self.device):
            params_norm: float | None = None
            if self._is_lockstep or self.world_size == 1:
                # No round follows: this report closes the epoch.
                self.replica.finite_check.require_finite()
                if self.replica.averager.leads and plan.num_batches:
                    params_norm = float(norm(self.replica.state.params.flats))
            self.protocol.end_plan()
            self._reporter.report_epoch(plan.epoch, params_norm)

    def handle_control(self) -> bool:
        """Handle all messages received; while parked, wait for a higher limit.

        Returns:
            True if ``Shutdown`` was received.
        """
        self._reporter.flush()
        while True:
            while self._deferred:
                self._receive(self._deferred.popleft())
            if not self._inbox.empty():
                # This thread is the only reader.
                self._receive(self._inbox.get_nowait())
                continue
            if self.protocol.may_train:
                return False
            if not self.protocol.parked:
                return self.protocol.leaving
            if self.protocol.report_due:
                self.report_timing()
            self._receive(self._next_message())

    def _next_message(self, timeout_s: float | None = None) -> Any:
        """Wait for a message, after sending those held for copies.

        Raises:
            queue.Empty: None was received in time.
        """
        with self._recorder.waiting(self.protocol):
            self._reporter.flush(wait=True)
            return self._inbox.get(timeout=timeout_s)

    def _receive_next(self) -> None:
        """Handle the next message, between two steps; blocks until there is one."""
        self._receive(self._deferred.popleft() if self._deferred else self._next_message())

    def _receive(self, message: m.ToWorker | Wake) -> None:
        if isinstance(message, Wake):
            self._submit_held()  # the last rank may have begun the epoch
            return
        with self._recorder.handling(message, self.protocol):
            if isinstance(message, m.StartEpoch) and self.protocol.accepts(message.plan):
                self._submit_early(message.plan)
            work = self.protocol.receive(message)
            if isinstance(work, m.Regroup):
                self._regroup(work)
            elif isinstance(work, m.ToWorkerReplica):
                self._handler.handle(work)
            elif work is not None:
                self._reporter.send(work)

    def _regroup(self, message: m.Regroup) -> None:
        """Join the collective of the remaining ranks.

        Raises:
            CollectiveAborted, CollectiveTimeout: In lockstep, another rank has died.
            GpuWorkerError: The group could not be connected.
        """
        assert self._peers is not None, "a standalone worker has no group"
        try:
            collective = self._peers.groups.connect(
                message.generation, message.ranks, self.rank, message.backend
            )
        except (CollectiveAborted, CollectiveTimeout) as error:
            if not self.config.falls_back:
                raise GpuWorkerError(f"rank {self.rank} could not join its new group") from error
            self._send_unconnected(message, error)
            return
        self.replica.join(collective)
        self.steps.is_torn = False
        if self._loop is not None:
            self._loop.regrouped(message.generation, message.ranks)
        self.protocol.on_regrouped(message.generation)
        if message.step is None:
            return
        if message.donor is not None and message.donor != self.rank:
            donor = self._peers.replicas.get(message.donor)
            self.replica.copy_if_behind(donor, message.donor)
        collective.barrier()  # the donor must not train before all have copied
        self._reporter.send(m.Regrouped(rank=self.rank, generation=message.generation))

    def _send_unconnected(self, message: m.Regroup, error: BaseException) -> None:
        """Report that the new group could not be connected; another one follows."""
        self._reporter.send(
            m.ConnectFailed(
                rank=self.rank,
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

    def request_stop(self) -> None:
        """Request the end of the run at a step boundary."""
        self._outbox.put(m.StopRequested())

    def run(self) -> None:
        """Train plan after plan until ``Shutdown``, then leave."""
        try:
            self._resume_epochs()
            if self._loop is None:
                _exhaust(self._run())
            else:
                with worker_context(self), thread_generator(self._cpu_generator):
                    self._loop.run(self._run())
        except Exception as error:
            if self._shared is not None and self._shared.compare(warn=False):
                add_note_once(error, self._shared.message())
            raise
        finally:
            self._recorder.ended()
            self._epoch_starts.leave(self.rank)
            self.steps.forget_graphs()  # before another worker may use their stream

    def _run(self) -> Generator[Any, None, None]:
        """The control flow of the worker, which yields each batch to the body of an own loop."""
        rates = self.replica.rates
        names = () if rates is None else rates.names
        statistics = uses_own_statistics(self.replica.model)
        self._reporter.send(
            m.Ready(rank=self.rank, scale_invariant=names, batch_statistics=statistics)
        )
        while True:
            try:
                yield from self._train_plans()
                break
            except PieceTooLarge as error:
                logger.warning(
                    "rank %d: %s; it gets smaller pieces from now on, and the step is repeated",
                    self.rank,
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
                repeats = self.config.redoes or self.config.falls_back or self._loop is not None
                can_continue = self._is_lockstep and repeats
                fault = str(error) if error.failed else None
                if not can_continue and not self.drain_until_shutdown(DRAIN_S):
                    raise GpuWorkerError(
                        f"rank {self.rank}: a collective was aborted, and no rank has reported a "
                        f"cause within {DRAIN_S:g} s"
                    ) from error
            except CollectiveTimeout as error:
                # A peer is late, not dead: form a new group with those that wait.
                can_continue = self.config.survives or (self.config.falls_back and error.failed)
                if not (can_continue and self._is_lockstep):
                    raise
                fault = str(error) if error.failed else None
            if self.protocol.leaving:
                self._reporter.report_rest()
                break
            self._halt(fault)
        is_torn = self.steps.is_torn and self._has_failed
        if self._snapshot_requested() and not is_torn and self.flat_state.params.is_whole:
            self.send_final_snapshot()
        self.report_exiting()

    @property
    def _has_failed(self) -> bool:
        """True if the run has failed, so that the state is that of an interrupted step."""
        return self.protocol.shutdown is not None and self.protocol.shutdown.failed

    def answer_after_failure(self) -> bool:
        """Wait for ``Shutdown`` after an exception, and send the state of before the failed step
        if it is requested.

        The coordinator aborts the collectives first, so that the reductions of launched steps end.
        The effects of a round that was completed or given up are received until then; its
        callbacks are not called.

        Returns:
            True if the state was sent.

        Raises:
            queue.Empty: There was no message within ``DRAIN_S``.
        """
        self._forget_loads()
        while self.protocol.shutdown is None:
            message = self._deferred.popleft() if self._deferred else self._next_message(DRAIN_S)
            if isinstance(message, m.Update):
                message = replace(message, tasks=())
            if isinstance(message, (m.Update, m.Rollback, m.Shutdown)):
                self._receive(message)
        if not (self._snapshot_requested() and self.flat_state.params.is_whole):
            return False
        if self._loop is not None and not self._loop.undo_failed():
            return False
        self.steps.abandon_steps()
        self._reporter.report_rest()
        self.send_final_snapshot()
        self.report_exiting()
        return True

    def _train_plans(self) -> Generator[Any, None, None]:
        train_fn = self._functions.train_fn
        try:
            while (plan := self.wait_for_epoch_plan()) is not None:
                if (yield from self._train_plan(plan, train_fn, self._loop)):
                    return
            if self._loop is not None:
                self._loop.abandon_step()
            self._end_shared()
        except (CollectiveAborted, CollectiveTimeout):
            self.steps.abandon_steps()
            raise

    def _halt(self, fault: str | None = None, too_large: PieceTooLarge | None = None) -> None:
        """Leave the plan and report the position, as the group of ranks is broken.

        Args:
            fault: The fault of the transport, if that is the cause.
            too_large: The error of this rank, if it lacked memory for its piece.
        """
        self._recorder.halted()
        self._forget_loads()
        if self._loop is not None:
            self._loop.halted()
        self._context.finish()  # a peer may copy from this replica after the report
        if not self.protocol.leaving:
            self.protocol.halt()
        self._send_halted(fault, too_large)

    def _send_halted(
        self, fault: str | None = None, too_large: PieceTooLarge | None = None
    ) -> None:
        cause = None if too_large is None else too_large.__cause__
        self._reporter.send(
            m.Halted(
                rank=self.rank,
                generation=self.protocol.generation,
                step=self._lockstep.step,
                num_syncs=self._lockstep.num_syncs,
                fault=fault,
                report=self._reporter.take_report(),
                too_large=0 if too_large is None else too_large.num_samples,
                error=cause if isinstance(cause, Exception) else None,
                left=None if self._loop is None else self._loop.left_now(self.current_epoch),
            )
        )

    def report_exiting(self) -> None:
        """Send the worker's last message."""
        self._recorder.leaving()
        self.protocol.on_gone()
        self._reporter.send(m.Exiting(rank=self.rank))
        self._reporter.flush(wait=True)

    def drain_until_shutdown(self, timeout_s: float | None = None) -> bool:
        """Discard messages, without training or rounds, until ``Shutdown``.

        Args:
            timeout_s: Longest wait in seconds; ``None``: no limit.

        Returns:
            True if it was received.
        """
        self._recorder.leaving()
        self.protocol.leave()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.protocol.shutdown is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._deferred.popleft() if self._deferred else self._next_message(left)
            except queue.Empty:
                return False
            if not isinstance(message, Wake):
                self.protocol.receive(message)
        return True

    def close(self) -> bool:
        """Close the loader and the worker; False if the loader's thread is alive. Idempotent."""
        ended = True if self._loader is None else bool(self._loader.close())
        self._loader = None
        ended &= self._evaluation.close()
        self._loop = None
        self.steps.close()  # breaks a cycle of references: the replica is freed at once
        return ended


class _EpochLeft(Exception):
    """The body of an own loop has left the epoch in lockstep."""


def _exhaust(flow: Generator[Any, None, T]) -> T:
    """Run a control flow that yields nothing; returns its result."""
    try:
        next(flow)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("only the body of an own loop takes batches")
