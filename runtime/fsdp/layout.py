"""Offsets of each parameter's chunk in a rank's flat shard and in the full tensor.

A parameter's elements, in the order of its memory, are padded with zeros to a multiple of the
number of shards and cut into equal chunks. A rank's flat shard holds its chunk of every
parameter, contiguously. A full tensor holds every padded parameter contiguously, so that the
parameters are views of it. Small parameters are exchanged together in buckets, large ones alone
and without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.replica.flat import ALIGNMENT_BYTES, dense_stride

LARGE_ELEMENTS = 1 << 16
"""Parameters with at least this many elements are exchanged alone."""
BUCKET_BYTES = 25 * 2**20
"""Size limit of a bucket of small parameters."""


class Layout:
    """Offsets of parameters of one dtype, either all trainable or all frozen.

    Args:
        tensors: Each parameter with its index in the module.

    Attributes:
        dtype: The parameters' dtype.
        slots: The parameters, in order of index.
        buckets: The parameters grouped by exchange.
    """

    def __init__(self, tensors: Sequence[tuple[int, Tensor]], num_shards: int) -> None:
        first = tensors[0][1]
        self.dtype = first.dtype
        self.num_shards = num_shards
        self._unit = max(1, ALIGNMENT_BYTES // first.element_size())
        self.shard_numel = self.full_numel = 0
        small = [pair for pair in tensors if pair[1].numel() < LARGE_ELEMENTS]
        large = [pair for pair in tensors if pair[1].numel() >= LARGE_ELEMENTS]
        buckets = [self._bucket(group) for group in _make_buckets(small)]
        for pair in large:
            self.shard_numel = _round_up(self.shard_numel, self._unit)
            buckets.append(self._bucket([pair]))
        self.buckets = tuple(buckets)
        slots = (slot for bucket in buckets for slot in bucket.slots)
        self.slots = tuple(sorted(slots, key=lambda slot: slot.index))

    def _bucket(self, tensors: Sequence[tuple[int, Tensor]]) -> Bucket:
        start = self.shard_numel
        slots = tuple(self._slot(index, tensor) for index, tensor in tensors)
        return Bucket(slots, start, self.shard_numel)

    def _slot(self, index: int, tensor: Tensor) -> Slot:
        chunk = -(-tensor.numel() // self.num_shards)
        self.full_numel = _round_up(self.full_numel, self._unit)
        slot = Slot(
            index=index,
            shape=tensor.size(),
            stride=dense_stride(tensor),
            numel=tensor.numel(),
            chunk=chunk,
            shard_offset=self.shard_numel,
            full_offset=self.full_numel,
        )
        self.shard_numel += chunk
        self.full_numel += chunk * self.num_shards
        return slot


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are exchanged together, or one large parameter.

    Attributes:
        start: Offset of their first chunk in the flat shard.
        stop: End of their last chunk.
    """

    slots: tuple[Slot, ...]
    start: int
    stop: int

    @property
    def chunks(self) -> list[int]:
        return [slot.chunk for slot in self.slots]


@dataclass(frozen=True, slots=True)
class Slot:
    """The shape and offsets of one parameter.

    Attributes:
        shape: The parameter's shape.
        stride: Dense strides.
        chunk: Elements of each rank's chunk, padding included.
    """

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    numel: int
    chunk: int
    shard_offset: int
    full_offset: int

    @property
    def order(self) -> tuple[int, ...]:
        """Strides of dimensions above 1, which order the elements."""
        strides = zip(self.shape, self.stride, strict=True)
        return tuple(stride for size, stride in strides if size != 1)

    def extent(self, rank: int) -> tuple[int, int]:
        """Range of the elements that a rank holds, without padding."""
        return min(rank * self.chunk, self.numel), min((rank + 1) * self.chunk, self.numel)

    def shard_of(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's elements in its flat shard, without padding."""
        start, stop = self.extent(rank)
        return flat[self.shard_offset : self.shard_offset + stop - start]

    def padded_of(self, full: Tensor, num_shards: int) -> Tensor:
        return full[self.full_offset : self.full_offset + num_shards * self.chunk]

    def view_of(self, padded: Tensor) -> Tensor:
        """The parameter as a view of its padded elements."""
        return torch.as_strided(padded, self.shape, self.stride, padded.storage_offset())

    def flatten(self, tensor: Tensor) -> Tensor:
        """A tensor's elements in the order of the parameter's memory; a view if possible."""
        if tensor.stride() != self.stride and not self._has_same_order(tensor):
            copy = torch.empty_strided(
                self.shape, self.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = copy.copy_(tensor)
        return torch.as_strided(tensor, (self.numel,), (1,), tensor.storage_offset())

    def _has_same_order(self, tensor: Tensor) -> bool:
        """True if strides differ in dimensions of size 1 alone."""
        strides = zip(self.shape, tensor.stride(), self.stride, strict=True)
        return all(own == other for size, own, other in strides if size != 1)


def _make_buckets(tensors: Sequence[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    buckets: list[list[tuple[int, Tensor]]] = []
    num_bytes = 0
    for index, tensor in tensors:
        added = tensor.numel() * tensor.element_size()
        if not buckets or num_bytes + added > BUCKET_BYTES:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append((index, tensor))
        num_bytes += added
    return buckets


def make_layouts(tensors: Sequence[Tensor], num_shards: int) -> list[Layout]:
    """Make one layout per dtype, separately for trainable and frozen parameters."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.requires_grad), []).append((index, tensor))
    return [Layout(group, num_shards) for group in groups.values()]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
