"""Parameters that every rank holds in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.collective import Collective, ReduceOp
from runtime.core.errors import ReplicaMismatch
from runtime.fsdp.exchange import from_rank0, used_on_any_rank
from runtime.fsdp.layout import Bucket, make_layouts
from runtime.fsdp.shared_parameters import SharedParameter, describe_original
from runtime.replica.flat import checksum, states_of, views_of
from runtime.replica.gradients import refuse_sparse

DIFFERS = (
    "FSDP: the parameter {name!r} differs between ranks, as forward changes it by its batch, or a "
    "rank has changed it since wrapping: change it after optimizer.step(), alike on every rank, or "
    "make it a buffer if it is not trained; initialize the module before it is wrapped; build an "
    "embedding without max_norm, and limit its norm after the step"
)


class ReplicatedParameters:
    """The module's own parameters, with the interface of :class:`ShardedParameters`.

    Used in the thread of its rank only; everything runs on the current stream. Construction is a
    collective call.

    Args:
        world: All ranks; they start with rank 0's values.

    Attributes:
        generation: Always 0: full values are never replaced.
        is_unsharded: Always ``False``: there is nothing to free.
        needs_all_gather: Always ``False``.
    """

    generation = 0
    is_unsharded = False
    shards_changed = False
    needs_all_gather = False
    is_prefetching = False
    gradients_changed = False

    def __init__(self, found: Sequence[SharedParameter], world: Collective) -> None:
        self.names = [each.name for each in found]
        self.shards = [each.parameter for each in found]
        for each in found:
            describe_original(each.parameter, each.parameter, each.name)
        self._world = world
        self._sums_values = True  # in the first forward
        self._is_changed = True  # since the last comparison, possibly: at first by initialization
        trainable = [p for p in self.shards if p.requires_grad]
        self._trainable = trainable
        self._added: set[int] = set()  # indices of gradients not yet reduced
        self._hooks: list[RemovableHandle] = []
        if world.world_size > 1:
            for i, parameter in enumerate(trainable):
                hook = partial(_add_index, self._added, i)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)
        # With one shard, flat shards are full tensors.
        self._layouts = make_layouts(trainable, 1)
        with torch.no_grad():
            for parameter in self.shards:
                parameter.copy_(from_rank0(parameter, world))

    @property
    def is_trainable(self) -> bool:
        """True if any parameter is trainable."""
        return bool(self._trainable)

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def check(self) -> None:
        """No effect: nothing is gathered."""

    def check_shards(self) -> None:
        """No effect: the module holds the parameters."""

    def unshard(self) -> None:
        """No effect: full values always exist."""

    def full_states(self) -> list[tuple[int, int]]:
        """State of each parameter, to detect changes; see :class:`ShardedParameters`."""
        return states_of(self.shards, with_values=self._sums_values)

    def check_unchanged(self, states: Sequence[tuple[int, int]]) -> None:
        """Record if forward has changed parameters, which :meth:`reduce` then compares."""
        self._is_changed |= self.full_states() != states
        self._sums_values = False

    def reshard(self) -> None:
        """No effect: full values are kept."""

    def refresh_full(self) -> None:
        """No effect: the optimizer writes the full values."""

    def restore_full(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def wait_prefetch(self) -> None:
        """No effect: there is no prefetch."""

    def drop_prefetch(self) -> None:
        """No effect: there is no prefetch."""

    def start_prefetch(self, make_group: Callable[[], Collective], name: str) -> None:
        """Never called: nothing is gathered."""
        raise AssertionError("nothing to prefetch")

    def as_shards(self) -> AbstractContextManager[None]:
        """No effect: the module always holds the parameters."""
        return nullcontext()

    as_full_shapes = as_shards

    def record_gradients(self) -> None:
        """No effect: each rank has all gradients."""

    def end_forward(self) -> None:
        """No effect: the parameters hold all gradients."""

    def begin_backward(self) -> None:
        """No effect: the parameters hold all gradients."""

    def check_mark(self) -> None:
        """No effect: clearing gradients clears all of them."""

    def check_gradients(self) -> None:
        """Raise ``ValueError`` if a gradient is sparse."""
        refuse_sparse(self.names, [parameter.grad for parameter in self.shards])

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients over all ranks, in place; a collective call.

        Call after :meth:`check_gradients`.

        Raises:
            ReplicaMismatch: Parameters differ, at the first call or after a forward changed some.
        """
        used = [parameter.grad is not None for parameter in self._trainable]
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flats: list[Tensor] = []
        copied: list[tuple[list[Tensor], list[Tensor]]] = []
        for layout in self._layouts:
            for bucket in layout.buckets:
                gradients = self._gradients_of(bucket)
                if len(gradients) == 1:
                    flat = bucket.slots[0].flatten(gradients[0])  # a view in most cases
                    views = [bucket.slots[0].view_of(flat)]
                else:
                    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                    views = views_of(flat, [g.size() for g in gradients])
                if flat.data_ptr() != gradients[0].data_ptr():
                    copied.append((gradients, views))
                flats.append(flat)
        self._world.all_reduce_coalesced_(
            flats, ReduceOp.AVG, tally=used.count(False) + self._is_changed
        )
        num_missing = self._world.tally
        for gradients, views in copied:
            torch._foreach_copy_(gradients, views)
        if num_missing:
            *used, is_changed = used_on_any_rank([*used, self._is_changed], self._world)
            for parameter, is_used in zip(self._trainable, used, strict=True):
                if not is_used:
                    parameter.grad = None
            if is_changed:
                self._compare_values()
        self._added.clear()

    def _compare_values(self) -> None:
        """Compare the parameters with those of the other ranks; a collective call."""
        self._is_changed = False
        sums = torch.stack([checksum(p).cpu() for p in self.shards])
        gathered = sums.new_empty(self._world.world_size * len(sums))
        self._world.all_gather_into(gathered, sums)
        by_rank = gathered.view(self._world.world_size, -1)
        differs = (by_rank != by_rank[0]).any(0)
        if differs.any():
            name = self.names[int(differs.int().argmax())]
            raise ReplicaMismatch(DIFFERS.format(name=name))

    @property
    def has_unreduced(self) -> bool:
        """True if a backward pass has added to gradients since the last reduction."""
        return any(self._trainable[i].grad is not None for i in self._added)

    def _gradients_of(self, bucket: Bucket) -> list[Tensor]:
        gradients: list[Tensor] = []
        for slot in bucket.slots:
            gradient = self._trainable[slot.index].grad
            assert gradient is not None
            gradients.append(gradient)
        return gradients

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trainable if p.grad is not None]

    def drop_gradients(self) -> None:
        """No effect: the parameters hold all gradients."""

    def full_values(self) -> Iterator[tuple[int, Tensor]]:
        for index, parameter in enumerate(self.shards):
            yield index, parameter.detach()

    def shape_of(self, index: int) -> torch.Size:
        return self.shards[index].size()

    def shard_facts(self) -> None:
        """``None``: each rank has whole parameters."""

    def check_shard_facts(self, facts: Mapping[str, Any]) -> None:
        """No effect: the sizes of shards do not fit."""

    @torch.no_grad()
    def load(self, index: int, values: Tensor) -> None:
        """Copy values, of the parameter's shape and on any device."""
        self.shards[index].copy_(values)

    def mark_loaded(self, *, was_changed: bool) -> None:
        """No effect: there is no other copy."""


def _add_index(added: set[int], index: int, _: Tensor) -> None:
    added.add(index)
