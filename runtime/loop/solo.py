"""One device: the model itself, with nothing in between."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.loop.ambient import outside_autocast
from runtime.loop.engine import CLIP_LATE, MIXED, Engine
from runtime.loop.journal import Journal
from runtime.loop.learning_rate import LearningRate
from runtime.loop.replica import LossFn, checked_loss, mean_of_accumulated
from runtime.loop.scatter import move, placed
from runtime.replica.build import OptimFactory, build_optimizer


class Solo(Engine):
    """One model on one device, in the caller's thread and on its streams.

    Args:
        model: On the device.
        device: Where it is.
        optim_factory: Makes the optimizer.
        max_grad_norm: Clips gradients; ``None``: they stay as they are.
        journal: Takes down what happens.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        optim_factory: OptimFactory,
        *,
        max_grad_norm: float | None,
        journal: Journal,
    ) -> None:
        model.train()
        model.zero_grad(set_to_none=True)
        self._model = model
        self._device = device
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = build_optimizer(optim_factory, model, self._params, None)
        self._max_grad_norm = max_grad_norm
        self._journal = journal
        self._num_accumulated = 0
        self._guards: list[RemovableHandle] = []
        self._nodes: dict[int, Any] = {}  # of the parameters, by place; the guards are in them
        self.devices = (device,)
        self.models = (model,)
        self.optimizers = (self._optimizer,)
        self.rate = LearningRate(self._optimizer)

    @property
    def direct(self) -> Callable[..., Any]:
        """What runs a batch with the least in between."""
        plain = self._device.type == "cpu" and not self._journal.on
        return self._model if plain else self.forward

    @property
    def chunk_ratios(self) -> tuple[float, ...]:
        """All of it."""
        return (1.0,)

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """One: there is nobody to reduce with."""
        return (1,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with the inputs on its device as with many devices."""
        start_s = time.perf_counter()
        if self._device.type != "cpu":
            args, kwargs = move((args, kwargs), self._device)
        output = self._model(*args, **kwargs)
        self._journal.record("forward", 0, start_s, time.perf_counter())
        return output

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Forward, loss and backward of each batch in turn."""
        self._notice_zeroed()
        if not self._num_accumulated and any(p.grad is not None for p in self._params):
            raise RuntimeError(MIXED)
        start_s = time.perf_counter()
        losses = []
        self._unguard()
        try:
            for batch in batches:
                loss = checked_loss(loss_fn(self._model, move(batch, self._device)))
                with outside_autocast():
                    loss.backward()  # type: ignore[no-untyped-call]
                self._num_accumulated += 1
                losses.append(loss.detach().reshape(()))
        except BaseException:
            self.zero_grad()  # half of the gradients are no use
            raise
        if self._num_accumulated:
            self._guard()
        self._journal.record("accumulate", 0, start_s, time.perf_counter())
        return torch.stack(losses) if losses else torch.empty(0, device=self._device)

    def step(self) -> None:
        """Clip, step and forget the gradients."""
        start_s = time.perf_counter()
        self.rate.check()
        self._notice_zeroed()
        if self._num_accumulated:
            mean_of_accumulated(self._params, self._num_accumulated, self._max_grad_norm)
            self._num_accumulated = 0
        elif self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params, self._max_grad_norm)
        self._unguard()
        self._optimizer.step()
        self._model.zero_grad(set_to_none=True)
        self.rate.advance()
        self._journal.record("step", 0, start_s, time.perf_counter())
        self._journal.step += 1

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients."""
        if self._num_accumulated:
            raise RuntimeError(CLIP_LATE)
        return nn.utils.clip_grad_norm_(self._params, max_norm)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._num_accumulated = 0
        self._unguard()
        self._model.zero_grad(set_to_none=True)

    def sync_params(self) -> None:
        """Nobody else has weights."""

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self._optimizer.load_state_dict(state)

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of the model."""
        setattr(self._model, name, placed(value, self._device, copy=False))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to the model."""
        own = placed(tensor, self._device, copy=False)
        self._model.register_buffer(name, own, persistent)

    def close(self) -> None:
        """Nothing was started."""

    def _notice_zeroed(self) -> None:
        """The caller may have dropped what was accumulated, by ``optimizer.zero_grad()``."""
        if self._num_accumulated and all(p.grad is None for p in self._params):
            self._num_accumulated = 0

    def _guard(self) -> None:
        """Until the step, refuse gradients from elsewhere before any of them is added."""
        for place, p in enumerate(self._params):
            if p.requires_grad and place not in self._nodes:
                self._nodes[place] = torch.autograd.graph.get_gradient_edge(p).node
        refuse = partial(_refuse, weakref.ref(self))  # the nodes may live longer
        self._guards = [node.register_prehook(refuse) for node in self._nodes.values()]

    def _unguard(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards = []
        if self._device.type != "cpu":
            self._nodes.clear()  # one belongs to the stream under which it was made


def _refuse(solo: weakref.ref[Solo], grads: Any) -> None:
    if (self := solo()) is not None:
        self._notice_zeroed()
        if self._num_accumulated:
            raise RuntimeError(MIXED)
