"""The worker: one thread for each device, which trains a replica and serves the coordinator."""

from __future__ import annotations
