"""The interface of ReplicatedModule to its devices, and the errors that all engines raise."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.core.loss_weights import Weight
from runtime.loop.learning_rate import LearningRate
from runtime.loop.rank_replica import FollowingOptimizer, LossFn
from runtime.replica.step_checks import STEP_CHECKS


class LoopEngine(Protocol):
    """Trains one model on one device or on several."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, in order of rank."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """Each device's model; rank 0's is the user's."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The model's optimizer."""

    @property
    def rate(self) -> LearningRate:
        """The learning rate of the optimizer."""

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
        """Step the optimizer with the gradients of the whole batch, and clear them."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole batch; returns their norm before."""

    def zero_grad(self) -> None:
        """Clear all gradients since the last step."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes reduce no gradients."""

    def sync_params(self) -> None:
        """Copy the model's parameters and buffers to all devices now."""

    def check_caller(self) -> None:
        """Refuse a change of the model by a rank's thread, during a pass."""

    def close(self) -> None:
        """End the threads, if there are any, and the recording."""


class DirectSteps:
    """Observes steps that the caller makes, directly or by a ``GradScaler``.

    These are steps of the model's optimizer, and of others that train parameters of the model: the
    latter are refused after the engine's step, which has cleared their gradients. An optimizer
    that does not initialise its base class has no hooks, and is not observed.

    Args:
        optimizer: Its optimizer; it may outlive the engine.
        before: A method of the engine, called before such a step; may refuse it.
        after: A method of the engine, called after it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stepped: set[int] = set()  # parameters of other optimizers that have stepped
        self._cleared: set[int] = set()  # and of those whose gradients the engine has cleared
        STEP_CHECKS.watch(self._check_other, model.parameters())
        self._is_expected = False
        self._handles: list[RemovableHandle] = []
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return
        this = weakref.ref(self)
        self._before, self._after = weakref.WeakMethod(before), weakref.WeakMethod(after)
        self._handles = [
            optimizer.register_step_pre_hook(partial(_call, this, "_before")),
            optimizer.register_step_post_hook(partial(_call, this, "_after")),
        ]

    @contextmanager
    def expected(self) -> Iterator[None]:
        """A step of the engine."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def clearing(self, params: Iterable[Tensor]) -> None:
        """Record that the engine clears all gradients, after a step of the model's optimizer."""
        known = self._stepped
        if (optimizer := self._optimizer()) is not None:
            known = known.union(id(p) for group in optimizer.param_groups for p in group["params"])
        self._cleared = {id(p) for p in params if id(p) not in known and p.grad is not None}
        self._stepped = set()

    def _check_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any optimizer that has parameters of the model."""
        if optimizer is self._optimizer() or isinstance(optimizer, FollowingOptimizer):
            return
        params = [p for group in optimizer.param_groups for p in group["params"]]
        cleared = [p for p in params if id(p) in self._cleared]
        if cleared and all(p.grad is None for p in cleared):  # else of a later backward pass
            raise RuntimeError(CLEARED.format(kind=type(optimizer).__name__))
        self._stepped.update(id(p) for p in params if p.grad is not None)

    def close(self) -> None:
        """Observe no more steps. Idempotent."""
        self._cleared = set()
        for handle in self._handles:
            handle.remove()


def _call(steps: weakref.ref[DirectSteps], name: str, *args: object) -> None:
    if (this := steps()) is None or this._is_expected:
        return
    if (method := getattr(this, name)()) is not None:
        method()


CLEARED = (
    "{kind} would step without gradients, which model.step() has cleared: step it before "
    "model.step(), or pass all parameters to one optimizer, in groups of their own"
)
STEPPED_OUTSIDE = (
    "each device keeps its own gradients until model.step() reduces them, after accumulate(...) "
    "and with max_anchor: call model.step() instead of optimizer.step()"
)
STEPPED_DEFERRED = (
    "each device keeps its own gradients of the backward passes within no_sync(): run the last "
    "backward pass of the step outside of it, or call model.step()"
)
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
