"""The interface of ReplicatedModule to its devices, and the errors that all engines raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runtime.core.loss_weights import Weight
from runtime.loop.learning_rate import LearningRate
from runtime.loop.loop_replica import LossFn


class LoopEngine(Protocol):
    """Trains one model on one device or on several."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, in order of rank."""

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Each device's model; rank 0's is the user's."""

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Each device's optimizer."""

    @property
    def rate(self) -> LearningRate:
        """The learning rate of all optimizers."""

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """Each device's share of a batch."""

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Number of batches of each device between two reductions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch."""

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Add up the gradients of several batches, each trained on one device."""

    def step(self, weight: Weight | None = None, *, reduce: bool | None = None) -> None:
        """Reduce the gradients, step every optimizer and clear the gradients."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch; returns their norm before."""

    def zero_grad(self) -> None:
        """Clear all gradients since the last step."""

    def sync_params(self) -> None:
        """Copy rank 0's parameters and buffers to all replicas."""

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load an optimizer's state on every rank."""

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of every replica."""

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to every replica."""

    def close(self) -> None:
        """End the threads, if there are any, and the recording."""


MIXED_GRADIENTS = (
    "loss.backward() and accumulate(...) cannot share a step: their gradients are averaged "
    "differently; call model.step() or model.zero_grad() in between"
)
LOCAL_GRADIENTS = (
    "each device keeps its own gradients until they are reduced, after accumulate(...) and with "
    "max_anchor: clip them with DdpConfig(max_grad_norm=...)"
)
WEIGHTED_TWICE = (
    "step(weight=...) divides the gradients of loss.backward(): after accumulate(...) leave it out "
    "and let loss_fn return (loss, weight)"
)
PARTLY_WEIGHTED = (
    "loss_fn returned a weight for some batches of this step only, and what the other losses are "
    "means over is not known: return (loss, weight) for all of them"
)


def total_weight(weights: Sequence[Weight | None]) -> Weight | None:
    """The sum of weights that are given for all batches, or for none of them."""
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise ValueError(PARTLY_WEIGHTED)
    return sum(given[1:], given[0]) if given else None
