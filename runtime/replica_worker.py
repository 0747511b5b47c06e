"""A worker's replica and what can be asked of it, without the loop that trains it."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator import messages as m
from coordinator.policy import ApplyPolicy
from runtime.answers import Answers
from runtime.averaging import ReplicaAverager
from runtime.collective import Collective
from runtime.context import worker_context
from runtime.device import DeviceContext
from runtime.flat import FlatState
from runtime.protocol import WorkerProtocol
from runtime.replica import BuildOrder, build_replica
from runtime.reporter import Reporter
from runtime.schedule import SchedulerFactory
from runtime.step import GradientReducer, Stepper
from runtime.worker_types import (
    UserFunctions,
    WorkerChannels,
    WorkerConfig,
    WorkerEndpoints,
)


class ReplicaWorker:
    """The part of :class:`~runtime.worker.GpuWorker` that users and tools ask.

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
        self._lockstep = collective is not None and config.policy is ApplyPolicy.SYNC
        self._protocol = WorkerProtocol(config.rank)
        self._reporter = Reporter(
            self._protocol, endpoints.outbox, self._context, config.report_interval_s
        )
        self._batch_samples = 1
        self._key_generator(0)
        self._build(order, collective)

    def _build(self, order: BuildOrder, collective: Collective | None) -> None:
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
        lockstep = collective if self._lockstep else None
        self._stepper = Stepper(
            self.model,
            params,
            self.optimizer,
            device=c.device,
            precision=c.precision,
            max_grad_norm=c.max_grad_norm,
            reducer=GradientReducer(params, lockstep) if lockstep is not None else None,
        )
        self._averager = ReplicaAverager(self._state, self._context, collective)
        self._answers = Answers(
            self, self.model, self._protocol, self._averager, self._reporter, f, self._context
        )

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
        self._reporter.meter.log.push_scalar(name, value, self._batch_samples)

    def _key_generator(self, epoch: int) -> None:
        state = np.random.SeedSequence([self.config.seed, self.rank, epoch])
        self.generator.manual_seed(int(state.generate_state(1, np.uint64)[0] >> 1))

    # -- averaging, for tools and tests ----------------------------------------------

    def snapshot_params(self, round_id: int = 0) -> m.ParamSnapshot:
        """The live state as CPU tensors that alias nothing, with its weight."""
        payload = self._averager.snapshot(reuse=False)
        return m.ParamSnapshot(
            rank=self.rank,
            round=round_id,
            payload=payload,
            num_samples=self._protocol.samples,
            num_batches=self._protocol.batches,
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
