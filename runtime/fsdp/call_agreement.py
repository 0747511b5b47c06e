"""Agreement of all ranks on their collective calls; a failure on some ranks aborts the group."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

from runtime.collective import Collective
from runtime.collective.base import Group


class CallAgreement:
    """The collective calls of a group, and the ranks that failed before one. Thread-safe.

    All ranks make the same calls in the same order, so each counts its own. A call that fails
    before anything was exchanged is no matter if it fails on every rank: all go on. If it
    fails on some alone, the others would wait for them in it or in the next: the group is
    aborted through a rank that failed, as soon as one rank has failed and another has not,
    whoever comes first.

    Args:
        world_size: How many ranks there are.

    Attributes:
        reason: Why the group was aborted, if it was for a rank's failure; the first stands.
    """

    def __init__(self, world_size: int) -> None:
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._numbers = [0] * world_size
        # Of each call that not all have made: what became of the ranks that told.
        self._outcomes: dict[int, dict[int, _Failure | None]] = {}

    def made(self, end: Collective) -> None:
        """A rank makes its next call."""
        self._tell(end, None, counts=True)

    def refused(self, end: Collective, error: BaseException) -> None:
        """A rank's next call has failed before anything was exchanged."""
        self._tell(end, error, counts=True)

    def failed(self, end: Collective, error: BaseException) -> None:
        """A rank has failed between two calls."""
        self._tell(end, error, counts=False)

    def broke(self, end: Collective, error: BaseException) -> None:
        """A rank has failed in a call that the others are in: aborts the group."""
        with self._lock:
            self.reason = self.reason or _reason(end, error)
        end.abort()

    def _tell(self, end: Collective, error: BaseException | None, *, counts: bool) -> None:
        rank = end.rank
        with self._lock:
            number = self._numbers[rank]
            told = self._outcomes.setdefault(number, {})
            # A failure before a call stands, even if the call is made then.
            if error is not None:
                told[rank] = _Failure(weakref.ref(end), _reason(end, error))
            elif rank not in told:
                told[rank] = None
            if counts:
                self._numbers[rank] += 1
                if min(self._numbers) > number:
                    del self._outcomes[number]
            failures = [failure for failure in told.values() if failure is not None]
            if not failures or len(failures) == len(told):
                return
            self.reason = self.reason or failures[0].reason
        # Not under the lock; through the rank that failed, which the error names then.
        (failures[0].end() or end).abort()


class _Failure(NamedTuple):
    """Where a rank failed.

    Attributes:
        end: Its end; a group must not be kept alive by what is known of its calls.
        reason: What the others are told.
    """

    end: weakref.ref[Collective]
    reason: str


def _reason(end: Collective, error: BaseException) -> str:
    return f"rank {end.rank} failed: {type(error).__name__}: {error}"


_LOCK = threading.Lock()  # no finalizer takes it
_CALLS: weakref.WeakKeyDictionary[Group, CallAgreement] = weakref.WeakKeyDictionary()


def agreement_of(end: Collective) -> CallAgreement:
    """What all ranks of a group tell each other through, whatever they wrap."""
    with _LOCK:
        return _CALLS.setdefault(end._group, CallAgreement(end.world_size))
