"""Modules and optimizers in the form that a CUDA graph of their step requires."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.replica.scaled_rates import ScaledRates


def _unscaled(index: int) -> float:
    del index
    return 1.0


class CapturableOptimizer:
    """Makes an optimizer count its steps and read its learning rates on the device.

    A graph keeps the Python numbers of its capture. Learning rates are therefore tensors during
    each step, captured or not, and plain numbers at all other times: for the user, the scheduler
    and in checkpoints. All steps of all ranks use the same form, so replicas stay bitwise equal.

    Optimizers that accept no tensor as a learning rate (SGD, unless it is ``fused``) keep plain
    numbers, which are part of :meth:`settings`.

    Args:
        optimizer: Not stepped yet. ``capturable`` is set in it where it exists.
        scaled: The factors of its learning rates; ``None``: they are not scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        scaled: ScaledRates | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._factor_of = _unscaled if scaled is None else scaled.of_group
        self._device = device
        if "capturable" in optimizer.defaults:
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["capturable"] = True
        # PyTorch's warning that such an optimizer also runs without a capture.
        optimizer._warned_capturable_if_run_uncaptured = True
        self._tensors: list[Tensor | None] = []
        self._written: list[float | None] = []
        self._add_groups()

    def _add_groups(self) -> None:
        """Make the tensors of new groups, which may also be added during the run."""
        for group in self._optimizer.param_groups[len(self._tensors) :]:
            accepts_tensor = group.get("capturable") or group.get("fused")
            rate = group["lr"]
            on_device = isinstance(rate, Tensor) and rate.device == self._device
            dtype = _rate_dtype(group)
            tensor = torch.zeros((), dtype=dtype, device=self._device)
            self._tensors.append(tensor if accepts_tensor and not on_device else None)
            self._written.append(None)

    def refresh(self) -> None:
        """Write the current learning rates to the tensors; the host does not wait."""
        groups = self._optimizer.param_groups
        if len(groups) > len(self._tensors):
            self._add_groups()
        for i, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if tensor is None:
                continue
            rate = float(group["lr"]) * self._factor_of(i)
            if rate != self._written[i]:
                self._written[i] = rate
                tensor.fill_(rate)

    @contextmanager
    def rates(self) -> Iterator[None]:
        """Make the learning rates tensors, with the values of the last :meth:`refresh`."""
        groups = self._optimizer.param_groups
        plain = [group["lr"] for group in groups]
        for i, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if tensor is not None:
                group["lr"] = tensor
            elif (factor := self._factor_of(i)) != 1.0:
                group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, plain, strict=True):
                group["lr"] = rate

    def settings(self) -> Hashable:
        """All numbers that a graph of the step keeps from its capture."""
        return tuple(
            (
                len(group["params"]),
                (
                    ("lr_factor", self._factor_of(i) if tensor is None else 1.0),
                    *(
                        (name, _plain(value))
                        for name, value in group.items()
                        if name not in ("params", "initial_lr") and (name != "lr" or tensor is None)
                    ),
                ),
            )
            for i, (group, tensor) in enumerate(
                zip(self._optimizer.param_groups, self._tensors, strict=True)
            )
        )

    def changed_settings(self, before: Hashable) -> str:
        """Names of the settings that differ from ``before``."""
        names = set()
        for (_, old), (_, new) in zip(before, self.settings(), strict=False):  # type: ignore[call-overload]
            names |= {name for name, value in new if (name, value) not in old}
        return ", ".join(sorted(names))

    def state_tensors(self) -> list[Tensor]:
        """All tensors of its state, which a graph of the step reads and writes."""
        return [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]

    def state_identity(self) -> tuple[Any, int, Any]:
        """Identifies the state object at low cost: compare with ``is`` and ``==``."""
        state = self._optimizer.state
        return state, len(state), next(iter(state.values()), None)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context of a step's capture, in which Python values of the state must not change.

        A replay would not repeat changes made in Python. They are reverted.

        Raises:
            CannotCapture: The step changes its state outside the device.
            StateMissing: The step creates state that does not exist yet.
        """
        optimizer = self._optimizer
        for p, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != p.device:
                    raise CannotCapture(f"its state {name!r} is on {value.device}")
        states = {p: dict(state) for p, state in optimizer.state.items()}
        groups = [dict(group) for group in optimizer.param_groups]
        try:
            yield
        finally:
            created, changed = self._differences(states, groups)
            for p in list(optimizer.state):
                if p in states:
                    optimizer.state[p].clear()
                    optimizer.state[p].update(states[p])
                else:
                    del optimizer.state[p]
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
        if changed is not None:
            raise CannotCapture(f"each step changes {changed!r} of its state in Python")
        if created:
            raise StateMissing

    def _differences(
        self, states: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]
    ) -> tuple[bool, str | None]:
        """True if state was created, and the name of a changed value, if any."""
        created = False
        for p, state in self._optimizer.state.items():
            before = states.get(p)
            for name, value in state.items():
                if before is None or before.get(name) is None:
                    created = created or value is not None
                elif not _same(before[name], value):
                    return created, name
        for group, old in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in group.items():
                if name not in ("params", "lr") and not _same(old.get(name), value):
                    return created, name
        return created, None


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return before is now
    return bool(before == now)


def _rate_dtype(group: dict[str, Any]) -> torch.dtype:
    """The precision of the parameters; fused kernels always read a float32."""
    params = group["params"]
    exact = params and params[0].dtype is torch.float64 and not group.get("fused")
    return torch.float64 if exact else torch.float32


def _plain(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value)
    return tuple(value) if isinstance(value, list) else value


class ModuleTensors:
    """Tensors of a module other than its parameters: buffers and plain attributes.

    A graph reads and writes the tensors of its capture. If the module replaces one of them, in a
    step or between two, replays still use the old one.

    Args:
        module: The module, with its current submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, object], str, str, Tensor]] = []
        for prefix, part in module.named_modules():
            for place in (part._buffers, part.__dict__):
                for key, value in place.items():
                    if isinstance(value, Tensor):
                        name = f"{prefix}.{key}" if prefix else key
                        self._places.append((place, key, name, value))

    def first_replaced(self) -> str | None:
        """Name of the first tensor that the module has replaced; ``None`` if there is none."""
        for place, key, name, value in self._places:
            if place.get(key) is not value:
                return name
        return None

    def restore(self) -> None:
        for place, key, _, value in self._places:
            place[key] = value


class CannotCapture(Exception):
    """The step cannot be captured as a graph; the message has the reason."""


class StateMissing(Exception):
    """The optimizer has no state: it has not stepped yet, or its state was dropped."""
