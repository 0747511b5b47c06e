"""Viewer: the queue of messages to one open page."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_WAITING = 8
"""Messages that wait for a slow page; beyond, it gets the history instead."""


class Viewer:
    """One open page. Used only in the event loop's thread.

    Args:
        history: Gives the whole state, as a message.
    """

    def __init__(self, history: Callable[[], bytes]) -> None:
        self._history = history
        self._waiting: deque[bytes] = deque()
        self._behind = True  # a new page has nothing yet
        self._closed = False
        self._changed = asyncio.Event()
        self._changed.set()

    def put(self, message: bytes) -> None:
        """Send what is new; never waits."""
        if not self._behind:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(message)
            else:
                self.restart()
        self._changed.set()

    def restart(self) -> None:
        """Send the history next, whatever is waiting."""
        self._waiting.clear()
        self._behind = True
        self._changed.set()

    def close(self) -> None:
        """Send what is waiting, then nothing more."""
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Wait for the next message; ``None`` after the last."""
        while True:
            if self._behind:
                # What is made now holds all that was put before.
                self._behind = False
                return self._history()
            if self._waiting:
                return self._waiting.popleft()
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
