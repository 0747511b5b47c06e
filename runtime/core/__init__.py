"""What everything else stands on: errors, checks, nested values, threads, signals, context."""

from __future__ import annotations
