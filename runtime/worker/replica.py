"""What a worker trains: its replica, with all that a checkpoint saves and a peer may copy."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.errors import CheckpointError, CollectiveAborted, without_tracebacks
from runtime.device.base import Device
from runtime.device.metering import StepMeter, ValueLog
from runtime.device.timing import StepTimer
from runtime.replica.averager import ReplicaAverager
from runtime.replica.batch_norm import synchronise
from runtime.replica.build import BuildOrder, build_replica
from runtime.replica.capturable import CapturableOptimizer
from runtime.replica.flat import NamedParams, ParamSubset
from runtime.replica.global_batch import GlobalBatch
from runtime.replica.non_finite import ReplicaFiniteCheck, StepFiniteCheck
from runtime.replica.optimizers import Optimizers
from runtime.replica.reducer import GradientReducer
from runtime.replica.stepper import OptimizerPart, Stepper
from runtime.worker.collective_groups import CollectiveGroups
from runtime.worker.lockstep import LockstepProgress
from runtime.worker.rank_checkpoint import RankCheckpoint
from runtime.worker.recorder import WorkerRecorder
from runtime.worker.worker_config import UserFunctions, WorkerConfig

logger = logging.getLogger(__name__)


class WorkerReplica:
    """Builds what one worker trains, and holds it. In the worker's thread.

    Args:
        config: The worker's settings.
        functions: The user's functions.
        context: The device.
        collective: Under ``SYNC`` reduces gradients, else averages parameters.
        order: Shared by all workers of a run.
        generator: The worker's, a part of its checkpoint.
        progress: Is brought to where a checkpoint was made.
        together: Where the rank stands in a lockstep run.
        timer: Times the steps.
        meter: Counts the steps, and holds their losses.
        recorder: Is told of checkpoints and averages.
        resume: Where an earlier run stood, of which this one goes on.

    Attributes:
        model: The model, in train mode.
        optimizer: Its optimizer.
        state: The parameters and buffers that are averaged, each flat.
        schedule: The learning rate.
        capturable: The optimizer as a graph can hold it; ``None``: steps are eager.
        stepper: Makes steps.
        judge: Looks at the replica before it is used.
        averager: The replica's side of an averaging.
        own: This rank's own part of a checkpoint.
        lockstep: Whether the ranks make their steps together.
        alone: Whether there is no other rank.
        part_log: Holds the values of one of several optimizers' steps while it is made.
        context, generator, progress, together: See above.

    Raises:
        TypeError, ValueError: What a factory gives cannot be trained.
    """

    def __init__(
        self,
        config: WorkerConfig,
        functions: UserFunctions,
        context: Device,
        collective: Collective | None,
        order: BuildOrder,
        *,
        generator: torch.Generator,
        progress: WorkerProgress,
        lockstep: LockstepProgress,
        timer: StepTimer,
        meter: StepMeter,
        recorder: WorkerRecorder,
        resume: ResumePoint | None = None,
    ) -> None:
        self.rank = config.rank
        self.alone = config.world_size == 1
        self.context = context
        self.generator = generator
        self.progress = progress
        self.lockstep = lockstep
        self.is_lockstep = collective is not None and config.policy is ApplyPolicy.SYNC
        self._recorder = recorder
        if collective is not None:
            recorder.joins(collective)
        replica = build_replica(
            order,
            config.rank,
            config.device,
            functions.model_factory,
            functions.optim_factory,
            param_groups=functions.param_groups,
            scheduler=functions.scheduler,
            total_steps=config.total_steps,
            schedule_every=config.schedule_every,
            finish=context.finish,
            load=None if resume is None else resume.load_weights,
        )
        self.model = replica.model
        self.optimizer = replica.optimizer
        self.state = replica.state
        self.schedule = replica.schedule
        self._scale_rates(config.lr_scale)
        params = self.state.params
        context.pin_accumulators(params.params)
        self.capturable: CapturableOptimizer | None = None
        if config.cuda_graphs and context.has_graphs:
            self.capturable = CapturableOptimizer(self.optimizer, config.device)
        self._reducers: list[GradientReducer] = []
        self.part_log = ValueLog()
        self.stepper = self._make_stepper(config, collective, timer, meter)
        self.finite_check = ReplicaFiniteCheck(
            config.on_non_finite,
            config.rank,
            params,
            self.optimizer,
            meter,
            lambda: progress.local_step,
            averaged=config.world_size > 1 and not self.is_lockstep,
        )
        self.averager = ReplicaAverager(self.state, context, collective)
        self.own = RankCheckpoint(
            rank=config.rank,
            model=self.model,
            state=self.state,
            stepper=self.stepper,
            schedule=self.schedule,
            averager=self.averager,
            generator=generator,
            context=context,
            lockstep=lockstep,
            log=meter.log,
            lr_scale=config.lr_scale,
            is_lockstep=self.is_lockstep,
        )
        if resume is not None:
            saved = resume.rank(config.rank)
            self.own.restore(saved)
            progress.local_step, progress.epoch = saved["local_step"], saved["epoch"]

    def _scale_rates(self, scale: float) -> None:
        """Multiply the learning rate; on top of a scheduler at every step."""
        if scale == 1.0:
            return
        if self.schedule.scheduler is None:
            self.schedule.scale_lr(scale)
        else:
            self.schedule.set_scale(scale)

    def _make_stepper(
        self,
        config: WorkerConfig,
        collective: Collective | None,
        timer: StepTimer,
        meter: StepMeter,
    ) -> Stepper:
        """Makes steps, under lockstep with the other ranks."""
        parts: list[OptimizerPart] = []
        finite_check: StepFiniteCheck | None = None
        if isinstance(self.optimizer, Optimizers):
            for name, optimizer in self.optimizer.members.items():
                named = self._params_of(name)
                own = self._step_judge(config, named, self.part_log)
                reducer = self._make_reducer(config, named, collective, own, timer)
                parts.append(OptimizerPart(name, named, optimizer, reducer, own))
        else:
            finite_check = self._step_judge(config, self.state.params, meter.log)
            self._make_reducer(config, self.state.params, collective, finite_check, timer)
        stepper = Stepper(
            self.model,
            self.state.params,
            self.optimizer,
            device=config.device,
            precision=config.precision,
            max_grad_norm=config.max_grad_norm,
            reducer=None if parts or not self._reducers else self._reducers[0],
            finite_check=finite_check,
            timer=timer,
            rates=None if self.capturable is None else self.capturable.rates,
            is_prompt=self.context.is_prompt,
            parts=parts,
        )
        has_layers = config.sync_batchnorm and collective is not None
        if has_layers or config.all_gather:
            stepper.global_batch = GlobalBatch(collective, self.context.comm, timer)
        if has_layers and stepper.global_batch is not None:
            synchronise(self.model, stepper.global_batch)
        return stepper

    def _params_of(self, name: str) -> ParamSubset:
        """The trainable parameters of a submodule."""
        own = {id(p) for p in self.model.get_submodule(name).parameters()}
        both = zip(self.state.params.params, self.state.params.names, strict=True)
        found = [(p, named) for p, named in both if id(p) in own]
        return ParamSubset([p for p, _ in found], [named for _, named in found])

    def _make_reducer(
        self,
        config: WorkerConfig,
        params: NamedParams,
        collective: Collective | None,
        finite_check: StepFiniteCheck | None,
        timer: StepTimer,
    ) -> GradientReducer | None:
        if collective is None or not self.is_lockstep:
            return None
        reducer = GradientReducer(
            params,
            collective,
            finite_check,
            self.context.comm,
            bucket_bytes=config.bucket_bytes,
            timer=timer,
        )
        self._reducers.append(reducer)
        return reducer

    def _step_judge(
        self, config: WorkerConfig, params: NamedParams, log: ValueLog
    ) -> StepFiniteCheck | None:
        """Who judges each step, where that is done before it is made."""
        mode = config.on_non_finite
        if mode == "ignore" or (mode == "raise" and not self.is_lockstep):
            return None
        return StepFiniteCheck(
            mode,
            config.rank,
            params,
            self.state.buffers,
            log,
            config.device,
            losses_only=config.precision == "fp16",
        )

    def capture_state(self) -> m.Extra:
        """This rank's own part of a checkpoint, as it is between two steps; a copy.

        Returns:
            The state, or why it cannot be saved, which stops no training.
        """
        at = self.progress
        try:
            with self._recorder.capture():
                return self.own.capture(
                    local_step=at.local_step, epoch=at.epoch, begun_epoch=at.begun_epoch
                )
        except CheckpointError as error:
            failure = error
        except Exception as error:  # in the user's optimizer, scheduler or module
            logger.exception("rank %d: its state could not be taken", self.rank)
            failure = CheckpointError(
                f"the state of rank {self.rank} could not be taken: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
        without_tracebacks(failure)
        return failure

    def sync_buffers(self) -> None:
        """Under lockstep, average the buffers: every rank is between the same two steps."""
        if self.is_lockstep:
            with self._recorder.averaging():
                self.averager.sync_buffers(self.lockstep.buffer_samples)
                self.lockstep.synced()

    def join(self, collective: Collective) -> None:
        """Meet the other ranks there from now on, and leave the collective of before."""
        self._recorder.joins(collective)
        before, self.averager.collective = self.averager.collective, collective
        for reducer in self._reducers:
            reducer.join(collective)
        if self.stepper.global_batch is not None:
            self.stepper.global_batch.join(collective)
        if before is not None:
            before.close()

    def copy_if_behind(self, donor: WorkerReplica | None, rank: int) -> None:
        """Stand where another rank stands that has come further.

        Args:
            donor: What that rank trains; it must stand still meanwhile.
            rank: That rank.

        Raises:
            CollectiveAborted: It is gone.
        """
        if donor is None:
            raise CollectiveAborted(f"rank {rank} died before it was copied from")
        if self.lockstep.position < donor.lockstep.position:
            self.copy_from(donor)
            self.context.finish()  # the donor trains on as soon as this is told
            self.lockstep.copy_from(donor.lockstep)

    def copy_from(self, donor: WorkerReplica) -> None:
        """Take over everything that training has changed in another rank's replica.

        Parameters, buffers, optimizer, schedule and gradient scaler. The donor must stand
        still meanwhile.
        """
        self.state.copy_from(donor.state)
        self.stepper.copy_from(donor.stepper)
        self.schedule.copy_from(donor.schedule)


@dataclass(slots=True)
class RunPeers:
    """Shared by the workers of a run in which ranks may die.

    Attributes:
        groups: Where the ranks that are left meet.
        replicas: What each rank trains, once its worker is built. A rank reads another's state
            only while that one waits for it in the first meeting of a new group.
    """

    groups: CollectiveGroups
    replicas: dict[int, WorkerReplica] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerProgress:
    """How far a worker has come.

    Attributes:
        local_step: Batches trained by it.
        epoch: Epoch of the plan in progress or the last one.
        begun_epoch: The last epoch that it has begun.
    """

    local_step: int = 0
    epoch: int = 0
    begun_epoch: int = -1


def key_generator(generator: torch.Generator, seed: int, rank: int, epoch: int) -> None:
    """Have a worker's generator draw what belongs to its seed, rank and epoch."""
    state = np.random.SeedSequence([seed, rank, epoch])
    generator.manual_seed(int(state.generate_state(1, np.uint64)[0] >> 1))
