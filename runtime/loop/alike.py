"""Keeping all replicas as rank 0 is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from runtime.loop.rank_threads import Runner, Task
from runtime.loop.replica import LoopReplica, ParamGroups


class Mirror:
    """Compares rank 0's model with what it was, and passes changes on.

    Looked at before the replicas compute, while nobody else uses them: train and eval mode of
    each module, frozen and unfrozen parameters, weights that were changed in place, and
    buffers that were changed or replaced. The version counter of a tensor tells of changes in
    place; it does not see those through ``.data``.

    What rank 0's own forward makes of its buffers is no change of the caller's: see
    :meth:`buffers_are_seen`.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._first, *self._others = replicas
        self._modes = self._read_modes()
        self._trainable = self._read_trainable()
        self._trained = list(self._trainable)
        self._versions = self._read_versions()
        self._slots = [
            (f"{prefix}.{key}" if prefix else key, slots, key)
            for prefix, module in self._first.model.named_modules()
            for slots in (module._parameters, module._modules)
            for key in slots
        ]
        self._parts = self._read_parts()
        self.buffers_are_seen()

    def check(self) -> None:
        """Make sure that rank 0's model consists of what the optimizers and replicas hold.

        Raises:
            RuntimeError: A parameter or a module was replaced.
        """
        parts = self._read_parts()
        if any(map(is_not, parts, self._parts)):
            changed = [new is not old for new, old in zip(parts, self._parts, strict=True)]
            raise RuntimeError(
                f"{self._slots[changed.index(True)][0]!r} of the primary was replaced, and the "
                "optimizers and the other replicas hold what was there before: put it back and "
                "change weights in place (load_state_dict without assign, p.copy_()), or build "
                "the whole model before"
            )

    def flags(self, *, always: bool = False) -> bool:
        """Pass modes and frozen parameters on; tells whether a mode has changed.

        Args:
            always: Whether the others may have changed theirs.

        Raises:
            RuntimeError: A parameter requires a gradient that did not when it was set up.
        """
        modes = self._read_modes()
        changed = modes != self._modes
        if changed or always:
            self._modes = modes
            for replica in self._others:
                for module, mode in zip(replica.modules, modes, strict=True):
                    if module.training is not mode:
                        module.training = mode
        trainable = self._read_trainable()
        if always or trainable != self._trainable:
            self._refuse_strangers(trainable)
            self._trainable = trainable
            for replica in self._others:
                for p, flag in zip(replica.tensors, trainable, strict=True):
                    if p.requires_grad is not flag:
                        p.requires_grad_(flag)
        return changed

    def _refuse_strangers(self, trainable: Sequence[bool]) -> None:
        if not any(now and not then for now, then in zip(trainable, self._trained, strict=True)):
            return
        names = [name for name, _ in self._first.model.named_parameters()]
        for name, now, then in zip(names, trainable, self._trained, strict=True):
            if now and not then:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the replicas were built, so no optimizer "
                    "holds it and no gradient of it is exchanged: leave it trainable in "
                    "Trainer.setup or in model_factory, freeze it afterwards, and unfreeze it "
                    "when it is due"
                )

    def weights_changed(self) -> bool:
        """Whether rank 0's weights were changed since :meth:`weights_are_alike`."""
        return self._read_versions() != self._versions

    def weights_are_alike(self) -> None:
        """All ranks have the same weights now."""
        self._versions = self._read_versions()

    def buffers_changed(self) -> bool:
        """Whether rank 0's buffers were changed or replaced since :meth:`buffers_are_seen`.

        Raises:
            RuntimeError: Replaced by one of another shape or dtype, which others cannot take.
        """
        now = self._first.state.buffers.tensors()
        if not any(map(is_not, now, self._buffers)):
            return _versions(now) != self._buffer_versions
        names = self._first.state.buffers.names
        for replica in self._others:
            for name, new, old in zip(names, now, replica.state.buffers.tensors(), strict=True):
                if (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise RuntimeError(
                        f"buffer {name!r} was replaced by one of shape {tuple(new.shape)} and "
                        f"{new.dtype}, the other replicas have {tuple(old.shape)} and {old.dtype}: "
                        "keep both, or register such a buffer before Trainer.setup"
                    )
        return True

    def is_changed(self) -> bool:
        """Whether weights or buffers were changed or replaced since :meth:`are_alike`."""
        now = self._first.state.buffers.tensors()
        if self.weights_changed() or any(map(is_not, now, self._buffers)):
            return True
        return _versions(now) != self._buffer_versions

    def are_alike(self) -> None:
        """All replicas have rank 0's weights and buffers now."""
        self.weights_are_alike()
        self.buffers_are_seen()

    def buffers_written(self) -> bool:
        """Whether any of rank 0's buffers was written to since; one that was replaced is not."""
        now = self._first.state.buffers.tensors()
        pairs = zip(now, self._buffers, _versions(now), self._buffer_versions, strict=True)
        return any(new is old and v != before for new, old, v, before in pairs)

    def buffers_are_seen(self) -> None:
        """Rank 0's buffers, as they are now, hold nothing that others must be told of."""
        self._buffers = self._first.state.buffers.tensors()
        self._buffer_versions = _versions(self._buffers)

    def _read_parts(self) -> list[object]:
        return [slots.get(key) for _, slots, key in self._slots]

    def _read_modes(self) -> list[bool]:
        return [module.training for module in self._first.modules]

    def _read_trainable(self) -> list[bool]:
        return [p.requires_grad for p in self._first.tensors]

    def _read_versions(self) -> list[int]:
        return _versions(self._first.tensors)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed; tensors of inference mode do not tell."""
    return [-1 if t.is_inference() else t._version for t in tensors]


class Likeness:
    """Brings to the other replicas what happens to rank 0's model and optimizer.

    For the thread that has its turn, while no task runs.

    Args:
        replicas: Alike, in order of rank; rank 0's model and optimizer are the user's.
        runner: Runs what they do.
        drifting: Whether devices compute different bits from the same gradients.

    Attributes:
        broken: Whether a step ended half-way: what rank 0 has counts.
        buffers_differ: Whether replicas may have changed their buffers, each in its own way.
        groups: The optimizers' parameter groups.
    """

    def __init__(self, replicas: Sequence[LoopReplica], runner: Runner, *, drifting: bool) -> None:
        self._replicas = replicas
        self._first = replicas[0]
        self._runner = runner
        self._drifting = drifting
        self._mirror = Mirror(replicas)
        self.groups = ParamGroups(replicas)
        self.broken = False
        self.buffers_differ = False
        self._loaded = False
        likeness = weakref.ref(self)  # the hook must not keep the threads alive

        def on_load(optimizer: torch.optim.Optimizer) -> None:
            if (self := likeness()) is not None:
                self._loaded = True

        self._first.optimizer.register_load_state_dict_post_hook(on_load)

    def prepare(self) -> None:
        """Before the replicas compute: what the caller did to rank 0 holds for all.

        Raises:
            RuntimeError, ValueError: It cannot hold for the others.
            ReplicaFailed: A replica could not take it over.
        """
        self._mirror.check()
        self.groups.follow()
        modes_changed = self._mirror.flags()
        buffers_changed = self._mirror.buffers_changed()
        if self._loaded or self.broken or self._state_was_cleared():
            self._copy("copy_optimizer")
            self._loaded = False
        if self.broken or self._mirror.weights_changed():
            self.sync()
            self.broken = False
        elif buffers_changed or (
            self.buffers_differ and (modes_changed or not self._first.model.training)
        ):
            self._copy("copy_buffers")
            self._buffers_are_alike()

    def _state_was_cleared(self) -> bool:
        num_kept = len(self._first.optimizer.state)
        return any(len(replica.optimizer.state) != num_kept for replica in self._replicas)

    @contextmanager
    def computing(self, *, prepared: bool) -> Iterator[None]:
        """Around tasks of forward or backward, in train mode or not.

        What rank 0's forward makes of its buffers is not to be taken for the caller's doing.

        Args:
            prepared: Whether this comes right behind :meth:`prepare`; else there may be
                changes of the caller's, which stay to be passed on.
        """
        if self._first.state.buffers and any(m.training for m in self._first.modules):
            self.buffers_differ = True
        pending = not prepared and self._mirror.buffers_changed()
        try:
            yield
        finally:
            if not pending:
                if self._mirror.buffers_written():
                    self.buffers_differ = True  # by a forward in eval mode
                self._mirror.buffers_are_seen()

    def stepped(self) -> None:
        """All have stepped, and have rank 0's buffers."""
        if self._drifting:
            self._copy("copy_params")
        self._mirror.are_alike()
        self.buffers_differ = False

    def sync(self) -> None:
        """Give rank 0's parameters and buffers to all."""
        self._mirror.check()
        self._mirror.buffers_changed()  # or they do not fit
        self._copy("copy_weights")
        self._mirror.are_alike()
        self.buffers_differ = False

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every rank."""
        self.groups.follow()
        load = partial(self._first.optimizer.load_state_dict, state)
        idle: list[Task | None] = [None] * (len(self._replicas) - 1)
        self._runner.run([load, *idle], "load")
        self._copy("copy_optimizer")
        self._loaded = False

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of every replica."""
        for replica in self._replicas:
            replica.set_attribute(name, value)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool) -> None:
        """Add a buffer to every replica."""
        for replica in self._replicas:
            replica.register_buffer(name, tensor, persistent)

    def _buffers_are_alike(self) -> None:
        self._mirror.buffers_are_seen()
        self.buffers_differ = False

    def _copy(self, method: str) -> None:
        tasks = [partial(getattr(replica, method), self._first) for replica in self._replicas[1:]]
        self._runner.run([None, *tasks], method)
