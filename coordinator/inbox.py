"""Where events for the coordinator arrive, so that one round's answers wake it once.

A thread that wakes up takes the interpreter from a worker, finds its code gone from the
caches, and costs several times what it does. The answers to a request that went to every
rank bring nothing on before the last of them, so the first ones wait for it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coordinator import messages as m
from coordinator.commands import Command, Send

if TYPE_CHECKING:
    _Queue = queue.SimpleQueue[m.Event]
else:
    _Queue = queue.SimpleQueue

HELD_S = 1.0
"""Nothing is held back for longer, in seconds."""

_ANSWERS: dict[type, type] = {
    m.RequestParams: m.ParamSnapshot,
    m.Update: m.SyncAck,
    m.SyncNow: m.SyncAck,
}
"""What is asked of every rank of a round, and what each of them says to it."""
_USUAL = (m.BatchReport, m.EpochReport, *set(_ANSWERS.values()))
"""What comes while ranks train and answer; after anything else one may never answer."""
_FROM_OUTSIDE = (m.StopRequested, m.SaveRequested, m.AbortRequested)


class Inbox(_Queue):
    """A queue that holds the answers of a round back until the last one, or anything else.

    Acknowledgements may all wait for the next report, if nothing can follow from them before
    it. What a rank puts is taken in that order: it takes along what was held. ``put`` may be
    called from any thread, and for what comes from outside the run in a signal handler, as it
    then takes no lock; all else from one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[m.Event] = []
        self._missing: dict[tuple[type, int], int] = {}
        self._acks_wait = False

    def handled(
        self, event: m.Event, commands: Sequence[Command], *, acks_wait: bool = False
    ) -> None:
        """An event was handled, and these commands are about to be carried out.

        Whether more answers are awaited is decided here and not where events are put: what
        ends a round may have been put before the round began.

        Args:
            event: The event.
            commands: What follows from it.
            acks_wait: If ranks are asked to acknowledge something, whether the last of them
                brings nothing on either, and every rank will report after it.
        """
        asked: list[tuple[type, int]] = []
        for command in commands:
            if isinstance(command, Send):
                answer = _ANSWERS.get(type(command.message))
                if answer is not None:
                    asked.append((answer, command.message.round))  # type: ignore[union-attr]
        if asked or not isinstance(event, _USUAL):
            with self._lock:
                self._release()
                self._missing = dict(Counter(asked))
                self._acks_wait = acks_wait
        elif self._acks_wait and isinstance(event, m.EpochReport):
            # It may have been a rank's last word before its acknowledgement.
            with self._lock:
                self._acks_wait = False
                if not self._missing:
                    self._release()

    def put(self, item: m.Event, block: bool = True, timeout: float | None = None) -> None:
        """Put an event; wakes whoever waits in ``get`` unless others are yet to answer."""
        if isinstance(item, _FROM_OUTSIDE):
            super().put(item)
            return
        with self._lock:
            if isinstance(item, m.BatchReport) and any(self._missing.values()):
                # The count that makes the next round due may be reached: no other report comes.
                self._acks_wait = False
            holds = self._may_wait(item)
            if holds:
                self._held.append(item)
            if not any(self._missing.values()):
                self._missing.clear()
            if not holds:
                self._release()
                super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> m.Event:
        """The next event; what is held if none comes for a while.

        Raises:
            queue.Empty: None came in time.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            wait = min(left, HELD_S) if self.waits else left
            try:
                return super().get(block, None if wait == math.inf else max(0.0, wait))
            except queue.Empty:
                if not block:
                    raise
            if not self.let_go() and wait == left:
                raise queue.Empty

    @property
    def waits(self) -> bool:
        """Whether something is held back, or may be."""
        with self._lock:
            return bool(self._missing or self._held)

    def let_go(self) -> bool:
        """Hold nothing back any longer; returns whether anything was."""
        with self._lock:
            held = bool(self._held)
            self._missing.clear()
            self._release()
        return held

    def _may_wait(self, event: Any) -> bool:
        """Whether this is an answer that brings nothing on yet; counts it."""
        kind = type(event)
        if kind is m.SyncAck and not event.ok:
            self._missing.clear()
            return False
        left = self._missing.get((kind, getattr(event, "round", -1)), 0) - 1
        if left < 0:
            return False
        self._missing[kind, event.round] = left
        return left > 0 or (self._acks_wait and kind is m.SyncAck)

    def _release(self) -> None:
        for event in self._held:
            super().put(event)
        self._held.clear()
