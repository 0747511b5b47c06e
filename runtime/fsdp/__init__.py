"""Parameters, gradients and optimizer state sharded over the ranks."""

from runtime.fsdp.reachable import reachable_bytes
from runtime.fsdp.strategy import ShardingStrategy
from runtime.fsdp.wrapper import FSDP

__all__ = ["FSDP", "ShardingStrategy", "reachable_bytes"]
