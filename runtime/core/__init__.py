"""Base layer: errors, argument checks, nested values, threads, signals, worker context."""

from __future__ import annotations
