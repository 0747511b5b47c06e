"""One replica: its model, its optimizer, and what its thread does with them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.core.nested import Spec, flatten
from runtime.device.base import DeviceContext
from runtime.loop.ambient import outside_autocast
from runtime.loop.exchange import GradientExchange
from runtime.loop.scatter import Piece, carry, move, placed
from runtime.replica.build import OptimFactory, build_optimizer
from runtime.replica.flat import FlatBuffers, FlatState

LossFn = Callable[[nn.Module, Any], Tensor]
Options = Sequence[Mapping[str, Any]]
"""Settings of an optimizer's groups, without their parameters."""


class Shard:
    """One replica's part of one call, with the graph that leads to its outputs.

    Attributes:
        rank: The replica.
        start: First sample.
        stop: One past the last.
        spec: What the output is like.
        outputs: Its tensors; ``None`` once the graph was freed.
    """

    def __init__(self, rank: int, start: int, stop: int, piece: Piece, spec: Spec) -> None:
        self.rank = rank
        self.start, self.stop = start, stop
        self.spec = spec
        self.outputs: list[Tensor] | None = []
        self._piece: Piece | None = piece

    def backward(
        self, grads: Sequence[Tensor | None], *, params: bool, keep: bool
    ) -> list[Tensor | None]:
        """Run backward in the replica's thread.

        Args:
            grads: For each output its gradient, on the replica's device.
            params: Whether parameters get gradients too, not only inputs.
            keep: Whether the graph is used again.

        Returns:
            The gradient of each input tensor's piece, where one was asked for.
        """
        assert self.outputs is not None, "checked by the caller"
        assert self._piece is not None, "goes with the outputs"
        leaves = self._piece.leaves
        wanted = [leaf for leaf in leaves if leaf is not None]
        pairs = [(o, g) for o, g in zip(self.outputs, grads, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        if pairs and (params or wanted):
            outputs, given = zip(*pairs, strict=True)
            torch.autograd.backward(
                outputs, given, retain_graph=keep, inputs=None if params else wanted
            )
        found = [None if leaf is None else leaf.grad for leaf in leaves]
        for leaf in wanted:
            leaf.grad = None
        if not keep:
            self.outputs = self._piece = None
        return found


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

    Attributes:
        model: The model, in train mode.
        optimizer: The optimizer.
        tensors: All parameters, frozen ones too.
        modules: All modules.
        sample_timer: Times forward and backward, for so many samples.
        batch_timer: Times whole batches.
        sync_timer: Times the averages of several batches.
        reduced_s: When the last exchange of gradients began and ended, on the host.
    """

    def __init__(
        self,
        rank: int,
        context: DeviceContext,
        model: nn.Module,
        optim_factory: OptimFactory,
        used: list[list[bool]],
    ) -> None:
        self.rank = rank
        self.device = context.device
        self.model = model
        model.train()
        model.zero_grad(set_to_none=True)
        self.state = FlatState(model)
        context.pin_accumulators(self.state.params.params)
        self.optimizer = build_optimizer(optim_factory, model, self.state.params.params, None)
        self.tensors = list(model.parameters())
        self.modules = list(model.modules())
        self.sample_timer = context.new_timer()
        self.batch_timer = context.new_timer()
        self.sync_timer = context.new_timer()
        self._exchange = GradientExchange(self.state.params, rank, used, context.comm)
        self._comm = context.comm
        self.reduced_s = (0.0, 0.0)

    # -- one batch, shared out ---------------------------------------------------------

    def forward(self, piece: Piece, start: int, stop: int) -> Shard:
        """Run the model on its piece."""
        timed = torch.is_grad_enabled()
        if timed:
            self.sample_timer.start()
        output = self.model(*piece.args, **piece.kwargs)
        if timed:
            self.sample_timer.stop(stop - start)
        outputs: list[Tensor] = []
        spec = flatten(output, outputs, strict=True)
        shard = Shard(self.rank, start, stop, piece, spec)
        shard.outputs = outputs
        return shard

    def backward(
        self, shard: Shard, grads: Sequence[Tensor | None], *, params: bool, keep: bool
    ) -> list[Tensor | None]:
        """Run backward on what :meth:`forward` gave."""
        self.sample_timer.start()
        given = [None if g is None else carry(g, self.device) for g in grads]
        found = shard.backward(given, params=params, keep=keep)
        self.sample_timer.stop(0)
        return found

    def collect(self, collective: Collective) -> None:
        """See :meth:`GradientExchange.collect`."""
        start_s = time.perf_counter()
        self._exchange.collect(collective)
        self.reduced_s = (start_s, time.perf_counter())

    def hand_to(self, first: LoopReplica) -> None:
        """See :meth:`GradientExchange.hand_to`."""
        start_s = time.perf_counter()
        self._exchange.hand_to(first._exchange)
        self.reduced_s = first.reduced_s = (start_s, time.perf_counter())

    def take_from(self, first: LoopReplica) -> None:
        """See :meth:`GradientExchange.take_from`."""
        self.state.params.check()
        self._exchange.take_from(first._exchange)

    @property
    def num_elements(self) -> int:
        """Of the parameters that are exchanged."""
        return self._exchange.num_elements

    # -- several batches between two reductions ------------------------------------------

    def accumulate(self, loss_fn: LossFn, batches: Sequence[Any]) -> Tensor:
        """Forward, loss and backward of each batch in turn; gradients add up.

        Returns:
            Their losses, of shape ``(len(batches),)``, on the device.
        """
        losses = []
        for batch in batches:
            self.batch_timer.start()
            loss = checked_loss(loss_fn(self.model, move(batch, self.device)))
            with outside_autocast():
                loss.backward()  # type: ignore[no-untyped-call]
            self.batch_timer.stop(1)
            losses.append(loss.detach().reshape(()))
        return torch.stack(losses) if losses else torch.empty(0, device=self.device)

    def average(self, collective: Collective, count: int, max_norm: float | None) -> None:
        """Clip what was accumulated, divide it by its batches, and average it over the ranks.

        Args:
            collective: Where the ranks meet.
            count: Batches of this rank, which are its weight.
            max_norm: Of the accumulated gradient; ``None``: as it is.
        """
        self.state.params.check()
        mean_of_accumulated(self.state.params.params, count, max_norm)
        collective.barrier()  # that the slowest is waited for is no cost of the exchange
        start_s = time.perf_counter()
        self.sync_timer.start()
        self._exchange.average(collective, count)
        self.sync_timer.stop(1)
        self.reduced_s = (start_s, time.perf_counter())

    # -- steps -----------------------------------------------------------------------

    def clip(self, max_norm: float) -> Tensor:
        """Clip this rank's gradients; gives the norm they had."""
        return nn.utils.clip_grad_norm_(self.state.params.params, max_norm)

    def spread(self, collective: Collective) -> None:
        """See :meth:`GradientExchange.spread`."""
        self.state.params.check()
        self._exchange.spread(collective)

    def step(self, options: Options | None) -> None:
        """Step the optimizer with the settings of rank 0's, and forget the gradients."""
        if options is not None:
            self._set_options(options)
        self.optimizer.step()
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

    # -- what the caller adds ----------------------------------------------------------

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute of the model; tensors on its device, rank 0's as they are."""
        setattr(self.model, name, placed(value, self.device, copy=self.rank > 0))
        if name in self.model._buffers:  # perhaps of another shape
            self.state.buffers = FlatBuffers(self.model)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool) -> None:
        """Add a buffer to the model, on its device."""
        own = placed(tensor, self.device, copy=self.rank > 0)
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

    # -- rank 0's state ----------------------------------------------------------------

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


def mean_of_accumulated(params: Sequence[nn.Parameter], count: int, max_norm: float | None) -> None:
    """Clip gradients that were added up over ``count`` batches, then divide them by it."""
    if count == 0:
        return
    if max_norm is not None:
        nn.utils.clip_grad_norm_(params, max_norm)
    grads = [p.grad for p in params if p.grad is not None]
    if count > 1 and grads:
        torch._foreach_div_(grads, float(count))


def checked_loss(loss: object) -> Tensor:
    """A scalar loss with a graph, or an error that says what to do."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}: return the batch's mean loss as a tensor"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}: return a scalar, the batch's "
            "mean loss, for instance loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient: compute it from the output of the module "
            "that it is given, outside torch.no_grad()"
        )
    return loss
