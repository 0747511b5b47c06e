"""ShardedParams: the parameters of a run's replica, whose optimizer trains this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.checkpoint.content import ShardFacts
from runtime.checkpoint.optimizer_shards import cut_state
from runtime.collective import Collective
from runtime.fsdp.group_closer import OwnedGroups
from runtime.fsdp.layout import Slot
from runtime.fsdp.sharded import ShardedParameters
from runtime.fsdp.shared_parameters import find_parameters
from runtime.fsdp.strategy import ShardingStrategy, make_groups
from runtime.replica.flat import FlatParams
from runtime.replica.optimizers import (
    Optimizers,
    has_modes,
    load_optimizer_state,
    needs_whole_parameters,
    optimizer_kind,
)


class ShardedParams(FlatParams):
    """The trainable parameters of a module, whose gradients and optimizer state are sharded.

    The module holds the full parameters, so that user code, evaluations and checkpoints see the
    whole model on every rank. :meth:`release` replaces them by the shards for the optimizer's step,
    and :meth:`gather` restores them. User code may write to the full parameters, on all ranks
    alike, and may freeze some. Those that are frozen at the beginning are not sharded: an update
    of theirs in ``train_fn`` is not made on a rank without samples. Construction is a collective
    call.

    Args:
        optimizer: Its optimizer, which trains the shards from here on.
        strategy: Any but ``NO_SHARD``.
        intra_node_size: For ``HYBRID_SHARD``: ranks of a node.

    Attributes:
        group: The ranks that share one copy of the parameters.
        is_whole: True while the module holds the full parameters.

    Raises:
        ValueError: The parameters or the optimizer cannot be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        base: FlatParams,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        strategy: ShardingStrategy,
        intra_node_size: int | None,
    ) -> None:
        _check_optimizer(optimizer)
        found = [each for each in find_parameters(module) if each.parameter.requires_grad]
        groups = make_groups(collective, strategy, intra_node_size)
        self._owned = OwnedGroups()
        self._owned.add(groups.owned)
        self.group = groups.shard
        self._world = collective
        self.store = ShardedParameters(
            found, collective, groups, keep_full=not strategy.frees_parameters
        )
        self.names, self.params = base.names, base.params
        self.trained = [self.store.shard_of(p) for p in self.params]
        # Both are in the order of named_parameters().
        places = [(i, slot) for i, x in enumerate(self.store.layouts) for slot in x.slots]
        self._places = sorted(places, key=lambda place: place[1].index)
        self._slots = {
            id(shard): slot for shard, (_, slot) in zip(self.trained, self._places, strict=True)
        }
        self.is_whole = False
        self._optimizer = optimizer
        self._train_shards()
        self.gather()

    def _train_shards(self) -> None:
        """Replace the parameters of the optimizer, which has made no step, by the shards."""
        optimizer = self._optimizer
        state = optimizer.state_dict() if optimizer.state else None
        self.adopt_groups()
        optimizer.state.clear()
        if state is not None:
            load_optimizer_state(optimizer, self.own_part(state))

    def adopt_groups(self) -> None:
        """See :meth:`FlatParams.adopt_groups`.

        Raises:
            ValueError: A parameter is in two groups.
        """
        groups = self._optimizer.param_groups
        for group in groups:
            group["params"][:] = [self.store.shard_of(p) for p in group["params"]]
        held = [id(p) for group in groups for p in group["params"]]
        if len(set(held)) < len(held):
            raise ValueError("some parameters appear in more than one parameter group")

    def gather(self) -> None:
        """Gather the full parameters from the shards and install them in the module; collective."""
        self.store.unshard()
        if self._world is not self.group:
            self._world.barrier()  # no rank is a step ahead: a failure leaves all shards or none
        self.flats = self.store.full_flats
        self.is_whole = True

    def release(self) -> None:
        """Update the shards from the full parameters, install them, and free what the strategy
        does not keep.
        """
        self.store.update_from_full()
        self.is_whole = False
        self.flats = []
        self.store.reshard()

    def close(self) -> None:
        """Close the subgroups. After a failure full parameters are allocated, to load a state."""
        self._owned.close()
        if not self.is_whole:
            self.store.allocate_full()
            self.flats = self.store.full_flats

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """See :meth:`FlatParams.views`."""
        return self.viewer()(flats)

    def viewer(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """See :meth:`FlatParams.viewer`."""
        places, num = self._places, self.group.world_size
        return lambda flats: [slot.view_of(slot.padded_of(flats[i], num)) for i, slot in places]

    def check(self) -> None:
        self._pointers = [view.data_ptr() for view in self.views(self.flats)]
        super().check()

    def _slots_of_optimizer(self) -> list[Slot]:
        groups = self._optimizer.param_groups
        return [self._slots[id(p)] for group in groups for p in group["params"]]

    def shard_facts(self) -> ShardFacts:
        """See :meth:`FlatParams.shard_facts`."""
        slots = self._slots_of_optimizer()
        return ShardFacts(
            rank=self.group.rank,
            num_shards=self.group.world_size,
            shapes=tuple(tuple(slot.shape) for slot in slots),
            strides=tuple(tuple(slot.stride) for slot in slots),
        )

    def own_part(self, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`FlatParams.own_part`."""
        slots = self._slots_of_optimizer()

        def cut(i: int, value: Tensor) -> Tensor:
            start, stop = slots[i].extent(self.group.rank)
            return slots[i].flatten(value)[start:stop].clone()

        return cut_state(optimizer_state, [slot.shape for slot in slots], cut)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind, reason = optimizer_kind(optimizer), ""
    if isinstance(optimizer, Optimizers):
        kind, reason = "a dict of optimizers", "which reduce their gradients separately"
    elif has_modes(optimizer):
        reason = "which has train() and eval() modes and moves the weights itself"
    elif needs_whole_parameters(optimizer):
        reason = "whose step depends on whole parameters, of which a rank has a part"
    if reason:
        raise ValueError(f"sharded(...) cannot be combined with {kind}, {reason}: leave it out")
