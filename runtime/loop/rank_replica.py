"""One rank's part of the user's own loop, and the sum of the ranks' gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.core.loss_weights import (
    LossWeightFn,
    Weight,
    Weighted,
    check_meant_as_weight,
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
from runtime.loop.loop_recorder import LoopRecorder, num_samples_of
from runtime.loop.mirror import ModelMirror
from runtime.loop.runner import Runner
from runtime.loop.scatter import ShardInput, nested_to_device, to_device
from runtime.replica.error_notes import MemoryUse, explain_error, explain_size
from runtime.replica.gradients import FlatGradients, refuse_sparse
from runtime.replica.max_norm import MaxNorm

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, float | Tensor]]
Addition = tuple[list[Tensor], list[Tensor]]
"""Targets, and the source to be added to each."""
Row = Sequence[Tensor | None]
"""Gradients of one rank, in order of the model's parameters."""
MAX_INLINE_ELEMENTS = 1 << 20
"""Up to this many elements over all ranks, the calling thread adds gradients up; more are divided
among the ranks' threads."""
LOOP_REMEDY = (
    "pass smaller batches, with loss.backward() for each of them and one model.step(), which "
    "trains as many samples in each step with less memory"
)
ACCUMULATE_REMEDY = (
    "pass more batches of fewer samples to accumulate(...), which trains as many in each step with "
    "less memory"
)
STATE_REMEDY = (
    "keep the pieces, by DdpConfig(balance=False) and a loader with drop_last=True, or make the "
    "state an input of forward that it returns"
)
CHUNK_ELEMENTS = 1 << 18
"""Larger gradients are added up in pieces, by several threads."""


class RankReplica:
    """One rank's passes. Used in the rank's thread, inside ``context.activate()``.

    Args:
        mirror: The model and its copies.
        loss_weight: See :class:`~gpuworker.DdpConfig`.

    Attributes:
        sample_timer: Times forward and backward per sample.
        batch_timer: Times batches of :meth:`accumulate`.
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
        self._largest = 0  # samples of the largest piece that fitted into memory
        self._last = 0  # samples of the last piece

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
            try:
                output = model(*inputs.args, **inputs.kwargs)
            except (RuntimeError, ValueError) as error:
                given: dict[Any, Any] = {**dict(enumerate(inputs.args)), **inputs.kwargs}
                memory = MemoryUse(stop - start, LOOP_REMEDY, self._largest)
                explain_error(error, "your loop", model, given, place="inputs", memory=memory)
                explain_size(error, (self._last, stop - start), STATE_REMEDY)
                raise
            self._last = stop - start
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
        first_leaves: Sequence[Tensor],
        retain_graph: bool,
    ) -> list[Tensor | None]:
        """Run backward of a shard from :meth:`forward`; see :meth:`ShardOutput.backward`."""
        self.sample_timer.start()
        given = [None if g is None else to_device(g, self.device) for g in grads]
        mask = _loss_weight_mask(shard, given)
        num_samples = shard.stop - shard.start
        with self.mirror.computing(self.rank) as model, _masking_grads(shard.leaves, mask):
            try:
                found = shard.backward(
                    given,
                    wanted=wanted,
                    first_leaves=first_leaves,
                    retain_graph=retain_graph,
                )
            except RuntimeError as error:
                memory = MemoryUse(num_samples, LOOP_REMEDY, self._largest)
                explain_error(error, "your loop", model, (), memory=memory)
                raise
        self._largest = max(self._largest, num_samples)
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
                loss, weight = train_batch(model, loss_fn, batch, self.device, self.leaves)
                self.batch_timer.stop(1)
                losses.append(loss)
                weights.append(weight)
        found = torch.stack(losses) if losses else torch.empty(0, device=self.device)
        return found, weights

    def all_reduce(
        self, collective: Collective, row: Row, has_grad: Sequence[bool], names: Sequence[str]
    ) -> list[Tensor | None]:
        """Sum the gradients of all ranks by a collective.

        Args:
            has_grad: True if any rank has one, for each parameter.
            names: Name of each parameter.
        """
        start_s = time.monotonic()
        refuse_sparse(names, row)
        used = [i for i, flag in enumerate(has_grad) if flag]
        store = FlatGradients([self.leaves[i] for i in used])
        store.load([row[i] for i in used])
        with self._comm():
            collective.all_reduce_coalesced_(store.flats)
        self.exchange_span_s = (start_s, time.monotonic())
        if self.rank:
            return []
        found: list[Tensor | None] = [None] * len(row)
        for i, view in zip(used, store.views, strict=True):
            found[i] = view
        return found


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


class GradientReduction:
    """Sums the gradients of all ranks on the first device.

    Ranks that share memory are added up in place, large gradients by the ranks' threads; others
    are reduced by the collective.

    Args:
        mirror: The model and its copies.
        replicas: In order of rank.
        runner: Runs tasks in the ranks' threads.
    """

    def __init__(
        self,
        mirror: ModelMirror,
        replicas: Sequence[RankReplica],
        runner: Runner,
        recorder: LoopRecorder,
    ) -> None:
        self._mirror = mirror
        self._replicas = replicas
        self._runner = runner
        self._recorder = recorder

    def sum(self, rows: Sequence[Row], params: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The sum of each parameter's gradients; ``None`` where no rank has one.

        Args:
            rows: One per rank; may be overwritten.
        """
        has_grad = [any(g is not None for g in column) for column in zip(*rows, strict=True)]
        if not any(has_grad) or len(rows) == 1:
            return rows[0] if len(rows) == 1 else [None] * len(params)
        if self._mirror.shares_memory:
            found = self._add_in_place(rows, params)
        else:
            names = self._mirror.names()
            ends = zip(self._replicas, self._runner.collectives(), rows, strict=True)
            tasks = [partial(self._all_reduce, *end, has_grad, names) for end in ends]
            found = self._runner.run(tasks, "reduce")[0].value
        self._recorder.record_reductions(each.exchange_span_s for each in self._replicas)
        return found

    def sum_into(self, params: Sequence[Tensor], rows: Sequence[Row]) -> None:
        """Set the gradients of the parameters to the :meth:`sum`."""
        for p, grad in zip(params, self.sum(rows, params), strict=True):
            p.grad = grad

    def _add_in_place(
        self, rows: Sequence[Row], params: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        start_s = time.monotonic()
        self._replicas[0].sync_timer.start()
        total = list(rows[0])
        is_dense = all(g is None or g.layout is torch.strided for row in rows for g in row)
        if is_dense and len(rows) * sum(p.numel() for p in params) > MAX_INLINE_ELEMENTS:
            columns = [[g for g in column if g is not None] for column in zip(*rows, strict=True)]
            parts = _divided(columns, len(rows))
            self._runner.run([partial(_add, part) for part in parts], "reduce")
            total = [column[0] if column else None for column in columns]
        else:
            for row in rows[1:]:
                add_rows(total, row)
        self._replicas[0].sync_timer.stop(1)
        for replica in self._replicas:
            replica.exchange_span_s = (start_s, time.monotonic())
        return total

    def _all_reduce(
        self,
        replica: RankReplica,
        collective: Collective,
        row: Row,
        has_grad: Sequence[bool],
        names: Sequence[str],
    ) -> Sequence[Tensor | None]:
        """Run in a rank's thread."""
        with self._runner.aborting_on_error():
            collective.barrier()  # keeps the wait for the slowest rank out of the timing
            replica.sync_timer.start()
            found = replica.all_reduce(collective, row, has_grad, names)
            replica.sync_timer.stop(1)
            return found


def _divided(columns: Sequence[list[Tensor]], num_parts: int) -> list[list[Addition]]:
    """Additions of each column to its first tensor, divided into parts of similar size.

    The parts run at the same time, so all additions to a target are in one.
    """
    parts: list[list[Addition]] = [
        [([], []) for _ in range(num_parts - 1)] for _ in range(num_parts)
    ]
    whole = 1 + sum(column[0].numel() for column in columns if column)
    done = 0
    for column in columns:
        pieces: Iterable[Sequence[Tensor]] = [column] if column else []
        if column and column[0].numel() > CHUNK_ELEMENTS and all(g.is_contiguous() for g in column):
            pieces = zip(*(torch.split(g.view(-1), CHUNK_ELEMENTS) for g in column), strict=True)
        for target, *sources in pieces:
            part = parts[done * num_parts // whole]
            for (targets, added), source in zip(part, sources, strict=False):
                targets.append(target)
                added.append(source)
            done += target.numel()
    return parts


@torch.no_grad()
def _add(additions: Sequence[Addition]) -> None:
    for targets, sources in additions:
        if targets:
            torch._foreach_add_(targets, sources)


def clip_and_scale_(
    grads: Sequence[Tensor], max_norm: MaxNorm, before: Weight, after: Weight
) -> None:
    """Multiply gradients by ``before``, clip them, and multiply by ``after``."""
    if max_norm.limit is None:
        multiply_(grads, before * after)
        return
    multiply_(grads, before)
    max_norm.clip_grads(grads)
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


def read_loss(result: object, params: Sequence[Tensor]) -> tuple[Tensor, Weight | None]:
    """The loss and weight that a ``loss_fn`` of ``accumulate`` returned for these parameters."""
    if isinstance(result, tuple) and (len(result) == 2 or isinstance(result, Weighted)):
        if not isinstance(result, Weighted):
            check_meant_as_weight(result[1], "loss_fn", "else return the loss alone")
        weight = check_weight("the weight of the loss", result[1])
        return checked_loss(result[0], "loss_fn", weight, params), weight
    return checked_loss(result, "loss_fn"), None


def train_batch(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    device: torch.device,
    params: Sequence[Tensor],
) -> tuple[Tensor, Weight | None]:
    """Run forward, loss and backward of a batch of ``accumulate``.

    Returns:
        The detached loss, 0 if its weight is 0, and the weight; ``None``: without one.
    """
    try:
        loss, weight = read_loss(loss_fn(model, nested_to_device(batch, device)), params)
        return weighted_backward(loss, weight, params), weight
    except (RuntimeError, ValueError) as error:
        memory = MemoryUse(num_samples_of(batch), ACCUMULATE_REMEDY)
        explain_error(error, "loss_fn", model, batch, owns_backward=True, memory=memory)
        raise


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


class FollowingOptimizer(torch.optim.Optimizer):
    """The model's optimizer, as an optimizer of a further rank.

    There is one model, trained by the first optimizer. This one has its parameters, state and
    settings; stepping it has no effect, and changes of its settings last until
    :meth:`follow`.
    """

    def __init__(self, first: torch.optim.Optimizer) -> None:
        super().__init__([dict(group) for group in first.param_groups], {})
        self._first = first
        self._opt_called = True  # schedulers warn without a step
        self.follow()

    def follow(self) -> None:
        """Take the first optimizer's groups, settings and state."""
        groups = self._first.param_groups
        self.state = self._first.state
        del self.param_groups[len(groups) :]
        self.param_groups += [{} for _ in groups[len(self.param_groups) :]]
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.clear()
            mine.update(group)

    def step(self, closure: Any = None) -> Any:
        """No effect: the first optimizer steps."""

    def load_state_dict(self, state_dict: Any) -> None:
        """No effect: load the state into the first optimizer."""
