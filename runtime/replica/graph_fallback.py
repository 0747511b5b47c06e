"""Why steps are not captured: told once, and known to all workers of a run."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)


class CannotCapture(Exception):
    """The step cannot be a graph; the message says why."""


class Fallbacks:
    """What the workers of a run have found out; thread-safe.

    A rank that knows it from another one need not break a capture of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._optimizer = False
        self._all = False

    @property
    def without_optimizer(self) -> bool:
        """Whether the optimizer cannot be captured."""
        return self._optimizer

    @property
    def without_graphs(self) -> bool:
        """Whether nothing can be captured."""
        return self._all

    def leave_out_optimizer(self, rank: int, reason: str) -> None:
        """No rank captures the optimizer from here on."""
        self._optimizer = True
        self._tell(rank, "the optimizer steps without a graph", reason)

    def give_up(self, rank: int, reason: str, *, everywhere: bool = True) -> None:
        """A rank captures nothing from here on, nor does any other if so ``everywhere``."""
        if everywhere:  # not "or": that would write back what it read before another rank's word
            self._all = True
        self._tell(rank, "steps are made without a graph", reason)

    def pass_by(self, rank: int, reason: str) -> None:
        """Some windows of batches are made without a graph."""
        self._tell(rank, "some steps are made without a graph", reason)

    def _tell(self, rank: int, what: str, reason: str) -> None:
        with self._lock:
            first = reason not in self._told
            self._told.add(reason)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "cuda_graphs, rank %d: %s: %s", rank, what, reason)
