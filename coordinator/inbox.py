"""Where events for the coordinator arrive, so that one round's answers wake it once.

A thread that wakes up takes the interpreter from a worker, finds its code gone from the
caches, and costs several times what it does. The answers to a request that went to every
rank bring nothing on before the last of them, so the first ones wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coordinator import messages as m
from coordinator.commands import Command, Send

if TYPE_CHECKING:
    _Queue = queue.SimpleQueue[m.Event]
else:
    _Queue = queue.SimpleQueue

_ANSWERS: dict[type, type] = {
    m.RequestParams: m.ParamSnapshot,
    m.Update: m.SyncAck,
    m.SyncNow: m.SyncAck,
}
"""What is asked of every rank of a round, and what each of them says to it."""


class Inbox(_Queue):
    """A queue that holds the answers of a round back until the last one, or anything else.

    Order is kept: whatever is put takes along what was held. Nothing is held for longer than
    a ``get`` with a timeout waits, and nothing once a rank failed, left or did not succeed,
    which may then never answer. ``put`` from any thread; ``get`` and ``expect`` from one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[m.Event] = []
        self._missing: dict[tuple[type, int], int] = {}

    def expect(self, commands: Sequence[Command]) -> None:
        """These commands are about to be carried out: how many answers will come."""
        asked: list[tuple[type, int]] = []
        for command in commands:
            if isinstance(command, Send):
                answer = _ANSWERS.get(type(command.message))
                if answer is not None:
                    asked.append((answer, command.message.round))  # type: ignore[union-attr]
        if asked:
            with self._lock:
                self._missing = dict(Counter(asked))

    def put(self, item: m.Event, block: bool = True, timeout: float | None = None) -> None:
        """Put an event; wakes whoever waits in ``get`` unless others are yet to answer."""
        with self._lock:
            if self._may_wait(item):
                self._held.append(item)
                return
            self._release()
            super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> m.Event:
        """The next event; once the time is over, what is held.

        Raises:
            queue.Empty: None came in time.
        """
        try:
            return super().get(block, timeout)
        except queue.Empty:
            if not block:
                raise
        with self._lock:
            self._release()
        return super().get_nowait()

    def _may_wait(self, event: Any) -> bool:
        """Whether more answers of the same round are to come; counts this one."""
        kind = type(event)
        if kind in (m.BatchReport, m.EpochReport):
            return False
        left = 0
        if kind is m.ParamSnapshot or (kind is m.SyncAck and event.ok):
            left = self._missing.get((kind, event.round), 0) - 1
        if left <= 0:
            self._missing.clear()
            return False
        self._missing[kind, event.round] = left
        return True

    def _release(self) -> None:
        for event in self._held:
            super().put(event)
        self._held.clear()
