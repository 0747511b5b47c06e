"""Closes process groups when their owner is closed or garbage-collected.

The garbage collector may run at any point, even in a thread that holds the lock of the group to
be closed. So a finalizer takes no lock: it puts a key into a reentrant queue, and a thread closes
the groups.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

from runtime.collective import Collective

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
"""Seconds that interpreter exit waits for the thread."""


class GroupCloser:
    """Closes the groups of owners that were garbage-collected. Thread-safe.

    Its daemon thread runs while any groups are registered.

    Attributes:
        collected: Keys of groups whose owner was collected; safe to put from a finalizer.
    """

    def __init__(self) -> None:
        self.collected: SimpleQueue[int] = SimpleQueue()
        self._lock = threading.Lock()  # never taken by a finalizer
        self._keys = itertools.count()
        self._groups_by_key: dict[int, list[Collective]] = {}
        self._thread: threading.Thread | None = None

    def register(self, groups: list[Collective]) -> int:
        """Register groups to be closed later, and return their key.

        Raises:
            RuntimeError: No thread could be started.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fsdp-closer", daemon=True)
                thread.start()
                self._thread = thread
            key = next(self._keys)
            self._groups_by_key[key] = groups
            return key

    def close(self, key: int) -> None:
        """Close groups in the calling thread, unless they are closed already."""
        with self._lock:
            groups = self._groups_by_key.pop(key, [])
        try:
            _close(groups)
        finally:
            self.collected.put(key)  # lets the thread end if nothing is registered

    def close_all(self) -> None:
        """Close all registered groups and end the thread."""
        with self._lock:
            thread = self._thread
            keys = list(self._groups_by_key)
        for key in keys:
            self.close(key)
        if thread is not None:
            thread.join(EXIT_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            key = self.collected.get()
            with self._lock:
                groups = self._groups_by_key.pop(key, [])
            _close(groups)
            del groups
            with self._lock:
                if not self._groups_by_key:
                    self._thread = None
                    return


class OwnedGroups:
    """Groups closed by :meth:`close`, garbage collection of this object, or interpreter exit.

    Used in the owner's thread only.
    """

    def __init__(self) -> None:
        self._groups: list[Collective] = []
        self._finalizer: weakref.finalize[..., OwnedGroups] | None = None
        self._key = -1

    def add(self, groups: Sequence[Collective]) -> None:
        """Take ownership of groups; they are closed at once if that fails."""
        self._groups.extend(groups)
        if not groups or self._finalizer is not None:
            return
        try:
            self._key = CLOSER.register(self._groups)
        except BaseException:
            _close(self._groups)
            raise
        self._finalizer = weakref.finalize(self, CLOSER.collected.put, self._key)
        self._finalizer.atexit = False  # see GroupCloser.close_all

    def close(self) -> None:
        """Close the groups in the calling thread. Idempotent."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            CLOSER.close(self._key)


def _close(groups: Sequence[Collective]) -> None:
    for group in groups:
        try:
            group.close()
        except Exception:
            logger.warning("rank %d: a subgroup did not close", group.rank, exc_info=True)


CLOSER = GroupCloser()
"""The closer of this process."""
atexit.register(CLOSER.close_all)
