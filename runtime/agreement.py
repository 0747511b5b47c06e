"""Where lockstep ranks stop together."""

from __future__ import annotations

import threading


class StopAgreement:
    """The global step before which every rank of a lockstep run stops.

    A rank that is asked to stop at the edge of step ``s`` has not joined the reduction of
    ``s``, so no peer can have passed it: naming ``s + 1`` before joining is seen by all
    of them, because the reduction orders it before their next look. The first name counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_at: int | None = None

    def propose(self, step: int) -> None:
        """Name the step before which to stop, unless one is named already."""
        with self._lock:
            if self._stop_at is None:
                self._stop_at = step

    def reached(self, step: int) -> bool:
        """Whether ``step`` must not begin."""
        return self._stop_at is not None and step >= self._stop_at
