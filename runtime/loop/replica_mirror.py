"""Copies changes of rank 0's model and optimizer to the other replicas."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from runtime.loop.loop_replica import LoopReplica, Options
from runtime.loop.rank_threads import Task
from runtime.loop.runner import Runner


class ReplicaMirror:
    """Copies the caller's changes of rank 0's model and optimizer to the other replicas.

    Compared before the replicas compute: train and eval mode of each module, frozen and unfrozen
    parameters, weights changed in place, buffers changed or replaced, and the optimizer's groups
    and state. Changes in place are detected by tensors' version counters, which do not count
    changes through ``.data``.

    Not thread-safe; used while no task runs.

    Args:
        replicas: Identical, in order of rank; rank 0's model and optimizer are the user's.
        runner: Runs tasks in the replicas' threads.

    Attributes:
        is_inconsistent: True if a step failed midway, so that rank 0's state must be copied.
        buffers_may_differ: True if replicas may have updated their buffers independently.
        groups: The optimizers' parameter groups.
        optimizer_loaded: True if a state was loaded into rank 0's optimizer only.
    """

    def __init__(self, replicas: Sequence[LoopReplica], runner: Runner) -> None:
        self._first, *self._others = replicas
        self._runner = runner
        self.groups = ParamGroupMirror(replicas)
        self.is_inconsistent = False
        self.buffers_may_differ = False
        self.optimizer_loaded = False
        mirror = weakref.ref(self)  # the hook must not keep the threads alive

        def on_load(optimizer: torch.optim.Optimizer) -> None:
            if (self := mirror()) is not None:
                self.optimizer_loaded = True

        self._first.optimizer.register_load_state_dict_post_hook(on_load)
        self._modes = self._read_modes()
        self._trainable = self._read_trainable()
        self._trained = list(self._trainable)
        self._slots = [
            (f"{prefix}.{key}" if prefix else key, slots, key)
            for prefix, module in self._first.model.named_modules()
            for slots in (module._parameters, module._modules)
            for key in slots
        ]
        self._parts = self._read_parts()
        self.mark_synced()

    def prepare(self) -> None:
        """Copy all changes of rank 0 to the others, before the replicas compute.

        Raises:
            RuntimeError, ValueError: A change cannot be copied.
            ReplicaFailed: A replica failed to copy it.
        """
        self.check()
        self.groups.propagate()
        modes_changed = self.sync_flags()
        buffers_changed = self._buffers_changed()
        if self.optimizer_loaded or self.is_inconsistent or self._state_was_cleared():
            self.copy("copy_optimizer")
            self.optimizer_loaded = False
        if self.is_inconsistent or self._weights_changed():
            self.sync()
            self.is_inconsistent = False
        elif buffers_changed or (
            self.buffers_may_differ and (modes_changed or not self._first.model.training)
        ):
            self.copy("copy_buffers")
            self._record_buffers()
            self.buffers_may_differ = False

    def _state_was_cleared(self) -> bool:
        num_kept = len(self._first.optimizer.state)
        return any(len(replica.optimizer.state) != num_kept for replica in self._others)

    @contextmanager
    def watching_buffers(self, *, prepared: bool) -> Iterator[None]:
        """Attribute buffer changes during forward and backward tasks to the replicas.

        Without this, rank 0's own updates would count as changes of the caller.

        Args:
            prepared: Whether :meth:`prepare` ran just before; otherwise changes of the caller may
                be pending, which stay pending.
        """
        if self._first.state.buffers and any(m.training for m in self._first.modules):
            self.buffers_may_differ = True
        pending = not prepared and self._buffers_changed()
        try:
            yield
        finally:
            if not pending:
                if self._buffers_written():
                    self.buffers_may_differ = True  # by a forward in eval mode
                self._record_buffers()

    def sync(self) -> None:
        """Copy rank 0's parameters and buffers to all replicas."""
        self.check()
        self._buffers_changed()  # raises if shapes differ
        self.copy("copy_weights")
        self.mark_synced()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every rank."""
        self.groups.propagate()
        load = partial(self._first.optimizer.load_state_dict, state)
        idle: list[Task | None] = [None] * len(self._others)
        self._runner.run([load, *idle], "load")
        self.copy("copy_optimizer")
        self.optimizer_loaded = False

    def copy(self, method: str, operation: str | None = None, *, changes: bool = False) -> None:
        """Call a copying method of every other replica with rank 0's replica.

        Args:
            method: Name of a method of :class:`LoopReplica`.
            operation: Name of the tasks in errors; ``None``: ``method``.
            changes: See :meth:`Runner.run`.
        """
        tasks = [partial(getattr(replica, method), self._first) for replica in self._others]
        self._runner.run([None, *tasks], operation or method, changes=changes)

    def check(self) -> None:
        """Check that no parameter or module of rank 0's model was replaced.

        Raises:
            RuntimeError: A parameter or a module was replaced.
        """
        parts = self._read_parts()
        if any(map(is_not, parts, self._parts)):
            changed = [new is not old for new, old in zip(parts, self._parts, strict=True)]
            raise RuntimeError(
                f"{self._slots[changed.index(True)][0]!r} of the primary was replaced, and the "
                "optimizers and the other replicas hold the original: put it back and "
                "change weights in place (load_state_dict without assign, p.copy_()), or build "
                "the whole model before"
            )

    def sync_flags(self, *, always: bool = False) -> bool:
        """Copy train modes and ``requires_grad`` to the others; returns whether a mode changed.

        Args:
            always: Copy even without a change, since the others may have changed.

        Raises:
            RuntimeError: A parameter requires a gradient that was frozen at set-up.
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
            self._check_unfrozen(trainable)
            self._trainable = trainable
            for replica in self._others:
                for p, flag in zip(replica.tensors, trainable, strict=True):
                    if p.requires_grad is not flag:
                        p.requires_grad_(flag)
        return changed

    def _check_unfrozen(self, trainable: Sequence[bool]) -> None:
        if not any(now and not then for now, then in zip(trainable, self._trained, strict=True)):
            return
        names = [name for name, _ in self._first.model.named_parameters()]
        for name, now, then in zip(names, trainable, self._trained, strict=True):
            if now and not then:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the replicas were built, so no optimizer "
                    "holds it and no gradient of it is exchanged: leave it trainable in "
                    "Trainer.setup or in model_factory, freeze it afterwards, and unfreeze it "
                    "later"
                )

    def _weights_changed(self) -> bool:
        return _versions(self._first.tensors) != self._versions

    def _buffers_changed(self) -> bool:
        """True if rank 0's buffers were changed or replaced since :meth:`_record_buffers`.

        Raises:
            RuntimeError: A buffer was replaced by one of another shape or dtype.
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

    def has_changed(self) -> bool:
        """True if weights or buffers were changed or replaced since :meth:`mark_synced`."""
        now = self._first.state.buffers.tensors()
        if self._weights_changed() or any(map(is_not, now, self._buffers)):
            return True
        return _versions(now) != self._buffer_versions

    def mark_synced(self) -> None:
        """Record that all replicas have rank 0's weights and buffers."""
        self._versions = _versions(self._first.tensors)
        self._record_buffers()
        self.buffers_may_differ = False

    def _buffers_written(self) -> bool:
        """True if any of rank 0's recorded buffers was written to in place."""
        now = self._first.state.buffers.tensors()
        pairs = zip(now, self._buffers, _versions(now), self._buffer_versions, strict=True)
        return any(new is old and v != before for new, old, v, before in pairs)

    def _record_buffers(self) -> None:
        self._buffers = self._first.state.buffers.tensors()
        self._buffer_versions = _versions(self._buffers)

    def _read_parts(self) -> list[object]:
        return [slots.get(key) for _, slots, key in self._slots]

    def _read_modes(self) -> list[bool]:
        return [module.training for module in self._first.modules]

    def _read_trainable(self) -> list[bool]:
        return [p.requires_grad for p in self._first.tensors]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Version counters; inference tensors have none."""
    return [-1 if t.is_inference() else t._version for t in tensors]


class ParamGroupMirror:
    """Copies changes of rank 0's parameter groups to the other optimizers.

    Parameters of different replicas are matched by their index in the model.

    Args:
        replicas: Identical, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._first, *self._others = replicas
        self._indices = {id(p): i for i, p in enumerate(self._first.state.params.params)}
        self._members = self._read()

    def propagate(self) -> None:
        """Regroup the other optimizers like rank 0's.

        Raises:
            ValueError: Rank 0's optimizer received an untrained parameter, which is removed.
        """
        members = self._read()
        if members == self._members:
            return
        if any(p not in self._indices for group in members for p in group):
            self._remove_untrained()
            raise ValueError(
                "the optimizer was given a parameter that the model does not train; it was removed "
                "again: only parameters that required a gradient in Trainer.setup are exchanged "
                "between the replicas; freeze parameters after it, and add them to the optimizer "
                "later"
            )
        indices = [[self._indices[p] for p in group] for group in members]
        for replica in self._others:
            replica.set_groups(indices, self.options())
        self._members = members

    def check(self) -> None:
        """Check that rank 0's groups are unchanged.

        Raises:
            RuntimeError: They changed.
        """
        if self._read() != self._members:
            raise RuntimeError(
                "the first optimizer has other parameter groups than the others: build all "
                "groups in optim_factory"
            )

    def options(self) -> Options:
        """A copy of the current settings of rank 0's groups."""
        return [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._first.optimizer.param_groups
        ]

    def _remove_untrained(self) -> None:
        kept = []
        for group in self._first.optimizer.param_groups:
            known = [p for p in group["params"] if id(p) in self._indices]
            if known or not group["params"]:
                group["params"] = known
                kept.append(group)
        self._first.optimizer.param_groups[:] = kept

    def _read(self) -> list[list[int]]:
        # The model outlives this object, so no id is reused.
        return [list(map(id, group["params"])) for group in self._first.optimizer.param_groups]
