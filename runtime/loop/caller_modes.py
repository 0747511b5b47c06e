"""Gradient mode, inference mode and autocast of the calling thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class CallerModes:
    """Gradient mode, inference mode and autocast of a thread.

    Attributes:
        grad: True if gradients are enabled.
        inference: True if ``torch.inference_mode`` is enabled.
        autocasts: Device type and dtype of each enabled autocast.
        cache: True if autocast caches cast weights.
    """

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    cache: bool

    @classmethod
    def capture(cls) -> CallerModes:
        """The modes of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in _DEVICE_TYPES
                if torch.is_autocast_enabled(kind)
            ),
            cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the modes to the calling thread for the duration of the context."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cache))
            yield


def modes_not_carried() -> list[str]:
    """Names of the ``TorchFunctionMode`` and ``TorchDispatchMode`` objects of the calling thread.

    Ranks cannot share them. Default devices are left out.
    """
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Disable autocast for a backward pass, as PyTorch requires.

    Backward runs each operation in the dtype of its forward, unless autocast changes it.
    """
    with ExitStack() as stack:
        for kind in _DEVICE_TYPES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
