"""Outer optimizers: they apply the mean change of all machines to the global parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.core.checks import check_float


class OuterOptimizer(ABC):
    """Computes new global parameters from the old ones and the weighted mean change of all
    machines. Every machine makes the same step, bit for bit.
    """

    @abstractmethod
    def step(self, old: Sequence[Tensor], change: Sequence[Tensor]) -> list[Tensor]:
        """The new global parameters.

        Args:
            old: Flat parameters on the CPU, one tensor for each dtype; read-only.
            change: The mean of ``old - trained`` over machines, of the same shapes, in float32
                or better: the gradient of the outer step.

        Returns:
            New tensors, of the dtypes of ``old``.
        """

    @property
    def name(self) -> str:
        """Identity that must be equal on all machines: the ``repr`` if defined, else the class."""
        kind = type(self)
        return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(self)

    @property
    def min_rounds(self) -> float:
        """Rounds in a run, with fewer of which a warning is logged."""
        return 0.0

    def state(self) -> list[Tensor]:
        """State tensors for healing and checkpoints; never modified afterwards."""
        return []

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Restore the result of :meth:`state`.

        Raises:
            ValueError: The state is another outer optimizer's.
        """
        if state:
            raise ValueError(f"{self!r} has no state, but got {len(state)} tensors")


class Mean(OuterOptimizer):
    """The weighted mean of the machines' parameters."""

    def step(self, old: Sequence[Tensor], change: Sequence[Tensor]) -> list[Tensor]:
        """See :meth:`OuterOptimizer.step`."""
        return [(p - c).to(p.dtype) for p, c in zip(old, change, strict=True)]

    def __repr__(self) -> str:
        return "Mean()"


class Nesterov(OuterOptimizer):
    """SGD with Nesterov momentum on the mean change of the machines, as in DiLoCo (Douillard et
    al., 2023).

    Momentum takes ``1 / (1 - momentum)`` rounds to build up. The defaults are for runs of 30
    rounds or more, DiLoCo's ``lr=0.7, momentum=0.9`` for hundreds; with fewer, :class:`Mean` is
    better. A run of fewer than ``2 / (1 - momentum)`` rounds logs a warning.

    The momentum buffers are float32 or better, one for each dtype of the parameters.

    Args:
        lr: Learning rate of the outer step; 1.0 without momentum equals :class:`Mean`.
        momentum: Momentum of the outer step, in [0, 1).
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.5) -> None:
        self.lr = check_float("lr", lr, 0.0, above=True)
        self.momentum = check_float("momentum", momentum, 0.0)
        if not momentum < 1:
            raise ValueError(f"Nesterov(momentum={momentum}): pass a number in [0, 1)")
        self._buffers: list[Tensor] = []

    @property
    def min_rounds(self) -> float:
        """See :attr:`OuterOptimizer.min_rounds`."""
        return 2 / (1 - self.momentum) if self.momentum else 0.0

    def step(self, old: Sequence[Tensor], change: Sequence[Tensor]) -> list[Tensor]:
        """See :meth:`OuterOptimizer.step`."""
        if self._buffers:
            # New tensors: a peer may be reading the old ones to heal.
            pairs = zip(self._buffers, change, strict=True)
            self._buffers = [(b * self.momentum).add_(c) for b, c in pairs]
        else:
            self._buffers = [c.clone() for c in change]
        return [
            (p - self.lr * torch.add(c, b, alpha=self.momentum)).to(p.dtype)
            for p, c, b in zip(old, change, self._buffers, strict=True)
        ]

    def state(self) -> list[Tensor]:
        """See :meth:`OuterOptimizer.state`."""
        return list(self._buffers)

    def load_state(self, state: Sequence[Tensor]) -> None:
        """See :meth:`OuterOptimizer.load_state`."""
        self._buffers = list(state)

    def __repr__(self) -> str:
        return f"Nesterov(lr={self.lr:g}, momentum={self.momentum:g})"
