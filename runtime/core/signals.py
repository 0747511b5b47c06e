"""Ctrl-C and SIGTERM, for all runs of the process together.

The handler is installed while the main thread waits for a run, and at no other time. It
may run between any two instructions of that thread, whatever locks the thread holds, so
it takes none: it counts, and puts requests into queues that allow for that.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)

POLL_S = 0.2
"""A signal that comes in the instant before a lock is waited for is seen by Python only
when that wait ends, so no wait is longer than this."""

EXIT_S = 10.0
"""How long runs that are in progress at the end of the process may take to end."""

Disposition = Callable[[int, FrameType | None], Any] | int | None


class InterruptHandler:
    """One handler for all runs and for all calls that wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of _runs; never taken by the handler
        self._runs: tuple[Stoppable, ...] = ()
        self._period: InterruptibleWait | None = None
        self._num_waits = 0
        self._previous: dict[int, Disposition] = {}
        self._handler = self._on_signal

    def add(self, run: Stoppable) -> None:
        """A run is in progress; from any thread."""
        with self._lock:
            self._runs = (*self._runs, run)

    def remove(self, run: Stoppable) -> None:
        """A run is over. Idempotent."""
        with self._lock:
            self._runs = tuple(other for other in self._runs if other is not run)

    @contextmanager
    def waiting(self) -> Iterator[InterruptibleWait]:
        """Answer signals while the main thread waits; in other threads do nothing.

        The first signal stops every run, the second aborts them. Waits may be nested; when
        the last one is left, the handlers found before act on what came: a function is
        called, and where there was the default action, the process ends by it.

        Raises:
            KeyboardInterrupt: A signal came; raised when the wait is left.
        """
        if threading.current_thread() is not threading.main_thread():
            yield InterruptibleWait()
            return
        self._num_waits += 1
        try:
            if self._period is None:
                self._period = InterruptibleWait(POLL_S)
                self._install()
            yield self._period
        finally:
            self._leave()

    def _install(self) -> None:
        self._previous = {}
        for signum in SIGNALS:
            previous = signal.getsignal(signum)
            # None: it was not installed from Python and could not be put back.
            if previous is not None and previous != signal.SIG_IGN:
                self._previous[signum] = previous
                signal.signal(signum, self._handler)

    def _leave(self) -> None:
        period = self._period
        self._num_waits -= 1
        if self._num_waits == 0:
            for signum, previous in self._previous.items():
                if signal.getsignal(signum) is self._handler:  # else it is somebody else's
                    signal.signal(signum, previous)
            # Until here a signal was still counted; from here on it is not ours.
            self._period = None
        if period is None or not period.received:
            return
        if self._num_waits == 0:
            for signum in dict.fromkeys(period.received):
                self._pass_on(signum)
        raise KeyboardInterrupt

    def _pass_on(self, signum: int) -> None:
        previous = self._previous[signum]
        if callable(previous):
            if previous is not signal.default_int_handler:  # which raises what we raise
                previous(signum, None)
        elif signal.getsignal(signum) == signal.SIG_DFL:
            signal.raise_signal(signum)

    def abort_all(self) -> None:
        """The interpreter ends: its daemon threads must not be in the middle of a step then.

        Blocks for some seconds at most.
        """
        runs = self._runs
        for run in runs:
            run.abort()
        deadline = time.monotonic() + EXIT_S
        for run in runs:
            run.wait_threads(max(0.0, deadline - time.monotonic()))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        period = self._period
        if period is None:
            raise KeyboardInterrupt  # called by a handler that replaced this one and kept it
        period.received.append(signum)
        period.count += 1
        if period.count == 1:
            for run in self._runs:
                run.stop()
        elif period.count == 2:
            for run in self._runs:
                run.abort()


class InterruptibleWait:
    """A time of waiting, and the signals that came in it.

    Args:
        poll_s: Longest time without a look for signals; ``None``: none are expected.

    Attributes:
        count: How often an interrupt was asked for.
        received: The signals, in order.
    """

    def __init__(self, poll_s: float | None = None) -> None:
        self._poll_s = poll_s
        self.count = 0
        self.received: list[int] = []

    @property
    def interrupted(self) -> bool:
        """Whether a wait shall last until its run is over, and then raise."""
        return self.count > 0

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits any more, even for a run that is being aborted."""
        return self.count > 2

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> None:
        """Wait for ``condition`` or for a while, at most for ``timeout_s``."""
        bounds = [bound for bound in (timeout_s, self._poll_s) if bound is not None]
        condition.wait(min(bounds, default=None))


class Stoppable(Protocol):
    """A run, as the handler sees it. The first two return at once and take no lock."""

    def stop(self) -> None:
        """End at a step boundary."""

    def abort(self) -> None:
        """End without waiting for one."""

    def wait_threads(self, timeout_s: float | None = None) -> None:
        """Wait until the run has ended, or for a while."""


INTERRUPTS = InterruptHandler()
"""The one of this process."""

atexit.register(INTERRUPTS.abort_all)
