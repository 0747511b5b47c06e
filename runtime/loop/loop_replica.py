"""One rank's replica in the user's own loop."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from runtime.loop.scatter import ShardInput, nested_to_device, to_device
from runtime.replica.build import OptimFactory, build_optimizer
from runtime.replica.flat import FlatParams, FlatState, reals
from runtime.replica.gradients import refuse_sparse, scale_for_mean_

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
Options = Sequence[Mapping[str, Any]]
"""Settings of an optimizer's parameter groups, without the parameters."""
STEPPED_OUTSIDE = (
    "the optimizer of a model from Trainer.setup was stepped outside model.step(), directly or by "
    "a GradScaler: it would train one replica only, on gradients that may still be scaled. Call "
    "model.step() instead; with autocast use bfloat16, which needs no GradScaler"
)


class LoopReplica:
    """One rank's model and optimizer in the user's own loop.

    Created and used in the rank's thread, inside ``context.activate()``. Rank 0's model and
    optimizer are also used by the caller while no task runs.

    Args:
        rank: The replica's rank.
        context: The replica's device context.
        model: The replica's model, on that device.
        optim_factory: Makes the optimizer.
        has_grad: See :class:`GradientExchange`.
        loss_weight: See :class:`~gpuworker.DdpConfig`.

    Attributes:
        model: The model, in train mode.
        optimizer: The optimizer.
        guard: Refuses steps of the optimizer outside :meth:`step`.
        tensors: All parameters, frozen ones too.
        modules: All modules.
        sample_timer: Times forward and backward per sample.
        batch_timer: Times batches of :meth:`accumulate`.
        sync_timer: Times reductions.
        exchange: Exchanges gradients with the other ranks.
        exchange_span_s: Start and end of the last gradient exchange, on the host.
    """

    def __init__(
        self,
        rank: int,
        context: Device,
        model: nn.Module,
        optim_factory: OptimFactory,
        has_grad: list[list[bool]],
        loss_weight: LossWeightFn | None = None,
    ) -> None:
        self.rank = rank
        self._loss_weight = loss_weight
        self.device = context.device
        self.model = model
        model.train()
        model.zero_grad(set_to_none=True)
        self.state = FlatState(model)
        self.optimizer = build_optimizer(optim_factory, model, self.state.params.params, None)
        self.guard = StepGuard(self.optimizer)
        self.tensors = list(model.parameters())
        self.modules = list(model.modules())
        self.sample_timer = context.new_timer()
        self.batch_timer = context.new_timer()
        self.sync_timer = context.new_timer()
        self.exchange = GradientExchange(self.state.params, rank, has_grad, context.comm)
        self._stashed: dict[int, Tensor] = {}
        self._comm = context.comm
        self.exchange_span_s = (0.0, 0.0)

    def forward(self, inputs: ShardInput, start: int, stop: int) -> ShardOutput:
        """Run the model on samples ``start`` to ``stop`` of a batch."""
        timed = torch.is_grad_enabled()
        if timed:
            self.sample_timer.start()
        output = self.model(*inputs.args, **inputs.kwargs)
        if timed:
            self.sample_timer.stop(stop - start)
        outputs: list[Tensor] = []
        spec = flatten(output, outputs, strict=True)
        shard = ShardOutput(self.rank, start, stop, inputs, spec)
        shard.outputs = outputs
        if any(t.dim() == 0 and t.is_floating_point() for t in outputs):
            shard.weight = output_weight(
                self.model, inputs.args, inputs.kwargs, output, self._loss_weight
            )
            own = weight_field(output)
            shard.weight_index = next((i for i, t in enumerate(outputs) if t is own), None)
        return shard

    def backward(
        self,
        shard: ShardOutput,
        grads: Sequence[Tensor | None],
        *,
        param_grads: bool,
        retain_graph: bool,
    ) -> list[Tensor | None]:
        """Run backward of a shard from :meth:`forward`; see :meth:`ShardOutput.backward`."""
        self.sample_timer.start()
        given = [None if g is None else to_device(g, self.device) for g in grads]
        mask = _loss_weight_mask(shard, given) if param_grads else None
        with _masking_grads(self.state.params.params, mask):
            found = shard.backward(given, param_grads=param_grads, retain_graph=retain_graph)
        self.sample_timer.stop(0)
        return found

    def reduce_to_first(self, collective: Collective) -> None:
        """See :meth:`GradientExchange.reduce_to_first`."""
        start_s = time.monotonic()
        self.exchange.reduce_to_first(collective)
        self.exchange_span_s = (start_s, time.monotonic())

    def add_grads_to(self, first: LoopReplica) -> None:
        """See :meth:`GradientExchange.add_grads_to`."""
        start_s = time.monotonic()
        self.exchange.add_grads_to(first.exchange)
        self.exchange_span_s = first.exchange_span_s = (start_s, time.monotonic())

    def copy_grads_from(self, first: LoopReplica) -> None:
        """See :meth:`GradientExchange.copy_grads_from`."""
        self.state.params.check()
        self.exchange.copy_grads_from(first.exchange)

    def accumulate(
        self, loss_fn: LossFn, batches: Sequence[Any]
    ) -> tuple[Tensor, list[Weight | None]]:
        """Run forward, loss and backward of each batch sequentially; gradients add up.

        Returns:
            The losses, of shape ``(len(batches),)``, on the device, and their weights; ``None``
            for a loss that ``loss_fn`` returned without a weight.
        """
        losses, weights = [], []
        for batch in batches:
            self.batch_timer.start()
            loss, weight = read_loss(loss_fn(self.model, nested_to_device(batch, self.device)))
            losses.append(weighted_backward(loss, weight, self.state.params.params))
            self.batch_timer.stop(1)
            weights.append(weight)
        found = torch.stack(losses) if losses else torch.empty(0, device=self.device)
        return found, weights

    @torch.no_grad()
    def stash(self) -> None:
        """Move the gradients to the stash, adding to stashed ones."""
        targets, sources = [], []
        for index, p in enumerate(self.tensors):
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                name, _ = list(self.model.named_parameters())[index]
                refuse_sparse(name, p.grad)
            if index in self._stashed:
                targets.append(self._stashed[index])
                sources.append(p.grad)
            else:
                self._stashed[index] = p.grad
            p.grad = None
        if targets:
            torch._foreach_add_(targets, sources)

    def unstash(self) -> None:
        """Set the gradients to the stashed ones plus those since."""
        self.stash()
        for index, grad in self._stashed.items():
            self.tensors[index].grad = grad
        self._stashed = {}

    def clear_stash(self) -> None:
        """Drop stashed gradients."""
        self._stashed = {}

    def divide(self, weight: Weight) -> None:
        """Divide the gradients of weighted losses by the sum of the weights."""
        divide_grads_(self.state.params.params, weight)

    def average(
        self,
        collective: Collective,
        count: int,
        max_norm: float | None,
        weights: Sequence[Weight] | None = None,
    ) -> None:
        """Clip accumulated gradients, divide them by the batch count, and average over ranks.

        Args:
            collective: This rank's collective.
            count: Number of batches of this rank, which is its weight.
            max_norm: Clip the accumulated gradient to this L2 norm; ``None``: do not clip.
            weights: Sum of loss weights of each rank; ``None``: batches weigh the same.
        """
        self.state.params.check()
        params = self.state.params.params
        amount: float = count
        if weights is not None:
            divide_grads_(params, weights[self.rank], count)
        average_accumulated_(params, count, max_norm)
        if weights is not None:
            own = weights[self.rank]
            if any(isinstance(weight, Tensor) for weight in weights):
                grads = [p.grad for p in params if p.grad is not None]
                with self._comm():
                    scale_for_mean_(grads, own, self.device, collective)
                amount = 1.0  # gradients are scaled: the plain mean is the weighted mean
            else:
                assert not isinstance(own, Tensor), "checked above"
                amount = own
        collective.barrier()  # keeps the wait for the slowest rank out of the timing
        start_s = time.monotonic()
        self.sync_timer.start()
        self.exchange.average(collective, amount)
        self.sync_timer.stop(1)
        self.exchange_span_s = (start_s, time.monotonic())

    def clip(self, max_norm: float) -> Tensor:
        """Clip this rank's gradients; returns their norm before."""
        return nn.utils.clip_grad_norm_(self.state.params.params, max_norm)

    def broadcast_from_first(self, collective: Collective) -> None:
        """See :meth:`GradientExchange.broadcast_from_first`."""
        self.state.params.check()
        self.exchange.broadcast_from_first(collective)

    def step(self, options: Options | None, *, keep: bool = False) -> None:
        """Step the optimizer with rank 0's settings; clear the gradients unless ``keep``."""
        if options is not None:
            self._set_options(options)
        with self.guard.stepping():
            self.optimizer.step()
        if not keep:
            self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for p in self.tensors:
            p.grad = None

    def _set_options(self, options: Options) -> None:
        groups = self.optimizer.param_groups
        for group, given in zip(groups, options, strict=True):
            for key, value in given.items():
                old = group.get(key)
                if isinstance(value, Tensor) and isinstance(old, Tensor):
                    old.copy_(value)
                else:
                    group[key] = value

    def set_groups(self, members: Sequence[Sequence[int]], options: Options) -> None:
        """Regroup the optimizer's parameters.

        Args:
            members: Each group's indices into the trained parameters.
            options: Each group's settings; used for new groups.
        """
        params, groups = self.state.params.params, self.optimizer.param_groups
        del groups[len(members) :]
        for group, indices in zip(groups, members, strict=False):
            group["params"] = [params[i] for i in indices]
        for index in range(len(groups), len(members)):
            own = [params[i] for i in members[index]]
            self.optimizer.add_param_group({**options[index], "params": own})

    @torch.no_grad()
    def copy_weights(self, first: LoopReplica) -> None:
        """Copy rank 0's parameters, frozen ones too, and buffers."""
        for mine, theirs in zip(self.tensors, first.tensors, strict=True):
            mine.copy_(theirs)
        self.copy_buffers(first)

    @torch.no_grad()
    def copy_params(self, first: LoopReplica) -> None:
        """Copy rank 0's trained parameters."""
        first.state.params.check()
        self.state.params.check()
        for mine, theirs in zip(self.state.params.flats, first.state.params.flats, strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def copy_buffers(self, first: LoopReplica) -> None:
        """Copy rank 0's buffers directly; both on the CPU, or no pending writes."""
        mine, theirs = self.state.buffers.tensors(), first.state.buffers.tensors()
        if mine:
            with _buffer_write_mode(mine):
                torch._foreach_copy_(mine, theirs)

    @torch.no_grad()
    def restore_buffers(self, saved: Sequence[Tensor]) -> None:
        """Restore saved buffers, if any were saved."""
        mine = self.state.buffers.tensors()
        if saved and mine:
            with _buffer_write_mode(mine):
                torch._foreach_copy_(mine, list(saved))

    @torch.no_grad()
    def broadcast_buffers(self, collective: Collective) -> None:
        """Broadcast rank 0's buffers."""
        buffers = self.state.buffers
        floats, others = buffers.empty()
        with self._comm():
            buffers.read_into(floats, others)
            for flat in (*floats, *others):
                collective.broadcast_(flat)
            if self.rank:
                with _buffer_write_mode(buffers.tensors()):
                    buffers.write_from(floats, others)

    def copy_optimizer(self, first: LoopReplica) -> None:
        """Copy rank 0's optimizer state."""
        state = first.optimizer.state_dict()
        # load_state_dict keeps tensors of the right dtype and device without a copy, so they are
        # copied first. To this device, in order with its stream: a clone on the other GPU
        # would run there on an unordered stream.
        memo: dict[int, Any] = {
            id(t): t.clone() if t.device.type == "cpu" else t.to(self.device, copy=True)
            for entry in (*state["state"].values(), *state["param_groups"])
            if isinstance(entry, dict)
            for t in entry.values()
            if isinstance(t, Tensor)
        }
        self.optimizer.load_state_dict(copy.deepcopy(state, memo))


def _buffer_write_mode(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """The mode in which buffers can be written: inference tensors only in inference mode."""
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else nullcontext()


def average_accumulated_(
    params: Sequence[nn.Parameter], count: int, max_norm: float | None
) -> None:
    """Clip gradients accumulated over ``count`` batches, then divide them by ``count``."""
    if count == 0:
        return
    if max_norm is not None:
        nn.utils.clip_grad_norm_(params, max_norm)
    grads = [p.grad for p in params if p.grad is not None]
    if count > 1 and grads:
        torch._foreach_div_(grads, float(count))


def _loss_weight_mask(shard: ShardOutput, grads: Sequence[Tensor | None]) -> Tensor | None:
    """A shard's weight on a GPU, if only weighted losses run backward; else ``None``."""
    if not isinstance(shard.weight, Tensor) or shard.outputs is None:
        return None
    outputs = [o for o, g in zip(shard.outputs, grads, strict=True) if g is not None]
    return shard.weight if all(o.dim() == 0 for o in outputs) else None


def divide_grads_(params: Sequence[nn.Parameter], weight: Weight, times: float = 1.0) -> None:
    """Multiply gradients by ``times / weight``; with weight 0 they become zeros."""
    grads = [p.grad for p in params if p.grad is not None]
    factor = inverse_of(weight) * times
    if isinstance(factor, Tensor):
        scale_(grads, factor)
    elif grads:
        torch._foreach_mul_(grads, factor)


def read_loss(result: object) -> tuple[Tensor, Weight | None]:
    """The loss and weight that a ``loss_fn`` of ``accumulate`` returned."""
    if isinstance(result, tuple) and (len(result) == 2 or isinstance(result, Weighted)):
        if not isinstance(result, Weighted):
            check_meant_as_weight(result[1], "loss_fn", "else return the loss alone")
        return checked_loss(result[0], "loss_fn"), check_weight("the weight of the loss", result[1])
    return checked_loss(result, "loss_fn"), None


@contextmanager
def _masking_grads(params: Sequence[nn.Parameter], weight: Tensor | None) -> Iterator[None]:
    """Zero the gradients of a backward pass if its weight, a tensor not read by the host, is 0.

    They may be NaN then, and must not reach gradients that exist already.
    """
    if weight is None:
        yield
        return
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    yield
    new = [p.grad for p in params if p.grad is not None]
    scale_(new, (weight != 0).to(torch.float64))
    with torch.no_grad():
        for p, old in zip(params, before, strict=True):
            if old is not None:
                p.grad = old if p.grad is None else old.add_(p.grad)


def weighted_backward(
    loss: Tensor, weight: Weight | None, params: Sequence[nn.Parameter]
) -> Tensor:
    """Run backward of ``loss * weight`` outside autocast.

    With weight 0 the gradients of ``params`` are unchanged.

    Returns:
        The detached loss; 0 if its weight is 0.
    """
    found = loss.detach().reshape(())
    if isinstance(weight, float) and weight == 0:
        return torch.zeros_like(found)
    mask = weight if isinstance(weight, Tensor) else None
    with outside_autocast(), _masking_grads(params, mask):
        whole = loss if weight is None else loss * weight
        whole.backward()  # type: ignore[no-untyped-call]
    return torch.where(weight == 0, 0.0, found) if isinstance(weight, Tensor) else found


class GradientExchange:
    """Exchanges one replica's gradients in flat tensors. Used in the replica's thread.

    A parameter without a gradient on all ranks keeps ``.grad is None``. All ranks share the list
    ``has_grad``: a rank writes its entry before a collective and reads the others after it, so
    that nothing is read from a device.

    Args:
        params: The replica's parameters.
        rank: The replica's rank.
        has_grad: For each rank and parameter, whether it has a gradient.
        comm: The context for collectives, see :meth:`Device.comm`.
    """

    def __init__(
        self,
        params: FlatParams,
        rank: int,
        has_grad: list[list[bool]],
        comm: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._params = params.params
        self._names = params.names
        self._rank = rank
        self._has_grad = has_grad
        self._comm = comm
        flats = params.like()
        self._flats = reals(flats)
        self._views = params.views(flats)

    def reduce_to_first(self, collective: Collective) -> None:
        """Sum all ranks' gradients on rank 0; the others have none afterwards.

        Gradients that rank 0 had before are part of the sum.
        """
        self._pack()
        with self._comm():
            for flat in self._flats:
                collective.all_reduce_(flat)
        if self._rank == 0:
            self._unpack(self._any_rank_has_grad())
        else:
            self.clear()

    def broadcast_from_first(self, collective: Collective) -> None:
        """Broadcast rank 0's current gradients to all ranks."""
        if self._rank == 0:
            self._pack()
        with self._comm():
            for flat in self._flats:
                collective.broadcast_(flat)
        self._unpack(self._has_grad[0])

    def average(self, collective: Collective, weight: float) -> None:
        """Replace every rank's gradients by their mean, weighted by ``weight``."""
        self._pack(empty=weight == 0)
        with self._comm():
            collective.weighted_mean_(self._flats, weight)
        self._unpack(self._any_rank_has_grad())

    def clear(self) -> None:
        """Clear this rank's gradients."""
        for p in self._params:
            p.grad = None

    def _pack(self, *, empty: bool = False) -> None:
        """Copy the gradients into the flat tensors, and record which exist."""
        grads = [None if empty else p.grad for p in self._params]
        self._has_grad[self._rank] = [g is not None for g in grads]
        if empty:  # with weight 0 the tensors are not read
            return
        targets, sources = [], []
        for name, view, grad in zip(self._names, self._views, grads, strict=True):
            if grad is view:  # set by an earlier exchange, in place already
                continue
            if grad is None:
                view.zero_()
            else:
                refuse_sparse(name, grad)
                targets.append(view)
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    # The methods below run in the caller's thread while the ranks are idle.

    @property
    def num_elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel() for p in self._params)

    @torch.no_grad()
    def add_grads_to(self, first: GradientExchange) -> None:
        """Add this rank's gradients to rank 0's; this one has none afterwards."""
        targets, sources = [], []
        for name, mine, theirs in zip(self._names, self._params, first._params, strict=True):
            grad = mine.grad
            if grad is None:
                continue
            refuse_sparse(name, grad)
            if theirs.grad is None:
                theirs.grad = grad
            else:
                refuse_sparse(name, theirs.grad)
                targets.append(theirs.grad)
                sources.append(grad)
        if targets:
            torch._foreach_add_(targets, sources)
        self.clear()

    @torch.no_grad()
    def copy_grads_from(self, first: GradientExchange) -> None:
        """Copy rank 0's current gradients."""
        targets, sources = [], []
        for name, mine, view, theirs in zip(
            self._names, self._params, self._views, first._params, strict=True
        ):
            if theirs.grad is None:
                mine.grad = None
                continue
            refuse_sparse(name, theirs.grad)
            targets.append(view)
            sources.append(theirs.grad)
            mine.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)

    def _any_rank_has_grad(self) -> list[bool]:
        return [any(flags) for flags in zip(*self._has_grad, strict=True)]

    def _unpack(self, has_grad: Sequence[bool]) -> None:
        for p, view, flag in zip(self._params, self._views, has_grad, strict=True):
            p.grad = view if flag else None


class StepGuard:
    """Refuses an optimizer's steps outside :meth:`stepping`, until it is closed or collected.

    ``GradScaler.step`` calls the optimizer's ``step``, so it is refused too.

    Args:
        optimizer: A replica's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_stepping = False
        guard = weakref.ref(self)  # the optimizer may outlive the guard
        self._hook = optimizer.register_step_pre_hook(partial(_check_stepping, guard))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow steps for the duration of the context."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def close(self) -> None:
        """Allow all steps from here on. Idempotent."""
        self._hook.remove()


def _check_stepping(guard: weakref.ref[StepGuard], *args: object) -> None:
    if (self := guard()) is not None and not self.is_stepping:
        raise RuntimeError(STEPPED_OUTSIDE)
