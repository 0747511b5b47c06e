"""Learning rates scaled during optimizer steps that ignore the scale of the gradient."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from runtime.replica.optimizers import Optimizers, members_of, settings_of

logger = logging.getLogger(__name__)

_PROBE_STEPS = 16
"""Steps of a probe; RAdam, for instance, normalises from the sixth step on."""
_COMPARED_STEPS = 4
"""Last steps of a probe, whose displacements are compared."""
_SIZE, _SCALE = 0.5, 0.125
"""Gradient of a probe and its factor: small enough for optimizers that clip gradients to norm 1,
large enough for the ``eps`` of common settings."""
_TOLERANCE = 0.5
"""Relative difference of the displacements that is accepted: weight decay adds to the gradient. A
step in proportion to the gradient differs by 0.875."""


class ScaledRates:
    """Multiplies learning rates by a factor during the optimizer's step.

    Only groups whose steps ignore the scale of the gradient are scaled, as those of Adam, which a
    probe of each group's optimizer with its settings detects. Between steps the rates are those of
    the user, the scheduler and checkpoints.

    Args:
        optimizer: The optimizer; of several, each is probed by itself.
        warns: Log the first optimizer that cannot be probed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, warns: bool = False) -> None:
        self._optimizer = optimizer
        self._warns = warns
        self._scaled: list[bool] = []
        self._known: dict[str, bool | None] = {}
        self.factor = 1.0
        self._probe_groups()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizers with scaled groups, with their class."""
        found, first = [], 0
        members: dict[str, torch.optim.Optimizer] = {"": self._optimizer}
        if isinstance(self._optimizer, Optimizers):
            members = self._optimizer.members
        for name, each in members.items():
            end = first + len(each.param_groups)
            if any(self._scaled[first:end]):
                found.append(f"{type(each).__name__} ({name})" if name else type(each).__name__)
            first = end
        return tuple(found)

    def of_group(self, index: int) -> float:
        if index >= len(self._scaled):
            self._probe_groups()
        return self.factor if self._scaled[index] else 1.0

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Scale the rates within the context."""
        if self.factor == 1.0:
            yield
            return
        groups = self._optimizer.param_groups
        rates = [(g, g["lr"]) for i, g in enumerate(groups) if self.of_group(i) != 1.0]
        try:
            for group, rate in rates:
                group["lr"] = rate * self.factor
            yield
        finally:
            for group, rate in rates:
                group["lr"] = rate

    def _probe_groups(self) -> None:
        """Probe the groups that are new, which may also be added during the run."""
        owners = [each for each in members_of(self._optimizer) for _ in each.param_groups]
        groups = self._optimizer.param_groups
        for owner, group in list(zip(owners, groups, strict=True))[len(self._scaled) :]:
            dims = group["params"][0].dim() if group["params"] else 1
            settings = {k: v for k, v in settings_of(group).items() if k != "lr"}
            key = f"{type(owner)} {dims} {settings}"
            if key not in self._known:
                found = self._known[key] = ignores_gradient_scale(owner, group, dims)
                if found is None and self._warns:
                    self._warns = False
                    logger.info(
                        'lr_scale_ratio("auto"): the step of %s could not be probed, so its '
                        "learning rate is not multiplied; lr_scale_ratio(f) with a number does",
                        type(owner).__name__,
                    )
            self._scaled.append("lr" in group and bool(self._known[key]))


def ignores_gradient_scale(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], num_dims: int = 1
) -> bool | None:
    """Return True if steps of this optimizer do not depend on the scale of the gradient.

    Two new optimizers of its class step small CPU parameters, one with a multiple of the other's
    gradients. The optimizer, its state and random generators are not changed. For a subclass of an
    optimizer of PyTorch it is PyTorch's class: code of the subclass may count or record its steps.
    A class of PyTorch with equal settings is probed once in a process.

    Returns:
        ``None`` if its step fails, for instance because it requires a closure.
    """
    kind: Any = _probed_class(type(optimizer))
    settings = settings_of(group)
    if isinstance(settings.get("lr"), Tensor):
        settings["lr"] = float(settings["lr"])
    if kind.__module__.startswith("torch.optim."):
        with suppress(TypeError):  # a setting that has no hash
            return _probe_once(kind, num_dims, tuple(settings.items()))
    return _probe(kind, num_dims, settings)


@lru_cache(maxsize=64)
def _probe_once(kind: Any, num_dims: int, settings: tuple[tuple[str, Any], ...]) -> bool | None:
    return _probe(kind, num_dims, dict(settings))


def _probe(kind: type[Any], num_dims: int, settings: dict[str, Any]) -> bool | None:
    generator = torch.get_rng_state()
    try:
        one = _displacement(kind, settings, num_dims, _SIZE)
        other = _displacement(kind, settings, num_dims, _SIZE * _SCALE)
    except Exception:
        return None
    finally:
        torch.set_rng_state(generator)
    size = float(one.norm())
    if not (math.isfinite(size) and size > 0 and bool(other.isfinite().all())):
        return None
    return float((other - one).norm()) <= _TOLERANCE * size


def _probed_class(kind: type[torch.optim.Optimizer]) -> type[Any]:
    bases = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]
    return next((base for base in bases if base.__module__.startswith("torch.optim.")), kind)


def _displacement(kind: type[Any], settings: dict[str, Any], num_dims: int, size: float) -> Tensor:
    """The movement of a parameter in the last steps of a probe."""
    shape = [2] * num_dims
    p = torch.nn.Parameter(torch.full(shape, 0.05, dtype=torch.float64, device="cpu"))
    accepted = inspect.signature(kind).parameters
    # Some classes require an argument that is also a setting of each group.
    arguments = {name: settings[name] for name in settings if name in accepted}
    probe = kind([{**settings, "params": [p]}], **arguments)
    phases = torch.arange(p.numel(), dtype=torch.float64, device="cpu").reshape(p.shape)
    start = p.detach().clone()
    for step in range(_PROBE_STEPS):
        if step == _PROBE_STEPS - _COMPARED_STEPS:
            start = p.detach().clone()
        p.grad = size * (0.6 + 0.4 * torch.cos(1.3 * step + phases))
        probe.step()
    return p.detach() - start
