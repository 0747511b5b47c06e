"""Parameters, gradients and optimizer state sharded over the ranks."""

from runtime.fsdp.layout import ShardingStrategy
from runtime.fsdp.sharded import reachable_bytes
from runtime.fsdp.wrapper import FSDP

__all__ = ["FSDP", "ShardingStrategy", "reachable_bytes"]
