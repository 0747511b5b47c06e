"""Checks before the steps of any optimizer that has parameters of a wrapped model."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

logger = logging.getLogger(__name__)

GROUPED_BY_SHAPE = (
    "%s: %s. Shards of FSDP have one dimension, so that p.dim(), p.ndim, p.shape and p.numel() do "
    "not describe the parameters: make the groups by len(p.original_shape), by the names of "
    "fsdp.named_parameters(), or with fsdp.param_groups(f), where f(module) sees full shapes"
)


class OptimizerStepChecks:
    """Refuses optimizer steps that would train nothing, or each rank separately. Thread-safe.

    These are steps on original parameters, which shards have replaced in the module, steps on
    shards whose gradients were not reduced, and steps whose gradients were cleared before.
    """

    # A hook checks each optimizer at its next step: a search of the whole heap for optimizers
    # when a module is wrapped takes seconds in a large process.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sharded: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._watched: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[StepCheck]]] = {}
        self._version = 0
        self._checked: weakref.WeakKeyDictionary[
            Optimizer, tuple[int, Sequence[weakref.ref[StepCheck]]]
        ] = weakref.WeakKeyDictionary()

    def watch(
        self,
        check: StepCheck,
        parameters: Iterable[nn.Parameter],
        sharded: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Call ``check``, held weakly, before steps on ``parameters``; refuse ``sharded``."""
        method = weakref.WeakMethod(check)
        with self._lock:
            if self._version == 0:
                register_optimizer_step_pre_hook(self._check)
            self._version += 1
            for known in (self._sharded, self._watched):
                for key in [key for key, (ref, _) in known.items() if ref() is None]:
                    del known[key]
            for name, parameter in (sharded or {}).items():
                self._sharded[id(parameter)] = weakref.ref(parameter), name
            for parameter in parameters:
                self._watched[id(parameter)] = weakref.ref(parameter), method

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Allow steps on these parameters again."""
        with self._lock:
            for parameter in parameters:
                self._sharded.pop(id(parameter), None)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Run before each step of any optimizer; its parameters are inspected only once.

        Raises:
            ValueError: Its parameters were replaced by shards.
            RuntimeError: Its gradients were not reduced, or were cleared.
        """
        with self._lock:
            version, checks = self._checked.get(optimizer, (0, ()))
            if version != self._version:
                checks = self._checks_of(optimizer)
                self._checked[optimizer] = self._version, checks
        for ref in checks:
            if (check := ref()) is not None:
                check(optimizer)

    def _checks_of(self, optimizer: Optimizer) -> Sequence[weakref.ref[StepCheck]]:
        found: dict[int, weakref.ref[StepCheck]] = {}
        is_sharded = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                ref, name = self._sharded.get(id(p), (None, ""))
                if ref is not None and ref() is p:
                    raise ValueError(
                        f"{type(optimizer).__name__} was built from {name!r} before the module "
                        "was wrapped, and would train nothing; build the optimizer from "
                        "fsdp.parameters()"
                    )
                watched = self._watched.get(id(p))
                if watched is not None and watched[0]() is p:
                    found[id(watched[1])] = watched[1]
                    shape = getattr(p, "shape", None)
                    is_sharded |= getattr(p, "original_shape", shape) != shape
        if is_sharded and (suspicion := _grouped_by_shape(optimizer)) is not None:
            logger.warning(GROUPED_BY_SHAPE, type(optimizer).__name__, suspicion)
        return tuple(found.values())


def _grouped_by_shape(optimizer: Optimizer) -> str | None:
    """A sign that groups were made by the shapes of shards, or ``None``."""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        if not group["params"]:
            return f"parameter group {index} is empty"
    if len(groups) == 1:
        for name, default in optimizer.defaults.items():
            if groups[0].get(name, default) != default and "lr" not in name:
                return f"all parameters are in one group, whose {name} is not the optimizer's"
    return None


StepCheck = Callable[[Optimizer], None]
"""Called before an optimizer step; raises if that would train nothing."""
STEP_CHECKS = OptimizerStepChecks()
"""The checks of this process."""
