"""MisuseWatch: steps and changes that the body of an own loop makes itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

CHANGED_GRADIENTS = (
    "the loop changes gradients before worker.step(), such as by clip_grad_norm_, when they are "
    "those of one worker's samples, and step() reduces them afterwards: clip by max_grad_norm(f) "
    "on the builder, or change them in a hook, worker.optimizer.register_step_pre_hook(f), which "
    "runs after the reduction"
)
CHANGED_WEIGHTS = (
    "the loop changes weights between backward() and worker.step(), when gradients are those of "
    "one worker's samples: weights that it computes from them, as SAM does, differ between "
    "workers. Trainer.setup has the gradients of the whole batch after loss.backward(); make a "
    "change that is the same on all workers after worker.step()"
)


class MisuseWatch:
    """Refuses steps of the optimizers that the body makes itself, and warns once of gradients and
    weights that it changes before the ranks reduce the gradients.

    Args:
        optimizers: Those of the replica.
        is_body: True while the body has a batch.
        params: A parameter of each optimizer whose gradients ranks reduce.
        warns: True on the rank that logs warnings.

    Attributes:
        is_stepping: ``worker.step()`` makes a step.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        is_body: Callable[[], bool],
        params: Iterable[nn.Parameter],
        *,
        warns: bool,
    ) -> None:
        self._is_body = is_body
        self.is_stepping = False
        self._has_warned = self._has_warned_of_weights = not warns
        self._gradients: dict[nn.Parameter, tuple[Tensor | None, int]] = {}
        self._weights: dict[nn.Parameter, int] = {}  # versions at the first backward pass
        self._hooks = [each.register_step_pre_hook(self._require_own_step) for each in optimizers]
        for p in params:
            hook = p.register_post_accumulate_grad_hook(self._watch)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _require_own_step(self, *_: object) -> None:
        if self._is_body() and not self.is_stepping:
            raise RuntimeError(
                "worker.optimizer.step() would change the replica of this rank alone: call "
                "worker.step(loss), or worker.step() after loss.backward(), which also clips by "
                "max_grad_norm(...) and clears the gradients"
            )

    def _watch(self, p: nn.Parameter) -> None:
        self._gradients[p] = p.grad, -1 if p.grad is None else p.grad._version
        self._weights.setdefault(p, p._version)

    def begin_batch(self) -> None:
        """The body may change weights before its first backward pass on a batch."""
        self._weights.clear()

    def after_backward(self) -> None:
        """Record the gradients that a backward pass of ``worker.backward()`` has left."""
        for p in self._gradients:
            self._watch(p)

    def before_step(self) -> None:
        """Warn if the body has changed a gradient, such as by clipping, or a weight."""
        gradients, self._gradients = self._gradients, {}
        weights, self._weights = self._weights, {}
        is_changed = any(p._version != version for p, version in weights.items())
        if is_changed and not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            logger.warning(CHANGED_WEIGHTS)
        for p, (grad, version) in gradients.items():
            is_changed = grad is not None and p.grad is grad and grad._version != version
            if is_changed and not self._has_warned:
                self._has_warned = True
                logger.warning(CHANGED_GRADIENTS)
