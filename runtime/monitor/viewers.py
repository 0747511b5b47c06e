"""The pages that are open, and what each of them still has to be sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_WAITING = 8
"""Messages that wait for a slow page; beyond, it gets the history instead."""


class Viewer:
    """One open page. In the event loop's thread alone.

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
        """Send what is waiting and no more."""
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


class Viewers:
    """All pages that are open. In the event loop's thread alone.

    Args:
        history: Gives the whole state, as a message.
        max_viewers: No more than these.
    """

    def __init__(self, history: Callable[[], bytes], max_viewers: int) -> None:
        self._history = history
        self._max_viewers = max_viewers
        self._viewers: set[Viewer] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    def add(self) -> Viewer | None:
        """A page was opened; ``None`` if there are too many."""
        if self._closed or len(self._viewers) >= self._max_viewers:
            return None
        viewer = Viewer(self._history)
        self._viewers.add(viewer)
        return viewer

    def remove(self, viewer: Viewer) -> None:
        """A page was closed."""
        self._viewers.discard(viewer)

    def put(self, message: bytes) -> None:
        """Send something to all."""
        for viewer in self._viewers:
            viewer.put(message)

    def restart(self) -> None:
        """All begin anew with the history."""
        for viewer in self._viewers:
            viewer.restart()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()
