"""Errors that the coordinator itself raises."""

from __future__ import annotations


class AveragingFailed(RuntimeError):
    """More averaging rounds failed in a row than ``max_failed_rounds`` allows."""
