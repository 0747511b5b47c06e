"""A live web page of a run."""

from __future__ import annotations

from runtime.monitor.monitor import Monitor

__all__ = ["Monitor"]
