"""Feed: the data of a monitor's pages, encoded once for all of them."""

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
    """The data of the pages: facts, present state and past of a run, as JSON.

    Each item is encoded once, when it is added; the history for a new page joins the encoded
    items, whose number is bounded. The texts are ASCII without line breaks, ``<``, ``>`` and
    ``&``, so that they are safe in an event stream and within a page. Callable from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(None)

    def begin(self, facts: Json | None) -> None:
        """Clear everything and start another run."""
        with self._lock:
            self._facts = embedded(facts)
            self._now = "null"
            self._ticks: Decimated[str] = Decimated(MAX_TICKS)
            self._epochs: Decimated[str] = Decimated(MAX_EPOCHS)
            self._events: list[str] = []

    def add(self, now: Json, ticks: list[Json], epochs: list[Json], events: list[Json]) -> str:
        """Add a reading.

        Args:
            now: The present state of the run.
            ticks: New readings of the counters, in order.

        Returns:
            The encoded update, for pages that have everything before it.
        """
        encoded_items = [[embedded(item) for item in items] for items in (ticks, epochs, events)]
        state = embedded(now)
        with self._lock:
            self._now = state
            for tick in encoded_items[0]:
                self._ticks.add(tick)
            for epoch in encoded_items[1]:
                self._epochs.add(epoch)
            self._events = [*self._events, *encoded_items[2]][-MAX_EVENTS:]
        encoded = [_list(items) for items in encoded_items]
        return _object(now=state, ticks=encoded[0], epochs=encoded[1], events=encoded[2])

    def history(self) -> str:
        """The encoded history, for a new page."""
        with self._lock:
            facts, now = self._facts, self._now
            ticks, epochs, events = self._ticks.read(), self._epochs.read(), self._events
        return _object(facts=facts, now=now, ticks=_list(ticks), epochs=_list(epochs),
                       events=_list(events))  # fmt: skip


def _list(items: list[str]) -> str:
    return f"[{','.join(items)}]"


def _object(**items: str) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in items.items()) + "}"
