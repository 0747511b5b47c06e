"""Handling of Ctrl-C, SIGTERM and SIGHUP for all runs of the process.

The handler is installed only while the main thread waits for a run. It may run between any two
instructions of that thread, whatever locks the thread holds, so it acquires none: it counts
signals and puts requests into reentrant queues.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that end runs; Windows has no SIGHUP."""

POLL_S = 0.2
"""Maximum duration of a wait: Python handles a signal that arrives just before a lock wait only
when the wait ends."""

REPETITION_S = 1.0
"""Time after the first signal in which others are taken as the same one: ``timeout`` and job
schedulers send it to a process and to its group."""

EXIT_S = 10.0
"""Seconds for active runs to end when the interpreter exits."""

Disposition = Callable[[int, FrameType | None], Any] | int | None


class InterruptHandler:
    """Signal handler shared by all runs and all calls that wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _runs; not acquired by the handler
        self._runs: tuple[Stoppable, ...] = ()
        self._period: InterruptibleWait | None = None
        self._num_waits = 0
        self._previous: dict[int, Disposition] = {}
        self._exit_signal: tuple[int, int] | None = None
        self._handler = self._on_signal

    def add(self, run: Stoppable) -> None:
        """Register a run. Thread-safe."""
        with self._lock:
            self._runs = (*self._runs, run)

    def remove(self, run: Stoppable) -> None:
        """Unregister a run. Idempotent."""
        with self._lock:
            self._runs = tuple(other for other in self._runs if other is not run)

    @property
    def interrupted(self) -> bool:
        """True if a signal has been received and is being handled; from any thread."""
        period = self._period
        return period is not None and period.interrupted

    @contextmanager
    def waiting(self) -> Iterator[InterruptibleWait]:
        """Handle signals while the main thread waits; no effect in other threads.

        The first signal stops every run, the second aborts them, unless it follows within
        :data:`REPETITION_S`. Waits may be nested. When the
        outermost one ends, received signals are passed to the previous handlers: a function is
        called. The default action, which ends the process, follows at interpreter exit, so that
        the code after the wait can use the state of the run.

        Raises:
            KeyboardInterrupt: A signal was received; raised when the wait ends.
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
            # None: not installed from Python, so it could not be restored.
            if previous is not None and previous != signal.SIG_IGN:
                self._previous[signum] = previous
                signal.signal(signum, self._handler)

    def _leave(self) -> None:
        period = self._period
        self._num_waits -= 1
        if self._num_waits == 0:
            for signum, previous in self._previous.items():
                if signal.getsignal(signum) is self._handler:  # else replaced by user code
                    signal.signal(signum, previous)
            # Signals were counted until here.
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
            if previous is not signal.default_int_handler:  # raises KeyboardInterrupt, as we do
                previous(signum, None)
        elif self._exit_signal is None:
            self._exit_signal = os.getpid(), signum

    def end_process(self) -> None:
        """At interpreter exit, end the process by the first signal whose default action is due,
        so that its exit status names the signal.
        """
        pid, signum = self._exit_signal or (0, signal.SIGTERM)
        if pid != os.getpid() or signal.getsignal(signum) != signal.SIG_DFL:
            return  # also in a child that was forked since
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        logging.shutdown()
        signal.raise_signal(signum)

    def abort_all(self) -> None:
        """Abort all runs at interpreter exit, since daemon threads must not be within a step then.

        Blocks for at most :data:`EXIT_S`.
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
            raise KeyboardInterrupt  # called by a handler that replaced this one
        period.received.append(signum)
        if not period.add():
            return
        if period.count == 1:
            for run in self._runs:
                run.stop("signalled")
        elif period.count == 2:
            for run in self._runs:
                run.abort()


class InterruptibleWait:
    """A wait, and the signals received during it.

    Args:
        poll_s: Maximum duration of a lock wait; ``None``: unlimited.

    Attributes:
        received: The signals, in order.
    """

    def __init__(self, poll_s: float | None = None) -> None:
        self._poll_s = poll_s
        self.count = 0
        self.received: list[int] = []
        self._first_at = 0.0

    def add(self) -> bool:
        """Count an interrupt; returns False if it repeats the first one."""
        now = time.monotonic()
        if self.count == 1 and now - self._first_at < REPETITION_S:
            return False
        if self.count == 0:
            self._first_at = now
        self.count += 1
        return True

    @property
    def interrupted(self) -> bool:
        """True if the call must wait for the end of its run and then raise."""
        return self.count > 0

    @property
    def is_abandoned(self) -> bool:
        """True if the call must return although the run is still being aborted."""
        return self.count > 2

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> None:
        """Wait for ``condition``, at most ``timeout_s`` and ``poll_s``."""
        bounds = [bound for bound in (timeout_s, self._poll_s) if bound is not None]
        condition.wait(min(bounds, default=None))


class Stoppable(Protocol):
    """Interface of a run for the handler. ``stop`` and ``abort`` neither block nor lock."""

    def stop(self, reason: str = "stopped") -> None:
        """Stop at a step boundary."""

    def abort(self) -> None:
        """Stop without waiting for a step boundary."""

    def wait_threads(self, timeout_s: float | None = None) -> None:
        """Wait until the run has ended, at most ``timeout_s``."""


INTERRUPTS = InterruptHandler()
"""The handler of this process."""

# In reverse order: the process ends last.
atexit.register(INTERRUPTS.end_process)
atexit.register(INTERRUPTS.abort_all)
