"""Engine of one device, in the caller's thread."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.core.loss_weights import Weight
from runtime.loop.learning_rate import LearningRate
from runtime.loop.loop_engine import LOCAL_GRADIENTS, MIXED_GRADIENTS, WEIGHTED_TWICE, total_weight
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.loop_replica import (
    LossFn,
    StepGuard,
    average_accumulated_,
    divide_grads_,
    read_loss,
    weighted_backward,
)
from runtime.loop.scatter import nested_to_device, to_replica
from runtime.replica.build import OptimFactory, build_optimizer


class SingleDeviceEngine:
    """One model on one device, in the caller's thread and on its streams.

    Args:
        model: On the device.
        device: The model's device.
        optim_factory: Makes the optimizer.
        max_grad_norm: Clip gradients to this L2 norm; ``None``: do not clip.
        recorder: Records the work on a timeline.

    Attributes:
        devices, models, optimizers, rate: See :class:`LoopEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        optim_factory: OptimFactory,
        max_grad_norm: float | None,
        recorder: LoopRecorder,
    ) -> None:
        model.train()
        model.zero_grad(set_to_none=True)
        self._model = model
        self._device = device
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = build_optimizer(optim_factory, model, self._params, None)
        self._step_guard = StepGuard(self._optimizer)
        self._max_grad_norm = max_grad_norm
        self._recorder = recorder
        self._num_accumulated = 0
        self._weights: list[Weight | None] = []
        self._guards: list[RemovableHandle] = []
        self._nodes: dict[
            int, Any
        ] = {}  # autograd nodes of parameters, by index; the hooks are on them
        self.devices = (device,)
        self.models = (model,)
        self.optimizers = (self._optimizer,)
        self.rate = LearningRate(self._optimizer)

    @property
    def plain_forward(self) -> Callable[..., Any]:
        """The callable that runs a batch with the least overhead."""
        plain = self._device.type == "cpu" and not self._recorder.enabled
        return self._model if plain else self.forward

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
        output = self._model(*args, **kwargs)
        self._recorder.record("forward", start_s)
        if torch.is_grad_enabled() and self._recorder.enabled:
            self._recorder.watch_backward(output)
            self._recorder.record_batches(0, [(args, kwargs)])
        return output

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Run forward, loss and backward of each batch sequentially."""
        self._detect_zero_grad()
        if not self._num_accumulated and any(p.grad is not None for p in self._params):
            raise RuntimeError(MIXED_GRADIENTS)
        start_s = time.monotonic()
        losses = []
        self._remove_guards()
        try:
            for batch in batches:
                loss, weight = read_loss(
                    loss_fn(self._model, nested_to_device(batch, self._device))
                )
                losses.append(weighted_backward(loss, weight, self._params))
                self._num_accumulated += 1
                self._weights.append(weight)
            total_weight(self._weights)
        except BaseException:
            self.zero_grad()  # partial gradients are invalid
            raise
        if self._num_accumulated:
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
        if self._num_accumulated:
            if weight is not None:
                raise ValueError(WEIGHTED_TWICE)
            weight = total_weight(self._weights)
        if weight is not None:
            divide_grads_(self._params, weight, max(1, self._num_accumulated))
            empty = isinstance(weight, float) and weight == 0
        if self._num_accumulated:
            average_accumulated_(self._params, self._num_accumulated, self._max_grad_norm)
            self._num_accumulated = 0
            self._weights = []
        elif self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._max_grad_norm)
        self._remove_guards()
        if not empty:
            with self._step_guard.stepping():
                self._optimizer.step()
        self._model.zero_grad(set_to_none=True)
        self.rate.advance()
        self._recorder.record("step", start_s)
        self._recorder.step += 1

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if self._num_accumulated:
            raise RuntimeError(LOCAL_GRADIENTS)
        return nn.utils.clip_grad_norm_(self._params, max_norm)

    def zero_grad(self) -> None:
        self._num_accumulated = 0
        self._weights = []
        self._remove_guards()
        self._model.zero_grad(set_to_none=True)

    def sync_params(self) -> None:
        """No effect: there is one replica."""

    def load_optimizer(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def set_attribute(self, name: str, value: object) -> None:
        setattr(self._model, name, to_replica(value, self._device, copy=False))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        own = to_replica(tensor, self._device, copy=False)
        self._model.register_buffer(name, own, persistent)

    def close(self) -> None:
        """End the recording; the optimizer may be stepped directly from then on."""
        self._step_guard.close()
        self._recorder.finish()

    def _detect_zero_grad(self) -> None:
        """Account for accumulated gradients that ``optimizer.zero_grad()`` cleared."""
        if self._num_accumulated and all(p.grad is None for p in self._params):
            self._num_accumulated = 0
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
        if self._num_accumulated:
            raise RuntimeError(MIXED_GRADIENTS)
