"""What the tests of signals share: a wait that can be acted in, a run held in a step."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from signal import SIGINT, SIGTERM

from runtime.core.signals import INTERRUPTS, InterruptibleWait
from tests.support.running import Gate, builder

FOREVER = 100_000
SOON_S = 3.0
"""Less than the grace of a run that fails."""


def dispositions():
    """What SIGINT and SIGTERM do at present."""
    return [signal.getsignal(signum) for signum in (SIGINT, SIGTERM)]


@contextmanager
def as_found():
    """Fail if the handlers are others afterwards, or a run is still known."""
    before = dispositions()
    yield
    after = dispositions()
    for signum, handler in zip((SIGINT, SIGTERM), before, strict=True):
        signal.signal(signum, handler)
    assert after == before
    assert INTERRUPTS._runs == ()


def raising(signum):
    """Raises a signal in the thread that calls it."""
    return lambda: signal.raise_signal(signum)


def held_run(**kwargs):
    """A run without end that is in a step until its gate is opened; gives both."""
    gate = Gate()
    handle = builder(train=gate, dataset=FOREVER, **kwargs).run()
    gate.await_entry()
    return gate, handle


class Waits:
    """Acts in the main thread each time it is about to wait, with the handle's lock held.

    Attributes:
        actions: For each wait to come, functions to call.
        entered: Set once somebody waits.
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
    """A run that only notes what is asked of it."""

    def __init__(self):
        self.stopped, self.aborted = threading.Event(), threading.Event()
        self.stop, self.abort = self.stopped.set, self.aborted.set


class Noted:
    """A user's handler that notes its calls, and what was installed meanwhile."""

    def __init__(self):
        self.calls = []
        self.during = []

    def __call__(self, signum, frame):
        self.calls.append((signum, frame))
        self.during.append(dispositions())
