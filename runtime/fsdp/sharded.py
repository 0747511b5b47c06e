"""Parameters that are sharded: their shards, for a while the whole of them, and their gradients.

Everything runs in the calling thread, and on the stream that is current there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runtime.collective import Collective
from runtime.device import cuda_api
from runtime.fsdp.exchange import gather_into, gathered_slots, reduce_gradients
from runtime.fsdp.layout import Layout, Slot, make_layouts
from runtime.fsdp.param_prefetch import ParamPrefetch
from runtime.fsdp.shared_parameters import SharedParameter
from runtime.fsdp.strategy import ShardGroups


class ShardedParameters:
    """A rank's shards, and the full parameters while they exist.

    The module's own parameter objects carry the full values: hooks on them, ties and lists of
    them stay. While there are no full values they are empty, and the module holds the shards in
    their place. So a graph that outlives the full values fails instead of computing with others.

    For the thread of its rank; everything runs on the current stream.

    Args:
        found: The module's parameters.
        world: All ranks; rank 0's values become everybody's. A collective call.
        groups: With whom to exchange what.
        keep_full: Whether full values always exist.

    Attributes:
        names: Names of the parameters.
        shards: This rank's elements of each, one-dimensional, without padding.
        generation: Counts the times at which full values were replaced or freed.
        is_held: Whether the full values are in the module.
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
        self.is_held = False
        self._groups = groups
        self._keep_full = keep_full
        self._wholes = [each.parameter for each in found]
        self._places = [each.places for each in found]
        self._rank = groups.shard.rank
        self._layouts = make_layouts(self._wholes, groups.shard.world_size)
        self._slots = sorted(
            (slot for layout in self._layouts for slot in layout.slots), key=lambda s: s.index
        )
        self._flats: list[Tensor] = []
        self._fulls: list[Tensor] | None = None
        self._empties: list[Tensor] = []
        self._prefetch: ParamPrefetch | None = None
        self._stream: cuda_api.Stream | None = None  # of its prefetches on a GPU
        self._side: Collective | None = None
        self._may_be_stale = False
        shards: dict[int, nn.Parameter] = {}
        for layout in self._layouts:
            self._flats.append(self._shard(layout, world, shards))
        self.shards = [shards[slot.index] for slot in self._slots]
        self._pointers = [shard.data_ptr() for shard in self.shards]
        self._of_whole = {
            id(whole): shard for whole, shard in zip(self._wholes, self.shards, strict=True)
        }
        self._stamp = self._versions()
        if keep_full:
            self._form()
        self._install(self.shards)

    @torch.no_grad()
    def _shard(self, layout: Layout, world: Collective, shards: dict[int, nn.Parameter]) -> Tensor:
        """Replaces the parameters of a layout, one after the other, by this rank's chunks."""
        device = self._wholes[layout.slots[0].index].device
        flat = torch.zeros(layout.shard_numel, dtype=layout.dtype, device=device)
        empty = flat.new_empty(0)
        self._empties.append(empty)
        for slot in layout.slots:
            whole = self._wholes[slot.index]
            values = flat.new_empty(slot.numel)
            values.copy_(slot.flatten(whole.detach()))
            world.broadcast_(values)
            start, stop = slot.extent(self._rank)
            shard = slot.shard_of(flat, self._rank)
            shard.copy_(values[start:stop])
            shards[slot.index] = nn.Parameter(shard, requires_grad=whole.requires_grad)
            whole.data, whole.grad = empty, None
        return flat

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter is."""
        return any(shard.requires_grad for shard in self.shards)

    @property
    def is_prefetching(self) -> bool:
        """Whether a prefetch was started that no forward has used."""
        return self._prefetch is not None

    @property
    def must_gather(self) -> bool:
        """Whether :meth:`hold` forms the full values anew, unless it has prefetched ones."""
        return self._fulls is None or self._may_be_stale or self.is_changed

    @property
    def is_changed(self) -> bool:
        """Whether the shards were written to since they were gathered last."""
        return self._stamp != self._versions()

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The shard of a full parameter; anything else as it is."""
        return self._of_whole.get(id(parameter), parameter)

    def check(self) -> None:
        """Makes sure that the full values can be formed from the shards.

        Raises:
            RuntimeError: A shard was moved, frozen or unfrozen, or shards were changed behind a
                prefetch, which is given up.
        """
        self.check_shards()
        if self._prefetch is not None and self.is_changed:
            self.drop_prefetch()
            raise RuntimeError(
                "the shards were changed after prefetch_forward_params() had begun to gather "
                "them; step the optimizer first, then prefetch"
            )

    def hold(self) -> None:
        """Brings the full values into the module, by a collective call unless they are there.

        To be called after :meth:`check`.
        """
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            self._fulls = list(prefetch.join())
        elif self.must_gather:
            if self._fulls is not None and self.is_changed:
                self.generation += 1  # what was computed with the old values is void
            if not self._keep_full:
                self._fulls = None  # freed before there are others
            self._form()
        elif self.is_held:
            return
        # A step may still come: fused optimizers write without a trace in the version.
        self._may_be_stale = any(shard.grad is not None for shard in self.shards)
        self._show_wholes()

    def release(self) -> None:
        """Puts the shards into the module, and frees the full values unless they are kept."""
        self._install(self.shards)
        self.is_held = False
        self.generation += 1
        if not self._keep_full:
            self._fulls = None
            for layout, empty in zip(self._layouts, self._empties, strict=True):
                for slot in layout.slots:
                    self._wholes[slot.index].data = empty

    def refresh(self) -> None:
        """Forms the kept full values of shards that were stepped; a collective call."""
        if self.is_changed:
            self.generation += 1
        self._form()
        self._may_be_stale = False

    def restore(self) -> None:
        """Gives the module its full parameters back for good; a collective call."""
        self._fulls = None
        self._form()
        self._show_wholes()
        for whole in self._wholes:
            whole.grad = None

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Lets the module hold the shards meanwhile."""
        held = self.is_held
        if held:
            self._install(self.shards)
        try:
            yield
        finally:
            if held:
                self._install(self._wholes)

    def _show_wholes(self) -> None:
        assert self._fulls is not None
        for layout, full in zip(self._layouts, self._fulls, strict=True):
            for slot in layout.slots:
                padded = slot.padded_of(full, layout.num_shards)
                self._wholes[slot.index].data = slot.shaped(padded)
        self._install(self._wholes)
        self.is_held = True

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for owner, key in places:
                # Not setattr: a module may look at shapes there.
                owner._parameters[key] = parameter

    def _new_fulls(self) -> list[Tensor]:
        # Tensors of inference mode could not be written to by a prefetch's thread, nor trained.
        with torch.inference_mode(False):
            return [
                flat.new_empty(layout.full_numel)
                for layout, flat in zip(self._layouts, self._flats, strict=True)
            ]

    def _form(self) -> None:
        fulls = self._new_fulls() if self._fulls is None else self._fulls
        self._stamp = self._versions()
        gather_into(fulls, self._flats, self._layouts, self._groups.shard)
        self._fulls = fulls

    def _versions(self) -> list[int]:
        # A shard and its flat tensor count their writes together.
        return [flat._version for flat in self._flats]

    def check_shards(self) -> None:
        """Raises ``RuntimeError`` if a shard was moved, frozen or unfrozen."""
        for name, shard, whole, pointer in zip(
            self.names, self.shards, self._wholes, self._pointers, strict=True
        ):
            if shard.data_ptr() != pointer:
                raise RuntimeError(
                    f"the shard of {name!r} was moved to other memory; write to it in place "
                    "(p.copy_(...)), and move the module before it is wrapped"
                )
            if shard.requires_grad != whole.requires_grad:
                raise RuntimeError(
                    f"requires_grad of {name!r} was changed; freeze and unfreeze before wrapping"
                )

    def start_prefetch(self, side: Callable[[], Collective], name: str) -> None:
        """Starts to gather in another thread.

        Args:
            side: Makes a group for it; called the first time, a collective call.
            name: Of the thread.
        """
        if self._side is None:
            self._side = side()
        group, layouts, flats = self._side, self._layouts, self._flats

        def gather(fulls: Sequence[Tensor]) -> None:
            try:
                gather_into(fulls, flats, layouts, group)
            except BaseException:
                group.abort()  # peers must not wait until this rank's forward tells
                raise

        self._stamp = self._versions()
        self._prefetch = ParamPrefetch(gather, self._new_fulls(), name, self._stream)
        self._stream = self._prefetch.stream

    def wait_prefetch(self) -> None:
        """Waits for a prefetch, so that no two exchanges run at once; it stays pending."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.join()
            self._prefetch = prefetch

    def drop_prefetch(self) -> None:
        """Waits for a prefetch and forgets it, whatever came of it."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.end()

    def check_gradients(self) -> None:
        """Raises ``ValueError`` if a gradient is sparse."""
        for name, whole in zip(self.names, self._wholes, strict=True):
            if whole.grad is not None and whole.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse, which FSDP does not support; use "
                    "Embedding(..., sparse=False)"
                )

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the full gradients into those of the shards, and releases; collective.

        To be called after :meth:`check_gradients`.
        """
        self.release()
        self._may_be_stale = True
        trained = [
            (layout, flat)
            for layout, flat in zip(self._layouts, self._flats, strict=True)
            if self.shards[layout.slots[0].index].requires_grad
        ]
        layouts = [layout for layout, _ in trained]
        reduced = reduce_gradients(
            layouts, [flat for _, flat in trained], self._wholes, self._groups
        )
        for layout, gradients in zip(layouts, reduced, strict=True):
            for slot in layout.slots:
                gradient = slot.shard_of(gradients, self._rank)
                shard = self.shards[slot.index]
                if shard.grad is None:
                    shard.grad = gradient
                else:
                    shard.grad.add_(gradient)

    def gradients(self) -> list[Tensor]:
        """The full gradients that were not reduced."""
        return [whole.grad for whole in self._wholes if whole.grad is not None]

    @property
    def has_unreduced(self) -> bool:
        """Whether there are full gradients that were not reduced."""
        return any(whole.grad is not None for whole in self._wholes)

    def drop_gradients(self) -> None:
        """Forgets full gradients that were not reduced."""
        for whole in self._wholes:
            whole.grad = None

    def full_values(self) -> Iterator[tuple[int, Tensor]]:
        """Each parameter's place and full values, which are soon gone; a collective call."""
        for layout, flat in zip(self._layouts, self._flats, strict=True):
            for slot, values in gathered_slots(flat, layout, self._groups.shard):
                yield slot.index, values

    def shape_of(self, index: int) -> torch.Size:
        """Shape of a full parameter."""
        return self._slots[index].shape

    @torch.no_grad()
    def load(self, index: int, values: Tensor) -> None:
        """Takes full values over, of a parameter's shape and on any device."""
        slot = self._slots[index]
        flat = slot.flatten(values.detach())
        start, stop = slot.extent(self._rank)
        self.shards[index].copy_(flat[start:stop])
        if self._keep_full:
            self._padded(slot)[: slot.numel].copy_(flat)

    def loaded(self, *, was_changed: bool) -> None:
        """The kept full values are those of the shards, if they were before."""
        if self._keep_full and not was_changed:
            self._stamp = self._versions()
            self.generation += 1

    def _padded(self, slot: Slot) -> Tensor:
        assert self._fulls is not None
        for layout, full in zip(self._layouts, self._fulls, strict=True):
            if slot in layout.slots:
                return slot.padded_of(full, layout.num_shards)
        raise AssertionError("a slot of no layout")
