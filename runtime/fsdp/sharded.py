"""Parameters sharded over ranks: shards, temporary full values, and gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.device import cuda_api
from runtime.fsdp.exchange import (
    gather_into,
    gathered_slots,
    reduce_gradients,
    used_on_any_rank,
)
from runtime.fsdp.layout import Layout, Slot, make_layouts
from runtime.fsdp.param_prefetch import ParamPrefetch
from runtime.fsdp.shared_parameters import SharedParameter, describe_original
from runtime.fsdp.strategy import ShardGroups
from runtime.replica.flat import states_of
from runtime.replica.gradients import refuse_sparse

logger = logging.getLogger(__name__)

CLEARED = (
    "gradients were cleared after backward() and before sync_gradients(), by "
    "optimizer.zero_grad(), which clears those of the shards only: call fsdp.zero_grad() to drop a "
    "batch after its backward()"
)
DIRECT_GRADIENTS = (
    "FSDP: the loss depends on shards of fsdp.parameters(), of which each rank has a part. "
    "Gradients of elementwise terms, such as sums of squares, are right; those of norms are not, "
    "and the value of the loss is that of this rank's part. Compute such terms from "
    "fsdp.module.parameters() between forward() and backward(), where these are full"
)


class ShardedParameters:
    """A rank's shards, and the full parameters while they exist.

    The module's original parameter objects hold the full values, so hooks, ties and references to
    them stay valid. While resharded they are empty, and the module holds the shards in their
    place. So an autograd graph that outlives the full values fails instead of reading others.

    Used in the thread of its rank only; everything runs on the current stream. Construction is a
    collective call.

    Args:
        world: All ranks; they start with rank 0's values.
        keep_full: Keep full values between steps.

    Attributes:
        shards: This rank's elements of each parameter, one-dimensional, without padding.
        generation: Number of times that full values were replaced or freed.
        is_unsharded: True while the module holds the full values.
    """

    def __init__(
        self,
        found: Sequence[SharedParameter],
        world: Collective,
        groups: ShardGroups,
        *,
        keep_full: bool,
    ) -> None:
        self.names = [each.name for each in found]
        self.generation = 0
        self.is_unsharded = False
        self._sums_values = True
        self._world = world
        self._groups = groups
        self._keep_full = keep_full
        self._params = [each.parameter for each in found]
        self._locations = [each.locations for each in found]
        self._rank = groups.shard.rank
        self.layouts = make_layouts(self._params, groups.shard.world_size)
        self._slots = sorted(
            (slot for layout in self.layouts for slot in layout.slots), key=lambda s: s.index
        )
        self._flats: list[Tensor] = []
        self._full_flats: list[Tensor] | None = None
        self._empties: list[Tensor] = []
        self._prefetch: ParamPrefetch | None = None
        self._stream: cuda_api.Stream | None = None  # for prefetches, on a GPU
        self._prefetch_group: Collective | None = None
        self._may_be_stale = False
        self._grad_versions: dict[int, int] = {}  # by parameter, one of each flat gradient
        self._mark: _Mark | None = None
        self._before_backward: Tensor | None = None
        self._has_warned = False
        shards: dict[int, nn.Parameter] = {}
        for layout in self.layouts:
            self._flats.append(self._shard(layout, world, shards))
        self.shards = [shards[slot.index] for slot in self._slots]
        self._pointers = [shard.data_ptr() for shard in self.shards]
        trained = [shard for shard in self.shards if shard.requires_grad and shard.numel()]
        self._marked = min(trained, key=Tensor.numel, default=None)
        self._shard_of_param = {
            id(param): shard for param, shard in zip(self._params, self.shards, strict=True)
        }
        self._gathered_versions = self._versions()
        if keep_full:
            self._all_gather()
        self._install(self.shards)

    @torch.no_grad()
    def _shard(self, layout: Layout, world: Collective, shards: dict[int, nn.Parameter]) -> Tensor:
        """Replace the parameters of a layout, one at a time, by this rank's chunks."""
        device = self._params[layout.slots[0].index].device
        flat = torch.zeros(layout.shard_numel, dtype=layout.dtype, device=device)
        empty = flat.new_empty(0)
        self._empties.append(empty)
        for slot in layout.slots:
            param = self._params[slot.index]
            values = flat.new_empty(slot.numel)
            values.copy_(slot.flatten(param.detach()))
            world.broadcast_(values)
            start, stop = slot.extent(self._rank)
            shard = slot.shard_of(flat, self._rank)
            shard.copy_(values[start:stop])
            shards[slot.index] = _shard_parameter(shard, param, self.names[slot.index])
            param.data, param.grad = empty, None
        return flat

    @property
    def is_trainable(self) -> bool:
        """True if any parameter is trainable."""
        return any(shard.requires_grad for shard in self.shards)

    @property
    def is_prefetching(self) -> bool:
        """True if a prefetch was started that no forward has used."""
        return self._prefetch is not None

    @property
    def needs_all_gather(self) -> bool:
        """True if :meth:`unshard` has to gather, unless a prefetch did."""
        return self._full_flats is None or self._may_be_stale or self.shards_changed

    @property
    def shards_changed(self) -> bool:
        """True if the shards were written to since the last all-gather."""
        return self._gathered_versions != self._versions()

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The shard of a full parameter; any other parameter unchanged."""
        return self._shard_of_param.get(id(parameter), parameter)

    def check(self) -> None:
        """Check that the full values can be gathered from the shards.

        Raises:
            RuntimeError: A shard was moved, frozen or unfrozen, or shards were changed during a
                prefetch, which is dropped.
        """
        self.check_shards()
        if self._prefetch is not None and self.shards_changed:
            self.drop_prefetch()
            raise RuntimeError(
                "the shards were changed after prefetch_forward_params() had started to "
                "gather them; step the optimizer first, then prefetch"
            )

    def unshard(self) -> None:
        """Install the full values in the module; collective unless they exist already.

        Call after :meth:`check`.
        """
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            self._full_flats = list(prefetch.join())
        elif self.needs_all_gather:
            if self._full_flats is not None and self.shards_changed:
                self.generation += 1  # invalidates graphs of the old values
            if not self._keep_full:
                self._full_flats = None  # freed before others are allocated
            self._all_gather()
        elif self.is_unsharded:
            return
        # A step may follow: fused optimizers write without a change of the version counter.
        self._may_be_stale = any(shard.grad is not None for shard in self.shards)
        self._install_params()

    def full_states(self) -> list[tuple[int, int]]:
        """Memory and version counter of each full parameter, to detect changes; for the first
        forward checksums, which writes through ``.data`` change, too.
        """
        return states_of(self._params, with_values=self._sums_values)

    def check_unchanged(self, states: Sequence[tuple[int, int]]) -> None:
        """Check the full parameters, whose values are gathered from the shards, after a forward.

        Raises:
            RuntimeError: They have changed since :meth:`full_states`, which would be lost.
        """
        for name, old, new in zip(self.names, states, self.full_states(), strict=True):
            if old != new:
                raise RuntimeError(
                    f"FSDP: forward changes the parameter {name!r}, whose value is gathered from "
                    "the shards, so that the change would be lost: change the shards of "
                    "fsdp.parameters() after optimizer.step(), make it a buffer if it is not "
                    "trained, or use NO_SHARD"
                )
        self._sums_values = False

    def reshard(self) -> None:
        """Install the shards in the module, and free the full values unless they are kept."""
        self._install(self.shards)
        self.is_unsharded = False
        self.generation += 1
        if not self._keep_full:
            self._full_flats = None
            for layout, empty in zip(self.layouts, self._empties, strict=True):
                for slot in layout.slots:
                    self._params[slot.index].data = empty

    @torch.no_grad()
    def update_from_full(self) -> None:
        """Copy this rank's elements of the full values, which user code may have changed, into the
        shards.
        """
        for slot, shard, param in zip(self._slots, self.shards, self._params, strict=True):
            start, stop = slot.extent(self._rank)
            shard.copy_(slot.flatten(param.detach())[start:stop])

    @property
    def full_flats(self) -> list[Tensor]:
        """The full values of each of :attr:`layouts`, while they exist."""
        return self._full_flats or []

    def refresh_full(self) -> None:
        """Gather the kept full values after an optimizer step; a collective call."""
        if self.shards_changed:
            self.generation += 1
        self._all_gather()
        self._may_be_stale = False

    def restore_full(self) -> None:
        """Give the module its full parameters back permanently; a collective call."""
        self._full_flats = None
        self._all_gather()
        self._install_params()
        for param in self._params:
            param.grad = None

    def allocate_full(self) -> None:
        self._full_flats = self._new_full_flats()
        self._install_params()

    @contextmanager
    def as_full_shapes(self) -> Iterator[None]:
        """Install the original parameters, with their shapes, for the duration of the context.

        Their values are undefined unless the module is unsharded.
        """
        if self.is_unsharded:
            yield
            return
        for layout, empty in zip(self.layouts, self._empties, strict=True):
            for slot in layout.slots:
                self._params[slot.index].data = empty.new_empty(1).expand(slot.shape)
        self._install(self._params)
        try:
            yield
        finally:
            self._install(self.shards)
            for layout, empty in zip(self.layouts, self._empties, strict=True):
                for slot in layout.slots:
                    self._params[slot.index].data = empty

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Install the shards in the module for the duration of the context."""
        was_unsharded = self.is_unsharded
        if was_unsharded:
            self._install(self.shards)
        try:
            yield
        finally:
            if was_unsharded:
                self._install(self._params)

    def _install_params(self) -> None:
        assert self._full_flats is not None
        for layout, full in zip(self.layouts, self._full_flats, strict=True):
            for slot in layout.slots:
                padded = slot.padded_of(full, layout.num_shards)
                self._params[slot.index].data = slot.view_of(padded)
        self._install(self._params)
        self.is_unsharded = True

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, locations in zip(parameters, self._locations, strict=True):
            for owner, key in locations:
                # Not setattr, which a module may override to check shapes.
                owner._parameters[key] = parameter

    def _new_full_flats(self) -> list[Tensor]:
        # Inference tensors could neither be written by a prefetch thread nor trained.
        with torch.inference_mode(False):
            return [
                flat.new_empty(layout.full_numel)
                for layout, flat in zip(self.layouts, self._flats, strict=True)
            ]

    def _all_gather(self) -> None:
        full_flats = self._new_full_flats() if self._full_flats is None else self._full_flats
        self._gathered_versions = self._versions()
        gather_into(full_flats, self._flats, self.layouts, self._groups.shard)
        self._full_flats = full_flats

    def _versions(self) -> list[int]:
        # A shard and its flat tensor share one version counter.
        return [flat._version for flat in self._flats]

    def check_shards(self) -> None:
        """Raise ``RuntimeError`` if a shard was moved, frozen or unfrozen."""
        for name, shard, param, pointer in zip(
            self.names, self.shards, self._params, self._pointers, strict=True
        ):
            if shard.data_ptr() != pointer:
                raise RuntimeError(
                    f"the shard of {name!r} was moved to other memory; write to it in place "
                    "(p.copy_(...)), and move the module before it is wrapped"
                )
            if shard.requires_grad != param.requires_grad:
                raise RuntimeError(
                    f"requires_grad of {name!r} was changed; freeze and unfreeze before wrapping"
                )
            if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"the shard of {name!r} has a hook, which would not run: gradients reach "
                    "shards by sync_gradients(). Register it on the module's parameter before "
                    "wrapping, where it receives the whole gradient of this rank's samples"
                )

    def start_prefetch(self, make_group: Callable[[], Collective], name: str) -> None:
        """Start an all-gather in another thread.

        Args:
            make_group: Makes its group, by a collective call; called the first time only.
            name: The thread's name.
        """
        if self._prefetch_group is None:
            self._prefetch_group = make_group()
        group, layouts, flats = self._prefetch_group, self.layouts, self._flats

        def gather(full_flats: Sequence[Tensor]) -> None:
            try:
                gather_into(full_flats, flats, layouts, group)
            except BaseException:
                group.abort()  # or peers would wait until this rank's next forward
                raise

        self._gathered_versions = self._versions()
        self._prefetch = ParamPrefetch(gather, self._new_full_flats(), name, self._stream)
        self._stream = self._prefetch.stream

    def wait_prefetch(self) -> None:
        """Wait for a prefetch, so that no two exchanges overlap; it stays pending."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.join()
            self._prefetch = prefetch

    def drop_prefetch(self) -> None:
        """Wait for a prefetch and discard its result or error."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.wait()

    def end_forward(self) -> None:
        """Record the gradient of a shard, which a penalty on shards may replace in backward."""
        if (shard := self._marked) is not None and self._mark is None:
            self._before_backward = shard.grad

    def begin_backward(self) -> None:
        """Mark the gradient of a shard, to detect that it is cleared or written to before the
        reduction.
        """
        if (shard := self._marked) is None or self._mark is not None:
            return
        before, self._before_backward = self._before_backward, None
        is_placed = shard.grad is None
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
        elif shard.grad is not before:  # made earlier in this backward
            self._warn_of_direct_gradients()
        self._mark = _Mark(shard, shard.grad, shard.grad._version, is_placed)

    def check_mark(self) -> None:
        """Check that no optimizer has cleared gradients since :meth:`begin_backward`.

        Raises:
            RuntimeError: One has, which leaves those that are not reduced.
        """
        mark = self._mark
        if mark is None:
            return
        grad = mark.shard.grad
        is_written = grad is mark.grad and grad._version != mark.version
        if grad is None or (is_written and not grad.any()):
            raise RuntimeError(CLEARED)
        if is_written:
            self._warn_of_direct_gradients()

    def _warn_of_direct_gradients(self) -> None:
        if not self._has_warned and self._groups.shard.world_size > 1:
            self._has_warned = True
            logger.warning(DIRECT_GRADIENTS)

    def _remove_mark(self) -> None:
        mark, self._mark = self._mark, None
        is_unused = mark is not None and mark.is_placed and mark.grad._version == mark.version
        if mark is not None and is_unused and mark.shard.grad is mark.grad:
            mark.shard.grad = None

    def check_gradients(self) -> None:
        """Raise ``ValueError`` if a gradient is sparse."""
        refuse_sparse(self.names, [param.grad for param in self._params])

    @torch.no_grad()
    def reduce(self) -> None:
        """Reshard, and reduce-scatter the mean of full gradients into the shards'; collective.

        Call after :meth:`check_gradients`.
        """
        self.reshard()
        self.reduce_gradients()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Like :meth:`reduce`, without changing the parameters."""
        self._may_be_stale = True
        self._remove_mark()
        trained = [
            (layout, flat)
            for layout, flat in zip(self.layouts, self._flats, strict=True)
            if self.shards[layout.slots[0].index].requires_grad
        ]
        layouts = [layout for layout, _ in trained]
        used = [param.grad is not None for param in self._params]
        reduced, num_missing = reduce_gradients(
            layouts, [flat for _, flat in trained], self._params, self._groups
        )
        if num_missing:
            used = used_on_any_rank(used, self._world)
        for layout, gradients in zip(layouts, reduced, strict=True):
            for slot in layout.slots:
                if not used[slot.index]:
                    continue  # as on one device: no gradient, so that no optimizer touches it
                gradient = slot.shard_of(gradients, self._rank)
                shard = self.shards[slot.index]
                if shard.grad is None:
                    shard.grad = gradient
                else:
                    shard.grad.add_(gradient)
        self.record_gradients()

    def record_gradients(self) -> None:
        """Remember the reduced gradients as they are now, for :attr:`gradients_changed`."""
        self._grad_versions = {}
        for layout in self.layouts:
            for slot in layout.slots:
                # Those of a layout are views of one tensor, with one version counter.
                if (gradient := self.shards[slot.index].grad) is not None:
                    self._grad_versions[slot.index] = gradient._version
                    break

    @property
    def gradients_changed(self) -> bool:
        """True if reduced gradients, spread over several ranks, were written to since."""
        if self._groups.shard.world_size == 1:
            return False
        gradients = [(self.shards[i].grad, version) for i, version in self._grad_versions.items()]
        return any(g is not None and g._version != version for g, version in gradients)

    def gradients(self) -> list[Tensor]:
        """The full gradients not yet reduced."""
        return [param.grad for param in self._params if param.grad is not None]

    @property
    def has_unreduced(self) -> bool:
        """True if there are full gradients not yet reduced."""
        return any(param.grad is not None for param in self._params)

    def drop_gradients(self) -> None:
        """Drop full gradients not yet reduced."""
        self._remove_mark()
        for param in self._params:
            param.grad = None

    def full_values(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each parameter's index and full values, valid until the next; a collective call."""
        for layout, flat in zip(self.layouts, self._flats, strict=True):
            for slot, values in gathered_slots(flat, layout, self._groups.shard):
                yield slot.index, values

    def shape_of(self, index: int) -> torch.Size:
        return self._slots[index].shape

    def shard_facts(self) -> dict[str, Any]:
        """The shard that this rank holds, and the order of its elements."""
        orders = {name: list(s.order) for name, s in zip(self.names, self._slots, strict=True)}
        group = self._groups.shard
        return {"rank": group.rank, "num_shards": group.world_size, "orders": orders}

    def check_shard_facts(self, facts: Mapping[str, Any]) -> None:
        """Check that shards with these :meth:`shard_facts` can be loaded.

        Raises:
            ValueError: They are those of another rank, world size or memory format.
        """
        own = self.shard_facts()
        remedy = "load what full_state_dict() returns, which fits any of them"
        for key, what in ("num_shards", "number of ranks"), ("rank", "rank"):
            if facts[key] != own[key]:
                raise ValueError(
                    f"the state has the shards of another {what} ({facts[key]}, here {own[key]}): "
                    f"{remedy}"
                )
        for name, order in own["orders"].items():
            if facts["orders"].get(name, order) != order:
                raise ValueError(
                    f"the state's shard of {name!r} has another memory format, that is its "
                    f"elements are in another order: wrap a module of the same format, or {remedy}"
                )

    @torch.no_grad()
    def load(self, index: int, values: Tensor) -> None:
        """Copy full values, of the parameter's shape and on any device, into the shard."""
        slot = self._slots[index]
        flat = slot.flatten(values.detach())
        start, stop = slot.extent(self._rank)
        self.shards[index].copy_(flat[start:stop])
        if self._keep_full:
            self._padded(slot)[: slot.numel].copy_(flat)

    def mark_loaded(self, *, was_changed: bool) -> None:
        """Record that kept full values match the loaded shards, unless they were stale before."""
        if self._keep_full and not was_changed:
            self._gathered_versions = self._versions()
            self.generation += 1

    def _padded(self, slot: Slot) -> Tensor:
        assert self._full_flats is not None
        for layout, full in zip(self.layouts, self._full_flats, strict=True):
            if slot in layout.slots:
                return slot.padded_of(full, layout.num_shards)
        raise AssertionError("slot is in no layout")


class _Mark(NamedTuple):
    """The gradient of a shard at the start of backward.

    Attributes:
        is_placed: True if the shard had no gradient, and was given zeros.
    """

    shard: nn.Parameter
    grad: Tensor
    version: int
    is_placed: bool


def _shard_parameter(shard: Tensor, original: nn.Parameter, name: str) -> nn.Parameter:
    """A shard with the attributes that the user set on the original, its shape and its name."""
    parameter = nn.Parameter(shard, requires_grad=original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    describe_original(parameter, original, name)
    return parameter
