"""GpuWorker: the training loop of one device, in one thread.

The worker blocks on nothing but its inbox, where the coordinator's messages and the
loader's wake-ups arrive, and on the collectives that it is told to join. Between two
steps it answers every message; inside a step it answers none.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coordinator import messages as m
from coordinator.errors import GpuWorkerError
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, PieceTooLarge
from runtime.core.rng import install_thread_generators, thread_generator
from runtime.core.threads import prepare_threads
from runtime.data.loader import Loader
from runtime.device.base import Device
from runtime.device.cuda import open_device
from runtime.device.launch_load import LaunchLoad
from runtime.device.metering import StepMeter
from runtime.replica.build import BuildOrder
from runtime.replica.flat import FlatState, norm
from runtime.replica.graphs import GraphFallbacks
from runtime.replica.schedule import SchedulerFactories
from runtime.replica.stepper import TrainFns
from runtime.timeline.events import COMPUTE, DATA
from runtime.worker.lockstep import LockstepAgreement, LockstepProgress
from runtime.worker.message_handler import MessageHandler
from runtime.worker.plan_steps import PlanSteps
from runtime.worker.protocol import WorkerProtocol, WorkerState
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.replica import RunPeers, WorkerProgress, WorkerReplica, key_generator
from runtime.worker.reporter import Reporter
from runtime.worker.step import BatchLog, WorkerSteps
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

DRAIN_S = 30.0
"""How long a rank whose collective was broken waits to hear of the end of the run."""


class GpuWorker:
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
        launch_load: Shared by all workers of a run; receives samples of their launch times.
        resume: Where an earlier run stood, of which this one goes on.
        recorder: Is told what the worker's time goes to; ``None``: nobody is.

    Attributes:
        model: The replica, in train mode.
        optimizer: Its optimizer.
        generator: On the device, keyed by (seed, rank, epoch); for draws in ``train_fn``.
        protocol: What the worker may do and has done, as the coordinator counts it.
        replica: What is trained.
        steps: Makes the optimizer steps.

    Raises:
        TypeError, ValueError: What a factory gives cannot be trained.
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
        *,
        make_loader: Callable[[GpuWorker, Callable[[], None]], Loader] | None = None,
        collective: Collective | None = None,
        build_order: BuildOrder | None = None,
        agreement: LockstepAgreement | None = None,
        peers: RunPeers | None = None,
        device: Device | None = None,
        fallbacks: GraphFallbacks | None = None,
        launch_load: LaunchLoad | None = None,
        resume: ResumePoint | None = None,
        recorder: WorkerRecorder | None = None,
    ) -> None:
        prepare_threads()  # where no run did it
        install_thread_generators()
        self.config = config
        self.rank = config.rank
        self.world_size = config.world_size
        self.device = config.device
        self.generator = torch.Generator(config.device)
        key_generator(self.generator, config.seed, config.rank, 0)
        self.protocol = WorkerProtocol(config.rank)
        self._progress = WorkerProgress()
        self._recorder = recorder or WorkerRecorder()
        self._lane = self._recorder.lane
        self._functions = self._recorder.watch(functions)
        self._context = device or open_device(config.device, config.num_cpu_workers)
        self._lockstep = LockstepProgress(agreement)
        self._peers = peers
        timer = self._context.new_timer(launch_load)
        meter = StepMeter(self._context.new_log(), timer)
        meter.log.each = [] if config.metrics_every else None
        # A model may record scalars in a forward that its factory makes.
        self._values = BatchLog(meter.log)
        self._reporter = Reporter(
            self.protocol, endpoints.outbox, self._context, config.report_interval_s, meter
        )
        with worker_context(self):
            self.replica = WorkerReplica(
                config,
                self._functions,
                self._context,
                collective,
                build_order or BuildOrder(standalone=True),
                generator=self.generator,
                progress=self._progress,
                lockstep=self._lockstep,
                timer=timer,
                meter=meter,
                recorder=self._recorder,
                resume=resume,
            )
        self.model = self.replica.model
        self.optimizer = self.replica.optimizer
        self._schedule = self.replica.schedule
        self._reporter.schedule = self._schedule
        self._is_lockstep = self.replica.is_lockstep
        self.steps = WorkerSteps(
            config,
            self.replica,
            self.protocol,
            meter,
            timer,
            self._values,
            await_batch=self._await_batch,
            lane=self._lane,
            fallbacks=fallbacks,
        )
        self._answers = self._make_answers()
        self._inbox = endpoints.inbox
        self._deferred: deque[Any] = deque()
        self._submitted: list[m.EpochPlan] = []
        self._loader = make_loader(self, lambda: self._inbox.put(WAKE)) if make_loader else None
        self.protocol.built()
        if peers is not None:
            peers.replicas[self.rank] = self.replica

    def _make_answers(self) -> MessageHandler:
        return MessageHandler(
            self,
            self.replica,
            self.protocol,
            self._reporter,
            self._functions,
            self._recorder,
            self.steps.flush_weight,
            self.steps.conclude,
            falls_back=self.config.falls_back,
        )

    @property
    def _cpu_generator(self) -> torch.Generator | None:
        """What a worker on the CPU draws from, dropout included."""
        return self.generator if self.device.type == "cpu" else None

    @property
    def local_step(self) -> int:
        """Batches trained by this worker."""
        return self._progress.local_step

    @property
    def current_epoch(self) -> int:
        """Epoch of the plan in progress or the last one."""
        return self._progress.epoch

    @property
    def current_lr(self) -> float:
        """Learning rate of the optimizer's first group."""
        return self._schedule.current

    @property
    def flat_state(self) -> FlatState:
        """The parameters and buffers that are averaged."""
        return self.replica.state

    @property
    def current_version(self) -> int:
        """Averaging rounds taken."""
        return self.replica.averager.version

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

    def set_scheduler(self, factory: SchedulerFactories) -> None:
        """Drive the learning rate by ``factory(optimizer)``, one step for each batch."""
        self._schedule.attach(factory)

    def record_scalar(self, name: str, value: float | Tensor) -> None:
        """See :func:`gpuworker.record_scalar`."""
        self._values.record_scalar(name, value)

    def all_gather(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """See :func:`gpuworker.all_gather`."""
        return self.steps.all_gather(tensor)

    def forget_graphs(self) -> None:
        """Capture the step anew, after some eager ones.

        With ``cuda_graphs``, for a change that Python code makes while the run goes on and
        that a captured step cannot see: another rate of dropout, or another loss.
        """
        self.steps.forget_graphs()

    def train_step(self, batch: Any, train_fn: TrainFns | None = None) -> StepResult:
        """One optimizer step on one batch, eagerly, in the calling thread.

        Args:
            batch: A tuple, list or dict of tensors on the worker's device.
            train_fn: Instead of the worker's own.

        Returns:
            Device-side handles; nothing is synchronised.
        """
        with worker_context(self), thread_generator(self._cpu_generator):
            return self.steps.train_step(batch, train_fn or self._functions.train_fn)

    def capture_state(self) -> m.Extra:
        """This rank's own part of a checkpoint, as it is between two steps; a copy.

        Returns:
            The state, or why it cannot be saved, which stops no training.
        """
        return self.replica.capture_state()

    def snapshot_params(self, round_id: int = 0) -> m.ParamSnapshot:
        """The live state as CPU tensors that alias nothing, with its weight."""
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
            ValueError: The tensors' number, sizes or dtypes are not this model's. The
                live state is then as it was.
        """
        self.replica.averager.replace(average.average if isinstance(average, m.Update) else average)

    def report_timing(self) -> None:
        """Tell the coordinator what was trained since the last report."""
        self._reporter.report_timing()

    def report_epoch(self, epoch: int) -> None:
        """Tell the coordinator that a plan is done, with what no report has told yet."""
        self._reporter.report_epoch(epoch)

    def send_final_snapshot(self) -> None:
        """Send the last state, with the samples trained since the last round."""
        self._recorder.leaves()
        self._answers.send_final_snapshot()

    def wait_for_epoch_plan(self) -> m.EpochPlan | None:
        """Block until there is a plan; answer everything else meanwhile.

        Returns:
            The next plan, or ``None`` once ``Shutdown`` came.
        """
        with self._recorder.between_plans():
            while True:
                leaving = self.handle_control()
                # Under lockstep a peer may have begun a plan that came before an orderly end:
                # every rank then begins it, and all of them stop together.
                all_begin = self._is_lockstep and self._wants_snapshot()
                plan = self.protocol.begin_plan(leaving_too=all_begin)
                if plan is not None:
                    return plan
                if leaving:
                    return None
                self._receive(self._next_message())

    def run_epoch_plan(self, plan: m.EpochPlan, train_fn: TrainFns | None = None) -> bool:
        """Train a plan to its end, answering messages between steps.

        Args:
            plan: From :meth:`wait_for_epoch_plan`, or one of your own.
            train_fn: Instead of the worker's own.

        Returns:
            Whether ``Shutdown`` came before the end.
        """
        with self._recorder.plan(plan):
            return self._run_plan(plan, train_fn or self._functions.train_fn)

    def _run_plan(self, plan: m.EpochPlan, train_fn: TrainFns) -> bool:
        if self.protocol.plan is not plan:
            self.protocol.plans.appendleft(plan)
            self.protocol.begin_plan()
        with worker_context(self), thread_generator(self._cpu_generator):
            self._schedule.step_by_metrics(plan.metrics)
            self._begin_epoch(plan.epoch)
            self.steps.verify_graphs()
            self._submit(plan)
            self._submitted.remove(plan)
            windows = PlanSteps(plan, self.config)
            last = len(windows.steps) - 1
            for index, sizes in enumerate(windows.steps):
                if not self._may_step():
                    self._abandon(plan)
                    return self.protocol.leaving
                position = windows.position(index) if plan.shares else None
                if not self.steps.run(sizes, position, train_fn):
                    self._abandon(plan)
                    return True
                if windows.num_empty:
                    self.steps.count_empty(windows.num_empty.get(index, 0))
                if index < last:  # else the plan's own report follows
                    self._reporter.report_if_due()
            self.steps.conclude()
            if not plan.more:
                self.replica.sync_buffers()
            self._answers.apply_agreed()
        if plan.more:
            self.protocol.end_plan()
            self._reporter.report_epoch(plan.epoch, wait=False)
        else:
            self._end_plan(plan)
        return False

    def _begin_epoch(self, epoch: int) -> None:
        self._progress.epoch = self._reporter.epoch = epoch
        if epoch > self._progress.begun_epoch:
            self._progress.begun_epoch = epoch
            own = self.replica.own
            own.before_epoch_fn()
            key_generator(self.generator, self.config.seed, self.rank, epoch)
            if self._functions.epoch_fn is not None:
                self._functions.epoch_fn(epoch, self)
            own.after_epoch_fn(epoch)

    def _may_step(self) -> bool:
        """Answer messages; whether the next step may begin."""
        trains = not self._is_lockstep and self.protocol.state is WorkerState.TRAINING
        if trains and self._inbox.empty() and not (self._deferred or self._reporter.held):
            return True  # as most steps find it
        if self.handle_control() and not self._finish_together():
            return False
        if not self._is_lockstep:
            return True
        self._answers.apply_agreed()
        return not self._lockstep.stop_reached

    def _finish_together(self) -> bool:
        """Under lockstep a stop is agreed: this step is still made, by all ranks."""
        if self._is_lockstep and self._wants_snapshot():
            self._lockstep.propose_stop()
            return True
        return False

    def _wants_snapshot(self) -> bool:
        shutdown = self.protocol.shutdown
        return shutdown is not None and shutdown.snapshot

    def _await_batch(self, *, answer: bool) -> Any:
        """The next batch; while it is being loaded, messages are answered or put aside.

        Between steps a stalled loader must not delay an acknowledgement; inside a
        step the replica is in no state to answer.

        Args:
            answer: Whether messages are answered.
        """
        assert self._loader is not None, "a worker without a loader has no plans"
        lane = self._lane
        asked = 0.0 if lane is None else time.monotonic()
        if lane is not None and self._loader.reads_inline:
            lane.enter(DATA, asked)
        loaded = self._loader.try_next()
        if lane is not None and lane.cause != DATA:
            if loaded is not None:
                lane.record_interval(DATA, asked, COMPUTE)
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
            lane.enter(COMPUTE)
        return loaded.data

    def _submit(self, plan: m.EpochPlan) -> None:
        """Start loading a plan, unless it was when it arrived."""
        if not any(p is plan for p in self._submitted):
            self._submitted.append(plan)
            if self._loader is not None:
                self._loader.submit(plan)

    def _abandon(self, plan: m.EpochPlan) -> None:
        self.steps.conclude()
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        if self._lockstep.stop_reached:
            self.replica.own.keep_buffers()
            self.replica.sync_buffers()
            self.protocol.drop_plans()
        self._end_plan(plan)

    def _end_plan(self, plan: m.EpochPlan) -> None:
        with self._recorder.last_report(self.device):
            params_norm: float | None = None
            if self._is_lockstep or self.world_size == 1:
                # No round follows: the report closes the epoch.
                self.replica.finite_check.require_finite()
                if self.replica.averager.leads and plan.num_batches:
                    params_norm = float(norm(self.replica.state.params.flats))
            self.protocol.end_plan()
            self._reporter.report_epoch(plan.epoch, params_norm)

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
            if self.protocol.may_train:
                return False
            if not self.protocol.parked:
                return self.protocol.leaving
            if self.protocol.report_due:
                self.report_timing()
            self._receive(self._next_message())

    def _next_message(self, timeout_s: float | None = None) -> Any:
        """Block for a message; what still waits for copies is sent first.

        Raises:
            queue.Empty: None came in time.
        """
        with self._recorder.waiting(self.protocol):
            self._reporter.flush(wait=True)
            return self._inbox.get(timeout=timeout_s)

    def _receive(self, message: m.ToWorker | Wake) -> None:
        if isinstance(message, Wake):
            return
        with self._recorder.answering(message, self.protocol):
            if isinstance(message, m.StartEpoch) and self.protocol.accepts_plans:
                self._submit(message.plan)
            work = self.protocol.receive(message)
            if isinstance(work, m.Regroup):
                self._regroup(work)
            elif work is not None:
                self._answers.answer(work)

    def _regroup(self, message: m.Regroup) -> None:
        """Join the collective of the ranks that are left.

        Raises:
            CollectiveAborted, CollectiveTimeout: Under lockstep, another of them is gone.
            GpuWorkerError: The group could not be connected.
        """
        assert self._peers is not None, "a worker on its own has no group"
        try:
            collective = self._peers.groups.connect(
                message.generation, message.ranks, self.rank, message.backend
            )
        except (CollectiveAborted, CollectiveTimeout) as error:
            if not self.config.falls_back:
                raise GpuWorkerError(f"rank {self.rank} could not meet its new group") from error
            self._send_unconnected(message, error)
            return
        self.replica.join(collective)
        self.protocol.regrouped(message.generation)
        if message.step is None:
            return
        if message.donor is not None and message.donor != self.rank:
            donor = self._peers.replicas.get(message.donor)
            self.replica.copy_if_behind(donor, message.donor)
        collective.barrier()  # no donor trains on before all have copied
        self._reporter.put(m.Regrouped(rank=self.rank, generation=message.generation))

    def _send_unconnected(self, message: m.Regroup, error: BaseException) -> None:
        """The new group could not be connected: another one is to come."""
        self._reporter.put(
            m.ConnectFailed(
                rank=self.rank,
                generation=message.generation,
                backend=message.backend,
                error=str(error),
            )
        )
        if message.step is None:
            self.protocol.regrouped(message.generation)
        else:
            self.protocol.generation = message.generation
            self._send_halted()

    def run(self) -> None:
        """Train plan after plan until ``Shutdown``, then leave."""
        try:
            self._run()
        finally:
            self._recorder.ended()
            self.steps.forget_graphs()  # while their stream is this worker's alone

    def _run(self) -> None:
        self._reporter.put(m.Ready(rank=self.rank))
        while True:
            try:
                self._train_plans()
                break
            except PieceTooLarge as error:
                logger.warning(
                    "rank %d: %s; it gets smaller ones from here on, and the step is made again",
                    self.rank,
                    error,
                )
                self._halt(too_large=error)
                if self.protocol.leaving:
                    break
                continue
            except CollectiveAborted as error:
                # Another rank failed, which is told by that rank; if by none, by this one.
                goes_on = self._is_lockstep and (self.config.redoes or self.config.falls_back)
                fault = str(error) if error.failed else None
                if not goes_on and not self.drain_until_shutdown(DRAIN_S):
                    raise GpuWorkerError(
                        f"rank {self.rank}: a collective was broken, and no rank has told why "
                        f"within {DRAIN_S:g} s"
                    ) from error
            except CollectiveTimeout as error:
                # A peer is late, not dead: with others that wait, meet it anew.
                goes_on = self.config.survives or (self.config.falls_back and error.failed)
                if not (goes_on and self._is_lockstep):
                    raise
                fault = str(error) if error.failed else None
            if self.protocol.leaving:
                self._reporter.report_rest()
                break
            self._halt(fault)
        if self._wants_snapshot():
            self.send_final_snapshot()
        self.report_exiting()

    def _train_plans(self) -> None:
        try:
            while (plan := self.wait_for_epoch_plan()) is not None:
                if self.run_epoch_plan(plan):
                    return
        except (CollectiveAborted, CollectiveTimeout):
            self.steps.give_up()
            raise

    def _halt(self, fault: str | None = None, too_large: PieceTooLarge | None = None) -> None:
        """The group of ranks is broken: leave the plan, say where, and wait for the new one.

        Args:
            fault: Of the transport, if that is why.
            too_large: This rank breaks it, because it had no memory for its piece.
        """
        self._recorder.halts()
        if self._loader is not None:
            self._loader.cancel()
        self._submitted.clear()
        self._context.finish()  # a peer may copy from this replica as soon as it is told
        if not self.protocol.leaving:
            self.protocol.halt()
        self._send_halted(fault, too_large)

    def _send_halted(
        self, fault: str | None = None, too_large: PieceTooLarge | None = None
    ) -> None:
        cause = None if too_large is None else too_large.__cause__
        self._reporter.put(
            m.Halted(
                rank=self.rank,
                generation=self.protocol.generation,
                step=self._lockstep.step,
                num_syncs=self._lockstep.num_syncs,
                fault=fault,
                report=self._reporter.take_report(),
                too_large=0 if too_large is None else too_large.num_samples,
                error=cause if isinstance(cause, Exception) else None,
            )
        )

    def report_exiting(self) -> None:
        """Tell the coordinator that nothing more will come."""
        self._recorder.leaves()
        self.protocol.gone()
        self._reporter.put(m.Exiting(rank=self.rank))
        self._reporter.flush(wait=True)

    def drain_until_shutdown(self, timeout_s: float | None = None) -> bool:
        """Take messages, joining no round and training nothing, until ``Shutdown``.

        Args:
            timeout_s: How long to wait for it; ``None``: as long as it takes.

        Returns:
            Whether it came.
        """
        self._recorder.leaves()
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
        """End the loader and the worker; returns whether its thread has ended. Idempotent."""
        ended = True if self._loader is None else bool(self._loader.close())
        self._loader = None
        # Break the cycles of references, or only the collector of cycles frees the replica.
        self._reporter.meter.log.on_bad_loss = None
        self.__dict__.pop("_answers", None)
        self.steps.close()
        return ended
