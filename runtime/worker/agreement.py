"""Where lockstep ranks stop, or take their states, together."""

from __future__ import annotations

import threading


class StopAgreement:
    """The global steps before which every rank of a lockstep run stops, or takes its state.

    A rank that is asked to stop at the edge of step ``s`` has not joined the reduction of
    ``s``, so no peer can have passed it: naming ``s + 1`` before joining is seen by all
    of them, because the reduction orders it before their next look. The first name counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_at: int | None = None
        self._capture_at = (0, 0)

    def propose(self, step: int) -> None:
        """Name the step before which to stop, unless one is named already."""
        with self._lock:
            if self._stop_at is None:
                self._stop_at = step

    def reached(self, step: int) -> bool:
        """Whether ``step`` must not begin."""
        return self._stop_at is not None and step >= self._stop_at

    def propose_capture(self, capture: int, step: int) -> None:
        """Name the step before which a capture is made, unless that or a later one is named.

        Args:
            capture: Counts the captures of a run, from 1.
            step: The step.
        """
        with self._lock:
            if capture > self._capture_at[0]:
                self._capture_at = (capture, step)

    @property
    def capture_at(self) -> tuple[int, int]:
        """The last capture that was named, and its step; 0: none yet."""
        return self._capture_at
