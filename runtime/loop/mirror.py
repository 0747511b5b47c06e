"""Copies changes of rank 0's model and optimizer to the other replicas."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from runtime.loop.loop_replica import LoopReplica, Options
from runtime.loop.rank_threads import Task
from runtime.loop.runner import Runner


class ReplicaMirror:
    """Brings to the other replicas what happens to rank 0's model and optimizer.

    Looked at before the replicas compute, while nobody else uses them: train and eval mode of
    each module, frozen and unfrozen parameters, weights that were changed in place, buffers
    that were changed or replaced, and the optimizer's groups and state. The version counter of
    a tensor tells of changes in place; it does not see those through ``.data``.

    For the thread that has its turn, while no task runs.

    Args:
        replicas: Alike, in order of rank; rank 0's model and optimizer are the user's.
        runner: Runs what they do.

    Attributes:
        is_inconsistent: Whether a step ended half-way: what rank 0 has counts.
        buffers_may_differ: Whether replicas may have changed their buffers, each in its own way.
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
        """Before the replicas compute: what the caller did to rank 0 holds for all.

        Raises:
            RuntimeError, ValueError: It cannot hold for the others.
            ReplicaFailed: A replica could not take it over.
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
        """Around tasks of forward or backward, in train mode or not.

        What rank 0's forward makes of its buffers is not to be taken for the caller's doing.

        Args:
            prepared: Whether this comes right behind :meth:`prepare`; else there may be
                changes of the caller's, which stay to be passed on.
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
        """Give rank 0's parameters and buffers to all."""
        self.check()
        self._buffers_changed()  # or they do not fit
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

    def copy(self, method: str, what: str | None = None, *, changes: bool = False) -> None:
        """Let every other replica take something from rank 0's.

        Args:
            method: What of :class:`LoopReplica` does it.
            what: What an error says they did; ``None``: ``method``.
            changes: See :meth:`Runner.run`.
        """
        tasks = [partial(getattr(replica, method), self._first) for replica in self._others]
        self._runner.run([None, *tasks], what or method, changes=changes)

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

    def sync_flags(self, *, always: bool = False) -> bool:
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
                    "when it is due"
                )

    def _weights_changed(self) -> bool:
        return _versions(self._first.tensors) != self._versions

    def _buffers_changed(self) -> bool:
        """Whether rank 0's buffers were changed or replaced since :meth:`_record_buffers`.

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

    def has_changed(self) -> bool:
        """Whether weights or buffers were changed or replaced since :meth:`mark_synced`."""
        now = self._first.state.buffers.tensors()
        if self._weights_changed() or any(map(is_not, now, self._buffers)):
            return True
        return _versions(now) != self._buffer_versions

    def mark_synced(self) -> None:
        """All replicas have rank 0's weights and buffers now."""
        self._versions = _versions(self._first.tensors)
        self._record_buffers()
        self.buffers_may_differ = False

    def _buffers_written(self) -> bool:
        """Whether any of rank 0's buffers was written to since; one that was replaced is not."""
        now = self._first.state.buffers.tensors()
        pairs = zip(now, self._buffers, _versions(now), self._buffer_versions, strict=True)
        return any(new is old and v != before for new, old, v, before in pairs)

    def _record_buffers(self) -> None:
        """Rank 0's buffers, as they are now, hold nothing that others must be told of."""
        self._buffers = self._first.state.buffers.tensors()
        self._buffer_versions = _versions(self._buffers)

    def _read_parts(self) -> list[object]:
        return [slots.get(key) for _, slots, key in self._slots]

    def _read_modes(self) -> list[bool]:
        return [module.training for module in self._first.modules]

    def _read_trainable(self) -> list[bool]:
        return [p.requires_grad for p in self._first.tensors]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed; tensors of inference mode do not tell."""
    return [-1 if t.is_inference() else t._version for t in tensors]


class ParamGroupMirror:
    """Compares rank 0's groups with what they were, and passes changes on.

    Looked at before the replicas compute, while nobody else uses them. A parameter is found
    on another replica by its place in the model.

    Args:
        replicas: Alike, in order of rank.
    """

    def __init__(self, replicas: Sequence[LoopReplica]) -> None:
        self._first, *self._others = replicas
        self._places = {id(p): i for i, p in enumerate(self._first.state.params.params)}
        self._members = self._read()

    def propagate(self) -> None:
        """Regroup the others as rank 0's optimizer is grouped now.

        Raises:
            ValueError: A parameter that is not trained here; it is taken out again.
        """
        members = self._read()
        if members == self._members:
            return
        if any(p not in self._places for group in members for p in group):
            self._remove_untrained()
            raise ValueError(
                "the optimizer was given a parameter that is not a trained one of the model, and "
                "has been taken from it again: only what required a gradient in Trainer.setup is "
                "exchanged between the replicas; freeze parameters after it, and add them to the "
                "optimizer when they are due"
            )
        places = [[self._places[p] for p in group] for group in members]
        for replica in self._others:
            replica.set_groups(places, self.options())
        self._members = members

    def check(self) -> None:
        """Refuse other groups than there were.

        Raises:
            RuntimeError: There are.
        """
        if self._read() != self._members:
            raise RuntimeError(
                "the first optimizer has other parameter groups than the others: build all "
                "groups in optim_factory"
            )

    def options(self) -> Options:
        """Settings of rank 0's groups, as they are now; the caller's own."""
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
            known = [p for p in group["params"] if id(p) in self._places]
            if known or not group["params"]:
                group["params"] = known
                kept.append(group)
        self._first.optimizer.param_groups[:] = kept

    def _read(self) -> list[list[int]]:
        # A parameter of the model lives as long as this, so nothing else gets its number.
        return [list(map(id, group["params"])) for group in self._first.optimizer.param_groups]
