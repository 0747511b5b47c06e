"""A persistent thread per rank, and the jobs that run in all of them."""

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
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from coordinator.errors import GpuWorkerError
from runtime.core.errors import (
    CollectiveAborted,
    CollectiveTimeout,
)
from runtime.core.threads import IntraOpThreads, LiveRegistry, prepare_threads

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long threads may take to end; only user code that does not return takes that long."""
EXIT_TIMEOUT_S = 5.0
SIGNAL_POLL_S = 0.2
"""A signal that comes in the instant before a wait is seen by Python only when it ends, so
no wait is longer than this."""
Task = Callable[[], Any]
Inbox: TypeAlias = "queue.SimpleQueue[RankWork | None]"


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
        num_cpu_ranks: int = 0,
    ) -> None:
        self.name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._inboxes: list[Inbox] = [queue.SimpleQueue() for _ in contexts]
        ending = _LastExit(len(contexts), on_end)
        prepare_threads()
        self._threads = [
            threading.Thread(
                target=_thread_main,
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
            _send_stop(self._inboxes)
            for _ in self._threads[num_started:]:
                ending.leave()
            raise
        # These take no lock, for they may run wherever garbage is collected.
        weakref.finalize(self, _send_stop, self._inboxes).atexit = False
        share = max(1, IntraOpThreads.budget() // num_cpu_ranks) if num_cpu_ranks else 0
        lender = IntraOpThreads.lend(share) if num_cpu_ranks else 0
        self._take_back = weakref.finalize(self, IntraOpThreads.take_back, lender)
        self._take_back.atexit = False
        _OPEN.add(self)

    @property
    def closed(self) -> bool:
        """Whether no call is accepted any more."""
        return self._closed

    def start(self, work: Callable[[int], Any]) -> Job:
        """Let every rank's thread call ``work(rank)``, behind earlier jobs. Does not block.

        For whoever must know, if Ctrl-C comes meanwhile, that all ranks do it or none does:
        make a :class:`Job`, and :meth:`submit` it.

        Raises:
            RuntimeError: They are closed, or were left behind in a fork.
        """
        job = Job([partial(work, rank) for rank in range(len(self._inboxes))])
        self.submit(job)
        return job

    def submit(self, job: Job) -> None:
        """Give a job to the threads of its ranks. Does not block.

        Where an exception left this in the middle, the next try completes it: each rank does
        its part once, however often it gets the job.

        Raises:
            RuntimeError: As :meth:`start`; no rank has the job.
        """
        self.post(job, job.ranks)

    def post(self, work: RankWork, ranks: Iterable[int]) -> None:
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
            if isinstance(work, Job):
                work.is_posted = True
            for rank in ranks:
                self._inboxes[rank].put(work)

    def is_current_thread(self) -> bool:
        """Whether one of the threads calls this."""
        # Not current_thread(), which keeps an object for each thread of autograd; the number
        # of a thread that has ended may be another's by now.
        return any(t.ident == threading.get_ident() and t.is_alive() for t in self._threads)

    def exited(self) -> dict[int, str]:
        """Rank and name of each thread that has ended."""
        return {rank: t.name for rank, t in enumerate(self._threads) if not t.is_alive()}

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the threads behind the calls they have, and wait for them. Idempotent.

        Raises:
            RuntimeError: A thread is still alive after ``timeout_s`` seconds; named.
        """
        stuck = self.stop(timeout_s)
        if stuck:
            raise RuntimeError(
                f"{', '.join(stuck)} did not end within {timeout_s:g} s: user code does not return"
            )

    def stop(self, timeout_s: float) -> list[str]:
        """As :meth:`close`; gives the names of the threads that are still alive."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _send_stop(self._inboxes)
                self._take_back()
        deadline = time.monotonic() + timeout_s
        others = [t for t in self._threads if t is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in others if thread.is_alive()]


class _LastExit:
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


def _thread_main(
    rank: int,
    context: Callable[[], AbstractContextManager[object]],
    inbox: Inbox,
    ending: _LastExit,
) -> None:
    context_error: BaseException | None = None
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(context())
            except BaseException as error:
                context_error = error
            while (call := inbox.get()) is not None:
                call.run_rank(rank, context_error)
                call = None  # keeps nothing alive while it waits
    except BaseException:
        logger.warning("rank %d: the thread's context did not end well", rank, exc_info=True)
    finally:
        ending.leave()


def _send_stop(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


_OPEN: LiveRegistry[RankThreads] = LiveRegistry()


def _close_at_exit() -> None:
    for threads in _OPEN.all():
        try:
            threads.close(EXIT_TIMEOUT_S)
        except RuntimeError as error:
            logger.warning("%s", error)


atexit.register(_close_at_exit)


class RankWork(Protocol):
    """What the threads of some ranks do, each its part."""

    def run_rank(self, rank: int, context_error: BaseException | None) -> None:
        """Do a rank's part in its thread, or fail with ``context_error``. Never raises."""


@dataclass(slots=True)
class TaskOutcome:
    """What came of one rank's task.

    Attributes:
        value: What it returned.
        error: What it raised.
        start_s: When it began, by ``time.monotonic()``.
        end_s: When it ended.
    """

    value: Any = None
    error: BaseException | None = None
    start_s: float = 0.0
    end_s: float = 0.0


class Job:
    """Tasks of several ranks, and whoever waits for all of them. Thread-safe.

    Args:
        tasks: One for each rank; ``None``: nothing to do.

    Attributes:
        outcomes: One for each rank, in order; complete once :meth:`wait` says so.
        ranks: Those that have a task.
        is_posted: Whether a rank may have it.
    """

    def __init__(self, tasks: Sequence[Task | None]) -> None:
        self._tasks = list(tasks)  # each is its own rank's thread's
        self.outcomes = [TaskOutcome() for _ in tasks]
        self.ranks = [rank for rank, task in enumerate(tasks) if task is not None]
        self.is_posted = False
        self._lock = threading.Lock()
        self._num_left = len(self.ranks)
        # Not an Event: its methods are Python code, which Ctrl-C may leave in the middle with
        # the lock inside it held for good.
        self._done = threading.Lock()
        self._done.acquire()

    def run_rank(self, rank: int, context_error: BaseException | None) -> None:
        """Do a rank's task, in its thread, once; ``context_error`` is why it cannot be done."""
        outcome, task = self.outcomes[rank], self._tasks[rank]
        if task is None:
            return
        outcome.start_s = time.monotonic()
        try:
            if context_error is not None:
                raise context_error
            outcome.value = task()
        except BaseException as error:
            outcome.error = error
        self._tasks[rank] = task = None  # what it holds is the caller's alone from here on
        outcome.end_s = time.monotonic()
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self._done.release()

    def wait(self, timeout_s: float | None = None, threads: RankThreads | None = None) -> bool:
        """Block until every rank is through; ``False`` if time is up before.

        Can be interrupted by a signal. The ranks' work goes on then.

        Args:
            timeout_s: In seconds; ``None``: no end.
            threads: Those that do it, if the caller wants to know when they have ended.

        Raises:
            GpuWorkerError: A thread has ended with its part undone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._num_left:
            left = (
                SIGNAL_POLL_S
                if deadline is None
                else min(SIGNAL_POLL_S, deadline - time.monotonic())
            )
            if left <= 0:
                return False
            # Taken by whoever waits first, who leaves it to the others.
            if self._done.acquire(timeout=left):
                self._done.release()
            elif threads is not None:
                dead = [name for rank, name in threads.exited().items() if self._tasks[rank]]
                if dead:
                    raise GpuWorkerError(f"threads have ended: {', '.join(dead)}; set up again")
        return True


def root_failures(outcomes: Sequence[TaskOutcome]) -> list[tuple[int, BaseException]]:
    """Rank and error of those that failed on their own account; else of the first woken one."""
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    # Peers of a rank that failed are only woken by it.
    own = [f for f in failed if not isinstance(f[1], (CollectiveAborted, CollectiveTimeout))]
    return own or failed[:1]


def first_failure(outcomes: Sequence[TaskOutcome]) -> tuple[int, BaseException] | None:
    """Rank and error of the first that failed on its own account, if one did."""
    failed = root_failures(outcomes)
    return failed[0] if failed else None
