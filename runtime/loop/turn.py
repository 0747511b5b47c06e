"""One call of a model at a time, and none from inside another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turn:
    """Lets threads have their turns.

    Args:
        check_thread: Raises in a thread that others wait for.

    Attributes:
        lock: Held by whoever has its turn.
    """

    def __init__(self, check_thread: Callable[[], None]) -> None:
        self._check_thread = check_thread
        self.lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for this thread's turn, and have it.

        Raises:
            RuntimeError: Called from inside another call, which waits for this one.
        """
        self._check_thread()
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "the model was called from inside one of its own calls, for instance by the "
                "timeline: do that once the call has returned"
            )
        with self.lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None
