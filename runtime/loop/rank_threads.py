"""A persistent thread per rank, and the jobs that run in all of them."""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from coordinator.run_errors import GpuWorkerError
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.core.live_registry import LiveRegistry
from runtime.core.rng import CallGenerators, install_thread_generators
from runtime.core.threads import IntraOpThreads, prepare_threads

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Seconds that close() waits; only user code that does not return takes that long."""
EXIT_TIMEOUT_S = 5.0
SIGNAL_POLL_S = 0.2
"""Longest single wait: Python handles a signal that arrives just before a wait only after it."""
Task = Callable[[], Any]
Inbox: TypeAlias = "queue.SimpleQueue[Job | None]"


class _Current(threading.local):
    """The inbox of the rank that the thread is; not its ident, which another thread may get."""

    inbox: Inbox | None = None


_CURRENT = _Current()


class RankThreads:
    """Daemon threads, one per rank, that run jobs sequentially until they are closed.

    They are named ``<name>-<rank>``. They end with :meth:`close`, when this object is
    garbage-collected, or when the interpreter exits. They keep ``contexts`` and ``on_end`` alive,
    so those must not refer to this object's owner.

    Args:
        name: Prefix of the threads' names.
        contexts: Factory of each thread's context manager. If one raises, every job of its rank
            fails with that exception.
        on_end: Called once, in the last thread to end.
        num_cpu_ranks: Number of threads that compute on the CPU. If not 0, the calling thread
            gets as many intra-op threads as each of them until the end.
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
        last_exit = _LastExit(len(contexts), on_end)
        prepare_threads()
        install_thread_generators()
        self._threads = [
            threading.Thread(
                target=_thread_main,
                args=(rank, context, inbox, last_exit),
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
                last_exit.leave()
            raise
        # Finalizers take no lock: the garbage collector may run them at any point.
        weakref.finalize(self, _send_stop, self._inboxes).atexit = False
        share = max(1, IntraOpThreads.budget() // num_cpu_ranks) if num_cpu_ranks else 0
        overridden = IntraOpThreads.override(share) if num_cpu_ranks else 0
        self._reset_threads = weakref.finalize(self, IntraOpThreads.reset, overridden)
        self._reset_threads.atexit = False
        _OPEN.add(self)

    @property
    def closed(self) -> bool:
        """True once no more jobs are accepted."""
        return self._closed

    def start(self, work: Callable[[int], Any]) -> Job:
        """Make every rank's thread call ``work(rank)``, after earlier jobs. Does not block.

        To learn whether a ``KeyboardInterrupt`` left all ranks or none with the job, make a
        :class:`Job` and :meth:`submit` it.

        Raises:
            RuntimeError: The threads are closed, or belong to the parent of this fork.
        """
        job = Job([partial(work, rank) for rank in range(len(self._inboxes))])
        self.submit(job)
        return job

    def submit(self, job: Job) -> None:
        """Post a job to the threads of its ranks. Does not block.

        Idempotent: after an interrupt, a second call completes the first, and each rank runs its
        task once.

        Raises:
            RuntimeError: As :meth:`start`; no rank received the job.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the threads of {self.name} are in the process that made them, not in this fork "
                "of it: build the object in the process that uses it"
            )
        with self._lock:  # so that close() is before or after this job on every rank
            if self._closed:
                raise RuntimeError(f"the threads of {self.name} are closed")
            job.is_posted = True
            for rank in job.ranks:
                self._inboxes[rank].put(job)

    def is_current_thread(self) -> bool:
        """True if the caller is one of the threads."""
        return _CURRENT.inbox in self._inboxes

    def exited(self) -> dict[int, str]:
        """Rank and name of each thread that has ended."""
        return {rank: t.name for rank, t in enumerate(self._threads) if not t.is_alive()}

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the threads after their jobs, and wait for them. Idempotent.

        Raises:
            RuntimeError: A thread is still alive after ``timeout_s`` seconds.
        """
        stuck = self.stop(timeout_s)
        if stuck:
            raise RuntimeError(
                f"{', '.join(stuck)} did not end within {timeout_s:g} s: user code does not return"
            )

    def stop(self, timeout_s: float) -> list[str]:
        """Like :meth:`close`, but return the names of threads that are still alive."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _send_stop(self._inboxes)
                self._reset_threads()
        deadline = time.monotonic() + timeout_s
        others = [t for t in self._threads if t is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in others if thread.is_alive()]


class _LastExit:
    """Calls a function in the last thread to leave."""

    def __init__(self, num_threads: int, on_last: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_threads
        self._on_last = on_last

    def leave(self) -> None:
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self._on_last()


def _thread_main(
    rank: int,
    context: Callable[[], AbstractContextManager[object]],
    inbox: Inbox,
    last_exit: _LastExit,
) -> None:
    _CURRENT.inbox = inbox
    context_error: BaseException | None = None
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(context())
            except BaseException as error:
                context_error = error
            while (call := inbox.get()) is not None:
                call.run_rank(rank, context_error)
                call = None  # so that a waiting thread keeps nothing alive
    except BaseException:
        logger.warning("rank %d: the thread's context failed to exit", rank, exc_info=True)
    finally:
        last_exit.leave()


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


@dataclass(slots=True)
class TaskOutcome:
    """The result of one rank's task.

    Attributes:
        error: The raised exception.
        start_s: Start, by ``time.monotonic()``.
        end_s: End, by the same clock.
    """

    value: Any = None
    error: BaseException | None = None
    start_s: float = 0.0
    end_s: float = 0.0


class Job:
    """One task per rank, to be waited for together by the thread that makes it.

    Args:
        tasks: One per rank; ``None``: no task.

    Attributes:
        outcomes: One per rank; complete once :meth:`wait` returns ``True``.
        is_posted: True if a rank may have received the job.
    """

    def __init__(self, tasks: Sequence[Task | None]) -> None:
        self._context = contextvars.copy_context()
        self._tasks = list(tasks)  # each entry is written by its rank's thread only
        self.outcomes = [TaskOutcome() for _ in tasks]
        self.ranks = [rank for rank, task in enumerate(tasks) if task is not None]
        self._generators = CallGenerators(len(self.ranks))
        self.is_posted = False
        self._lock = threading.Lock()
        self._num_left = len(self.ranks)
        # Not an Event: a KeyboardInterrupt may leave its Python code with the inner lock held.
        self._done = threading.Lock()
        self._done.acquire()

    def run_rank(self, rank: int, context_error: BaseException | None) -> None:
        """Run a rank's task once, in its thread, or fail with ``context_error``."""
        outcome, task = self.outcomes[rank], self._tasks[rank]
        if task is None:
            return
        outcome.start_s = time.monotonic()
        try:
            if context_error is not None:
                raise context_error
            with self._generators.of_rank(rank):
                # A copy for each rank: threads cannot be in one context together.
                outcome.value = self._context.copy().run(task)
        except BaseException as error:
            outcome.error = error
        self._tasks[rank] = task = None  # only the caller keeps its references from here on
        outcome.end_s = time.monotonic()
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self._done.release()

    def wait(self, timeout_s: float | None = None, threads: RankThreads | None = None) -> bool:
        """Block until every rank is done; returns ``False`` on timeout.

        A signal may interrupt it; the ranks' tasks continue then.

        Args:
            timeout_s: In seconds; ``None``: no timeout.
            threads: The threads that run the tasks; ``None``: do not check that they are alive.

        Raises:
            GpuWorkerError: A thread ended without running its task.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._num_left:
            left = SIGNAL_POLL_S
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
            if left <= 0:
                return False
            # Released again for other waiters.
            if self._done.acquire(timeout=left):
                self._done.release()
            elif threads is not None:
                dead = [name for rank, name in threads.exited().items() if self._tasks[rank]]
                if dead:
                    raise GpuWorkerError(f"threads have ended: {', '.join(dead)}; set up again")
        self._generators.advance()
        return True


def root_failures(outcomes: Sequence[TaskOutcome]) -> list[tuple[int, BaseException]]:
    """Rank and error of ranks that caused a failure; else of the first aborted one."""
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    # Peers of a failed rank are only aborted by it.
    own = [f for f in failed if not isinstance(f[1], (CollectiveAborted, CollectiveTimeout))]
    return own or failed[:1]


def first_failure(outcomes: Sequence[TaskOutcome]) -> tuple[int, BaseException] | None:
    """Rank and error of the first rank that caused a failure; ``None``: none failed."""
    failed = root_failures(outcomes)
    return failed[0] if failed else None
