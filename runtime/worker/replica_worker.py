"""A worker's replica and what can be asked of it, without the loop that trains it."""

from __future__ import annotations

import logging
import queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator import messages as m
from coordinator.errors import GpuWorkerError
from coordinator.policy import ApplyPolicy
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.errors import (
    CheckpointError,
    CollectiveAborted,
    CollectiveTimeout,
    without_frames,
)
from runtime.device.base import DeviceContext, StepMeter
from runtime.replica.averaging import ReplicaAverager
from runtime.replica.build import BuildOrder, build_replica
from runtime.replica.flat import FlatState
from runtime.replica.graph_optimizer import CapturableOptimizer
from runtime.replica.non_finite import ReplicaJudge, StepJudge
from runtime.replica.reducer import GradientReducer
from runtime.replica.schedule import SchedulerFactory
from runtime.replica.step import Stepper
from runtime.worker.config import UserFunctions, WorkerChannels, WorkerConfig, WorkerEndpoints
from runtime.worker.lockstep import Lockstep
from runtime.worker.peers import Peers
from runtime.worker.protocol import WorkerProtocol
from runtime.worker.reporter import Reporter
from runtime.worker.rounds import Answers
from runtime.worker.state import RankState

logger = logging.getLogger(__name__)


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
        device: DeviceContext,
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

    def _make_own(self, resume: ResumePoint | None) -> RankState:
        c = self.config
        own = RankState(
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
