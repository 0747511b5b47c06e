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
from runtime.loop.scatter import ShardInput, nested_to_device, to_device, to_replica
from runtime.replica.build import OptimFactory, build_optimizer
from runtime.replica.flat import FlatBuffers, FlatParams, FlatState, reals
from runtime.replica.gradients import refuse_sparse, scale_for_mean_

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, float | Tensor]]
Options = Sequence[Mapping[str, Any]]
"""Settings of an optimizer's groups, without their parameters."""
STEPPED_OUTSIDE = (
    "the optimizer of a model from Trainer.setup was stepped outside model.step(), by hand or by "
    "a GradScaler: it would train one replica alone, on gradients that may still be scaled. Call "
    "model.step() instead; with autocast use bfloat16, which needs no GradScaler"
)


class LoopReplica:
    """A replica of a loop of the user's own.

    Made and used in the thread of its device, inside ``context.activate()``; rank 0's model
    and optimizer are the user's too while no task runs.

    Args:
        rank: Its rank.
        context: Its device.
        model: Its model, on that device.
        optim_factory: Makes its optimizer.
        used: See :class:`GradientExchange`.
        loss_weight: See :class:`~runtime.DdpConfig`.

    Attributes:
        model: The model, in train mode.
        optimizer: The optimizer.
        guard: Refuses steps of it that this replica does not make.
        tensors: All parameters, frozen ones too.
        modules: All modules.
        sample_timer: Times forward and backward, for so many samples.
        batch_timer: Times whole batches.
        sync_timer: Times the averages of several batches.
        exchange: Its gradients on their way to the others.
        exchange_span_s: When the last exchange of gradients began and ended, on the host.
    """

    def __init__(
        self,
        rank: int,
        context: Device,
        model: nn.Module,
        optim_factory: OptimFactory,
        used: list[list[bool]],
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
        self.exchange = GradientExchange(self.state.params, rank, used, context.comm)
        self._stashed: dict[int, Tensor] = {}
        self._comm = context.comm
        self.exchange_span_s = (0.0, 0.0)

    def forward(self, piece: ShardInput, start: int, stop: int) -> ShardOutput:
        """Run the model on its piece."""
        timed = torch.is_grad_enabled()
        if timed:
            self.sample_timer.start()
        output = self.model(*piece.args, **piece.kwargs)
        if timed:
            self.sample_timer.stop(stop - start)
        outputs: list[Tensor] = []
        spec = flatten(output, outputs, strict=True)
        shard = ShardOutput(self.rank, start, stop, piece, spec)
        shard.outputs = outputs
        if any(t.dim() == 0 and t.is_floating_point() for t in outputs):
            shard.weight = output_weight(
                self.model, piece.args, piece.kwargs, output, self._loss_weight
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
        """Run backward on what :meth:`forward` gave."""
        self.sample_timer.start()
        given = [None if g is None else to_device(g, self.device) for g in grads]
        mask = _weight_mask(shard, given) if param_grads else None
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
        """Forward, loss and backward of each batch in turn; gradients add up.

        Returns:
            Their losses, of shape ``(len(batches),)``, on the device, and what each is a mean
            over, where ``loss_fn`` told.
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
        """Put the gradients aside, to those that are held already."""
        targets, sources = [], []
        for place, p in enumerate(self.tensors):
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                name, _ = list(self.model.named_parameters())[place]
                refuse_sparse(name, p.grad)
            if place in self._stashed:
                targets.append(self._stashed[place])
                sources.append(p.grad)
            else:
                self._stashed[place] = p.grad
            p.grad = None
        if targets:
            torch._foreach_add_(targets, sources)

    def unstash(self) -> None:
        """Make what is held the gradients again, together with those since."""
        self.stash()
        for place, grad in self._stashed.items():
            self.tensors[place].grad = grad
        self._stashed = {}

    def clear_stash(self) -> None:
        """Forget what is held."""
        self._stashed = {}

    def divide(self, weight: Weight) -> None:
        """Divide the gradients of weighted losses by the weights' sum."""
        divide_grads_(self.state.params.params, weight)

    def average(
        self,
        collective: Collective,
        count: int,
        max_norm: float | None,
        weights: Sequence[Weight] | None = None,
    ) -> None:
        """Clip what was accumulated, divide it by its batches, and average it over the ranks.

        Args:
            collective: Where the ranks meet.
            count: Batches of this rank, which are its weight.
            max_norm: Of the accumulated gradient; ``None``: as it is.
            weights: Of all ranks, where losses are weighted; ``None``: batches count alike.
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
                amount = 1.0  # the plain mean is the weighted one now
            else:
                assert not isinstance(own, Tensor), "judged above"
                amount = own
        collective.barrier()  # that the slowest is waited for is no cost of the exchange
        start_s = time.monotonic()
        self.sync_timer.start()
        self.exchange.average(collective, amount)
        self.sync_timer.stop(1)
        self.exchange_span_s = (start_s, time.monotonic())

    def clip(self, max_norm: float) -> Tensor:
        """Clip this rank's gradients; gives the norm they had."""
        return nn.utils.clip_grad_norm_(self.state.params.params, max_norm)

    def broadcast_from_first(self, collective: Collective) -> None:
        """See :meth:`GradientExchange.broadcast_from_first`."""
        self.state.params.check()
        self.exchange.broadcast_from_first(collective)

    def step(self, options: Options | None, *, keep: bool = False) -> None:
        """Step the optimizer with the settings of rank 0's; ``keep`` the gradients or forget."""
        if options is not None:
            self._set_options(options)
        with self.guard.stepping():
            self.optimizer.step()
        if not keep:
            self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
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

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of the model; tensors on its device, rank 0's as they are."""
        setattr(self.model, name, to_replica(value, self.device, copy=self.rank > 0))
        if name in self.model._buffers:  # perhaps of another shape
            self.state.buffers = FlatBuffers(self.model)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to the model, on its device."""
        own = to_replica(tensor, self.device, copy=self.rank > 0)
        self.model.register_buffer(name, own, persistent)
        self.state.buffers = FlatBuffers(self.model)

    def set_groups(self, members: Sequence[Sequence[int]], options: Options) -> None:
        """Regroup what the optimizer trains.

        Args:
            members: For each group the places of its parameters among the trained ones.
            options: For each group its settings; what is new keeps them.
        """
        params, groups = self.state.params.params, self.optimizer.param_groups
        del groups[len(members) :]
        for group, places in zip(groups, members, strict=False):
            group["params"] = [params[i] for i in places]
        for index in range(len(groups), len(members)):
            own = [params[i] for i in members[index]]
            self.optimizer.add_param_group({**options[index], "params": own})

    @torch.no_grad()
    def copy_weights(self, first: LoopReplica) -> None:
        """Take rank 0's parameters, frozen ones too, and buffers."""
        for mine, theirs in zip(self.tensors, first.tensors, strict=True):
            mine.copy_(theirs)
        self.copy_buffers(first)

    @torch.no_grad()
    def copy_params(self, first: LoopReplica) -> None:
        """Take rank 0's trained parameters."""
        first.state.params.check()
        self.state.params.check()
        for mine, theirs in zip(self.state.params.flats, first.state.params.flats, strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def copy_buffers(self, first: LoopReplica) -> None:
        """Take rank 0's buffers, from its own memory. Both on the CPU, or nobody writes."""
        mine, theirs = self.state.buffers.tensors(), first.state.buffers.tensors()
        if mine:
            with _writing(mine):
                torch._foreach_copy_(mine, theirs)

    @torch.no_grad()
    def restore_buffers(self, kept: Sequence[Tensor]) -> None:
        """Write back what the buffers were; nothing where none were kept."""
        mine = self.state.buffers.tensors()
        if kept and mine:
            with _writing(mine):
                torch._foreach_copy_(mine, list(kept))

    @torch.no_grad()
    def broadcast_buffers(self, collective: Collective) -> None:
        """Take rank 0's buffers through the collective."""
        buffers = self.state.buffers
        floats, others = buffers.empty()
        with self._comm():
            buffers.read_into(floats, others)
            for flat in (*floats, *others):
                collective.broadcast_(flat)
            if self.rank:
                with _writing(buffers.tensors()):
                    buffers.write_from(floats, others)

    def copy_optimizer(self, first: LoopReplica) -> None:
        """Take rank 0's optimizer state."""
        state = first.optimizer.state_dict()
        # load_state_dict keeps tensors of the right dtype and device, which are the other's,
        # so they are copied. To this device: that is in order with its stream, while a clone
        # on another GPU would run there on a stream that waits for nobody.
        memo: dict[int, Any] = {
            id(t): t.clone() if t.device.type == "cpu" else t.to(self.device, copy=True)
            for entry in (*state["state"].values(), *state["param_groups"])
            if isinstance(entry, dict)
            for t in entry.values()
            if isinstance(t, Tensor)
        }
        self.optimizer.load_state_dict(copy.deepcopy(state, memo))


def _writing(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Around writing to buffers: those that a forward has left in inference mode change there."""
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else nullcontext()


def average_accumulated_(
    params: Sequence[nn.Parameter], count: int, max_norm: float | None
) -> None:
    """Clip gradients that were added up over ``count`` batches, then divide them by it."""
    if count == 0:
        return
    if max_norm is not None:
        nn.utils.clip_grad_norm_(params, max_norm)
    grads = [p.grad for p in params if p.grad is not None]
    if count > 1 and grads:
        torch._foreach_div_(grads, float(count))


def _weight_mask(shard: ShardOutput, grads: Sequence[Tensor | None]) -> Tensor | None:
    """A piece's weight, if the host cannot read it and nothing but weighted losses goes back."""
    if not isinstance(shard.weight, Tensor) or shard.outputs is None:
        return None
    used = [o for o, g in zip(shard.outputs, grads, strict=True) if g is not None]
    return shard.weight if all(o.dim() == 0 for o in used) else None


def divide_grads_(params: Sequence[nn.Parameter], weight: Weight, times: float = 1.0) -> None:
    """Divide gradients by a weight and multiply them; of the weight 0 they become zeros."""
    grads = [p.grad for p in params if p.grad is not None]
    factor = inverse_of(weight) * times
    if isinstance(factor, Tensor):
        scale_(grads, factor)
    elif grads:
        torch._foreach_mul_(grads, factor)


def read_loss(result: object) -> tuple[Tensor, Weight | None]:
    """What a ``loss_fn`` of ``accumulate`` gave: a loss, with its weight or without."""
    if isinstance(result, tuple) and (len(result) == 2 or isinstance(result, Weighted)):
        return checked_loss(result[0], "loss_fn"), check_weight("the weight of the loss", result[1])
    return checked_loss(result, "loss_fn"), None


@contextmanager
def _masking_grads(params: Sequence[nn.Parameter], weight: Tensor | None) -> Iterator[None]:
    """Around a backward pass whose gradients are zeros if its weight, which is not read, is 0:
    they may be NaN then, and those that are there already must not be touched."""
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
    """Run backward, outside autocast, with the loss multiplied by its weight; gives the loss
    without its graph, 0 if its weight is. Of the weight 0 the parameters' gradients stay."""
    found = loss.detach().reshape(())
    if isinstance(weight, float) and weight == 0:
        return torch.zeros_like(found)
    mask = weight if isinstance(weight, Tensor) else None
    with outside_autocast(), _masking_grads(params, mask):
        whole = loss if weight is None else loss * weight
        whole.backward()  # type: ignore[no-untyped-call]
    return torch.where(weight == 0, 0.0, found) if isinstance(weight, Tensor) else found


class GradientExchange:
    """One replica's gradients, in flat tensors where the ranks meet. For its thread.

    A parameter that got no gradient on any rank keeps ``.grad is None``. Which ones got one
    is told in ``used``, a list that all ranks share: a rank writes its entry before it meets
    the others in a collective, and reads theirs after it, so nothing is read from a device.

    Args:
        params: The replica's parameters.
        rank: Its rank.
        used: For each rank which parameters had a gradient.
        comm: The context for collectives, see :meth:`Device.comm`.
    """

    def __init__(
        self,
        params: FlatParams,
        rank: int,
        used: list[list[bool]],
        comm: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._params = params.params
        self._names = params.names
        self._rank = rank
        self._used = used
        self._comm = comm
        flats = params.like()
        self._flats = reals(flats)
        self._views = params.views(flats)

    def reduce_to_first(self, collective: Collective) -> None:
        """Add all ranks' gradients up on rank 0; the others have none afterwards.

        What rank 0 had before is part of the sum.
        """
        self._pack()
        with self._comm():
            for flat in self._flats:
                collective.all_reduce_(flat)
        if self._rank == 0:
            self._unpack(self._used_on_any_rank())
        else:
            self.clear()

    def broadcast_from_first(self, collective: Collective) -> None:
        """Give rank 0's gradients, as they are now, to all ranks."""
        if self._rank == 0:
            self._pack()
        with self._comm():
            for flat in self._flats:
                collective.broadcast_(flat)
        self._unpack(self._used[0])

    def average(self, collective: Collective, weight: float) -> None:
        """Replace every rank's gradients by their mean, weighted by ``weight``."""
        self._pack(empty=weight == 0)
        with self._comm():
            collective.weighted_mean_(self._flats, weight)
        self._unpack(self._used_on_any_rank())

    def clear(self) -> None:
        """Forget this rank's gradients."""
        for p in self._params:
            p.grad = None

    def _pack(self, *, empty: bool = False) -> None:
        """Bring the gradients into the flat tensors, and tell which there are."""
        grads = [None if empty else p.grad for p in self._params]
        self._used[self._rank] = [g is not None for g in grads]
        if empty:  # with the weight 0 nobody looks at the tensors
            return
        targets, sources = [], []
        for name, view, grad in zip(self._names, self._views, grads, strict=True):
            if grad is view:  # of an earlier exchange, added to since
                continue
            if grad is None:
                view.zero_()
            else:
                refuse_sparse(name, grad)
                targets.append(view)
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    # In the caller's thread, while the ranks rest.

    @property
    def num_elements(self) -> int:
        """Of all parameters together."""
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
        """Take rank 0's gradients, as they are now."""
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

    def _used_on_any_rank(self) -> list[bool]:
        return [any(flags) for flags in zip(*self._used, strict=True)]

    def _unpack(self, used: Sequence[bool]) -> None:
        for p, view, flag in zip(self._params, self._views, used, strict=True):
            p.grad = view if flag else None


class StepGuard:
    """Refuses an optimizer's steps outside :meth:`stepping`, as long as it lives.

    ``GradScaler.step`` ends in the optimizer's own ``step``, so it is refused too.

    Args:
        optimizer: A replica's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_stepping = False
        guard = weakref.ref(self)  # the optimizer may live longer
        self._hook = optimizer.register_step_pre_hook(partial(_refuse_by_hand, guard))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the step that ``model.step()`` makes."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def close(self) -> None:
        """The optimizer is the user's own from here on. Idempotent."""
        self._hook.remove()


def _refuse_by_hand(guard: weakref.ref[StepGuard], *args: object) -> None:
    if (self := guard()) is not None and not self.is_stepping:
        raise RuntimeError(STEPPED_OUTSIDE)
