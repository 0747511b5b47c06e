"""Viewer: the queue of messages to one open page."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_WAITING = 8
"""Messages queued for a slow page; when exceeded, it gets the history instead."""


class Viewer:
    """The message queue of one open page. Used only in the event loop's thread.

    Args:
        history: Returns the whole history, as a message.
    """

    def __init__(self, history: Callable[[], bytes]) -> None:
        self._history = history
        self._waiting: deque[bytes] = deque()
        self._behind = True  # a new page needs the history
        self._closed = False
        self._changed = asyncio.Event()
        self._changed.set()

    def put(self, message: bytes) -> None:
        """Queue a message; never waits."""
        if not self._behind:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(message)
            else:
                self.restart()
        self._changed.set()

    def restart(self) -> None:
        self._waiting.clear()
        self._behind = True
        self._changed.set()

    def close(self) -> None:
        """End the queue after the queued messages."""
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Wait for the next message; ``None`` after the last."""
        while True:
            if self._behind:
                # The history includes all messages put before.
                self._behind = False
                return self._history()
            if self._waiting:
                return self._waiting.popleft()
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
