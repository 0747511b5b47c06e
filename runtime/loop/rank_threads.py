"""One persistent thread for each rank, for loops that the user's own thread runs."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

from runtime.core.threads import IntraOpThreads, Living, resolve_vector_math

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long threads may take to end; only user code that does not return takes that long."""
EXIT_S = 5.0
LOOK_S = 0.2
"""A signal that comes in the instant before a wait is seen by Python only when it ends, so
no wait is longer than this."""


class Work(Protocol):
    """What the threads of some ranks do, each its part."""

    def carry_out(self, rank: int, broken: BaseException | None) -> None:
        """Do a rank's part, in its thread; ``broken`` is why it cannot be done. Never raises."""


class Outcome(NamedTuple):
    """What became of a rank's work.

    Attributes:
        value: What it returned.
        error: What it raised, if it did.
    """

    value: Any = None
    error: BaseException | None = None


class Call:
    """One piece of work for every rank. Thread-safe.

    Attributes:
        outcomes: One for each rank, in order; complete once :meth:`wait` says so.
        is_begun: Whether a rank may have it.
    """

    def __init__(self, work: Callable[[int], Any], num_ranks: int) -> None:
        self._work = work
        self.outcomes: list[Outcome] = [Outcome()] * num_ranks
        self.is_begun = False
        self._taken = [False] * num_ranks  # each is its own rank's thread's
        self._lock = threading.Lock()
        self._num_left = num_ranks
        # Not an Event: its methods are Python code, which Ctrl-C may leave in the middle with
        # the lock inside it held for good.
        self._done = threading.Lock()
        self._done.acquire()

    def carry_out(self, rank: int, broken: BaseException | None) -> None:
        """Do a rank's part, in its thread, once; ``broken`` is why it cannot be done."""
        if self._taken[rank]:
            return
        self._taken[rank] = True
        if broken is not None:
            self.outcomes[rank] = Outcome(error=broken)
        else:
            try:
                self.outcomes[rank] = Outcome(self._work(rank))
            except BaseException as error:
                self.outcomes[rank] = Outcome(error=error)
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self._done.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until every rank is through; ``False`` if time is up before.

        Can be interrupted by a signal. The ranks' work goes on then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._num_left:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            # Taken by whoever waits first, who leaves it to the others.
            if self._done.acquire(timeout=left):
                self._done.release()
        return True


Inbox = queue.SimpleQueue[Work | None]


class RankThreads:
    """Threads that carry out calls, one after another, until they are closed.

    They are daemons named ``<name>-<rank>``. They end with :meth:`close`, when this object
    is garbage, and when the interpreter exits. They keep alive what ``contexts`` and
    ``on_end`` refer to, so those must not refer to this object's owner.

    Args:
        name: What the threads are called.
        contexts: For each rank, what makes the context that its thread lives in. If one
            fails, its error is the outcome of every call.
        on_end: Called once by the last thread to end, in that thread.
        lend: How many of the threads are CPU ones. If there are any, the calling thread has
            as many intra-op threads as each of them until the end.
    """

    def __init__(
        self,
        name: str,
        contexts: Sequence[Callable[[], AbstractContextManager[object]]],
        on_end: Callable[[], object] = lambda: None,
        *,
        lend: int = 0,
    ) -> None:
        self.name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._inboxes: list[Inbox] = [queue.SimpleQueue() for _ in contexts]
        ending = _Ending(len(contexts), on_end)
        resolve_vector_math()
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(rank, context, inbox, ending),
                name=f"{name}-{rank}",
                daemon=True,
            )
            for rank, (context, inbox) in enumerate(zip(contexts, self._inboxes, strict=True))
        ]
        num_started = 0
        try:
            for thread in self._threads:
                thread.start()
                num_started += 1
        except BaseException:
            _tell_to_end(self._inboxes)
            for _ in self._threads[num_started:]:
                ending.leave()
            raise
        # These take no lock, for they may run wherever garbage is collected.
        weakref.finalize(self, _tell_to_end, self._inboxes).atexit = False
        share = max(1, IntraOpThreads.budget() // lend) if lend else 0
        lender = IntraOpThreads.lend(share) if lend else 0
        self._take_back = weakref.finalize(self, IntraOpThreads.take_back, lender)
        self._take_back.atexit = False
        _OPEN.add(self)

    @property
    def closed(self) -> bool:
        """Whether no call is accepted any more."""
        return self._closed

    def start(self, work: Callable[[int], Any]) -> Call:
        """Let every rank's thread call ``work(rank)``, behind earlier calls. Does not block.

        For whoever must know, if Ctrl-C comes meanwhile, that all ranks do it or none does:
        :meth:`new_call` and :meth:`deliver`.

        Raises:
            RuntimeError: They are closed, or were left behind in a fork.
        """
        call = self.new_call(work)
        self.deliver(call)
        return call

    def new_call(self, work: Callable[[int], Any]) -> Call:
        """A call that no rank has yet."""
        return Call(work, len(self._inboxes))

    def deliver(self, call: Call) -> None:
        """Give a call to every rank's thread. Does not block.

        Where an exception left this in the middle, the next try completes it: each rank does
        its part once, however often it gets the call.

        Raises:
            RuntimeError: As :meth:`start`; no rank has the call.
        """
        self.post(call, range(len(self._inboxes)))

    def post(self, work: Work, ranks: Iterable[int]) -> None:
        """Let the threads of these ranks carry out work, behind earlier work. Does not block.

        Raises:
            RuntimeError: They are closed, or were left behind in a fork.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the threads of {self.name} are in the process that made them, not in this fork "
                "of it: build the object in the process that uses it"
            )
        with self._lock:  # a close comes before a call or behind it on every rank
            if self._closed:
                raise RuntimeError(f"the threads of {self.name} are closed")
            if isinstance(work, Call):
                work.is_begun = True
            for rank in ranks:
                self._inboxes[rank].put(work)

    def has_caller(self) -> bool:
        """Whether one of the threads calls this."""
        # Not current_thread(), which keeps an object for each thread of autograd; the number
        # of a thread that has ended may be another's by now.
        return any(t.ident == threading.get_ident() and t.is_alive() for t in self._threads)

    def dead(self) -> list[str]:
        """Names of the threads that have ended."""
        return [thread.name for thread in self._threads if not thread.is_alive()]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the threads behind the calls they have, and wait for them. Idempotent.

        Raises:
            RuntimeError: A thread is still alive after ``timeout_s`` seconds; named.
        """
        stuck = self.end(timeout_s)
        if stuck:
            raise RuntimeError(
                f"{', '.join(stuck)} did not end within {timeout_s:g} s: user code does not return"
            )

    def end(self, timeout_s: float) -> list[str]:
        """As :meth:`close`; gives the names of the threads that are still alive."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _tell_to_end(self._inboxes)
                self._take_back()
        deadline = time.monotonic() + timeout_s
        others = [t for t in self._threads if t is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in others if thread.is_alive()]


class _Ending:
    """Lets the last thread to leave end what all of them used."""

    def __init__(self, num_threads: int, then: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_threads
        self._then = then

    def leave(self) -> None:
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self._then()


def _serve(
    rank: int,
    context: Callable[[], AbstractContextManager[object]],
    inbox: Inbox,
    ending: _Ending,
) -> None:
    broken: BaseException | None = None
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(context())
            except BaseException as error:
                broken = error
            while (call := inbox.get()) is not None:
                call.carry_out(rank, broken)
                call = None  # keeps nothing alive while it waits
    except BaseException:
        logger.warning("rank %d: the thread's context did not end well", rank, exc_info=True)
    finally:
        ending.leave()


def _tell_to_end(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


_OPEN: Living[RankThreads] = Living()


def _close_at_exit() -> None:
    for threads in _OPEN.all():
        try:
            threads.close(EXIT_S)
        except RuntimeError as error:
            logger.warning("%s", error)


atexit.register(_close_at_exit)
