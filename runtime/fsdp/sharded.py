"""Parameters that are sharded: their shards, for a while the whole of them, and their gradients.

Everything runs in the calling thread, and on the stream that is current there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime.collective import Collective, ReduceOp
from runtime.collective.base import LOW_PRECISION
from runtime.device import cuda_api
from runtime.fsdp.layout import Bucket, Layout, Slot, make_layouts
from runtime.fsdp.param_prefetch import ParamPrefetch
from runtime.fsdp.shared_parameters import SharedParameter
from runtime.fsdp.strategy import ShardGroups
from runtime.replica.flat import dense_stride


def rank_0s(tensor: Tensor, world: Collective) -> Tensor:
    """A copy of rank 0's tensor, contiguous and on this rank's device; a collective call."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    world.broadcast_(copy)
    return copy


def _flat_view(gradients: Sequence[Tensor]) -> Tensor | None:
    """A single dense gradient in one dimension; ``None`` for any others."""
    if len(gradients) != 1 or dense_stride(gradients[0]) != gradients[0].stride():
        return None
    (gradient,) = gradients
    return torch.as_strided(gradient, (gradient.numel(),), (1,), gradient.storage_offset())


def _note(added: set[int], index: int, _: Tensor) -> None:
    added.add(index)


class ReplicatedParameters:
    """The module's own parameters, under the interface of sharded ones.

    For the thread of its rank; everything runs on the current stream.

    Args:
        found: The module's parameters.
        world: All ranks; rank 0's values become everybody's. A collective call.

    Attributes:
        names: Names of the parameters.
        shards: The parameters themselves.
        generation: Always 0: full values are never replaced.
        is_held: Always ``False``: there is nothing to free.
        must_gather: Always ``False``: there is nothing to form.
    """

    generation = 0
    is_held = False
    is_changed = False
    must_gather = False
    is_prefetching = False

    def __init__(self, found: Sequence[SharedParameter], world: Collective) -> None:
        self.names = [each.name for each in found]
        self.shards = [each.parameter for each in found]
        self._world = world
        trainable = [p for p in self.shards if p.requires_grad]
        self._trainable = trainable
        self._added: set[int] = set()  # places of gradients that were added to and not reduced
        self._hooks: list[RemovableHandle] = []
        if world.world_size > 1:
            for i, parameter in enumerate(trainable):
                hook = partial(_note, self._added, i)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)
        # One shard: full tensors and flat shards are the same.
        self._layouts = make_layouts(trainable, 1)
        with torch.no_grad():
            for parameter in self.shards:
                parameter.copy_(rank_0s(parameter, world))

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter is."""
        return bool(self._trainable)

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter."""
        return parameter

    def check(self) -> None:
        """Nothing: there is nothing to form."""

    def check_shards(self) -> None:
        """Nothing: they are what the module has."""

    def hold(self) -> None:
        """Nothing: the values are there."""

    def release(self) -> None:
        """Nothing: the values stay."""

    def refresh(self) -> None:
        """Nothing: the values are those of the optimizer."""

    def restore(self) -> None:
        """Gives the module its parameters back for good."""
        for hook in self._hooks:
            hook.remove()

    def wait_prefetch(self) -> None:
        """Nothing: there is none."""

    def drop_prefetch(self) -> None:
        """Nothing: there is none."""

    def start_prefetch(self, side: Callable[[], Collective], name: str) -> None:
        """Never called: there is nothing to gather."""
        raise AssertionError("nothing to prefetch")

    def as_shards(self) -> AbstractContextManager[None]:
        """Nothing: the module always holds them."""
        return nullcontext()

    def check_gradients(self) -> None:
        """Raises ``ValueError`` if a gradient is sparse."""
        for parameter in self._trainable:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    "a gradient is sparse, which FSDP does not support; use "
                    "Embedding(..., sparse=False)"
                )

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients over all ranks, in place; a collective call.

        To be called after :meth:`check_gradients`.
        """
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        wires: list[Tensor] = []
        copied: list[tuple[Tensor, list[Tensor]]] = []
        for layout in self._layouts:
            for bucket in layout.buckets:
                gradients = self._gradients_of(bucket)
                if (wire := _flat_view(gradients)) is None:
                    wire = torch.cat([gradient.reshape(-1) for gradient in gradients])
                    copied.append((wire, gradients))
                wires.append(wire)
        self._world.all_reduce_coalesced_(wires, ReduceOp.AVG)
        for wire, gradients in copied:
            parts = wire.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(
                gradients, [part.view(g.size()) for part, g in zip(parts, gradients, strict=True)]
            )
        self._added.clear()

    @property
    def has_unreduced(self) -> bool:
        """Whether a backward pass has added to gradients since the last reduction."""
        return any(self._trainable[i].grad is not None for i in self._added)

    def _gradients_of(self, bucket: Bucket) -> list[Tensor]:
        gradients: list[Tensor] = []
        for slot in bucket.slots:
            gradient = self._trainable[slot.index].grad
            assert gradient is not None
            gradients.append(gradient)
        return gradients

    def gradients(self) -> list[Tensor]:
        """The gradients."""
        return [p.grad for p in self._trainable if p.grad is not None]

    def drop_gradients(self) -> None:
        """Nothing: there are none but those of the parameters."""

    def full_values(self) -> Iterator[tuple[int, Tensor]]:
        """Each parameter's place and values."""
        for index, parameter in enumerate(self.shards):
            yield index, parameter.detach()

    def shape_of(self, index: int) -> torch.Size:
        """Shape of a parameter."""
        return self.shards[index].size()

    @torch.no_grad()
    def load(self, index: int, values: Tensor) -> None:
        """Takes values over, of a parameter's shape and on any device."""
        self.shards[index].copy_(values)

    def loaded(self, *, was_changed: bool) -> None:
        """Nothing: there is no other copy."""


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


def check_clip(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Judges arguments before anything is exchanged.

    Returns:
        Both as numbers.

    Raises:
        TypeError: One is no number.
        ValueError: The limit is negative, or the norm's order is not above zero.
    """
    numbers = []
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}={value!r}: pass a number") from error
    limit, order = numbers
    if not limit >= 0:
        raise ValueError(f"max_norm={limit}: pass what the norm is brought down to, from 0 up")
    if not order > 0:
        raise ValueError(f"norm_type={order}: pass the order of the norm, above 0")
    return limit, order


@torch.no_grad()
def sharded_norm(shards: Sequence[nn.Parameter], group: Collective, norm_type: float) -> Tensor:
    """The norm of gradients whose elements are spread over a group; a collective call.

    Args:
        shards: This rank's parameters; those without a gradient count nothing.
        group: The ranks that hold the rest.
        norm_type: Order of the norm, infinity included.

    Returns:
        A scalar on the shards' device, of the same bits on every rank; in float64 if all
        gradients are, else in float32.
    """
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    filled = [gradient for gradient in gradients if gradient.numel()]
    device = shards[0].device
    # Parts of a rank of few elements must not be rounded to a low precision.
    narrow = [g.double() for g in filled if g.dtype in LOW_PRECISION]
    low = torch.nn.utils.get_total_norm(narrow, norm_type)
    wide = [g for g in filled if g.dtype not in LOW_PRECISION]
    rest = torch.nn.utils.get_total_norm(wide, norm_type)
    parts = torch.stack([part.to(device, torch.float64) for part in (low, rest)])
    if math.isinf(norm_type):
        total = parts.amax()
        group.all_reduce_(total, ReduceOp.MAX)
    else:
        total = parts.pow(norm_type).sum()
        group.all_reduce_(total)
        total = total.pow(1.0 / norm_type)
    exact = all(gradient.dtype is torch.float64 for gradient in gradients)
    return total if exact else total.float()


def clip_by_(
    shards: Sequence[nn.Parameter], total: Tensor, max_norm: float, *, error_if_nonfinite: bool
) -> None:
    """Scales gradients down, whose norm over all ranks is ``total``, to ``max_norm``.

    Raises:
        RuntimeError: The norm is not finite and that is an error; nothing was changed.
    """
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the gradient's norm is {total.item()}, so it cannot be clipped; pass "
            "error_if_nonfinite=False to clip all the same"
        )
    torch.nn.utils.clip_grads_with_norm_(shards, max_norm, total)


@torch.no_grad()
def gather_into(
    fulls: Sequence[Tensor], flats: Sequence[Tensor], layouts: Sequence[Layout], group: Collective
) -> None:
    """Gathers all parameters from the ranks' flat shards, in one coalesced all-gather.

    Args:
        fulls: Written to; ``full_numel`` elements of each layout.
        flats: This rank's flat shard of each layout.
        layouts: Offsets of the parameters in both.
        group: The ranks that share the parameters.
    """
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    copied: list[tuple[Tensor, Bucket, list[Tensor]]] = []
    for layout, flat, full in zip(layouts, flats, fulls, strict=True):
        for bucket in layout.buckets:
            part = flat[bucket.start : bucket.stop]
            targets = [slot.padded_of(full, layout.num_shards) for slot in bucket.slots]
            output = targets[0]
            if len(targets) > 1:
                output = flat.new_empty(layout.num_shards, part.numel())
                columns = [target.view(layout.num_shards, -1) for target in targets]
                copied.append((output, bucket, columns))
            outputs.append(output)
            inputs.append(part)
    group.all_gather_coalesced(outputs, inputs)
    for gathered, bucket, columns in copied:
        torch.split_with_sizes_copy(gathered, bucket.chunks, dim=1, out=columns)


@torch.no_grad()
def gathered_slots(
    flat: Tensor, layout: Layout, group: Collective
) -> Iterator[tuple[Slot, Tensor]]:
    """Gathers one bucket after the other; yields each parameter as a view that is soon gone."""
    for bucket in layout.buckets:
        part = flat[bucket.start : bucket.stop]
        gathered = flat.new_empty(layout.num_shards, part.numel())
        group.all_gather_into(gathered, part)
        columns: Sequence[Tensor] = gathered.split(bucket.chunks, dim=1)  # type: ignore[no-untyped-call]
        for slot, column in zip(bucket.slots, columns, strict=True):
            yield slot, slot.shaped(column.contiguous().view(-1))


@torch.no_grad()
def reduce_gradients(
    layouts: Sequence[Layout],
    flats: Sequence[Tensor],
    owners: Sequence[Tensor],
    groups: ShardGroups,
) -> list[Tensor]:
    """Averages full gradients over all ranks, in one coalesced reduce-scatter.

    Args:
        layouts: Offsets of the parameters that have gradients.
        flats: This rank's flat shard of the parameters of each layout.
        owners: The full parameters. A gradient moves from its owner to the exchange, and is freed
            at its end; a missing one counts as zeros.
        groups: Groups of the shards and of the replicas.

    Returns:
        A new flat shard of gradients of each layout; its padding is zero.
    """
    shards = [torch.zeros_like(flat) for flat in flats]
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    for layout, flat, shard in zip(layouts, flats, shards, strict=True):
        for bucket in layout.buckets:
            # In turn: small gradients are freed as they are copied, so that no memory is added.
            inputs.append(_take_gradients(layout, bucket, owners, flat))
            outputs.append(shard[bucket.start : bucket.stop])
    groups.shard.reduce_scatter_coalesced(outputs, inputs, ReduceOp.AVG)
    inputs.clear()
    if groups.replicate is not None:
        groups.replicate.all_reduce_coalesced_(shards, ReduceOp.AVG)
    return shards


def _take_gradients(
    layout: Layout, bucket: Bucket, owners: Sequence[Tensor], like: Tensor
) -> Tensor:
    """The full gradients of a bucket, rank after rank, removed from their owners."""
    num_shards = layout.num_shards
    only = bucket.slots[0] if len(bucket.slots) == 1 else None
    if only is not None and only.numel == num_shards * only.chunk:
        gradient = owners[only.index].grad
        if gradient is not None:
            owners[only.index].grad = None
            return only.flatten(gradient)  # where it lies
    whole = like.new_zeros(num_shards, bucket.stop - bucket.start)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for slot in bucket.slots:
        gradient = owners[slot.index].grad
        if gradient is None:
            continue
        owners[slot.index].grad = None
        column = slot.shard_offset - bucket.start
        num_rows, rest = divmod(slot.numel, max(slot.chunk, 1))
        flat = slot.flatten(gradient)
        if num_rows:
            targets.append(whole[:num_rows, column : column + slot.chunk])
            sources.append(flat[: num_rows * slot.chunk].view(num_rows, slot.chunk))
        if rest:
            targets.append(whole[num_rows, column : column + rest])
            sources.append(flat[num_rows * slot.chunk :])
    if targets:
        torch._foreach_copy_(targets, sources)
    return whole
