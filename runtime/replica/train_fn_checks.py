"""Checks of the first calls of a training function: its own backward passes and what it trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.core.shared_objects import SharedObjects
from runtime.replica.flat import NamedParams
from runtime.replica.gradients import check_gradients

logger = logging.getLogger(__name__)

_NUM_GRAPHS = 2
"""Losses whose graphs are searched: a leaf of both is no input of one batch."""


class TrainFnChecks:
    """Checks the calls of one training function, in the worker's thread; nothing waits.

    The first window is checked for all parameters. Later ones cost the check of one parameter,
    another one each time, and only where gradients that the function made itself would be wrong.

    Args:
        is_reduced: True if ranks reduce gradients before the optimizer steps.
        warns: True on the rank that logs warnings.

    Attributes:
        is_first: True until the first backward pass.
        has_run_backward: True if the function has run a backward pass itself, before the first
            one of the run.
        shared: Objects that the workers share; ``None``: not compared.
    """

    def __init__(
        self, model: nn.Module, params: NamedParams, *, is_reduced: bool, warns: bool = True
    ) -> None:
        self._model = model
        self._names, self._params = params.names, params.params
        self._is_reduced = is_reduced
        self._warns = warns
        self.is_first = True
        self.has_run_backward = False
        self.shared: SharedObjects | None = None
        self._next = 0
        self._num_graphs = 0
        self._leaves: list[Tensor] = []
        self._rows_per_sample: float | None = None
        self._has_warned_of_rows = False

    def probe(self) -> list[_Probe]:
        """The present gradients of the parameters that :meth:`check_untouched` compares."""
        if self.is_first:
            chosen: Sequence[int] = range(len(self._params))
        else:
            self._next = (self._next + 1) % len(self._params)
            chosen = (self._next,)
        return [_Probe(i, grad := self._params[i].grad, _version(grad)) for i in chosen]

    def check_untouched(self, probes: Sequence[_Probe], why: str) -> None:
        """Check that the function has changed no gradient since :meth:`probe`.

        Args:
            probes: The result of :meth:`probe`.

        Raises:
            ValueError: It has called ``backward()`` or ``zero_grad()``.
        """
        for i, grad, version in probes:
            now = self._params[i].grad
            if now is not grad or _version(now) != version:
                if self.shares_changes():
                    return
                raise ValueError(
                    "train_fn changed the gradient of "
                    f"{self._names[i]!r} itself, by backward() or zero_grad(), but {why}: return "
                    "the sum of all losses from train_fn and leave backward() and zero_grad() out"
                )

    def note_own_backward(self, probes: Sequence[_Probe]) -> None:
        """Record that the function has changed gradients since :meth:`probe`, if it has."""
        changed = (
            (now := self._params[i].grad) is not grad or _version(now) != version
            for i, grad, version in probes
        )
        self.has_run_backward = any(changed) and not self.shares_changes()

    def shares_changes(self) -> bool:
        """True if another worker may have reached this one's graph through an object of both."""
        return self.shared is not None and self.shared.compare()

    def check_rows(self, batch: Any, num_samples: int) -> None:
        """Warn once if batches without a weight of their own have a varying number of rows per
        sample: their losses are means over rows, and are weighted by samples.
        """
        if not self._is_reduced or self._has_warned_of_rows or num_samples == 1:
            return  # the rows of one sample, as of a collate_fn that returns it, may be its steps
        rows = _num_rows(batch, num_samples)
        if rows is None:
            return
        ratio, self._rows_per_sample = self._rows_per_sample, rows / num_samples
        if ratio is not None and ratio != self._rows_per_sample:
            self._has_warned_of_rows = True
            logger.warning(
                "a batch of %d samples has %d rows, as where collate_fn leaves out samples or "
                "joins them: its loss counts as the mean of %d samples, while that of a plain loop "
                "is a mean over rows. Give the number of rows as the weight of the loss: "
                "return loss, len(batch[0]) in train_fn, worker.step(loss, weight=...) in a loop",
                num_samples,
                rows,
                num_samples,
            )

    def check_graph(self, loss: Tensor) -> None:
        """Warn of leaves of the first losses that receive gradients but that no optimizer has."""
        if self._num_graphs == _NUM_GRAPHS:
            return
        self._num_graphs += 1
        own = {id(p) for p in self._model.parameters()}
        found = [leaf for leaf in _leaves(loss) if id(leaf) not in own]
        earlier = {id(leaf) for leaf in self._leaves}
        for leaf in found:
            is_new = self._num_graphs == 1
            if isinstance(leaf, nn.Parameter) if is_new else id(leaf) in earlier:
                self._warn(leaf)
                found, self._num_graphs = [], _NUM_GRAPHS
                break
        self._leaves = found if self._num_graphs < _NUM_GRAPHS else []

    def _warn(self, leaf: Tensor) -> None:
        if self._warns:
            logger.warning(
                "train_fn's loss depends on a parameter of shape %s outside the model, which "
                "receives gradients but is not part of the model, so that no optimizer trains it: "
                "add its module in model_factory (model.criterion = criterion) and use "
                "model.criterion in train_fn, or freeze it, criterion.requires_grad_(False)",
                tuple(leaf.shape),
            )

    def versions(self) -> list[int] | None:
        """Version counters of the parameters before the first backward pass, else ``None``."""
        return [p._version for p in self._params] if self.is_first else None

    def check_first_backward(self, versions: Sequence[int]) -> None:
        """Check the gradients of the first backward pass, and hooks that step in it.

        Raises:
            ValueError: No parameter has a gradient, one is sparse, or a hook changes a parameter
                before its gradient is reduced.
        """
        self.is_first = False
        if self.has_run_backward and self._warns:
            logger.warning(
                "train_fn calls backward() itself: these gradients are added to those of the loss "
                "that it returns, for which the run calls backward(). If it is the same loss, they "
                "count twice: leave backward() out of train_fn"
            )
        changed = [
            name
            for name, p, version in zip(self._names, self._params, versions, strict=True)
            if p._version != version
        ]
        if not changed:
            check_gradients(self._names, self._params, "train_fn")
        elif self._is_reduced:
            raise ValueError(
                f"a hook changes the parameter {changed[0]!r} in the backward pass (an optimizer "
                "in backward), before its gradient is reduced over the ranks, so that the replicas "
                "would differ: pass the optimizer as optim_factory, or use policy('cadence'), "
                "which averages parameters"
            )
        elif self._warns:
            logger.warning(
                "a hook changes the parameter %r in the backward pass (an optimizer in backward): "
                "checkpoints do not contain the state of such an optimizer, and accumulate, "
                "max_grad_norm, scheduler and on_non_finite do not apply to it",
                changed[0],
            )


class _Probe(NamedTuple):
    number: int
    grad: Tensor | None
    version: int


def _num_rows(batch: Any, num_samples: int) -> int | None:
    """The common length of the batch's tensors along dimension 0; ``None`` if there is none, or
    if all of them have the samples in another dimension.
    """
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, (tuple, list, Mapping)):
        parts = (batch,)
    elif isinstance(batch, list) and len(batch) == num_samples:
        return None  # a list of samples
    # Nested tensors may have no shape.
    dense = [part for part in parts if isinstance(part, Tensor) and not part.is_nested]
    shapes = [part.shape for part in dense if part.dim()]
    if not shapes or any(shape[0] != shapes[0][0] for shape in shapes):
        return None
    rows = shapes[0][0]
    if rows != num_samples and all(num_samples in shape[1:] for shape in shapes):
        return None
    return rows


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of a loss's graph that receive gradients."""
    seen: set[Any] = set()
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        waiting += [each for each, _ in node.next_functions if each is not None]
