"""The worker: one thread for each device, which trains a replica and answers the coordinator."""

from __future__ import annotations
