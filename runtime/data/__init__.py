"""Data sets, loaders and prefetching to devices."""

from __future__ import annotations
