"""Devices: streams and events, timing, values read late, and memory."""

from __future__ import annotations
