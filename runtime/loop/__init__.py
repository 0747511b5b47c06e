"""A loop of the user's own: one module whose replicas train on all devices."""

from __future__ import annotations

from runtime.loop.ddp_config import DdpConfig
from runtime.loop.module import ReplicatedModule

__all__ = ["DdpConfig", "ReplicatedModule"]
