"""One rank's part of the user's own loop, and the sum of the ranks' gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.core.loss_weights import (
    LossWeightFn,
    Weight,
    Weighted,
    check_weight,
    checked_loss,
    inverse_of,
    output_weight,
    scale_,
    weight_field,
)
from runtime.core.nested import flatten
from runtime.device.base import Device
from runtime.loop.caller_modes import outside_autocast
from runtime.loop.gather import ShardOutput
from runtime.loop.mirror import ModelMirror
from runtime.loop.scatter import ShardInput, nested_to_device, to_device
from runtime.replica.flat import reals
from runtime.replica.gradients import refuse_sparse

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
Row = Sequence[Tensor | None]
"""Gradients of one rank, in order of the model's parameters."""
CHUNK_ELEMENTS = 1 << 18
"""Larger gradients are added up in pieces, by several threads."""


class RankReplica:
    """One rank's passes. Used in the rank's thread, inside ``context.activate()``.

    Args:
        rank: The rank.
        context: The rank's device context.
        mirror: The model and its copies.
        loss_weight: See :class:`~gpuworker.DdpConfig`.

    Attributes:
        sample_timer: Times forward and backward per sample.
        batch_timer: Times batches of :meth:`accumulate`.
        sync_timer: Times reductions.
        exchange_span_s: Start and end of the last reduction, on the host.
    """

    def __init__(
        self,
        rank: int,
        context: Device,
        mirror: ModelMirror,
        loss_weight: LossWeightFn | None = None,
    ) -> None:
        self.rank = rank
        self.device = context.device
        self.mirror = mirror
        self._loss_weight = loss_weight
        self._comm = context.comm
        self.sample_timer = context.new_timer()
        self.batch_timer = context.new_timer()
        self.sync_timer = context.new_timer()
        self.exchange_span_s = (0.0, 0.0)

    @property
    def leaves(self) -> list[Tensor]:
        """The rank's leaves, in order of the model's parameters."""
        return self.mirror.leaves[self.rank]

    def forward(self, inputs: ShardInput, start: int, stop: int) -> ShardOutput:
        """Run the model on samples ``start`` to ``stop`` of a batch."""
        timed = torch.is_grad_enabled()
        with self.mirror.computing(self.rank) as model:
            if timed:
                self.sample_timer.start()
            output = model(*inputs.args, **inputs.kwargs)
            if timed:
                self.sample_timer.stop(stop - start)
            shard = read_output(self.rank, model, inputs, output, (start, stop), self._loss_weight)
        shard.leaves = self.leaves
        return shard

    def backward(
        self,
        shard: ShardOutput,
        grads: Sequence[Tensor | None],
        *,
        wanted: Sequence[bool] | None,
        retain_graph: bool,
    ) -> list[Tensor | None]:
        """Run backward of a shard from :meth:`forward`; see :meth:`ShardOutput.backward`."""
        self.sample_timer.start()
        given = [None if g is None else to_device(g, self.device) for g in grads]
        mask = _loss_weight_mask(shard, given)
        with self.mirror.computing(self.rank):
            found = shard.backward(given, wanted=wanted, retain_graph=retain_graph)
        if mask is not None:
            new = [leaf.grad for leaf in shard.leaves if leaf.grad is not None]
            scale_(new, (mask != 0).to(torch.float64))
        self.sample_timer.stop(0)
        return found

    def accumulate(
        self, loss_fn: LossFn, batches: Sequence[Any]
    ) -> tuple[Tensor, list[Weight | None]]:
        """Compute forward, loss and backward of each batch sequentially; gradients add up.

        Returns:
            The losses, of shape ``(len(batches),)``, on the device, and their weights; ``None``
            for a loss that ``loss_fn`` returned without a weight.
        """
        losses, weights = [], []
        with self.mirror.computing(self.rank) as model:
            for batch in batches:
                self.batch_timer.start()
                loss, weight = read_loss(loss_fn(model, nested_to_device(batch, self.device)))
                losses.append(weighted_backward(loss, weight, self.leaves))
                self.batch_timer.stop(1)
                weights.append(weight)
        found = torch.stack(losses) if losses else torch.empty(0, device=self.device)
        return found, weights

    def all_reduce(
        self, collective: Collective, row: Row, has_grad: Sequence[bool], names: Sequence[str]
    ) -> list[Tensor | None]:
        """Sum the gradients of all ranks by a collective.

        Args:
            collective: This rank's collective.
            row: This rank's gradients.
            has_grad: Whether any rank has one, for each parameter.
            names: Name of each parameter.
        """
        start_s = time.monotonic()
        groups: dict[torch.dtype, list[int]] = {}
        leaves = self.leaves
        for index, (leaf, flag) in enumerate(zip(leaves, has_grad, strict=True)):
            if flag:
                groups.setdefault(leaf.dtype, []).append(index)
        found: list[Tensor | None] = [None] * len(row)
        for dtype, group in groups.items():
            sizes = [leaves[i].numel() for i in group]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
            parts = flat.split(sizes)  # type: ignore[no-untyped-call]
            views = [part.view(leaves[i].shape) for i, part in zip(group, parts, strict=True)]
            targets, sources = [], []
            for index, view in zip(group, views, strict=True):
                found[index] = view
                grad = row[index]
                if grad is not None:
                    refuse_sparse(names[index], grad)
                    targets.append(view)
                    sources.append(grad)
            if targets:
                torch._foreach_copy_(targets, sources)
            with self._comm():
                for real in reals([flat]):
                    collective.all_reduce_(real)
        self.exchange_span_s = (start_s, time.monotonic())
        return found if self.rank == 0 else []


def read_output(
    rank: int,
    model: nn.Module,
    inputs: ShardInput,
    output: Any,
    span: tuple[int, int],
    loss_weight: LossWeightFn | None,
) -> ShardOutput:
    """The output of a model on samples ``span``, with the weight of its scalar losses."""
    outputs: list[Tensor] = []
    spec = flatten(output, outputs, strict=True)
    shard = ShardOutput(rank, *span, inputs, spec)
    shard.outputs = outputs
    if any(t.dim() == 0 and t.is_floating_point() for t in outputs):
        shard.weight = output_weight(model, inputs.args, inputs.kwargs, output, loss_weight)
        own = weight_field(output)
        shard.weight_index = next((i for i, t in enumerate(outputs) if t is own), None)
    return shard


def take_grads(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Move the gradients out of leaves."""
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


@torch.no_grad()
def add_rows(total: list[Tensor | None], row: Row) -> None:
    """Add a rank's gradients to others on the same device, in place where possible."""
    targets, sources = [], []
    for index, grad in enumerate(row):
        if grad is None:
            continue
        mine = total[index]
        if mine is None:
            total[index] = grad
        elif mine.layout is torch.strided and grad.layout is torch.strided:
            targets.append(mine)
            sources.append(grad)
        else:
            total[index] = mine + grad
    if targets:
        torch._foreach_add_(targets, sources)


def divided_rows(rows: Sequence[Row], num_parts: int) -> list[list[tuple[list[Tensor], Row]]]:
    """Additions of all rows into the first, divided into parts of similar size.

    Every parameter with a gradient has a strided one in the first row.

    Returns:
        For each part, lists of targets and sources.
    """
    parts: list[list[tuple[list[Tensor], Row]]] = [[] for _ in range(num_parts)]
    for row in rows[1:]:
        pairs = []
        for mine, grad in zip(rows[0], row, strict=True):
            if mine is None or grad is None:
                continue
            if mine.numel() > CHUNK_ELEMENTS and mine.is_contiguous() and grad.is_contiguous():
                chunks = (t.view(-1).split(CHUNK_ELEMENTS) for t in (mine, grad))
                pairs += zip(*chunks, strict=True)
            else:
                pairs.append((mine, grad))
        whole = sum(mine.numel() for mine, _ in pairs)
        done = 0
        lists: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(num_parts)]
        for mine, grad in pairs:
            targets, sources = lists[min(num_parts - 1, done * num_parts // max(1, whole))]
            targets.append(mine)
            sources.append(grad)
            done += mine.numel()
        for part, own in zip(parts, lists, strict=True):
            if own[0]:
                part.append(own)
    return parts


@torch.no_grad()
def add_parts(part: Sequence[tuple[list[Tensor], Row]]) -> None:
    """Make the additions of one part of :func:`divided_rows`."""
    for targets, sources in part:
        torch._foreach_add_(targets, sources)


def clip_and_scale_(
    grads: Sequence[Tensor], max_norm: float | None, before: Weight, after: Weight
) -> None:
    """Multiply gradients by ``before``, clip them to an L2 norm, and multiply by ``after``."""
    if max_norm is None:
        multiply_(grads, before * after)
        return
    multiply_(grads, before)
    if grads:
        norm = nn.utils.get_total_norm(list(grads))
        torch._foreach_mul_(list(grads), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    multiply_(grads, after)


def multiply_(grads: Sequence[Tensor], factor: Weight) -> None:
    """Multiply gradients in place by a number, or by a scalar that the host does not read."""
    if isinstance(factor, Tensor):
        scale_(grads, factor)
    elif grads and factor != 1.0:
        torch._foreach_mul_(list(grads), factor)


def divide_grads_(params: Sequence[Tensor], weight: Weight, times: float = 1.0) -> None:
    """Multiply gradients by ``times / weight``; with weight 0 they become zeros."""
    multiply_([p.grad for p in params if p.grad is not None], inverse_of(weight) * times)


def read_loss(result: object) -> tuple[Tensor, Weight | None]:
    """The loss and weight that a ``loss_fn`` of ``accumulate`` returned."""
    if isinstance(result, tuple) and (len(result) == 2 or isinstance(result, Weighted)):
        return checked_loss(result[0], "loss_fn"), check_weight("the weight of the loss", result[1])
    return checked_loss(result, "loss_fn"), None


def weighted_backward(loss: Tensor, weight: Weight | None, leaves: Sequence[Tensor]) -> Tensor:
    """Run backward of ``loss * weight`` outside autocast.

    With weight 0 the gradients of ``leaves`` are unchanged.

    Returns:
        The detached loss; 0 if its weight is 0.
    """
    found = loss.detach().reshape(())
    if isinstance(weight, float) and weight == 0:
        return torch.zeros_like(found)
    mask = weight if isinstance(weight, Tensor) else None
    with outside_autocast(), _masking_grads(leaves, mask):
        whole = loss if weight is None else loss * weight
        whole.backward()  # type: ignore[no-untyped-call]
    return torch.where(weight == 0, 0.0, found) if isinstance(weight, Tensor) else found


@contextmanager
def _masking_grads(leaves: Sequence[Tensor], weight: Tensor | None) -> Iterator[None]:
    """Zero the gradients of a backward pass if its weight, a tensor not read by the host, is 0.

    They may be NaN then, and must not reach gradients that exist already.
    """
    if weight is None:
        yield
        return
    before = take_grads(leaves)
    yield
    new = [leaf.grad for leaf in leaves if leaf.grad is not None]
    scale_(new, (weight != 0).to(torch.float64))
    with torch.no_grad():
        for leaf, old in zip(leaves, before, strict=True):
            if old is not None:
                leaf.grad = old if leaf.grad is None else old.add_(leaf.grad)


def _loss_weight_mask(shard: ShardOutput, grads: Sequence[Tensor | None]) -> Tensor | None:
    """A shard's weight on a GPU, if only weighted losses run backward; else ``None``."""
    if not isinstance(shard.weight, Tensor) or shard.outputs is None:
        return None
    outputs = [o for o, g in zip(shard.outputs, grads, strict=True) if g is not None]
    return shard.weight if all(o.dim() == 0 for o in outputs) else None
