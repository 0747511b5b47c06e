"""Which ranks share a shard, and where each parameter's chunk lies in it and in the full tensor.

A parameter's elements, in the order of its memory, are padded with zeros to a multiple of the
number of shards and cut into equal chunks. A rank's flat shard holds its chunk of every
parameter side by side. A full tensor holds every padded parameter in one piece, so that the
parameters are views of it. Small parameters are exchanged together in buckets, large ones
alone, straight from and to where they belong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runtime.collective import Collective, ReduceOp, split_nodes
from runtime.collective.base import FLOATS
from runtime.core.errors import ReplicaMismatch
from runtime.replica.flat import ALIGNMENT_BYTES, dense_stride


@unique
class ShardingStrategy(Enum):
    """What each rank holds outside forward and backward.

    Attributes:
        FULL_SHARD: Its shard of parameters, gradients and optimizer state (ZeRO-3).
        SHARD_GRAD_OP: All parameters, and its shard of gradients and optimizer state (ZeRO-2).
        NO_SHARD: All parameters, gradients and optimizer state, like ``DistributedDataParallel``.
        HYBRID_SHARD: As ``FULL_SHARD`` between the ranks of a node; the nodes are replicas.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"

    @property
    def frees_parameters(self) -> bool:
        """Whether full parameters exist only in forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """With whom a rank exchanges what.

    Attributes:
        shard: The ranks that hold one copy of the parameters together.
        replicate: The ranks that hold the same shard as this one; ``None``: no other does.
        owned: Subgroups that were made for this, to be closed with it.
    """

    shard: Collective
    replicate: Collective | None = None
    owned: tuple[Collective, ...] = ()


def check_strategy(
    strategy: ShardingStrategy, world_size: int, intra_node_size: int | None
) -> None:
    """Judges a strategy before anything is exchanged.

    Raises:
        TypeError: Not a strategy, or the size is no integer.
        ValueError: The size is missing, does not belong, or does not divide the world size.
    """
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(f"strategy={strategy!r}: pass a ShardingStrategy")
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        if intra_node_size is not None:
            raise ValueError(
                f"intra_node_size={intra_node_size!r} means nothing with {strategy.name}; leave it "
                "out, or pass ShardingStrategy.HYBRID_SHARD"
            )
        return
    if intra_node_size is None:
        raise ValueError("HYBRID_SHARD needs intra_node_size, the number of ranks of a node")
    if isinstance(intra_node_size, bool) or not isinstance(intra_node_size, int):
        raise TypeError(f"intra_node_size={intra_node_size!r}: pass an int")
    if intra_node_size < 1 or world_size % intra_node_size:
        raise ValueError(
            f"intra_node_size={intra_node_size} does not divide the world size {world_size}; pass "
            "a number of ranks of which every node has as many"
        )


def make_groups(
    collective: Collective, strategy: ShardingStrategy, intra_node_size: int | None
) -> ShardGroups:
    """The groups of a strategy; a collective call for ``HYBRID_SHARD``."""
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        return ShardGroups(shard=collective)
    assert intra_node_size is not None
    intra, inter = split_nodes(collective, intra_node_size)
    return ShardGroups(shard=intra, replicate=inter, owned=(intra, inter))


def check_same(lines: Sequence[str], collective: Collective) -> None:
    """Compares descriptions over all ranks; a collective call.

    Args:
        lines: This rank's description, one thing a line.
        collective: The ranks.

    Raises:
        ReplicaMismatch: They differ; raised on every rank, naming the first difference.
    """
    text = "\n".join(lines).encode()
    digests = _gather(hashlib.sha256(text).digest(), collective)
    if len(set(digests)) == 1:
        return
    length = torch.tensor([len(text)])
    collective.all_reduce_(length, ReduceOp.MAX)
    padded = text.ljust(int(length.item()), b"\0")
    first, *others = [
        whole.rstrip(b"\0").decode().split("\n") for whole in _gather(padded, collective)
    ]
    for rank, other in enumerate(others, 1):
        for index in range(max(len(first), len(other))):
            here, there = (x[index] if index < len(x) else "nothing" for x in (first, other))
            if here != there:
                raise ReplicaMismatch(
                    f"rank {rank} wraps another module than rank 0, or in another way: it has "
                    f"{there}, rank 0 has {here}; build the same on every rank"
                )


def _gather(data: bytes, collective: Collective) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = torch.empty(collective.world_size * len(data), dtype=torch.uint8)
    collective.all_gather_into(whole, mine)
    return [bytes(row.tolist()) for row in whole.view(collective.world_size, -1)]


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter of a module.

    Attributes:
        name: Its first name.
        parameter: The parameter as the module was built with it.
        places: Every module and attribute that hold it: several where it is tied.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]


def find_parameters(module: nn.Module) -> list[SharedParameter]:
    """All parameters of a module, in the order of ``named_parameters``.

    Raises:
        TypeError: Not a module.
        ValueError: There are none, or one that cannot be sharded; says what to do.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps a torch.nn.Module, not a {type(module).__name__}")
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, key))
    found = [
        SharedParameter(name, p, tuple(places[id(p)])) for name, p in module.named_parameters()
    ]
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no parameters, so there is nothing to shard; call it "
            "without FSDP"
        )
    for each in found:
        if (fault := _fault(each.parameter, found[0].parameter.device)) is not None:
            raise ValueError(f"FSDP: parameter {each.name!r} {fault}")
    return found


def _fault(parameter: nn.Parameter, device: torch.device) -> str | None:
    if is_lazy(cast(Any, parameter)):
        return "is lazy; run one forward before wrapping, or give the module its sizes"
    if parameter.layout is not torch.strided:
        return f"has the layout {parameter.layout}; only dense parameters can be sharded"
    if parameter.is_meta:
        return "is on the meta device; give it values before wrapping"
    if parameter.device != device:
        return f"is on {parameter.device}, others are on {device}; use one device for each rank"
    if parameter.requires_grad and parameter.dtype not in FLOATS:
        return f"is trainable and {parameter.dtype}; only real floating-point ones can be"
    return None


def describe(module: nn.Module, found: Sequence[SharedParameter]) -> list[str]:
    """What must be the same on every rank, a parameter or buffer a line."""
    lines = []
    for each in found:
        p = each.parameter
        kind = "trainable" if p.requires_grad else "frozen"
        lines.append(f"{kind} {each.name!r} of shape {tuple(p.shape)} and {p.dtype}")
    for name, buffer in module.named_buffers():
        lines.append(f"a buffer {name!r} of shape {tuple(buffer.shape)} and {buffer.dtype}")
    return lines


LARGE = 1 << 16
"""Elements from which on a parameter is exchanged alone."""
BUCKET = 1 << 20
"""Elements that a bucket of small parameters may hold."""


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


def _fill(tensors: Sequence[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    buckets: list[list[tuple[int, Tensor]]] = []
    size = 0
    for index, tensor in tensors:
        if not buckets or size + tensor.numel() > BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append((index, tensor))
        size += tensor.numel()
    return buckets


def make_layouts(tensors: Sequence[Tensor], num_shards: int) -> list[Layout]:
    """One layout for each dtype, trainable and frozen parameters apart."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.requires_grad), []).append((index, tensor))
    return [Layout(group, num_shards) for group in groups.values()]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
