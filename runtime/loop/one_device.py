"""Engine of one device, in the caller's thread."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.core.loss_weights import Weight
from runtime.loop.learning_rate import LearningRate
from runtime.loop.loop_engine import (
    LOCAL_GRADIENTS,
    MIXED_GRADIENTS,
    STEPPED_OUTSIDE,
    WEIGHTED_TWICE,
    DirectSteps,
    total_weight,
)
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.rank_replica import (
    LossFn,
    clip_and_scale_,
    divide_grads_,
    train_batch,
)
from runtime.loop.scatter import nested_to_device
from runtime.replica.max_norm import MaxNorm


class SingleDeviceEngine:
    """One model on one device, in the caller's thread and on its streams.

    Attributes:
        devices, model, models, optimizer, rate: See :class:`LoopEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
        max_norm: MaxNorm,
        recorder: LoopRecorder,
    ) -> None:
        self.model = model
        self._device = device
        self._params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self._steps = DirectSteps(model, optimizer, self._before_direct_step, self._after_step)
        self._max_norm = max_norm
        self._recorder = recorder
        self._weights: list[Weight | None] = []  # of accumulated batches
        self._guards: list[RemovableHandle] = []
        self._nodes: dict[
            int, Any
        ] = {}  # autograd nodes of parameters, by index; the hooks are on them
        self.devices = (device,)
        self.models = (model,)
        self.rate = LearningRate(optimizer)

    @property
    def plain_forward(self) -> Callable[..., Any]:
        """The callable that runs a batch with the least overhead."""
        plain = self._device.type == "cpu" and not self._recorder.enabled
        return self.model if plain else self.forward

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """The whole batch."""
        return (1.0,)

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """One batch: nothing is reduced."""
        return (1,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs to the device, as with several devices, and run the model."""
        start_s = time.monotonic()
        if self._device.type != "cpu":
            args, kwargs = nested_to_device((args, kwargs), self._device)
        output = self.model(*args, **kwargs)
        self._recorder.record("forward", start_s)
        if torch.is_grad_enabled() and self._recorder.enabled:
            self._recorder.watch_backward(output)
            self._recorder.record_batches(0, [(args, kwargs)])
        return output

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Run forward, loss and backward of each batch sequentially."""
        self._detect_zero_grad()
        if not self._weights and any(p.grad is not None for p in self._params):
            raise RuntimeError(MIXED_GRADIENTS)
        start_s = time.monotonic()
        losses = []
        self._remove_guards()
        try:
            for batch in batches:
                loss, weight = train_batch(self.model, loss_fn, batch, self._device, self._params)
                losses.append(loss)
                self._weights.append(weight)
            total_weight(self._weights)
        except BaseException:
            self.zero_grad()  # partial gradients are invalid
            raise
        if self._weights:
            self._guard_gradients()
        self._recorder.record("accumulate", start_s)
        self._recorder.record_batches(0, batches)
        return torch.stack(losses) if losses else torch.empty(0, device=self._device)

    def step(self, weight: Weight | None = None, *, reduce: bool | None = None) -> None:
        """Clip, step and clear the gradients; nothing is reduced."""
        start_s = time.monotonic()
        self.rate.check()
        self._detect_zero_grad()
        empty = False
        if self._weights:
            if weight is not None:
                raise ValueError(WEIGHTED_TWICE)
            weight = total_weight(self._weights)
        if weight is not None:
            divide_grads_(self._params, weight, max(1, len(self._weights)))
            empty = isinstance(weight, float) and weight == 0
        if self._weights:
            grads = [p.grad for p in self._params if p.grad is not None]
            clip_and_scale_(grads, self._max_norm, 1.0, 1.0 / len(self._weights))
            self._weights = []
        else:
            self._max_norm.clip(self._params)
        self._remove_guards()
        if not empty:
            with self._steps.expected():
                self.optimizer.step()
        self._steps.clearing(self._params)
        self.model.zero_grad(set_to_none=True)
        self._after_step(start_s)

    def _before_direct_step(self) -> None:
        """Prepare a step of the optimizer that the caller makes."""
        self._detect_zero_grad()
        if self._weights:
            raise RuntimeError(STEPPED_OUTSIDE)
        self.rate.check()
        self._max_norm.clip(self._params)

    def _after_step(self, start_s: float | None = None) -> None:
        self.rate.advance()
        self._recorder.record_step(1, start_s)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if self._weights:
            raise RuntimeError(LOCAL_GRADIENTS)
        return nn.utils.clip_grad_norm_(self._params, max_norm)

    def zero_grad(self) -> None:
        self._weights = []
        self._remove_guards()
        self.model.zero_grad(set_to_none=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """No effect: nothing is reduced."""
        return nullcontext()

    def sync_params(self) -> None:
        """No effect: there is one replica."""

    def check_caller(self) -> None:
        """No effect: there are no threads."""

    def close(self) -> None:
        self._steps.close()
        self._recorder.finish()

    def _detect_zero_grad(self) -> None:
        """Account for accumulated gradients that ``optimizer.zero_grad()`` cleared."""
        if self._weights and all(p.grad is None for p in self._params):
            self._weights = []

    def _guard_gradients(self) -> None:
        """Raise before a ``loss.backward()`` adds gradients, until the step."""
        for index, p in enumerate(self._params):
            if p.requires_grad and index not in self._nodes:
                self._nodes[index] = torch.autograd.graph.get_gradient_edge(p).node
        refuse = partial(_check_mixed, weakref.ref(self))  # autograd nodes may outlive the engine
        self._guards = [node.register_prehook(refuse) for node in self._nodes.values()]

    def _remove_guards(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards = []
        if self._device.type != "cpu":
            self._nodes.clear()  # a node belongs to the stream on which it was created


def _check_mixed(engine: weakref.ref[SingleDeviceEngine], grads: Any) -> None:
    if (self := engine()) is not None:
        self._detect_zero_grad()
        if self._weights:
            raise RuntimeError(MIXED_GRADIENTS)
