"""GroupGate: wakes the threads that wait for ranks of a group that is aborted."""

from __future__ import annotations

import threading


class GroupGate:
    """The condition on which ranks of a run wait for each other, and the generations of groups that
    were aborted. Thread-safe.

    Attributes:
        condition: Guards what the ranks wait for; :meth:`abort` notifies it.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self._last = -1
        self._is_over = False

    def is_aborted(self, generation: int | None) -> bool:
        """True if a group was aborted; ``None``: if all were."""
        return self._is_over or (generation is not None and generation <= self._last)

    def abort(self, generation: int | None) -> None:
        """Wake all ranks that wait in a group or an earlier one; ``None``: in all, permanently."""
        with self.condition:
            if generation is None:
                self._is_over = True
            else:
                self._last = max(self._last, generation)
            self.condition.notify_all()
