"""Keeps all other CUDA workers still while one of them captures a graph.

A capture must not meet another one, a draw from the same device's generator in another
thread, or memory that is freed under a collective. So the worker that captures waits until
every other one has parked: at the start of a step, in front of a collective, or where it
waits for messages anyway.

It asks for that one step ahead (:meth:`GateMember.reserve`). Ranks that reduce in each step
then park in front of the next one, and not inside a reduction that waits for the one that
captures. If a rank is in a collective nevertheless, or in a function of the user, there is
no capture now, and the step is made eagerly.

Every wait is bounded: a rank that is stuck in the user's code costs the others a graph, not
the run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, unique

logger = logging.getLogger(__name__)

CAPTURE_WAIT_S = 2.0
"""How long a capture waits for the others to park."""
JOINED_WAIT_S = 0.1
"""How long it waits for ranks in a collective, which may be about to leave it."""
PARK_S = 60.0
"""How long a worker stays parked for captures."""


@unique
class _State(Enum):
    """What a worker is doing, as far as a capture is concerned."""

    AWAY = "away"
    ACTIVE = "active"
    PARKED = "parked"
    JOINED = "joined"


class CaptureGate:
    """What the CUDA workers of a process share; thread-safe.

    Args:
        wait_s: How long a capture waits for the others.
        joined_s: How long for those in a collective.
        park_s: How long a worker stays parked.
    """

    def __init__(
        self,
        wait_s: float = CAPTURE_WAIT_S,
        joined_s: float = JOINED_WAIT_S,
        park_s: float = PARK_S,
    ) -> None:
        self._wait_s = wait_s
        self._joined_s = joined_s
        self._park_s = park_s
        self._changed = threading.Condition()
        self._states: dict[GateMember, _State] = {}
        self._wanted: list[GateMember] = []  # who wants to capture, in order
        self._owner: GateMember | None = None

    def join(self) -> GateMember:
        """A worker begins; until its first step it is in functions of the user."""
        member = GateMember(self)
        with self._changed:
            self._states[member] = _State.AWAY
        return member


class GateMember:
    """One worker's end of the gate. For its own thread, but for :meth:`leave`."""

    def __init__(self, gate: CaptureGate) -> None:
        self._gate = gate

    def leave(self) -> None:
        """The worker is gone: nobody waits for it any more. Idempotent; from any thread."""
        gate = self._gate
        with gate._changed:
            gate._states.pop(self, None)
            self._withdraw()
            if gate._owner is self:
                gate._owner = None
            gate._changed.notify_all()

    def reserve(self) -> None:
        """Ask for a capture in the next step; the others park in front of theirs."""
        gate = self._gate
        with gate._changed:
            if self not in gate._wanted and self in gate._states:
                gate._wanted.append(self)

    def unreserve(self) -> None:
        """There is no capture after all. Idempotent."""
        with self._gate._changed:
            self._withdraw()

    def pause_point(self) -> None:
        """Park here while another worker captures, or is about to."""
        with self._gate._changed:
            self._set(_State.ACTIVE)
            if not self._is_free():
                self._park(self._is_free)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Around a wait that gives the device nothing: captures need not wait for it."""
        gate = self._gate
        with gate._changed:
            self._withdraw()  # the others must not wait for what this one waits for
            self._set(_State.PARKED)
        try:
            yield
        finally:
            with gate._changed:
                if self._is_unowned():
                    self._set(_State.ACTIVE)
                else:
                    self._park(self._is_unowned)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around a function of the user, which may take long: nobody captures meanwhile."""
        with self._gate._changed:
            self._withdraw()
            self._set(_State.AWAY)
        try:
            yield
        finally:
            with self._gate._changed:
                if not self._is_unowned():
                    self._park(self._is_unowned)
                self._set(_State.ACTIVE)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around what waits for other ranks; parks in front of it, never in it."""
        gate = self._gate
        with gate._changed:
            if not self._is_unowned():
                self._park(self._is_unowned)
            self._set(_State.JOINED)
        try:
            yield
        finally:
            with gate._changed:
                self._set(_State.ACTIVE)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold all others still; yields whether that was possible now.

        Blocks while another worker captures, and then until the others have parked, for
        a short while at most, and a shorter one if one of them is in a collective.
        """
        gate = self._gate
        with gate._changed:
            if gate._owner is not None:
                self._park(lambda: gate._owner is None)
            granted = self._claim()
            self._withdraw()
        try:
            yield granted
        finally:
            if granted:
                with gate._changed:
                    if gate._owner is self:
                        gate._owner = None
                    gate._changed.notify_all()

    # -- with the lock held ---------------------------------------------------------

    def _set(self, state: _State) -> None:
        states = self._gate._states
        if self in states and states[self] is not state:
            states[self] = state
            self._gate._changed.notify_all()

    def _withdraw(self) -> None:
        if self in self._gate._wanted:
            self._gate._wanted.remove(self)
            self._gate._changed.notify_all()

    def _is_unowned(self) -> bool:
        return self._gate._owner in (None, self)

    def _is_free(self) -> bool:
        """Whether the next step may begin: nobody else captures, or is next to."""
        gate = self._gate
        if not self._is_unowned():
            return False
        first = gate._wanted[0] if gate._wanted else self
        # One that is in a collective may wait for this very rank there.
        return first is self or gate._states.get(first) is _State.JOINED

    def _park(self, is_over: Callable[[], bool]) -> None:
        gate = self._gate
        before = gate._states.get(self, _State.ACTIVE)
        self._set(_State.PARKED)
        if not gate._changed.wait_for(is_over, gate._park_s):
            logger.warning("a capture takes more than %g s: going on beside it", gate._park_s)
        self._set(before)

    def _claim(self) -> bool:
        gate = self._gate
        if gate._owner is not None or _State.AWAY in self._others():
            return False
        gate._owner = self  # from here on nobody joins a collective
        if gate._changed.wait_for(
            lambda: _State.JOINED not in self._others(), gate._joined_s
        ) and gate._changed.wait_for(lambda: self._others() <= {_State.PARKED}, gate._wait_s):
            return True
        gate._owner = None
        gate._changed.notify_all()
        return False

    def _others(self) -> set[_State]:
        return {state for member, state in self._gate._states.items() if member is not self}


GATE = CaptureGate()
"""That of the process."""
