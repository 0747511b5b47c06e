"""Offsets of each parameter's chunk in a rank's flat shard and in the full tensor.

A parameter's elements, in the order of its memory, are padded with zeros to a multiple of the
number of shards and cut into equal chunks. A rank's flat shard holds its chunk of every
parameter side by side. A full tensor holds every padded parameter in one piece, so that the
parameters are views of it. Small parameters are exchanged together in buckets, large ones
alone, straight from and to where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.replica.flat import ALIGNMENT_BYTES, dense_stride

LARGE = 1 << 16
"""Elements from which on a parameter is exchanged alone."""
BUCKET_BYTES = 25 * 2**20
"""Bytes that a bucket of small parameters may hold."""


class Layout:
    """Where parameters of one dtype lie, all of them trainable or all of them frozen.

    Args:
        tensors: Each parameter's place among all, and the parameter.
        num_shards: How many ranks share them.

    Attributes:
        dtype: Their dtype.
        num_shards: How many ranks share them.
        slots: The parameters, in order.
        buckets: The parameters as they are exchanged.
        shard_numel: Elements of a flat shard.
        full_numel: Elements of a full tensor.
    """

    def __init__(self, tensors: Sequence[tuple[int, Tensor]], num_shards: int) -> None:
        first = tensors[0][1]
        self.dtype = first.dtype
        self.num_shards = num_shards
        self._unit = max(1, ALIGNMENT_BYTES // first.element_size())
        self.shard_numel = self.full_numel = 0
        small = [pair for pair in tensors if pair[1].numel() < LARGE]
        large = [pair for pair in tensors if pair[1].numel() >= LARGE]
        buckets = [self._bucket(group) for group in _fill(small)]
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
    """Parameters that are exchanged at once; a large one is alone.

    Attributes:
        slots: The parameters.
        start: Where their chunks start in the flat shard.
        stop: Where they end.
    """

    slots: tuple[Slot, ...]
    start: int
    stop: int

    @property
    def chunks(self) -> list[int]:
        """Sizes of the chunks, which lie side by side."""
        return [slot.chunk for slot in self.slots]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter.

    Attributes:
        index: Its place among the module's parameters.
        shape: Its shape.
        stride: Strides that fill its memory without gaps.
        numel: Its elements.
        chunk: Elements of each rank's chunk, padding included.
        shard_offset: Where the chunk starts in the flat shard.
        full_offset: Where the whole starts in the full tensor.
    """

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    numel: int
    chunk: int
    shard_offset: int
    full_offset: int

    def extent(self, rank: int) -> tuple[int, int]:
        """The elements that a rank holds, without padding."""
        return min(rank * self.chunk, self.numel), min((rank + 1) * self.chunk, self.numel)

    def shard_of(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's elements in its flat shard, without padding."""
        start, stop = self.extent(rank)
        return flat[self.shard_offset : self.shard_offset + stop - start]

    def padded_of(self, full: Tensor, num_shards: int) -> Tensor:
        """The padded parameter in a full tensor."""
        return full[self.full_offset : self.full_offset + num_shards * self.chunk]

    def shaped(self, padded: Tensor) -> Tensor:
        """The parameter as a view of its padded elements."""
        return torch.as_strided(padded, self.shape, self.stride, padded.storage_offset())

    def flatten(self, tensor: Tensor) -> Tensor:
        """A tensor's elements in the order of the parameter's memory; a view where it can be."""
        if tensor.stride() != self.stride:
            copy = torch.empty_strided(
                self.shape, self.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = copy.copy_(tensor)
        return torch.as_strided(tensor, (self.numel,), (1,), tensor.storage_offset())


def _fill(tensors: Sequence[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
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
    """One layout for each dtype, trainable and frozen parameters apart."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.requires_grad), []).append((index, tensor))
    return [Layout(group, num_shards) for group in groups.values()]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
