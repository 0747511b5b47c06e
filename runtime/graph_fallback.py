"""Why steps are not captured, told once."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)


class CannotCapture(Exception):
    """The step cannot be a graph; the message says why."""


class Fallbacks:
    """Warns once for each reason; shared by the workers of a run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def tell(self, rank: int, what: str, reason: str) -> None:
        """Say that something is not captured.

        Args:
            rank: Where it was found.
            what: What is made eagerly instead.
            reason: Why, the same text on every rank.
        """
        with self._lock:
            first = reason not in self._told
            self._told.add(reason)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "cuda_graphs, rank %d: %s: %s", rank, what, reason)
