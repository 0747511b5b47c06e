"""Agreement of all ranks on their collective calls; one that differs or fails aborts the group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple

from runtime.collective import Collective
from runtime.collective.base import Group
from runtime.core.errors import CollectiveAborted


class CallAgreement:
    """Detects collective calls that some ranks only make, or that fail on some only. Thread-safe.

    All ranks make the same calls in the same order, so each rank counts its own. If two ranks
    make different calls, their exchanges may still fit each other, so the group is aborted before
    the second one. A call that fails before any exchange on every rank is harmless: all continue.
    If it fails on some ranks only, the others would wait for them in this call or the next one. So
    the group is aborted, through a rank that failed, as soon as both outcomes are recorded.

    Attributes:
        reason: The first failure that aborted the group; ``None``: no failure did.
    """

    def __init__(self, world_size: int) -> None:
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._numbers = [0] * world_size
        # For each call that some ranks have not reached: failure or name of the ranks that have.
        self._outcomes: dict[int, dict[int, _Failure | str]] = {}

    def entered(self, collective: Collective, call: str) -> None:
        """Record that a rank enters its next call.

        Raises:
            CollectiveAborted: Another rank has made another call in its place.
        """
        self._report(collective, call, counts=True)

    def behind(self, collective: Collective) -> list[int]:
        """The ranks that have not made this rank's last call."""
        with self._lock:
            mine = self._numbers[collective.rank]
            return [rank for rank, number in enumerate(self._numbers) if number < mine]

    def rejected(self, collective: Collective, error: BaseException) -> None:
        """Record that a rank's next call failed before any exchange."""
        self._report(collective, error, counts=True)

    def failed_between(self, collective: Collective, error: BaseException) -> None:
        self._report(collective, error, counts=False)

    def failed_during(self, collective: Collective, error: BaseException) -> None:
        """Record that a rank failed inside a call, and abort the group."""
        with self._lock:
            self.reason = self.reason or _reason(collective, error)
        collective.abort()

    def _report(
        self, collective: Collective, outcome: BaseException | str, *, counts: bool
    ) -> None:
        rank = collective.rank
        with self._lock:
            number = self._numbers[rank]
            outcomes = self._outcomes.setdefault(number, {})
            # A failure before a call is kept, even if the rank then makes the call.
            if isinstance(outcome, BaseException):
                outcomes[rank] = _Failure(weakref.ref(collective), _reason(collective, outcome))
            else:
                outcomes.setdefault(rank, outcome)
            if counts:
                self._numbers[rank] += 1
                if min(self._numbers) > number:
                    del self._outcomes[number]
            failures = [each for each in outcomes.values() if isinstance(each, _Failure)]
            differs = not failures and self._differ(outcomes)
            if differs:
                self.reason = self.reason or differs
            elif not failures or len(failures) == len(outcomes):
                return
            else:
                self.reason = self.reason or failures[0].reason
        # Outside the lock; through the rank that failed, so that the error names it.
        through = failures[0].collective() if failures else None
        (through or collective).abort()
        if differs:
            raise CollectiveAborted(differs)

    @staticmethod
    def _differ(outcomes: Mapping[int, object]) -> str:
        """Two ranks with different calls; empty: there are none."""
        (one, call), *others = outcomes.items()
        for other, name in others:
            if name != call:
                return (
                    f"rank {one} called {call} where rank {other} called {name}: all ranks have to "
                    "make the same calls of FSDP in the same order, those of an evaluation or of "
                    "a last batch included"
                )
        return ""


class _Failure(NamedTuple):
    """A rank's failure.

    Attributes:
        collective: The rank's collective, held weakly so that records keep no group alive.
        reason: The message of the error that the other ranks raise.
    """

    collective: weakref.ref[Collective]
    reason: str


def _reason(collective: Collective, error: BaseException) -> str:
    return f"rank {collective.rank} failed: {type(error).__name__}: {error}"


_LOCK = threading.Lock()  # never taken by a finalizer
_AGREEMENTS: weakref.WeakKeyDictionary[Group, CallAgreement] = weakref.WeakKeyDictionary()


def agreement_of(collective: Collective) -> CallAgreement:
    """The agreement shared by all ranks and all FSDP modules of a group."""
    with _LOCK:
        return _AGREEMENTS.setdefault(collective._group, CallAgreement(collective.world_size))
