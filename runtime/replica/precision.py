"""Precision: the dtype of forward passes, and the scale of losses that fp16 requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of a replica's passes, with the gradient scaler of fp16.

    Args:
        name: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        device: The device of the passes.

    Attributes:
        dtype: The dtype to which forward passes cast; ``None``: they do not cast.
        scales: True if losses are scaled before their backward pass.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device_type = device.type
        self.dtype = _AUTOCAST.get(name)
        self.scales = name == "fp16"
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.scales)
        if self.scales:
            # Creates the scale now: a rank without a batch unscales before it ever scales.
            self._scaler.scale(torch.zeros((), device=device))

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.dtype)

    def without_autocast(self) -> AbstractContextManager[Any]:
        """The context of backward passes and steps within :meth:`autocast`.

        Casts of parameters are not kept, since the step changes these.
        """
        return nullcontext() if self.dtype is None else self._paused_autocast()

    @contextmanager
    def _paused_autocast(self) -> Iterator[None]:
        with torch.autocast(self._device_type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss) if self.scales else loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale."""
        if self.scales:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Step an optimizer, and adjust the scale.

        Returns:
            1 on the device if the step was skipped, as gradients overflowed; ``None``: it was made.
        """
        if not self.scales:
            optimizer.step()
            return None
        self._scaler.step(optimizer)
        found = list(self._scaler._found_inf_per_device(optimizer).values())
        self._scaler.update()
        return found[0] if found else None

    def state_dict(self) -> dict[str, Any] | None:
        """State of the scaler for a checkpoint; ``None``: losses are not scaled."""
        return self._scaler.state_dict() if self.scales else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the result of :meth:`state_dict`, unless either precision does not scale."""
        if self.scales and state:
            self._scaler.load_state_dict(dict(state))
