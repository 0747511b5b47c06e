"""A rank's part of a checkpoint: all state of the training except the weights."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from coordinator.codec import decode, encode
from runtime.checkpoint.content import SavedGenerators, SavedRank
from runtime.checkpoint.format import numpy_state, packed_arrays, plain, plain_key
from runtime.checkpoint.resume import check_rank
from runtime.checkpoint.subclasses import is_wrapper, restore_subclasses, without_class
from runtime.core.errors import CheckpointError
from runtime.device.base import Device
from runtime.device.metering import ValueLog
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState, ModuleState
from runtime.replica.optimizers import check_settings, settings_of, state_in_order
from runtime.replica.param_ema import ParamEma
from runtime.replica.schedule import Schedule
from runtime.replica.stepper import Stepper
from runtime.worker.lockstep import LockstepProgress, WorkerProgress

logger = logging.getLogger(__name__)

SCHEDULE_KEPT = (
    "the checkpoint's schedule is used, with %s: the rates follow the former. Give the scheduler "
    "the length of the whole training from the start, or train with the new one from the weights, "
    "model.load_state_dict(safetensors.torch.load_file(path / 'weights.safetensors')) in "
    "model_factory, without resume(path)"
)


class RankCheckpoint:
    """Captures and restores a rank's own state, in its thread, between two steps.

    Copies are ordered after the device's compute; :meth:`capture` blocks until they are in new
    CPU memory.

    Args:
        log: Numbers the batches.
        lr_scale: The settings' factor of the learning rate.

    Attributes:
        train_point: The parameters in training, while those of the replica are moved to the point
            of evaluation by an optimizer with modes.
    """

    def __init__(self, replica: CheckpointedReplica, log: ValueLog, lr_scale: float) -> None:
        self._replica = replica
        self._log = log
        self._lr_scale = lr_scale
        names = replica.state.buffers.names
        # Without lockstep, buffers in the state dict are averaged with the weights.
        averaged = set() if replica.is_lockstep else set(replica.model.state_dict())
        self._own_buffers = [i for i, name in enumerate(names) if name not in averaged]
        self._module = ModuleState(replica.model)
        self._built = [dict(group) for group in replica.optimizer.param_groups]
        self._num_groups = len(self._built)
        self._added: list[tuple[int, int]] = []  # epochs that added groups, and the groups before
        self.train_point: list[Tensor] | None = None
        self._before_sync: _Buffers | None = None
        self._generators: SavedGenerators | None = None
        self._begun_epoch = -1

    def capture(self) -> SavedRank:
        """Return a copy of the current state.

        Raises:
            CheckpointError, ValueError: It has a value that a checkpoint cannot hold.
        """
        replica = self._replica
        with replica.context.comm():
            saved = self._plain(self._collect(), copy=True)
            self._check_settings(saved)
            return saved

    def _plain(self, saved: SavedRank, *, copy: bool = False) -> SavedRank:
        rank = self._replica.rank
        found = plain(encode(saved), f"the state of rank {rank}", copy=copy)
        return decode(SavedRank, found, f"rank {rank}")

    def _collect(self, *, frozen: bool = True) -> SavedRank:
        """The current state, not copied; without ``frozen``, without frozen parameters."""
        replica, progress = self._replica, self._replica.progress
        params, ema = replica.state.params, replica.ema
        buffers = self._before_sync or self._buffers()
        has_flats = ema is not None or self.train_point is not None
        return SavedRank(
            stepper=replica.stepper.saved(),
            module=self._module.saved(frozen=frozen),
            schedule=replica.schedule.saved(),
            groups=self.group_names(),
            added=tuple(self._added),
            lr_scale=self._lr_scale,
            generators=_generators(replica.generator, replica.context),
            version=replica.averager.version,
            local_step=progress.local_step,
            epoch=progress.epoch,
            begun_epoch=progress.begun_epoch,
            body_steps=progress.body_steps,
            buffers=dict(buffers.tensors),
            together=buffers.together,
            shards=params.shard_facts(),
            train_point=None if self.train_point is None else tuple(self.train_point),
            ema=None if ema is None else ema.saved(),
            strides=params.strides() if has_flats else None,
        )

    def check(self, *, has_stepped: bool) -> None:
        """Check that a checkpoint of the current state could be resumed, by the rules of the
        reader, and load what can be loaded into copies; the tensors are not copied.

        Args:
            has_stepped: False before the first step, which creates the optimizer's state.

        Raises:
            CheckpointError: It could not; the message has the reason.
        """
        replica = self._replica
        for name, p in replica.model.named_parameters():
            if not p.requires_grad and is_wrapper(p):
                raise CheckpointError(
                    f"the frozen parameter {name!r} is of type {type(p).__name__}, a tensor "
                    "subclass that keeps its values in other tensors, which checkpoints do not "
                    "support: train without checkpoint_dir(path)"
                )
        try:
            with replica.context.comm():
                saved = self._plain(self._collect(frozen=False))
                check_rank(saved, replica.rank)
                self._check_settings(saved)
                if has_stepped:
                    replica.stepper.check_saved(saved.stepper)
                else:
                    replica.schedule.check_state()
                    self._module.check_extra_state()
        except CheckpointError:
            raise
        except Exception as error:  # in the user's optimizer, scheduler or module, too
            raise CheckpointError(
                f"no checkpoint of this run could be resumed: {type(error).__name__}: {error}. "
                "Correct state_dict() or load_state_dict() of the optimizer, the scheduler or the "
                "module (get_extra_state, set_extra_state), or train without checkpoint_dir(path)"
            ) from error

    def _check_settings(self, saved: SavedRank) -> None:
        """Raise ``CheckpointError`` for settings that an optimizer as it was built cannot load."""
        try:
            check_settings(self._built, saved.stepper.optimizer["param_groups"])
        except ValueError as error:
            raise CheckpointError(
                f"the state of rank {self._replica.rank} could not be loaded by a new optimizer: "
                f"{error}"
            ) from error

    def _buffers(self) -> _Buffers:
        buffers, lockstep = self._replica.state.buffers, self._replica.lockstep
        tensors = buffers.tensors()
        return _Buffers(
            {buffers.names[i]: without_class(tensors[i]) for i in self._own_buffers},
            (lockstep.step, lockstep.num_syncs, lockstep.buffer_samples),
        )

    def keep_buffers(self) -> None:
        """Keep the current buffers for checkpoints, before they are averaged within an epoch: for
        the end of the run, or for an evaluation, after which :meth:`return_buffers` follows.

        A run that does not pause here would not average them.
        """
        with self._replica.context.comm(), torch.no_grad():
            now = self._buffers()
            tensors = {name: t.clone() for name, t in now.tensors.items()}
            self._before_sync = now._replace(tensors=tensors)

    def return_buffers(self) -> None:
        """Restore the buffers that :meth:`keep_buffers` kept, if any."""
        kept, self._before_sync = self._before_sync, None
        if kept is not None:
            with self._replica.context.comm(), torch.no_grad():
                self._restore_buffers(kept.tensors)
            self._replica.lockstep.buffer_samples = kept.together[-1]

    def drop_kept_buffers(self) -> None:
        """Drop the buffers that :meth:`keep_buffers` kept: the state is another rank's."""
        self._before_sync = None

    def restore(self, saved: SavedRank) -> None:
        """Restore the state of :meth:`capture`.

        Random generators are restored by :meth:`before_epoch_fn` and :meth:`after_epoch_fn`.

        Raises:
            CheckpointError: The state is of another model or optimizer.
        """
        replica = self._replica
        schedule, lockstep, params = replica.schedule, replica.lockstep, replica.state.params
        replaced = schedule.replaced_settings(saved.schedule)
        try:
            self._add_groups(saved.groups)
            names = [[plain_key(name) for name in group] for group in saved.groups]
            own = state_in_order(saved.stepper.optimizer, names, self.group_names())
            replica.stepper.restore(replace(saved.stepper, optimizer=params.own_part(own)))
            schedule.load(saved.schedule)
            self._module.restore(saved.module)
        except Exception as error:
            raise CheckpointError(
                f"rank {replica.rank}: the checkpoint does not fit this optimizer, scheduler or "
                f"module ({type(error).__name__}: {error}); build them as in the run that wrote it"
            ) from error
        if replica.rank == 0:
            self._warn_of_settings(self._built, saved)
            if replaced:
                logger.warning(SCHEDULE_KEPT, replaced)
            kind, present = saved.schedule.kind, schedule.kind
            if bool(kind) != bool(present):
                logger.warning(
                    "the checkpoint has %s: %s",
                    f"the scheduler {kind}, and this run none" if kind else "no scheduler",
                    "the learning rates stay as they are; pass scheduler(f) to continue it"
                    if kind
                    else f"{present} begins here, at its first step",
                )
        if saved.lr_scale != self._lr_scale:
            schedule.rescale(self._lr_scale / saved.lr_scale)
        self._restore_buffers(restore_subclasses(saved.buffers))
        lockstep.step, lockstep.num_syncs, lockstep.buffer_samples = saved.together
        lockstep.equal_step = lockstep.step
        if replica.ema is not None and saved.ema is not None:
            flats = params.reordered(saved.ema.flats, saved.strides)
            replica.ema.restore(flats, saved.ema.batches_due)
        elif replica.ema is not None and replica.rank == 0:
            logger.warning(
                "the checkpoint has no moving average: ema(decay) starts from its weights"
            )
        replica.averager.version = saved.version
        self._log.number = saved.local_step
        self._generators, self._begun_epoch = saved.generators, saved.begun_epoch
        self._added = list(saved.added)

    def before_epoch(self, saved: SavedRank, epoch: int) -> None:
        """Add the parameter groups that the optimizer had before ``epoch_fn`` of an epoch."""
        counts = [num for number, num in saved.added if number >= epoch]
        self._add_groups(saved.groups[: min(counts, default=None)])

    def group_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each group of the optimizer."""
        names = {id(p): name for name, p in self._params_of_optimizer().items()}
        groups = self._replica.optimizer.param_groups
        return tuple(tuple(names.get(id(p), "") for p in group["params"]) for group in groups)

    def _params_of_optimizer(self) -> dict[str, Any]:
        own = self._replica.state.params
        named = {
            **dict(self._replica.model.named_parameters()),
            **dict(zip(own.names, own.trained, strict=True)),
        }
        return {plain_key(name): p for name, p in named.items()}

    def _add_groups(self, saved: Sequence[Sequence[str]]) -> None:
        """Add the groups that a callback of the earlier run added; settings are loaded later."""
        params, optimizer = self._params_of_optimizer(), self._replica.optimizer
        for names in saved[len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": [params[plain_key(name)] for name in names]})

    def _warn_of_settings(self, built: Sequence[dict[str, Any]], saved: SavedRank) -> None:
        """Warn of settings of the built optimizer that the checkpoint replaces."""
        theirs = saved.stepper.optimizer["param_groups"]
        scales = {"lr": self._lr_scale / saved.lr_scale}
        others = ("lr", "initial_lr", "params", *self._replica.schedule.cycled_settings)
        # Groups that a callback has added follow those that were built.
        for number, (group, held) in enumerate(zip(built, theirs, strict=False)):
            # A scheduler changes the rate and keeps the initial one.
            rate = "initial_lr" if {"initial_lr"} <= {*group} & {*held} else "lr"
            for name in (rate, *(n for n in settings_of(group) if n not in others)):
                new, old = _numbers(group[name]), _numbers(held.get(name))
                flags = {type(group[name]), type(held.get(name))} <= {bool, str}
                expected = [scales.get(name, 1.0) * value for value in old]
                if (flags and group[name] != held[name]) or (
                    len(new) == len(expected)
                    and not np.allclose(new, expected, rtol=1e-6, atol=0.0, equal_nan=True)
                ):
                    logger.warning(
                        "the checkpoint's %s=%s is used in group %d of the optimizer, not %s of "
                        "optim_factory: change it in epoch_fn, or start from the weights",
                        name,
                        held[name],
                        number,
                        group[name],
                    )

    def _restore_buffers(self, saved: Mapping[str, Tensor]) -> None:
        buffers = self._replica.state.buffers
        tensors = buffers.tensors()
        with torch.no_grad():
            for i in self._own_buffers:
                source = saved.get(buffers.names[i])
                if source is not None and source.shape == tensors[i].shape:
                    tensors[i].copy_(source)

    def before_epoch_fn(self) -> None:
        """Restore the process's generators, before the rank begins its first epoch."""
        self._num_groups = len(self._replica.optimizer.param_groups)
        if self._generators is not None and self._replica.rank == 0:
            _restore_process(self._generators, self._replica.context)

    def after_epoch_fn(self, epoch: int) -> None:
        """Restore all generators, if the checkpoint was made after the beginning of this epoch."""
        if len(self._replica.optimizer.param_groups) > self._num_groups:
            self._added.append((epoch, self._num_groups))
        saved, self._generators = self._generators, None
        if saved is None or epoch != self._begun_epoch:
            return
        generator = self._replica.generator
        if saved.worker.shape == generator.get_state().shape:  # else the device differs
            generator.set_state(saved.worker)
        if self._replica.rank == 0:
            _restore_process(saved, self._replica.context)


class CheckpointedReplica(Protocol):
    """A replica whose state is captured; see :class:`~runtime.worker.replica.WorkerReplica`."""

    rank: int
    is_lockstep: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: FlatState
    stepper: Stepper
    schedule: Schedule
    averager: ReplicaAverager
    ema: ParamEma | None
    generator: torch.Generator
    context: Device
    lockstep: LockstepProgress
    progress: WorkerProgress


class _Buffers(NamedTuple):
    """Buffers by name, and ``SavedRank.together``."""

    tensors: dict[str, Tensor]
    together: tuple[int, int, int]


def _numbers(value: Any) -> list[float]:
    """The number, or those of a tuple; empty for other values, such as tensors."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(part, bool) or not isinstance(part, (int, float)) for part in parts):
        return []
    return [float(part) for part in parts]


def _generators(generator: torch.Generator, context: Device) -> SavedGenerators:
    numbers = np.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    return SavedGenerators(
        worker=generator.get_state(),
        torch=torch.default_generator.get_state(),
        python=random.getstate(),
        numpy=packed_arrays(numbers),
        device=context.generator_state(),
    )


def _restore_process(saved: SavedGenerators, context: Device) -> None:
    torch.default_generator.set_state(saved.torch)
    if saved.device is not None:
        context.set_generator_state(saved.device)
    random.setstate(saved.python)
    try:
        np.random.set_state(numpy_state(saved.numpy))
    except ValueError as error:
        logger.warning("NumPy's global generator was not restored: %s", error)
