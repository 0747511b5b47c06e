"""Collectives on flat shards: all-gather of parameters, reduce-scatter of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.collective import Collective, ReduceOp
from runtime.fsdp.layout import Bucket, Layout, Slot
from runtime.fsdp.strategy import ShardGroups


@torch.no_grad()
def gather_into(
    full_flats: Sequence[Tensor],
    flats: Sequence[Tensor],
    layouts: Sequence[Layout],
    group: Collective,
) -> None:
    """Gather all parameters from the ranks' flat shards, in one coalesced all-gather.

    Args:
        full_flats: Written to; ``full_numel`` elements of each layout.
        flats: This rank's flat shard of each layout.
    """
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    copied: list[tuple[Tensor, Bucket, list[Tensor]]] = []
    for layout, flat, full in zip(layouts, flats, full_flats, strict=True):
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
    """Gather one bucket at a time, and yield each parameter as a view valid until the next."""
    for bucket in layout.buckets:
        part = flat[bucket.start : bucket.stop]
        gathered = flat.new_empty(layout.num_shards, part.numel())
        group.all_gather_into(gathered, part)
        columns: Sequence[Tensor] = gathered.split(bucket.chunks, dim=1)  # type: ignore[no-untyped-call]
        for slot, column in zip(bucket.slots, columns, strict=True):
            yield slot, slot.view_of(column.contiguous().view(-1))


@torch.no_grad()
def reduce_gradients(
    layouts: Sequence[Layout],
    flats: Sequence[Tensor],
    owners: Sequence[Tensor],
    groups: ShardGroups,
) -> tuple[list[Tensor], float]:
    """Average full gradients over all ranks, in one coalesced reduce-scatter.

    Args:
        flats: This rank's flat shard of the parameters of each layout.
        owners: The full parameters. A gradient moves from its owner to the exchange, and is freed
            at its end; a missing one counts as zeros.

    Returns:
        A new flat shard of gradients of each layout, whose padding is zero, and the number of
        missing gradients, summed over all ranks.
    """
    num_missing: float = sum(
        owners[slot.index].grad is None for layout in layouts for slot in layout.slots
    )
    shards = [torch.zeros_like(flat) for flat in flats]
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    for layout, flat, shard in zip(layouts, flats, shards, strict=True):
        for bucket in layout.buckets:
            # One at a time: small gradients are freed once copied, so that the peak does not grow.
            inputs.append(_take_gradients(layout, bucket, owners, flat))
            outputs.append(shard[bucket.start : bucket.stop])
    groups.shard.reduce_scatter_coalesced(outputs, inputs, ReduceOp.AVG, tally=num_missing)
    num_missing = groups.shard.tally
    inputs.clear()
    if groups.replicate is not None:
        groups.replicate.all_reduce_coalesced_(shards, ReduceOp.AVG, tally=num_missing)
        num_missing = groups.replicate.tally
    return shards, num_missing


def used_on_any_rank(used: Sequence[bool], world: Collective) -> list[bool]:
    """True for each parameter that has a gradient on any rank; a collective call on the host."""
    flags = torch.tensor(used, dtype=torch.int32)
    world.all_reduce_(flags, ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def _take_gradients(
    layout: Layout, bucket: Bucket, owners: Sequence[Tensor], like: Tensor
) -> Tensor:
    """The full gradients of a bucket in order of shards, removed from their owners."""
    num_shards = layout.num_shards
    only = bucket.slots[0] if len(bucket.slots) == 1 else None
    if only is not None and only.numel == num_shards * only.chunk:
        gradient = owners[only.index].grad
        if gradient is not None:
            owners[only.index].grad = None
            return only.flatten(gradient)  # without a copy
    padded = like.new_zeros(num_shards, bucket.stop - bucket.start)
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
            targets.append(padded[:num_rows, column : column + slot.chunk])
            sources.append(flat[: num_rows * slot.chunk].view(num_rows, slot.chunk))
        if rest:
            targets.append(padded[num_rows, column : column + rest])
            sources.append(flat[num_rows * slot.chunk :])
    if targets:
        torch._foreach_copy_(targets, sources)
    return padded


def from_rank0(tensor: Tensor, world: Collective) -> Tensor:
    """A contiguous copy of rank 0's tensor on this rank's device; a collective call."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    world.broadcast_(copy)
    return copy
