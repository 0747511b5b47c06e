"""Signal tests: actions during a wait, and a run blocked in a step."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from signal import SIGINT, SIGTERM

from runtime.core.signals import INTERRUPTS, InterruptibleWait
from tests.support.running import Gate, builder

FOREVER = 100_000
SOON_S = 3.0
"""Shorter than the grace period of a failed run."""


def dispositions():
    """The current handlers of SIGINT and SIGTERM."""
    return [signal.getsignal(signum) for signum in (SIGINT, SIGTERM)]


@contextmanager
def as_found():
    """Check that handlers are restored and no run is registered afterwards."""
    before = dispositions()
    yield
    after = dispositions()
    for signum, handler in zip((SIGINT, SIGTERM), before, strict=True):
        signal.signal(signum, handler)
    assert after == before
    assert INTERRUPTS._runs == ()


def raising(signum):
    """A function that raises a signal in the calling thread."""
    return lambda: signal.raise_signal(signum)


def held_run(grace_s=5.0, **kwargs):
    """An endless run blocked in a step, and the gate that releases it."""
    gate = Gate()
    handle = builder(train=gate, dataset=FOREVER, **kwargs)._set(grace_s=grace_s).run()
    gate.await_entry()
    return gate, handle


class Waits:
    """Runs actions in the main thread before each of its waits, with the handle's lock held.

    Attributes:
        actions: For each wait to come, functions to call.
        entered: Set once a thread waits.
        seen: The thread of each wait, and the handlers during it.
    """

    def __init__(self, monkeypatch):
        self.actions = []
        self.entered = threading.Event()
        self.seen = []
        real_wait = InterruptibleWait.wait

        def wait(period, condition, timeout_s):
            thread = threading.current_thread()
            self.seen.append((thread.name, dispositions()))
            if self.actions and thread is threading.main_thread():
                for action in self.actions.pop(0):
                    action()
            self.entered.set()
            real_wait(period, condition, timeout_s)

        monkeypatch.setattr(InterruptibleWait, "wait", wait)


class Probe:
    """A run that records calls of ``stop`` and ``abort``."""

    def __init__(self):
        self.stopped, self.aborted = threading.Event(), threading.Event()
        self.abort = self.aborted.set

    def stop(self, reason="stopped"):
        self.stopped.set()


class RecordedHandler:
    """A user's handler that records its calls and the installed handlers."""

    def __init__(self):
        self.calls = []
        self.during = []

    def __call__(self, signum, frame):
        self.calls.append((signum, frame))
        self.during.append(dispositions())
