"""One worker's replica: model, optimizer, schedule and scaler, and their checkpoint state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from runtime.checkpoint.content import SavedRank
from runtime.checkpoint.resume import ResumePoint
from runtime.collective import Collective
from runtime.core.errors import (
    CheckpointError,
    CollectiveAborted,
    ReplicaMismatch,
    without_tracebacks,
)
from runtime.replica.averager import ReplicaAverager
from runtime.replica.batch_norm import synchronise
from runtime.replica.build import BuildOrder, build_replica
from runtime.replica.capturable import CapturableOptimizer
from runtime.replica.drift import Drift, DriftCheck
from runtime.replica.flat import NamedParams, ParamSubset
from runtime.replica.global_batch_comm import GlobalBatchComm
from runtime.replica.max_norm import MaxNorm
from runtime.replica.non_finite import ReplicaFiniteCheck, StepFiniteCheck
from runtime.replica.optimizer_update import OptimizerPart, OptimizerUpdate
from runtime.replica.optimizers import (
    Optimizers,
    at_eval_point,
    has_modes,
    optimizer_kind,
    set_mode,
)
from runtime.replica.param_ema import ParamEma
from runtime.replica.precision import Precision
from runtime.replica.rank_statistics import first_difference, statistics_of, warn_of_frequencies
from runtime.replica.reducer import GradientReducer
from runtime.replica.stepper import Stepper
from runtime.replica.structure import StructureCheck
from runtime.replica.train_fn_checks import TrainFnChecks
from runtime.worker.rank_checkpoint import RankCheckpoint
from runtime.worker.rank_resources import RankResources
from runtime.worker.worker_config import UserFunctions, WorkerConfig

logger = logging.getLogger(__name__)

RANK_STATISTICS = (
    "buffer %r differs between the ranks of SYNC, as each computes it from its own samples: all "
    "take the mean when an epoch ends, while one device computes it from the whole batch. "
    "gpuworker.all_gather(x) in train_fn has the samples of all ranks"
)


NOT_ATTACHED = (
    "the checkpoint's schedule was attached by worker.set_scheduler(f) in epoch {epoch}, and "
    "epoch_fn does not attach one in that epoch: call worker.set_scheduler(f) in epoch_fn({epoch}, "
    "worker) as the earlier run did, or start from the weights, without resume(path)"
)


class WorkerReplica:
    """Builds and owns the replica of one worker. In the worker's thread.

    Args:
        collective: Under ``SYNC`` reduces gradients, otherwise averages parameters.
        order: The build order, shared by all workers of a run.
        resume: The state of an earlier run, which this run continues.

    Attributes:
        model: The model, in the modes that the user has set.
        state: The averaged parameters and buffers, in flat tensors.
        rates: Scales learning rates during steps; ``None``: they are not scaled.
        capturable: The optimizer in capturable form; ``None``: steps are eager.
        ema: Moving average of the parameters; ``None``: there is none.
        precision: The precision of its passes.
        global_batch: Exchanges within forward and backward passes; ``None``: there are none.
        finite_check: Checks the replica before it is used.
        averager: Averages the replica with its peers.
        checkpoint: This rank's own part of a checkpoint.
        is_lockstep: True if the ranks reduce gradients in every step.
        is_sharded: True if gradients and optimizer state are sharded over the ranks.
        is_single: True if there is no other rank.
        resumed_epochs: Epochs whose ``epoch_fn`` is called again before a checkpoint is restored.
        context, generator, progress, lockstep: See :class:`RankResources`.

    Raises:
        TypeError, ValueError: A factory's result cannot be trained.
    """

    _has_compared_statistics = False

    _has_reported_frozen = False
    resumed_epochs: Sequence[int] = ()
    _saved: SavedRank | None = None

    def __init__(
        self,
        rank: RankResources,
        functions: UserFunctions,
        collective: Collective | None,
        order: BuildOrder,
        *,
        resume: ResumePoint | None = None,
        first_pass: Callable[[nn.Module], None] | None = None,
    ) -> None:
        config, context = rank.config, rank.context
        self._resources = rank
        self.rank = config.rank
        self.is_single = config.world_size == 1
        self.context = context
        self.generator = rank.generator
        self.progress = progress = rank.progress
        self.lockstep = rank.lockstep
        self.is_lockstep = collective is not None and config.policy is ApplyPolicy.SYNC
        self._recorder = rank.recorder
        self._by_model = functions.loop is not None
        if collective is not None:
            rank.recorder.collective_changed(collective)
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
            scheduler_steps=config.scheduler_steps,
            by_model=functions.loop is not None,
            auto_lr=config.auto_lr,
            finish=context.finish,
            load=None if resume is None else resume.load_weights,
            first_pass=first_pass,
        )
        self.model, self.optimizer = replica.model, replica.optimizer
        self.state = replica.state
        self.schedule, self.rates = replica.schedule, replica.rates
        self.is_sharded = config.sharding is not None and collective is not None
        if config.sharding is not None and collective is not None:
            config.sharding.shard(self.model, self.state, self.optimizer, collective)
        self._set_train_mode()
        self._scale_rates(config.lr_scale)
        self._structure = StructureCheck(self.model, self.state, self.optimizer, self.schedule)
        self._drift = DriftCheck(self.model, self.state, self.optimizer)
        params = self.state.params
        context.pin_accumulators(params.params)
        self.capturable = self._make_capturable(config)
        self._reducers: list[GradientReducer] = []
        self.global_batch = self._join_global_batch(collective)
        self.ema = self._make_ema(config)
        self.precision = Precision(config.precision, config.device)
        self.stepper = self._make_stepper(collective)
        self.finite_check = ReplicaFiniteCheck(
            config.on_non_finite,
            config.rank,
            params,
            self.optimizer,
            rank.meter,
            lambda: progress.local_step,
            averaged=config.world_size > 1 and not self.is_lockstep,
        )
        self.averager = ReplicaAverager(
            self.state, context, collective, None if self._ema_of_steps else self.ema
        )
        self.checkpoint = RankCheckpoint(self, rank.meter.log, config.lr_scale)
        if resume is not None:
            self._resume(resume, calls_epoch_fn=functions.epoch_fn is not None)

    def _join_global_batch(self, collective: Collective | None) -> GlobalBatchComm | None:
        """Connect the layers that exchange global batches, if any; warn of those that cannot."""
        config = self._resources.config
        if self.is_lockstep and self.rank == 0:
            warn_of_frequencies(self.model)
        syncs_layers = config.sync_batchnorm and collective is not None
        if not (syncs_layers or config.all_gather):
            return None
        comm = GlobalBatchComm(collective, self.context.comm, self._resources.timer)
        if syncs_layers:
            synchronise(self.model, comm)
        return comm

    def _resume(self, resume: ResumePoint, *, calls_epoch_fn: bool) -> None:
        """Restore a checkpoint, unless ``epoch_fn`` is called first: see :meth:`resuming`."""
        saved = resume.rank(self.rank)
        attached_in = saved.schedule.attached_in
        if calls_epoch_fn:
            begun = range(resume.data.epoch, saved.begun_epoch + 1)
            epochs = {*begun, attached_in} - {None}
            self.resumed_epochs = sorted(epochs)
            self.progress.begun_epoch = begun[-1] if begun else -1
        elif attached_in is not None:
            raise CheckpointError(NOT_ATTACHED.format(epoch=attached_in))
        if not self.resumed_epochs:
            self._restore(saved)
            return
        self._saved = saved
        self.progress.local_step = saved.local_step

    @contextmanager
    def resuming(self) -> Iterator[Iterator[int]]:
        """Restore the whole state of the checkpoint after the calls of ``epoch_fn`` within; yields
        the epochs of these calls, with the weights and buffers that were loaded.

        Raises:
            CheckpointError: The run had attached a scheduler in one of them, which did not.
        """
        saved, self._saved = self._saved, None
        assert saved is not None, "epochs are called again for a resumed state"
        epochs, self.resumed_epochs = self.resumed_epochs, ()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        with torch.no_grad(), self.context.comm():
            kept = [tensor.clone() for tensor in tensors]
        yield self._epochs_to_call(epochs, saved)
        attached_in = saved.schedule.attached_in
        if attached_in is not None and self.schedule.attached_in is None:
            raise CheckpointError(NOT_ATTACHED.format(epoch=attached_in))
        with torch.no_grad(), self.context.comm():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        self._restore(saved)
        if self.progress.begun_epoch >= 0:
            self.checkpoint.before_epoch_fn()
            self.checkpoint.after_epoch_fn(self.progress.begun_epoch)

    def _epochs_to_call(self, epochs: Sequence[int], saved: SavedRank) -> Iterator[int]:
        for epoch in epochs:
            self.checkpoint.before_epoch(saved, epoch)
            yield epoch

    def _restore(self, saved: SavedRank) -> None:
        """Restore this rank's part of a checkpoint."""
        progress = self.progress
        self.checkpoint.restore(saved)
        flats: Sequence[Tensor] | None = saved.train_point
        if flats is not None:
            flats = self.state.params.reordered(flats, saved.strides)
        self._set_train_mode(flats)
        progress.local_step, progress.epoch = saved.local_step, saved.epoch
        progress.body_steps = saved.body_steps

    def _make_ema(self, config: WorkerConfig) -> ParamEma | None:
        if config.ema is None:
            return None
        if has_modes(self.optimizer):
            raise ValueError(
                f"ema({config.ema:g}): {optimizer_kind(self.optimizer)} has train() and eval() "
                "modes, and averages the weights itself: leave ema out"
            )
        return ParamEma(config.ema, self.state.params, config.accumulate)

    @property
    def _ema_of_steps(self) -> ParamEma | None:
        """The moving average, if each step updates it and not each averaging round."""
        return self.ema if self.is_lockstep or self.is_single else None

    def _set_train_mode(self, flats: Sequence[Tensor] | None = None) -> None:
        """Set an optimizer with modes to training, with its parameters at ``flats`` if given.

        Raises:
            ValueError: It has modes, and replicas average their weights.
        """
        if not has_modes(self.optimizer):
            return
        if not (self.is_lockstep or self.is_single):
            raise ValueError(
                f"optim_factory: {optimizer_kind(self.optimizer)} has train() and eval() modes, "
                "and derives the weights from its own state, which replicas under CADENCE and "
                'ASYNC do not average: use policy("sync")'
            )
        with torch.no_grad():
            set_mode(self.optimizer, "train")
            own = self.state.params.flats
            for flat, saved in zip(own, flats or (), strict=bool(flats)):
                flat.copy_(saved)

    @contextmanager
    def at_eval_point(self) -> Iterator[None]:
        """Hold the weights to be evaluated, saved or returned: of an optimizer with modes, those
        of its ``eval()``; otherwise the live ones.
        """
        with at_eval_point(self.optimizer, self.state.params.flats) as kept:
            self.checkpoint.train_point = kept
            try:
                yield
            finally:
                self.checkpoint.train_point = None

    def _scale_rates(self, scale: float) -> None:
        """Multiply the learning rate; with a scheduler, in every step."""
        if scale == 1.0:
            return
        if self.schedule.scheduler is None:
            self.schedule.scale_lr(scale)
        else:
            self.schedule.set_scale(scale)

    def _make_stepper(self, collective: Collective | None) -> Stepper:
        """Build the stepper, in lockstep with its reducers."""
        config = self._resources.config
        update = OptimizerUpdate(
            self.precision, MaxNorm(config.max_grad_norm), self._step_rates(), self._ema_of_steps
        )
        return Stepper(
            self.model,
            self._make_part(collective),
            update,
            timer=self._resources.timer,
            is_prompt=self.context.is_prompt,
            log=self._resources.log,
            global_batch=self.global_batch,
            sum_scale=config.sum_scale,
        )

    def _make_capturable(self, config: WorkerConfig) -> CapturableOptimizer | None:
        if not (config.cuda_graphs and self.context.has_graphs):
            return None
        return CapturableOptimizer(self.optimizer, config.device, self.rates)

    def _step_rates(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Context of each optimizer step that sets its learning rates; ``None``: as they are."""
        if self.capturable is not None:
            return self.capturable.rates
        return None if self.rates is None or not self.rates.names else self.rates.during_step

    def _params_of(self, name: str, optimizer: torch.optim.Optimizer) -> ParamSubset:
        """The trainable parameters of a submodule; in an own loop, of its optimizer."""
        if self._by_model:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        else:
            own = {id(p) for p in self.model.get_submodule(name).parameters()}
        both = zip(self.state.params.params, self.state.params.names, strict=True)
        found = [(p, named) for p, named in both if id(p) in own]
        return ParamSubset([p for p, _ in found], [named for _, named in found])

    def _make_part(self, collective: Collective | None) -> OptimizerPart:
        """The optimizer with the objects of its steps; one that stands for several has theirs."""
        is_reduced, warns = self.is_lockstep, self.rank == 0

        def part(
            params: NamedParams, optimizer: torch.optim.Optimizer, name: str = ""
        ) -> OptimizerPart:
            check = self._step_check(params)
            reducer = self._make_reducer(params, collective, check)
            return OptimizerPart(params, optimizer, checks(params), reducer, check, name)

        def checks(params: NamedParams) -> TrainFnChecks:
            return TrainFnChecks(self.model, params, is_reduced=is_reduced, warns=warns)

        params, optimizer = self.state.params, self.optimizer
        if not isinstance(optimizer, Optimizers):
            return part(params, optimizer)
        parts = tuple(
            part(self._params_of(name, member), member, name)
            for name, member in optimizer.members.items()
        )
        return OptimizerPart(params, optimizer, checks(params), parts=parts)

    def _make_reducer(
        self,
        params: NamedParams,
        collective: Collective | None,
        finite_check: StepFiniteCheck | None,
    ) -> GradientReducer | None:
        if collective is None or not self.is_lockstep:
            return None
        config, timer = self._resources.config, self._resources.timer
        sums = config.loss_reduction == "sum"
        if config.sharding is not None:
            reducer = config.sharding.make_reducer(
                self.state.params, collective, finite_check, timer=timer, sums=sums
            )
        else:
            reducer = GradientReducer(
                params,
                collective,
                finite_check,
                self.context.comm,
                bucket_bytes=config.bucket_bytes,
                timer=timer,
                sums=sums,
            )
        self._reducers.append(reducer)
        return reducer

    def _step_check(self, params: NamedParams) -> StepFiniteCheck | None:
        """The check of each step before it is made, if the mode requires one."""
        config = self._resources.config
        mode = config.on_non_finite
        if mode == "ignore" or (mode == "raise" and not self.is_lockstep):
            return None
        return StepFiniteCheck(
            mode,
            config.rank,
            params,
            self.state.buffers,
            config.device,
            losses_only=self.precision.scales,
        )

    def capture_state(self) -> m.Extra:
        """Capture this rank's own part of a checkpoint, between two steps.

        Returns:
            A copy of the state; if it cannot be saved, the error, which does not end the training.
        """
        try:
            with self._recorder.capture():
                return self.checkpoint.capture()
        except CheckpointError as error:
            failure = error
        except Exception as error:  # in the user's optimizer, scheduler or module
            logger.exception("rank %d: its state could not be captured", self.rank)
            failure = CheckpointError(
                f"the state of rank {self.rank} was not captured: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
        without_tracebacks(failure)
        return failure

    def check_structure(self) -> None:
        """Check the model after user code may have changed it; see :class:`StructureCheck`."""
        self._structure.check()
        self.state.params.check()
        for reducer in self._reducers:
            reducer.run_hooks_last()

    def sync_buffers(self) -> None:
        """In lockstep, average the buffers; every rank calls it between the same two steps."""
        if self.is_lockstep:
            with self._recorder.averaging():
                if self.global_batch is not None:
                    self.global_batch.share_statistics()
                own = None
                if not self._has_compared_statistics:
                    with self.context.comm():
                        own = {n: b.clone() for n, b in statistics_of(self.model).items()}
                self.averager.sync_buffers(self.lockstep.buffer_samples)
                self.lockstep.synced()
                if own is not None:
                    self._compare_statistics(own)

    def _compare_statistics(self, own: dict[str, Tensor]) -> None:
        """Warn once if this rank's buffers differ from the mean over the ranks."""
        self._has_compared_statistics = True
        with self.context.comm():
            name = first_difference(own, statistics_of(self.model))
        if name is not None and self.rank == 0:
            logger.warning(RANK_STATISTICS, name)

    def check_drift(self, replicas: Mapping[int, WorkerReplica], *, frozen: bool = False) -> None:
        """In lockstep, compare the replicas; every rank calls it between the same two steps.

        Frozen parameters that differ alone become those of the lowest rank.

        Args:
            replicas: The replicas of the run by rank, to copy frozen parameters from.
            frozen: Compare frozen parameters too.

        Raises:
            ReplicaMismatch: Replicas differ in more than frozen parameters.
        """
        collective = self.averager.collective
        if not self.is_lockstep or collective is None:
            return
        if collective.world_size == 1:
            self.lockstep.compared()
            return
        with self._recorder.averaging(), self.context.comm():
            drift = self._drift.compare(collective, frozen=frozen)
            if drift is None:
                self.lockstep.compared()
                return
            ranks = [int(rank) for rank in collective.all_gather_number(self.rank)]
        message = self._describe_drift(drift, ranks)
        donor = replicas.get(ranks[0])
        if not drift.is_frozen or donor is None:
            raise ReplicaMismatch(
                f"{message}. A callback, hook, optimizer or train_fn depends on the rank: let it "
                "act alike on every rank. If train_fn or the body of "
                "a loop changes weights or settings of the optimizer, which a rank without samples "
                "in the short last batch does not do: call drop_last(True), or make the change in "
                "a hook, optimizer.register_step_post_hook(f), which runs on every rank"
            )
        if donor is self:
            self._report_frozen(message)
            self.context.finish()
        collective.barrier()  # the donor's state is complete, and it does not train meanwhile
        if donor is not self:
            self._copy_frozen_from(donor)
            self.context.finish()
        collective.barrier()
        self.lockstep.compared()

    def _report_frozen(self, message: str) -> None:
        if self._has_reported_frozen:
            return
        self._has_reported_frozen = True
        logger.warning(
            "%s: train_fn, which updates it, is not called on a rank without samples in the "
            "short last batch. All ranks take those of rank %d at the end of each epoch; "
            "drop_last(True), or an update in optimizer.register_step_post_hook(f), keeps "
            "them equal in every step",
            message,
            self.rank,
        )

    def _describe_drift(self, drift: Drift, ranks: Sequence[int]) -> str:
        differing = ", ".join(str(ranks[i]) for i in drift.ranks)
        distance = "" if drift.distance is None else f" (relative distance {drift.distance:.2g})"
        return (
            f"replicas differ at step {self.lockstep.step} of SYNC: {drift.tensor} of rank "
            f"{differing} differs from that of rank {ranks[0]}{distance}; they were last equal "
            f"at step {self.lockstep.equal_step}"
        )

    @torch.no_grad()
    def _copy_frozen_from(self, donor: WorkerReplica) -> None:
        pairs = zip(self.model.parameters(), donor.model.parameters(), strict=True)
        for own, other in pairs:
            if not own.requires_grad:
                own.copy_(other)

    def join(self, collective: Collective) -> None:
        """Use another collective from now on, and close the earlier one."""
        self._recorder.collective_changed(collective)
        before, self.averager.collective = self.averager.collective, collective
        for reducer in self._reducers:
            reducer.join(collective)
        if self.global_batch is not None:
            self.global_batch.join(collective)
        if before is not None:
            before.close()

    def copy_if_behind(self, donor: WorkerReplica | None, rank: int) -> None:
        """Copy the state of another rank, if that is ahead of this one.

        Args:
            donor: The other rank's replica, which must not change meanwhile.
            rank: The other rank.

        Raises:
            CollectiveAborted: The other rank has died.
        """
        if donor is None:
            raise CollectiveAborted(f"rank {rank} died before it was copied from")
        if self.lockstep.position < donor.lockstep.position:
            self.copy_from(donor)
            self.context.finish()  # the donor continues to train once this rank reports
            self.lockstep.copy_from(donor.lockstep)
            self.progress.body_steps = donor.progress.body_steps
            self.checkpoint.drop_kept_buffers()

    def copy_from(self, donor: WorkerReplica) -> None:
        """Copy another rank's parameters, buffers, optimizer, schedule and gradient scaler.

        The donor must not change meanwhile.
        """
        self.state.copy_from(donor.state)
        theirs, own = donor.checkpoint.group_names(), self.checkpoint.group_names()
        self.stepper.copy_from(donor.stepper, theirs, own)
        self.schedule.copy_from(donor.schedule)
        if self.ema is not None and donor.ema is not None:
            self.ema.load(donor.ema.flats)
