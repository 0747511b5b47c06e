"""Threads that run one at a time, in an order drawn from a seed, on a virtual clock.

Stand-ins for the modules ``threading`` and ``time``: every call that may block, or that another
thread could overtake, hands the processor to a thread drawn at random. A schedule is so repeated
by its seed. Threads of the operating system carry them, as the code under test needs stacks.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import contextmanager
from typing import ClassVar

MAX_STEPS = 50_000


class Killed(BaseException):
    """Raised to end a thread of a finished schedule."""


class Carrier:
    """An OS thread that runs stepped threads one after another."""

    idle: ClassVar[deque[Carrier]] = deque()

    def __init__(self):
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job = None
        threading.Thread(target=self._loop, name="pytest_timeout-carrier", daemon=True).start()

    @classmethod
    def take(cls):
        return cls.idle.pop() if cls.idle else cls()

    def _loop(self):
        while True:
            self.baton.acquire()
            job, self.job = self.job, None
            job()


class Stepped:
    """State of one thread.

    Attributes:
        ready: Returns true once it may run; ``None``: at once.
        deadline: Time at which it runs in any case.
        what: The awaited event.
        slots: Values of the stand-ins for ``threading.local`` and of the model.
    """

    def __init__(self, name, carrier):
        self.name = name
        self.carrier = carrier
        self.ready = self.deadline = None
        self.what = "its start"
        self.timed_out = self.finished = False
        self.slots = {}


class Scheduler:
    """Runs stepped threads and the steps of a machine.

    Args:
        seed: Chooses the order.
        machine: ``steps()`` returns the possible steps, ``next_time()`` the next time.

    Attributes:
        now: The time, in seconds.
        failure: The failure of the schedule, if any.
    """

    active: Scheduler | None = None

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.machine = None
        self.now = 0.0
        self.num_steps = 0
        self.threads = []
        self.current = None
        self.failure = None
        self.trace = []
        self.dead = False
        self._stickiness = self.random.choice((0.0, 0.5, 0.8, 0.95))
        self._slow = self.random.choice((0.2, 1.0, 3.0))  # speed of devices relative to threads
        self._over = threading.Event()

    def run(self, main):
        """Run ``main`` as the first thread; returns once it has ended, or the schedule failed."""
        Scheduler.active = self
        try:
            first = self.spawn("main", main)
            self.current = first
            first.carrier.baton.release()
            self._over.wait()
        finally:
            Scheduler.active = None

    def spawn(self, name, work):
        """Start a thread; it runs when it is drawn."""
        carrier = Carrier.take()
        thread = Stepped(name, carrier)

        def job():
            try:
                if not self.dead:
                    work()
            except Killed:
                pass
            except BaseException as error:
                self.fail(f"{name} ended by {type(error).__name__}: {error}", error)
            if name == "main":
                self.dead = True
            thread.finished = True
            Carrier.idle.append(carrier)
            self._hand_over(thread)

        carrier.job = job
        self.threads.append(thread)
        return thread

    def block(self, ready, timeout_s, what):
        """Let others run until ``ready()``; returns False after a timeout."""
        if self.dead:
            raise Killed
        me = self.current
        me.ready, me.what = ready, what
        me.deadline = None if timeout_s is None or timeout_s < 0 else self.now + timeout_s
        self._hand_over(me)
        if self.dead:
            raise Killed
        return not me.timed_out

    def step(self, what="its turn"):
        """Let others run."""
        self.block(None, None, what)

    def fail(self, why, error=None):
        """End the schedule; the first reason is kept."""
        if self.failure is None and not self.dead:
            self.failure = why
            self.error = error
        self.dead = True

    def states(self):
        """One line with the wait of every thread."""
        waiting = [f"{t.name}: {t.what}" for t in self.threads if not t.finished]
        return "; ".join(waiting + self.machine.states())

    def _hand_over(self, me):
        chosen = self._choose(me)
        if chosen is None:
            self._over.set()
            return
        self.current = chosen
        if chosen is me:
            return
        chosen.carrier.baton.release()
        if not me.finished:
            me.carrier.baton.acquire()

    def _choose(self, me):
        while True:
            living = [t for t in self.threads if not t.finished]
            if self.dead:
                return living[0] if living else None
            self.num_steps += 1
            if self.num_steps > MAX_STEPS:
                self.fail(f"no end after {MAX_STEPS} steps: {self.states()}")
                continue
            ready = [t for t in living if self._is_ready(t)]
            if me in ready and self.random.random() < self._stickiness:
                self.trace.append((self.now, me.name, me.what))
                return me
            steps = self.machine.steps()
            if not ready and not steps:
                times = [t.deadline for t in living if t.deadline is not None]
                times += [time for time in (self.machine.next_time(),) if time is not None]
                if not times:
                    self.fail(f"hang: {self.states()}")
                    continue
                self.now = max(self.now, min(times))
                continue
            weight = self._slow * len(steps)
            if steps and self.random.random() * (len(ready) + weight) < weight:
                self.random.choice(steps)()
                continue
            if ready:
                chosen = self.random.choice(ready)
                self.trace.append((self.now, chosen.name, chosen.what))
                return chosen

    def _is_ready(self, thread):
        if thread.ready is None or thread.ready():
            thread.timed_out = False
            return True
        thread.timed_out = thread.deadline is not None and self.now >= thread.deadline
        return thread.timed_out


# -- the module threading ------------------------------------------------------------


def _scheduler():
    found = Scheduler.active
    assert found is not None, "outside of a schedule"
    return found


class Lock:
    def __init__(self):
        self._holder = None

    def acquire(self, blocking=True, timeout=-1):
        scheduler = _scheduler()
        if not blocking:
            scheduler.step()
        elif not scheduler.block(lambda: self._holder is None, timeout, "a lock"):
            return False
        if self._holder is not None:
            return False
        self._holder = scheduler.current
        return True

    def release(self):
        assert self._holder is not None or _scheduler().dead, "released twice"
        self._holder = None

    def locked(self):
        return self._holder is not None

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()


class Condition:
    def __init__(self, lock=None):
        self._lock = lock or Lock()
        self._num_notified = 0
        self._waiters = []

    def __enter__(self):
        self._lock.acquire()
        return self

    def __exit__(self, *_):
        self._lock.release()

    def wait(self, timeout=None):
        token = object()
        self._waiters.append(token)
        self._lock.release()
        try:
            return _scheduler().block(lambda: token not in self._waiters, timeout, "a condition")
        finally:
            if token in self._waiters:
                self._waiters.remove(token)
            self._lock.acquire()

    def wait_for(self, predicate, timeout=None):
        scheduler = _scheduler()
        end = None if timeout is None else scheduler.now + timeout
        while not predicate():
            rest = None if end is None else end - scheduler.now
            if rest is not None and rest <= 0:
                return False
            self.wait(rest)
        return True

    def notify_all(self):
        self._waiters.clear()


class Event:
    def __init__(self):
        self._is_set = False

    def set(self):
        self._is_set = True

    def is_set(self):
        return self._is_set

    def wait(self, timeout=None):
        return _scheduler().block(lambda: self._is_set, timeout, "an event")


class SimpleQueue:
    def __init__(self):
        self._items = []

    def put(self, item):
        self._items.append(item)

    def get(self):
        _scheduler().block(lambda: self._items, None, "an item")
        return self._items.pop(0)


class Queue:
    """Replaces the module ``queue``."""

    SimpleQueue = SimpleQueue


class Thread:
    def __init__(self, target=None, args=(), kwargs=None, name="thread", daemon=None):
        self._work = lambda: target(*args, **(kwargs or {}))
        self._stepped = None
        self.name = name

    def start(self):
        scheduler = _scheduler()
        self._stepped = scheduler.spawn(self.name, scheduler.machine.on_thread(self._work))
        scheduler.step("its turn after a start")

    def join(self, timeout=None):
        _scheduler().block(lambda: self._stepped.finished, timeout, f"the end of {self.name}")

    def is_alive(self):
        return not self._stepped.finished


class Local:
    """Attributes of each thread."""

    def __getattr__(self, name):
        try:
            return _scheduler().current.slots[id(self), name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        _scheduler().current.slots[id(self), name] = value


class Threading:
    """Replaces the module ``threading``."""

    Lock, Condition, Event, Thread, local = Lock, Condition, Event, Thread, Local
    TIMEOUT_MAX = threading.TIMEOUT_MAX

    @staticmethod
    def current_thread():
        return _scheduler().current


class Time:
    """Replaces the module ``time``."""

    @staticmethod
    def monotonic():
        return _scheduler().now

    perf_counter = monotonic

    @staticmethod
    def sleep(seconds):
        _scheduler().block(lambda: False, seconds, "its sleep")


@contextmanager
def stepped(*modules):
    """Replace the modules ``threading``, ``queue`` and ``time`` in these modules."""
    before = []
    for module in modules:
        for name, stand_in in (("threading", Threading), ("queue", Queue), ("time", Time)):
            if hasattr(module, name):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
