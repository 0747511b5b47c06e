"""Modules and optimizers in the form that a CUDA graph of their step requires."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class CapturableOptimizer:
    """Lets an optimizer count its steps and read its learning rates on the device.

    A graph holds the numbers that Python had when it was captured. So the learning rates
    stand in tensors during each step, captured or not, and are plain numbers at all other
    times: for the user, the scheduler and in checkpoints. Every step of every rank uses the
    same kind, which keeps replicas equal in every bit.

    Optimizers that take no tensor there (SGD, unless it is ``fused``) keep plain numbers;
    :meth:`settings` tells when those have changed.

    Args:
        optimizer: Not stepped yet. ``capturable`` is set in it where it exists.
        device: Where its parameters lie.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
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
        """Also for groups that are added while the run goes on."""
        for group in self._optimizer.param_groups[len(self._tensors) :]:
            takes = group.get("capturable") or group.get("fused")
            rate = group["lr"]
            there = isinstance(rate, Tensor) and rate.device == self._device
            dtype = _rate_dtype(group)
            tensor = torch.zeros((), dtype=dtype, device=self._device)
            self._tensors.append(tensor if takes and not there else None)
            self._written.append(None)

    def refresh(self) -> None:
        """Bring the tensors to the present learning rates; the host does not wait."""
        groups = self._optimizer.param_groups
        if len(groups) > len(self._tensors):
            self._add_groups()
        for i, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if tensor is not None and (rate := float(group["lr"])) != self._written[i]:
                self._written[i] = rate
                tensor.fill_(rate)

    @contextmanager
    def rates(self) -> Iterator[None]:
        """The learning rates are tensors, as they were at the last :meth:`refresh`."""
        groups = self._optimizer.param_groups
        plain = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            if tensor is not None:
                group["lr"] = tensor
        try:
            yield
        finally:
            for group, rate in zip(groups, plain, strict=True):
                group["lr"] = rate

    def settings(self) -> Hashable:
        """Every number that a graph of the step would hold on to."""
        return tuple(
            (
                len(group["params"]),
                tuple(
                    (name, _plain(value))
                    for name, value in group.items()
                    if name not in ("params", "initial_lr") and (name != "lr" or tensor is None)
                ),
            )
            for group, tensor in zip(self._optimizer.param_groups, self._tensors, strict=True)
        )

    def changed_settings(self, before: Hashable) -> str:
        """Names of the settings that are not as they were."""
        names = set()
        for (_, old), (_, new) in zip(before, self.settings(), strict=False):  # type: ignore[call-overload]
            names |= {name for name, value in new if (name, value) not in old}
        return ", ".join(sorted(names))

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of its state, which a graph of the step reads and writes."""
        return [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]

    def state_mark(self) -> tuple[Any, int, Any]:
        """Tells cheaply whether the state was replaced: compare with ``is`` and ``==``."""
        state = self._optimizer.state
        return state, len(state), next(iter(state.values()), None)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around the capture of a step: what Python keeps of the state must stay as it is.

        A replay would not repeat what Python does. Changes are taken back.

        Raises:
            CannotCapture: The step changes its state elsewhere than on the device.
            StateMissing: It makes state that no step has made before.
        """
        optimizer = self._optimizer
        for p, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != p.device:
                    raise CannotCapture(f"its state {name!r} lies on {value.device}")
        states = {p: dict(state) for p, state in optimizer.state.items()}
        groups = [dict(group) for group in optimizer.param_groups]
        try:
            yield
        finally:
            made, changed = self._differences(states, groups)
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
        if made:
            raise StateMissing

    def _differences(
        self, states: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]
    ) -> tuple[bool, str | None]:
        """Whether state was made, and the name of something that was changed."""
        made = False
        for p, state in self._optimizer.state.items():
            before = states.get(p)
            for name, value in state.items():
                if before is None or before.get(name) is None:
                    made = made or value is not None
                elif not _same(before[name], value):
                    return made, name
        for group, old in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in group.items():
                if name not in ("params", "lr") and not _same(old.get(name), value):
                    return made, name
        return made, None


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return before is now
    return bool(before == now)


def _rate_dtype(group: dict[str, Any]) -> torch.dtype:
    """As exact as the parameters; the fused kernels read a float32, whatever the parameters are."""
    params = group["params"]
    exact = params and params[0].dtype is torch.float64 and not group.get("fused")
    return torch.float64 if exact else torch.float32


def _plain(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value)
    return tuple(value) if isinstance(value, list) else value


class ModuleTensors:
    """The tensors that a module keeps beside its parameters: buffers and plain attributes.

    A graph reads and writes them where they were when it was captured. A module that gives
    one of them a new tensor, in a step or between two, is not followed by any replay.

    Args:
        module: The module; its parts are those of now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, object], str, str, Tensor]] = []
        for prefix, part in module.named_modules():
            for place in (part._buffers, part.__dict__):
                for key, value in place.items():
                    if isinstance(value, Tensor):
                        name = f"{prefix}.{key}" if prefix else key
                        self._places.append((place, key, name, value))

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [value for _, _, _, value in self._places]

    def first_replaced(self) -> str | None:
        """Name of the first that is another tensor now."""
        for place, key, name, value in self._places:
            if place.get(key) is not value:
                return name
        return None

    def put_back(self) -> None:
        """Make them what they were."""
        for place, key, _, value in self._places:
            place[key] = value


class CannotCapture(Exception):
    """The step cannot be a graph; the message says why."""


class StateMissing(Exception):
    """The optimizer has not stepped yet, or its state was dropped."""
