"""What the pages of a monitor show: read from the run now and then, encoded once for all."""

from __future__ import annotations

import threading
from typing import Any

from runtime.timeline.buffers import Decimated
from runtime.timeline.page import embedded

MAX_TICKS = 600
MAX_EPOCHS = 1000
MAX_EVENTS = 200

Json = dict[str, Any]


class Feed:
    """All that a page needs: facts of the run, how it stands, its past.

    Every piece is encoded when it comes and never again: the history for a new page is
    pieces put together, whose number is bounded. The texts are ASCII without line breaks,
    ``<``, ``>`` and ``&``, so that they can stand in an event stream or within a page.
    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, facts: Json | None) -> None:
        """Forget the past; another run begins."""
        with self._lock:
            self._facts = embedded(facts)
            self._now = "null"
            self._ticks: Decimated[str] = Decimated(MAX_TICKS)
            self._epochs: Decimated[str] = Decimated(MAX_EPOCHS)
            self._events: list[str] = []

    def add(self, now: Json, ticks: list[Json], epochs: list[Json], events: list[Json]) -> str:
        """Add what is new.

        Args:
            now: How the run stands.
            ticks: Readings of the counters, in order.
            epochs: Epochs that have closed.
            events: What has happened.

        Returns:
            It, encoded for the pages that have the rest.
        """
        fresh = [[embedded(item) for item in items] for items in (ticks, epochs, events)]
        standing = embedded(now)
        with self._lock:
            self._now = standing
            for tick in fresh[0]:
                self._ticks.add(tick)
            for epoch in fresh[1]:
                self._epochs.add(epoch)
            self._events = [*self._events, *fresh[2]][-MAX_EVENTS:]
        encoded = [_list(items) for items in fresh]
        return _object(now=standing, ticks=encoded[0], epochs=encoded[1], events=encoded[2])

    def history(self) -> str:
        """Everything, encoded for a page that has nothing."""
        with self._lock:
            facts, now = self._facts, self._now
            ticks, epochs, events = self._ticks.read(), self._epochs.read(), self._events
        return _object(facts=facts, now=now, ticks=_list(ticks), epochs=_list(epochs),
                       events=_list(events))  # fmt: skip


def _list(items: list[str]) -> str:
    return f"[{','.join(items)}]"


def _object(**items: str) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in items.items()) + "}"
