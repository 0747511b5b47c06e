"""The NCCL backends of one group: born together, aborted together, ended together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

END_S = 10.0
"""How long the last rank to leave waits for all backends to end."""


class Communicators:
    """What the ranks of one group share; thread-safe.

    NCCL ends a communicator only together with its peers on the machine, and one that is
    aborted alone can leave theirs hanging. So an abort by anyone aborts all of them, each in
    a thread of its own, and an orderly end comes when the last rank has left.

    Args:
        world_size: How many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._backends: dict[int, Any] = {}
        self._left: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._aborted = False
        self._ended = False

    def add(self, rank: int, backend: Any) -> None:
        """A rank has made its backend."""
        with self._lock:
            self._backends[rank] = backend
            if self._aborted:
                self._start("abort", rank, backend.abort)

    def abort(self) -> None:
        """Abort every backend, made or to be made. Idempotent; waits for none of them."""
        with self._lock:
            if self._aborted or self._ended:
                return
            self._aborted = True
            for rank, backend in self._backends.items():
                self._start("abort", rank, backend.abort)

    def leave(self, rank: int) -> None:
        """A rank uses its backend no more. Once all have left, waits until all have ended."""
        with self._lock:
            self._left.add(rank)
            if self._ended or len(self._left) < self._world_size:
                return
            self._ended = True
            if not self._aborted:
                for other, backend in self._backends.items():
                    self._start("close", other, backend.shutdown)
        self.settle(END_S)
        with self._lock:
            self._backends.clear()

    def settle(self, timeout_s: float) -> bool:
        """Wait for the aborts, or the end, that were begun; whether they are over."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            logger.warning("NCCL did not end within %g s: %s", timeout_s, ", ".join(stuck))
        return not stuck

    def _start(self, what: str, rank: int, end: Callable[[], object]) -> None:
        def run() -> None:
            try:
                end()
            except Exception:
                logger.warning("rank %d: NCCL %s failed", rank, what, exc_info=True)

        thread = threading.Thread(target=run, name=f"collective-{what}-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()
