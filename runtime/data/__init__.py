"""From a data set to batches on a device: loaders, slots in memory, prefetch."""

from __future__ import annotations
