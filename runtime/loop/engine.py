"""What stands behind the module of a loop: one device or several, used alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.loop.learning_rate import LearningRate
from runtime.loop.replica import LossFn

MIXED = (
    "loss.backward() and accumulate(...) cannot share a step: their gradients are averaged "
    "differently; call model.step() or model.zero_grad() in between"
)
CLIP_LATE = (
    "accumulate(...) leaves each device its own gradients until step(): clip them with "
    "DdpConfig(max_grad_norm=...)"
)


class Engine(ABC):
    """Trains one model on some devices.

    Attributes:
        devices: Theirs, in order of rank.
        models: The replicas; the first one is the user's.
        optimizers: One for each.
        rate: The learning rate.
    """

    devices: tuple[torch.device, ...]
    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    rate: LearningRate

    @property
    @abstractmethod
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's part of a batch."""

    @property
    @abstractmethod
    def batch_counts(self) -> tuple[int, ...]:
        """Each device's batches between two reductions."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch."""

    @abstractmethod
    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Train several batches up to their gradients; gives their losses."""

    @abstractmethod
    def step(self) -> None:
        """Step every optimizer and forget the gradients."""

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch; gives the norm they had."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def sync_params(self) -> None:
        """Give rank 0's weights to all."""

    @abstractmethod
    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every rank."""

    @abstractmethod
    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of every replica."""

    @abstractmethod
    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to every replica."""

    @abstractmethod
    def close(self) -> None:
        """End what was started. Idempotent."""
