"""Devices: streams and events, timing, values read late, memory."""

from __future__ import annotations
