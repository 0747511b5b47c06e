"""What the coordinator's own thread spends on averaging rounds."""

from __future__ import annotations

from coordinator import messages as m
from coordinator.state import Core

_OF_ROUNDS = (m.ParamSnapshot, m.Averaged, m.SyncAck)


class OwnTime:
    """Tells the thread's time for rounds from that for dealing batches out.

    Fewer rounds make the one less, longer chunks the other. Of reports those between two chunks
    belong to a round if their rank has reached the count that makes one due; others only come
    with time, or with the end of a chunk.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._before_s = 0.0
        self._of_round = False
        self._reporter: int | None = None
        self._rounds_s = 0.0

    def note(self, event: m.Event) -> None:
        """An event is to be handled: what was spent since the last one was spent on that."""
        spent_s = self._core.spent_s
        if self._of_round or self._has_reached():
            self._rounds_s += spent_s - self._before_s
        self._before_s = spent_s
        self._of_round = isinstance(event, _OF_ROUNDS)
        self._reporter = event.rank if isinstance(event, m.BatchReport) else None

    def _has_reached(self) -> bool:
        if self._reporter is None:
            return False
        count = self._core.elche.batch_counts[self._reporter]
        return self._core.ranks[self._reporter].since_round >= count > 0

    def take(self) -> float:
        """Seconds for rounds since this was last called; 0.0 where nobody measures them."""
        taken, self._rounds_s = self._rounds_s, 0.0
        return taken
