"""Closes process groups when their owner is closed or garbage-collected.

Garbage is collected in the middle of anything, maybe in a thread that holds the lock of the
very group that shall be closed. So a finalizer takes no lock: it puts a note into a queue that
allows for that, and a thread closes the groups.
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

EXIT_S = 5.0
"""How long the thread may take to end with the interpreter."""


class GroupCloser:
    """Closes the groups of those that are garbage. Thread-safe.

    Its thread, a daemon, lives while there is anything that it may have to close.

    Attributes:
        notes: Numbers of what is garbage; may be put wherever garbage is collected.
    """

    def __init__(self) -> None:
        self.notes: SimpleQueue[int] = SimpleQueue()
        self._lock = threading.Lock()  # never taken by a finalizer
        self._numbers = itertools.count()
        self._open: dict[int, list[Collective]] = {}
        self._thread: threading.Thread | None = None

    def watch(self, groups: list[Collective]) -> int:
        """Groups that may have to be closed; gives their number.

        Raises:
            RuntimeError: No thread could be started.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fsdp-closer", daemon=True)
                thread.start()
                self._thread = thread
            number = next(self._numbers)
            self._open[number] = groups
            return number

    def close(self, number: int) -> None:
        """Close groups in the calling thread; nothing if that was done."""
        with self._lock:
            groups = self._open.pop(number, [])
        try:
            _close(groups)
        finally:
            self.notes.put(number)  # the thread may have no more to do

    def close_all(self) -> None:
        """Close everything, and end the thread."""
        with self._lock:
            thread = self._thread
            numbers = list(self._open)
        for number in numbers:
            self.close(number)
        if thread is not None:
            thread.join(EXIT_S)

    def _run(self) -> None:
        while True:
            number = self.notes.get()
            with self._lock:
                groups = self._open.pop(number, [])
            _close(groups)
            del groups
            with self._lock:
                if not self._open:
                    self._thread = None
                    return


class OwnedGroups:
    """Groups that are closed with :meth:`close`, with this object and with the interpreter.

    For the thread of its owner.
    """

    def __init__(self) -> None:
        self._groups: list[Collective] = []
        self._finalizer: weakref.finalize[..., OwnedGroups] | None = None
        self._number = -1

    def add(self, groups: Sequence[Collective]) -> None:
        """Take charge of groups; if that fails they are closed."""
        self._groups.extend(groups)
        if not groups or self._finalizer is not None:
            return
        try:
            self._number = CLOSER.watch(self._groups)
        except BaseException:
            _close(self._groups)
            raise
        self._finalizer = weakref.finalize(self, CLOSER.notes.put, self._number)
        self._finalizer.atexit = False  # see Closer.close_all

    def close(self) -> None:
        """Close them in the calling thread. Idempotent."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            CLOSER.close(self._number)


def _close(groups: Sequence[Collective]) -> None:
    for group in groups:
        try:
            group.close()
        except Exception:
            logger.warning("rank %d: a subgroup did not close", group.rank, exc_info=True)


CLOSER = GroupCloser()
"""That of the process."""

atexit.register(CLOSER.close_all)
