"""Gradients of a loop that ranks hold until they are reduced, and the weights of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runtime.core.loss_weights import Weight, fractions_of, inverse_of
from runtime.loop.loop_engine import MIXED_GRADIENTS, total_weight
from runtime.loop.rank_replica import Row, add_rows

CHANGED_BEFORE_REDUCTION = (
    "gradients of the model were changed while other devices hold theirs: after a backward pass "
    "within no_sync(), after accumulate(...) and with max_anchor, .grad has those of the first "
    "device only. Change, clip or clear them after a backward pass outside no_sync(), drop them by "
    "model.zero_grad(), or clip by DdpConfig(max_grad_norm=...)"
)


class PendingGradients:
    """The ranks' gradients of the step in progress, and of stashed steps.

    Rank 0's gradients of the step in progress are those of the model's parameters; all others are
    held here, by parameter. Stashed steps are earlier ones that share a reduction. Each call takes
    the model's parameters, which the user may replace.

    Attributes:
        source: Origin of the gradients since the last step.
        weights: For each rank, the weights of the losses of ``accumulate`` since the last step;
            ``None``: returned without one.
        stashed_weights: The weight of each stashed step; ``None``: the mean of the steps.
    """

    def __init__(self, num_ranks: int) -> None:
        self.source = GradientSource.EMPTY
        self.weights: list[list[Weight | None]] = [[] for _ in range(num_ranks)]
        self.stashed_weights: list[Weight | None] = []
        self._held = [_RankGradients() for _ in range(1, num_ranks)]
        self._own = _OwnGradients()
        self._stashed = [_RankGradients() for _ in range(num_ranks)]

    @property
    def is_held(self) -> bool:
        """True if ranks hold gradients of the step in progress."""
        return any(self._held)

    @property
    def is_accumulated(self) -> bool:
        """True if the gradients are those of ``accumulate``."""
        return self.source is GradientSource.ACCUMULATED

    @property
    def has_run_backward(self) -> bool:
        """True if the model's own gradients are those of a backward pass since the last step."""
        return self.source is GradientSource.BACKWARD or any(map(_has_backward, self.weights[0]))

    def begin(self, source: GradientSource) -> None:
        """Set the origin of gradients that will be added.

        Raises:
            RuntimeError: There are gradients of another origin.
        """
        is_mixed = self.stashed_weights and source is GradientSource.ACCUMULATED
        if is_mixed or self.source not in (GradientSource.EMPTY, source):
            raise RuntimeError(MIXED_GRADIENTS)
        self.source = source

    def hold(self, params: Sequence[Tensor], rows: Sequence[Row]) -> None:
        """Add the gradients of all ranks but rank 0 to those that they hold.

        Args:
            rows: One per rank; may be overwritten.

        Raises:
            RuntimeError: The caller has changed gradients since the last call.
        """
        self._own.check()
        self._own.watch(params)
        for held, row in zip(self._held, rows[1:], strict=True):
            held.add(params, row)

    def take(self, params: Sequence[Tensor]) -> list[Row]:
        """The gradients of the step in progress, one row per rank; the ranks hold none then.

        Raises:
            RuntimeError: The caller has changed gradients since :meth:`hold`.
        """
        self._own.check()
        rows: list[Row] = [[p.grad for p in params], *(held.row(params) for held in self._held)]
        self.drop()
        return rows

    def record_own(self, params: Sequence[Tensor]) -> None:
        """Take the model's gradients, set since :meth:`hold`, as unchanged."""
        for p in params:
            self._own.record(p)

    def stash(self, params: Sequence[Tensor], weight: Weight | None) -> None:
        """Add the gradients of the step in progress to those of stashed steps.

        Args:
            weight: The weight of the step; ``None``: one of several equal ones.
        """
        for stashed, row in zip(self._stashed, self.take(params), strict=True):
            stashed.add(params, row)
        self.stashed_weights.append(weight)

    def take_stashed(self, params: Sequence[Tensor]) -> tuple[list[Row], Weight]:
        """The gradients of the stashed steps, one row per rank, and the divisor of their mean."""
        weight = total_weight(self.stashed_weights)
        divisor = float(len(self.stashed_weights)) if weight is None else weight
        rows: list[Row] = [stashed.row(params) for stashed in self._stashed]
        self.drop_stashed()
        self.source = GradientSource.BACKWARD
        return rows, divisor

    def total_weight(self) -> Weight | None:
        """The sum of the weights of ``accumulate``; ``None``: its losses have none.

        Raises:
            ValueError: Some have one.
        """
        return total_weight([weight for own in self.weights for weight in own])

    def mean_factors(
        self, weight: Weight | None, devices: Sequence[torch.device]
    ) -> list[tuple[Weight, Weight]]:
        """Factors of each rank's gradient of ``accumulate``, with which their sum is the mean.

        With the first one, applied before clipping, it is the sum of the means of its batches.

        Args:
            weight: The sum of the weights, not the number 0; ``None``: there are none.
            devices: The device of each rank, for factors that the host does not read.
        """
        counts = [len(own) for own in self.weights]
        if weight is None:
            return [(1.0, 1.0 / sum(counts))] * len(counts)
        totals = [total_weight(own) for own in self.weights]
        given: list[Weight] = [0.0 if total is None else total for total in totals]
        if any(isinstance(own, Tensor) for own in given):
            parts = fractions_of(given, devices[0])
        else:
            parts = [own / weight for own in given]
        found: list[tuple[Weight, Weight]] = []
        for own, part, count, device in zip(given, parts, counts, devices, strict=True):
            factors = (inverse_of(own) * count, part / max(1, count))
            found.append(
                tuple(f.to(device) if isinstance(f, Tensor) else f for f in factors)  # type: ignore[arg-type]
            )
        return found

    def drop(self) -> None:
        """Drop the gradients of the step in progress that ranks hold."""
        self._own.forget()
        for held in self._held:
            held.clear()

    def drop_stashed(self) -> None:
        self.stashed_weights = []
        for stashed in self._stashed:
            stashed.clear()

    def end_step(self) -> None:
        """Forget origin and weights of the step in progress."""
        self.source = GradientSource.EMPTY
        self.weights = [[] for _ in self.weights]


class GradientSource(Enum):
    """Origin of the gradients since the last step."""

    EMPTY = auto()
    BACKWARD = auto()
    """``loss.backward()``, or gradients set by the caller."""
    ACCUMULATED = auto()
    """``accumulate``: each rank holds its own gradients; the model has those of rank 0."""


class _RankGradients:
    """Gradients of one rank that are not reduced yet, by parameter."""

    def __init__(self) -> None:
        self._grads: dict[Tensor, Tensor | None] = {}

    def add(self, params: Sequence[Tensor], row: Row) -> None:
        """Add gradients, in order of ``params``."""
        mine = self.row(params)
        add_rows(mine, row)
        self._grads = dict(zip(params, mine, strict=True))

    def row(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients in order of ``params``."""
        return [self._grads.get(p) for p in params]

    def __bool__(self) -> bool:
        return bool(self._grads)

    def clear(self) -> None:
        self._grads = {}


class _OwnGradients:
    """Notices changes that the caller makes to the model's gradients, which are rank 0's, while
    the others hold theirs. Backward passes of the caller are no changes.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[Tensor | None, int]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, params: Sequence[Tensor]) -> None:
        """Record gradients as backward passes accumulate them."""
        if not self._handles:
            self._handles = [
                p.register_post_accumulate_grad_hook(self.record)  # type: ignore[no-untyped-call]
                for p in params
                if p.requires_grad
            ]

    def record(self, p: Tensor) -> None:
        self._seen[p] = (p.grad, -1 if p.grad is None else p.grad._version)

    def check(self) -> None:
        """Raise if a gradient was changed or replaced."""
        for p, (grad, version) in self._seen.items():
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise RuntimeError(CHANGED_BEFORE_REDUCTION)

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._seen = {}


def _has_backward(weight: Weight | None) -> bool:
    """True if a batch of this weight ran backward."""
    return weight is None or isinstance(weight, Tensor) or weight > 0
