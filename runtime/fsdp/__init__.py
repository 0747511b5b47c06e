"""Parameters, gradients and optimizer state sharded over the ranks."""

from runtime.fsdp.strategy import ShardingStrategy
from runtime.fsdp.wrapper import FSDP

__all__ = ["FSDP", "ShardingStrategy"]
