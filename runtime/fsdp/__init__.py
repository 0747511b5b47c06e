"""Parameters, gradients and optimizer state sharded over the ranks."""

from runtime.fsdp.memory import reachable_bytes
from runtime.fsdp.module import FSDP
from runtime.fsdp.strategy import ShardingStrategy

__all__ = ["FSDP", "ShardingStrategy", "reachable_bytes"]
