"""Full parameters from shards, and shards of averaged gradients from full gradients.

Everything runs in the calling thread, and on the stream that is current there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.collective import Collective, ReduceOp
from runtime.fsdp.layout import Bucket, Layout, Slot


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
    low = torch.nn.utils.get_total_norm([g.double() for g in filled if _is_low(g)], norm_type)
    rest = torch.nn.utils.get_total_norm([g for g in filled if not _is_low(g)], norm_type)
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


def _is_low(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


@torch.no_grad()
def gather_into(full: Tensor, flat: Tensor, layout: Layout, group: Collective) -> None:
    """Gathers all parameters of a layout from the ranks' flat shards.

    Args:
        full: Written to; ``layout.full_numel`` elements.
        flat: This rank's flat shard.
        layout: Where everything lies.
        group: The ranks that share the parameters.
    """
    for bucket in layout.buckets:
        part = flat[bucket.start : bucket.stop]
        targets = [slot.padded_of(full, layout.num_shards) for slot in bucket.slots]
        if len(targets) == 1:
            group.all_gather_into(targets[0], part)
            continue
        gathered = flat.new_empty(layout.num_shards, part.numel())
        group.all_gather_into(gathered, part)
        torch.split_with_sizes_copy(
            gathered,
            bucket.chunks,
            dim=1,
            out=[target.view(layout.num_shards, -1) for target in targets],
        )


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
    layout: Layout,
    owners: Sequence[Tensor],
    group: Collective,
    replicate: Collective | None,
    like: Tensor,
) -> Tensor:
    """Averages full gradients over all ranks; each rank gets its shard.

    Args:
        layout: Where everything lies.
        owners: The full parameters of all layouts. A gradient is taken from its owner, and
            freed there once it was read; none counts as zeros.
        group: The ranks that share the parameters.
        replicate: The ranks with the same shard as this one.
        like: This rank's flat shard of the parameters.

    Returns:
        A new flat shard of gradients; its padding is zero.
    """
    shard = torch.zeros_like(like)
    for bucket in layout.buckets:
        whole = _take_gradients(layout, bucket, owners, like)
        group.reduce_scatter_into(shard[bucket.start : bucket.stop], whole, ReduceOp.AVG)
        del whole
    if replicate is not None:
        replicate.all_reduce_(shard, ReduceOp.AVG)
    return shard


def _take_gradients(
    layout: Layout, bucket: Bucket, owners: Sequence[Tensor], like: Tensor
) -> Tensor:
    """The full gradients of a bucket, rank after rank; their owners give them away."""
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
