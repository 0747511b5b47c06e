"""A rank's part of a checkpoint: all state of the training except the weights."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
from runtime.worker.lockstep import LockstepProgress

logger = logging.getLogger(__name__)

State = dict[str, Any]
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
        stepper: The owner of the optimizer and the gradient scaler.
        averager: Counts the averages applied.
        log: Numbers the batches.
        lr_scale: The settings' factor of the learning rate.
        is_lockstep: True if each rank has its own buffers between two averagings of them.

    Attributes:
        train_point: The parameters in training, while those of the replica are moved to the point
            of evaluation by an optimizer with modes.
    """

    def __init__(
        self,
        *,
        rank: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: FlatState,
        stepper: Stepper,
        schedule: Schedule,
        averager: ReplicaAverager,
        generator: torch.Generator,
        context: Device,
        lockstep: LockstepProgress,
        log: ValueLog,
        lr_scale: float,
        is_lockstep: bool,
        ema: ParamEma | None = None,
    ) -> None:
        self._rank = rank
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._stepper = stepper
        self._schedule = schedule
        self._averager = averager
        self._generator = generator
        self._context = context
        self._lockstep = lockstep
        self._log = log
        self._lr_scale = lr_scale
        self._ema = ema
        names = state.buffers.names
        # Without lockstep, buffers in the state dict are averaged with the weights.
        averaged = set() if is_lockstep else set(model.state_dict())
        self._own_buffers = [i for i, name in enumerate(names) if name not in averaged]
        self._module = ModuleState(model)
        self._built = [dict(group) for group in optimizer.param_groups]
        self._num_groups = len(self._built)
        self._added: list[list[int]] = []  # epochs that added groups, and the groups before
        self.train_point: list[Tensor] | None = None
        self._before_sync: State | None = None
        self._generators: State | None = None
        self._begun_epoch = -1

    def capture(self, *, local_step: int, epoch: int, begun_epoch: int, body_steps: int) -> State:
        """Return a copy of the current state.

        Args:
            local_step: Batches trained by this rank.
            epoch: Epoch of the last plan.
            begun_epoch: The last epoch that the rank has begun.
            body_steps: Optimizer steps made by the body of its own loop.

        Raises:
            CheckpointError: The optimizer's state has a value that a checkpoint cannot hold.
        """
        with self._context.comm():
            state = self._collect(local_step, epoch, begun_epoch, body_steps)
            kept: State = plain(state, f"the state of rank {self._rank}", copy=True)
            self._check_settings(kept)
            return kept

    def _collect(
        self,
        local_step: int = 0,
        epoch: int = 0,
        begun_epoch: int = 0,
        body_steps: int = 0,
        *,
        frozen: bool = True,
    ) -> State:
        """The current state, not copied; without ``frozen``, without frozen parameters."""
        state = {
            **self._stepper.state_dict(),
            **self._module.state_dict(frozen=frozen),
            "groups": self.group_names(),
            "added": [list(each) for each in self._added],
            "schedule": self._schedule.state_dict(),
            "lr_scale": self._lr_scale,
            "generators": _generators(self._generator, self._context),
            "version": self._averager.version,
            "local_step": local_step,
            "epoch": epoch,
            "begun_epoch": begun_epoch,
            "body_steps": body_steps,
            **(self._before_sync or self._buffers()),
        }
        if (facts := self._state.params.shard_facts()) is not None:
            state["shards"] = facts
        if self.train_point is not None:
            state["train_point"] = self.train_point
        if self._ema is not None:
            state["ema"] = self._ema.state_dict()
        if "ema" in state or "train_point" in state:  # flat tensors
            state["strides"] = self._state.params.strides()
        return state

    def check(self, *, has_stepped: bool) -> None:
        """Check that a checkpoint of the current state could be resumed, by the rules of the
        reader, and load what can be loaded into copies; the tensors are not copied.

        Args:
            has_stepped: False before the first step, which creates the optimizer's state.

        Raises:
            CheckpointError: It could not; the message has the reason.
        """
        for name, p in self._model.named_parameters():
            if not p.requires_grad and is_wrapper(p):
                raise CheckpointError(
                    f"the frozen parameter {name!r} is of type {type(p).__name__}, a tensor "
                    "subclass that keeps its values in other tensors, which checkpoints do not "
                    "support: train without checkpoint_dir(path)"
                )
        try:
            with self._context.comm():
                state = plain(self._collect(frozen=False), f"the state of rank {self._rank}")
                check_rank(state, self._rank)
                self._check_settings(state)
                if has_stepped:
                    self._stepper.check_state(restore_subclasses(state, copy=False))
                else:
                    self._schedule.check_state()
                    self._module.check_extra_state()
        except CheckpointError:
            raise
        except Exception as error:  # in the user's optimizer, scheduler or module, too
            raise CheckpointError(
                f"no checkpoint of this run could be resumed: {type(error).__name__}: {error}. "
                "Correct state_dict() or load_state_dict() of the optimizer, the scheduler or the "
                "module (get_extra_state, set_extra_state), or train without checkpoint_dir(path)"
            ) from error

    def _check_settings(self, state: State) -> None:
        """Raise ``CheckpointError`` for settings that an optimizer as it was built cannot load."""
        try:
            check_settings(self._built, state["optimizer"]["param_groups"])
        except ValueError as error:
            raise CheckpointError(
                f"the state of rank {self._rank} could not be loaded by a new optimizer: {error}"
            ) from error

    def _buffers(self) -> State:
        tensors = self._state.buffers.tensors()
        return {
            "buffers": {
                self._state.buffers.names[i]: without_class(tensors[i]) for i in self._own_buffers
            },
            "together": [
                self._lockstep.step,
                self._lockstep.num_syncs,
                self._lockstep.buffer_samples,
            ],
        }

    def keep_buffers(self) -> None:
        """Keep the current buffers for checkpoints, before they are averaged within an epoch: for
        the end of the run, or for an evaluation, after which :meth:`return_buffers` follows.

        A run that does not pause here would not average them.
        """
        with self._context.comm(), torch.no_grad():
            kept = self._buffers()
            kept["buffers"] = {name: t.clone() for name, t in kept["buffers"].items()}
            self._before_sync = kept

    def return_buffers(self) -> None:
        """Restore the buffers that :meth:`keep_buffers` kept, if any."""
        kept, self._before_sync = self._before_sync, None
        if kept is not None:
            with self._context.comm(), torch.no_grad():
                self._restore_buffers(kept["buffers"])
            self._lockstep.buffer_samples = kept["together"][-1]

    def drop_kept_buffers(self) -> None:
        """Drop the buffers that :meth:`keep_buffers` kept: the state is another rank's."""
        self._before_sync = None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`capture`.

        Random generators are restored by :meth:`before_epoch_fn` and :meth:`after_epoch_fn`.

        Raises:
            CheckpointError: The state is of another model or optimizer.
        """
        replaced = self._schedule.replaced_settings(saved["schedule"])
        try:
            self._add_groups(saved.get("groups", []))
            own = dict(saved["optimizer"])
            if "groups" in saved:  # earlier versions lack them
                names = [[plain_key(name) for name in group] for group in saved["groups"]]
                own = state_in_order(own, names, self.group_names())
            own = self._state.params.own_part(own)
            self._stepper.load_state_dict({**saved, "optimizer": own})
            self._schedule.load_state_dict(saved["schedule"])
            self._module.load_state_dict(saved)
        except Exception as error:
            raise CheckpointError(
                f"rank {self._rank}: the checkpoint does not fit this optimizer, scheduler or "
                f"module ({type(error).__name__}: {error}); build them as in the run that wrote it"
            ) from error
        if self._rank == 0:
            self._warn_of_settings(self._built, saved)
            if replaced:
                logger.warning(SCHEDULE_KEPT, replaced)
            kind, present = saved["schedule"].get("kind"), self._schedule.kind
            if kind is not None and bool(kind) != bool(present):
                logger.warning(
                    "the checkpoint has %s: %s",
                    f"the scheduler {kind}, and this run none" if kind else "no scheduler",
                    "the learning rates stay as they are; pass scheduler(f) to continue it"
                    if kind
                    else f"{present} begins here, at its first step",
                )
        before = float(saved["lr_scale"])
        if before != self._lr_scale:
            self._schedule.rescale(self._lr_scale / before)
        self._restore_buffers(restore_subclasses(saved["buffers"]))
        lockstep = self._lockstep
        lockstep.step, lockstep.num_syncs, lockstep.buffer_samples = saved["together"]
        lockstep.equal_step = lockstep.step
        if self._ema is not None and "ema" in saved:
            flats = self._state.params.reordered(saved["ema"]["flats"], saved.get("strides"))
            self._ema.load_state_dict({**saved["ema"], "flats": flats})
        elif self._ema is not None and self._rank == 0:
            logger.warning(
                "the checkpoint has no moving average: ema(decay) starts from its weights"
            )
        self._averager.version = int(saved["version"])
        self._log.number = int(saved["local_step"])
        self._generators = saved["generators"]
        self._begun_epoch = int(saved["begun_epoch"])
        self._added = [list(each) for each in saved.get("added", [])]

    def before_epoch(self, saved: Mapping[str, Any], epoch: int) -> None:
        """Add the parameter groups that the optimizer had before ``epoch_fn`` of an epoch."""
        counts = [num for number, num in saved.get("added", []) if number >= epoch]
        self._add_groups(saved.get("groups", [])[: min(counts, default=None)])

    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each group of the optimizer."""
        names = {id(p): name for name, p in self._params_of_optimizer().items()}
        groups = self._optimizer.param_groups
        return [[names.get(id(p), "") for p in group["params"]] for group in groups]

    def _params_of_optimizer(self) -> dict[str, Any]:
        own = self._state.params
        named = {
            **dict(self._model.named_parameters()),
            **dict(zip(own.names, own.trained, strict=True)),
        }
        return {plain_key(name): p for name, p in named.items()}

    def _add_groups(self, saved: Sequence[Sequence[str]]) -> None:
        """Add the groups that a callback of the earlier run added; settings are loaded later."""
        params = self._params_of_optimizer()
        for names in saved[len(self._optimizer.param_groups) :]:
            self._optimizer.add_param_group({"params": [params[plain_key(name)] for name in names]})

    def _warn_of_settings(self, built: Sequence[State], saved: Mapping[str, Any]) -> None:
        """Warn of settings of the built optimizer that the checkpoint replaces."""
        theirs = saved["optimizer"]["param_groups"]
        scales = {"lr": self._lr_scale / float(saved["lr_scale"])}
        others = ("lr", "initial_lr", "params", *self._schedule.cycled_settings)
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
        tensors = self._state.buffers.tensors()
        with torch.no_grad():
            for i in self._own_buffers:
                source = saved.get(self._state.buffers.names[i])
                if source is not None and source.shape == tensors[i].shape:
                    tensors[i].copy_(source)

    def before_epoch_fn(self) -> None:
        """Restore the process's generators, before the rank begins its first epoch."""
        self._num_groups = len(self._optimizer.param_groups)
        if self._generators is not None and self._rank == 0:
            _restore_process(self._generators, self._context)

    def after_epoch_fn(self, epoch: int) -> None:
        """Restore all generators, if the checkpoint was made after the beginning of this epoch."""
        if len(self._optimizer.param_groups) > self._num_groups:
            self._added.append([epoch, self._num_groups])
        saved, self._generators = self._generators, None
        if saved is None or epoch != self._begun_epoch:
            return
        if saved["worker"].shape == self._generator.get_state().shape:  # else the device differs
            self._generator.set_state(saved["worker"])
        if self._rank == 0:
            _restore_process(saved, self._context)


def _numbers(value: Any) -> list[float]:
    """The number, or those of a tuple; empty for other values, such as tensors."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(part, bool) or not isinstance(part, (int, float)) for part in parts):
        return []
    return [float(part) for part in parts]


def _generators(generator: torch.Generator, context: Device) -> State:
    numbers = np.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    state: State = {
        "worker": generator.get_state(),
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": packed_arrays(numbers),
    }
    device_state = context.generator_state()
    if device_state is not None:
        state["device"] = device_state
    return state


def _restore_process(saved: Mapping[str, Any], context: Device) -> None:
    torch.default_generator.set_state(saved["torch"])
    if "device" in saved:
        context.set_generator_state(saved["device"])
    random.setstate(saved["python"])
    try:
        np.random.set_state(numpy_state(saved["numpy"]))
    except ValueError as error:
        logger.warning("NumPy's global generator was not restored: %s", error)
