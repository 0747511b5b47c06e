"""What a collective notes on a rank's lane, where no other rank has to wait for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runtime.timeline.causes import AVERAGING, SYNC

if TYPE_CHECKING:
    from runtime.timeline.recorder import Lane


class Meeting:
    """One collective on one rank's lane, which has the cause before again when it is over.

    The rank that arrives last is waited for, and after that all are: what is noted there
    takes each rank's time. So the last one notes nothing before it goes on, the others
    while they wait, and a short exchange is noted when it is over.

    Args:
        lane: Where it is noted.
    """

    __slots__ = ("_before", "_exchanging", "_lane", "_start")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._before = lane.cause
        self._start = time.monotonic()
        # The last one to arrive looks at what all want, and may do it at once.
        self._exchanging: float | None = self._start

    def waits(self) -> None:
        """The others have not arrived yet."""
        self._lane.enter(SYNC, self._start)
        self._exchanging = None

    def met(self, *, is_long: bool) -> None:
        """All are there, and the exchange begins."""
        if is_long:
            self._lane.enter(AVERAGING)
            self._exchanging = None
        elif self._exchanging is None:
            self._exchanging = time.monotonic()

    def over(self) -> None:
        """The collective is over, with or without success."""
        if self._exchanging is None:
            self._lane.enter(self._before)
        else:
            self._lane.enter_past(AVERAGING, self._exchanging, self._before)
