"""An optimizer whose step can be captured: what it reads must lie on the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
        if "capturable" in optimizer.defaults:
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["capturable"] = True
        # PyTorch's warning that such an optimizer also runs without a capture.
        optimizer._warned_capturable_if_run_uncaptured = True
        self._tensors: list[Tensor | None] = []
        for group in optimizer.param_groups:
            takes = group.get("capturable") or group.get("fused")
            plain = not isinstance(group["lr"], Tensor)
            self._tensors.append(
                torch.zeros((), dtype=_rate_dtype(group["params"]), device=device)
                if takes and plain
                else None
            )
        self._written: list[float | None] = [None] * len(self._tensors)

    def refresh(self) -> None:
        """Bring the tensors to the present learning rates; the host does not wait."""
        groups = self._optimizer.param_groups
        for i, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if tensor is not None and group["lr"] != self._written[i]:
                self._written[i] = group["lr"]
                tensor.fill_(group["lr"])

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
            tuple(
                (name, _plain(value))
                for name, value in group.items()
                if name not in ("params", "initial_lr") and (name != "lr" or tensor is None)
            )
            for group, tensor in zip(self._optimizer.param_groups, self._tensors, strict=True)
        )

    def changed_settings(self, before: Hashable) -> str:
        """Names of the settings that are not as they were."""
        names = set()
        for old, new in zip(before, self.settings(), strict=True):  # type: ignore[call-overload]
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


def _rate_dtype(params: list[Tensor]) -> torch.dtype:
    return torch.float64 if params and params[0].dtype is torch.float64 else torch.float32


def _plain(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value)
    return tuple(value) if isinstance(value, list) else value
