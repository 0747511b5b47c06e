"""A loop of the user's own: one module whose replicas train on all devices."""

from __future__ import annotations

from runtime.setup.config import DdpConfig, Timeline
from runtime.setup.module import ReplicatedModule

__all__ = ["DdpConfig", "ReplicatedModule", "Timeline"]
