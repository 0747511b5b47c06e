"""Sharding strategies, and the process groups that each of them uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique

from runtime.collective import Collective, split_nodes


@unique
class ShardingStrategy(Enum):
    """The state that each rank holds outside forward and backward.

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
        """True if full parameters exist only during forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The process groups of one rank.

    Attributes:
        shard: The ranks among which one copy of the parameters is sharded.
        replicate: The ranks that hold the same shard; ``None``: no other rank does.
        owned: Subgroups made for this wrapper, to be closed with it.
    """

    shard: Collective
    replicate: Collective | None = None
    owned: tuple[Collective, ...] = ()


def check_strategy(
    strategy: ShardingStrategy, world_size: int, intra_node_size: int | None
) -> None:
    """Validate a strategy before any exchange.

    Raises:
        TypeError: Not a strategy, or the node size is no integer.
        ValueError: The node size is missing, not applicable, or does not divide the world size.
    """
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(f"strategy={strategy!r}: pass a ShardingStrategy")
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        if intra_node_size is not None:
            raise ValueError(
                f"intra_node_size={intra_node_size!r} has no meaning with {strategy.name}; leave "
                "it out, or pass ShardingStrategy.HYBRID_SHARD"
            )
        return
    if intra_node_size is None:
        raise ValueError("HYBRID_SHARD needs intra_node_size, the number of ranks of a node")
    if isinstance(intra_node_size, bool) or not isinstance(intra_node_size, int):
        raise TypeError(f"intra_node_size={intra_node_size!r}: pass an int")
    if intra_node_size < 1 or world_size % intra_node_size:
        raise ValueError(
            f"intra_node_size={intra_node_size} does not divide the world size {world_size}; pass "
            "the number of ranks of each node"
        )


def make_groups(
    collective: Collective, strategy: ShardingStrategy, intra_node_size: int | None
) -> ShardGroups:
    """Make the groups of a strategy; a collective call for ``HYBRID_SHARD``."""
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        return ShardGroups(shard=collective)
    assert intra_node_size is not None
    intra, inter = split_nodes(collective, intra_node_size)
    return ShardGroups(shard=intra, replicate=inter, owned=(intra, inter))
