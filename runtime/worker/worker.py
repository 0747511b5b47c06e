"""GpuWorker: the training loop of one device, in one thread.

The worker blocks on its inbox, where the coordinator's messages and the loader's wake-ups arrive,
and on collectives, and on nothing else. It handles messages between two steps, never inside one.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from coordinator import messages as m
from runtime.collective import Collective
from runtime.core.context import worker_context
from runtime.core.rng import install_thread_generators
from runtime.core.threads import prepare_threads
from runtime.data.loader import Loader
from runtime.device.base import Device
from runtime.evaluation.pending_means import EvaluationView, drawing
from runtime.evaluation.predict import call_for_output
from runtime.replica.build import FactoryDraws, TrainFns
from runtime.replica.flat import FlatState
from runtime.replica.schedule import SchedulerFactories
from runtime.worker.flow import PlanLoads, ReplicaReplies, WorkerFlow
from runtime.worker.loop_worker import LoopWorker
from runtime.worker.meetings import LoopPeers, Meetings
from runtime.worker.operations import ReplicaOperations, StepOperations, exhaust
from runtime.worker.own_loop import OwnLoop
from runtime.worker.rank_resources import RankResources
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.replica import WorkerReplica
from runtime.worker.reporter import Reporter
from runtime.worker.run_peers import RunPeers
from runtime.worker.step import WorkerSteps
from runtime.worker.task_evaluation import TaskEvaluation, losses_of
from runtime.worker.worker_config import (
    WAKE,
    StepResult,
    UserFunctions,
    WorkerChannels,
    WorkerConfig,
    WorkerEndpoints,
)


class GpuWorker:
    """Trains one replica on one device. Build and use it in one thread.

    Args:
        config: Settings.
        functions: The user's functions.
        endpoints: Queues from :meth:`channels`.
        make_loader: Makes the worker's loader from the worker and a function that wakes it;
            ``None``: for tools that only call :meth:`train_step`.
        collective: Under ``SYNC`` reduces gradients, otherwise serves ``SyncNow``.
        device: The worker's device; ``None``: made from the settings.
        recorder: Records the worker's time; ``None``: not recorded.
        peers: Objects shared by the workers of a run; ``None``: a standalone worker.

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
        collective: Collective | None = None,
        device: Device | None = None,
        recorder: WorkerRecorder | None = None,
        peers: RunPeers | None = None,
    ) -> None:
        prepare_threads()  # unless a run has done so
        install_thread_generators()
        self.config = config
        self.rank = config.rank
        self.world_size = config.world_size
        self.device = config.device
        self._peers = shared = peers or RunPeers()
        resources = RankResources.open(config, device, recorder, shared.launch_load)
        self.generator = resources.generator
        self.protocol = resources.protocol
        self._progress = resources.progress
        self._recorder = resources.recorder
        self._functions = wrapped = self._recorder.wrap(functions)
        # A model factory may run a forward pass that records scalars.
        self._log, meter = resources.log, resources.meter
        self._inbox, self._outbox = endpoints.inbox, endpoints.outbox
        interval_s = config.report_interval_s
        self._reporter = Reporter(self.protocol, self._outbox, resources.context, interval_s, meter)
        self.replica = self._make_replica(resources, collective)
        self.model = self.replica.model
        self.optimizer = self.replica.optimizer
        self._schedule = self._reporter.schedule = self.replica.schedule
        meter.log.rate = lambda: self._schedule.host_lr
        self.steps = WorkerSteps(
            resources,
            self.replica,
            await_batch=lambda *, answer: self._flow.block_for_batch(answer=answer),
            fallbacks=shared.fallbacks,
        )
        if (objects := shared.order.shared) is not None:
            f = functions
            called = (f.train_fn, f.loop, f.val_fn, f.epoch_fn)
            objects.add(self.rank, called, self.model, self.optimizer)
        send = self._reporter.send
        evaluation = TaskEvaluation(
            self.replica, config, wrapped, send, shared.evaluations, shared.validation
        )
        self._loop = self._make_loop(resources, evaluation)
        self._ops = StepOperations(
            self, config, wrapped, self.steps, self._loop, shared, self._inbox
        )
        self._replica_ops = ReplicaOperations(
            self, config, wrapped, self.steps, self.protocol, self._recorder, evaluation
        )
        self._replies = ReplicaReplies(
            self.protocol, self._reporter, self._replica_ops, self._recorder
        )
        self._loads = self._make_loads(make_loader)
        self._flow: WorkerFlow = WorkerFlow(
            config,
            self.protocol,
            self._reporter,
            self._loads,
            self._ops,
            self._replies,
            self._recorder,
        )
        self.protocol.on_built()
        if peers is not None:
            peers.replicas[self.rank] = self.replica

    def _make_replica(
        self, resources: RankResources, collective: Collective | None
    ) -> WorkerReplica:
        with worker_context(self):
            return WorkerReplica(
                resources,
                self._functions,
                collective,
                self._peers.order,
                resume=self._peers.resume,
                first_pass=None if self._peers.first_batch is None else self._first_pass,
            )

    def _first_pass(self, model: nn.Module) -> None:
        """Run a forward pass of a model on the first batch; random generators stay as they are."""
        assert self._peers.first_batch is not None, "checked by the caller"
        batch = self._peers.first_batch(self)
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

    def _make_loop(self, resources: RankResources, evaluation: TaskEvaluation) -> OwnLoop | None:
        function = self._functions.loop
        if function is None:
            return None

        def bind(loop: OwnLoop) -> Callable[[], object]:
            return partial(function, LoopWorker(self, loop))

        return OwnLoop(
            bind,
            resources,
            self.steps,
            evaluation,
            self._peers.loop or LoopPeers(1, Meetings(self.config.collective_timeout_s)),
            lambda: exhaust(self._flow.receive_next()),
        )

    def _make_loads(
        self, make_loader: Callable[[GpuWorker, Callable[[], None]], Loader] | None
    ) -> PlanLoads:
        inbox, holds = self._inbox, self._functions.epoch_fn is not None

        def wake() -> None:
            inbox.put(WAKE)

        starts = self._peers.starts if holds and self.replica.is_lockstep else None
        if starts is not None:
            starts.join(self.rank, wake)
        loader = None if make_loader is None else make_loader(self, wake)
        return PlanLoads(self.rank, self._progress, loader, holds=holds, starts=starts)

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
        with self._ops.user_context():
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
        self._replies.send_final_snapshot()

    def wait_for_epoch_plan(self) -> m.EpochPlan | None:
        """Block until there is a plan, and handle all other messages meanwhile.

        Returns:
            The next plan, or ``None`` after ``Shutdown``.
        """
        return exhaust(self._flow.wait_for_plan())

    def run_epoch_plan(self, plan: m.EpochPlan, train_fn: TrainFns | None = None) -> bool:
        """Train a plan to its end, and handle messages between steps.

        Args:
            plan: The plan, for instance from :meth:`wait_for_epoch_plan`.
            train_fn: The function to use instead of the worker's own.

        Returns:
            True if ``Shutdown`` was received before the end.
        """
        self._resume_epochs()
        self._ops.train_fn = train_fn or self._functions.train_fn
        if self.protocol.plan is not plan:
            self.protocol.plans.appendleft(plan)
            self.protocol.begin_plan()
        return exhaust(self._flow.train_plan(plan))

    def _resume_epochs(self) -> None:
        if self.replica.resumed_epochs:
            self._ops.resume_epochs()
            self._loads.begin_epoch(self._progress.begun_epoch)

    def handle_control(self) -> bool:
        """Handle all messages received; while parked, wait for a higher limit.

        Returns:
            True if ``Shutdown`` was received.
        """
        return exhaust(self._flow.handle_control())

    def request_stop(self) -> None:
        """Request the end of the run at a step boundary."""
        self._outbox.put(m.StopRequested())

    def run(self) -> None:
        """Train plan after plan until ``Shutdown``, then leave."""
        try:
            self._resume_epochs()
            if self._loop is None:
                exhaust(self._flow.run())
            else:
                with self._ops.user_context():
                    self._loop.run(self._flow.run())
        except Exception as error:
            self._ops.note_shared(error)
            raise
        finally:
            self._recorder.ended()
            self._peers.starts.leave(self.rank)
            self.steps.forget_graphs()  # before another worker may use their stream

    def answer_after_failure(self) -> bool:
        """After an exception, send the state of before the failed step, if it is requested.

        Returns:
            True if the state was sent.

        Raises:
            queue.Empty: The coordinator has sent nothing for a long time.
        """
        return exhaust(self._flow.answer_after_failure())

    def report_exiting(self) -> None:
        """Send the worker's last message."""
        self._flow.report_exiting()

    def drain_until_shutdown(self, timeout_s: float | None = None) -> bool:
        """Discard messages, without training or rounds, until ``Shutdown``. The average of a round
        that this worker took part in is applied, and one that peers did not complete is undone.

        Args:
            timeout_s: Longest wait in seconds; ``None``: no limit.

        Returns:
            True if it was received.
        """
        return exhaust(self._flow.drain_until_shutdown(timeout_s))

    def close(self) -> bool:
        """Close the loader and the worker; False if the loader's thread is alive. Idempotent."""
        ended = self._loads.close()
        ended &= self._replica_ops.close()
        self._loop = None
        self._ops.close()
        self.steps.close()  # breaks a cycle of references: the replica is freed at once
        return ended
