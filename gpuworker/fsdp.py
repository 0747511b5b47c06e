"""Fully sharded data parallelism: :class:`FSDP` and its strategies."""

from __future__ import annotations

from gpuworker import FSDP, ShardingStrategy

__all__ = ["FSDP", "ShardingStrategy"]
