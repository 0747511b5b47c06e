"""Keeping all replicas as rank 0 is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from runtime.loop.mirror import Mirror
from runtime.loop.param_groups import ParamGroups
from runtime.loop.replica import LoopReplica
from runtime.loop.replicas import Task
from runtime.loop.runner import Runner


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

    # -- around what the replicas do -------------------------------------------------------

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
        self._mirror.weights_are_alike()
        self._buffers_are_alike()

    # -- on the caller's word --------------------------------------------------------------

    def sync(self) -> None:
        """Give rank 0's parameters and buffers to all."""
        self._mirror.check()
        self._mirror.buffers_changed()  # or they do not fit
        self._copy("copy_weights")
        self._mirror.weights_are_alike()
        self._buffers_are_alike()

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
