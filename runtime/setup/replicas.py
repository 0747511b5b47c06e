"""The threads in which replicas run: one for each device, idle until they are given work."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from runtime.device import DeviceContext, open_device
from runtime.errors import CollectiveAborted, CollectiveTimeout, GpuWorkerError, ReplicaFailed
from runtime.intra_op import IntraOpThreads

logger = logging.getLogger(__name__)

Task = Callable[[], Any]
END_S = 10.0
"""How long the end waits for all threads together."""
LOOK_S = 1.0
"""How often a caller looks whether the threads that it waits for live."""

_numbers = count()


@dataclass(slots=True)
class Outcome:
    """What came of one rank's task.

    Attributes:
        value: What it returned.
        error: What it raised.
        start_s: When it began, by ``time.perf_counter()``.
        end_s: When it ended.
    """

    value: Any = None
    error: BaseException | None = None
    start_s: float = 0.0
    end_s: float = 0.0


class Job:
    """Tasks of several ranks, and the caller that waits for all of them."""

    def __init__(self, tasks: Sequence[Task | None]) -> None:
        self._tasks: list[Task | None] = list(tasks)
        self.outcomes = [Outcome() for _ in tasks]
        self._left = sum(task is not None for task in tasks)
        self._mutex = threading.Lock()
        self._done = threading.Lock()
        if self._left:
            self._done.acquire()

    def perform(self, rank: int) -> None:
        """Do a rank's task, in its thread. Never raises."""
        outcome, task = self.outcomes[rank], self._tasks[rank]
        assert task is not None, "a rank without a task is given no job"
        outcome.start_s = time.perf_counter()
        try:
            outcome.value = task()
        except BaseException as error:
            outcome.error = error
        self._tasks[rank] = task = None  # what it holds is the caller's alone from here on
        outcome.end_s = time.perf_counter()
        with self._mutex:
            self._left -= 1
            if not self._left:
                self._done.release()

    def wait(self, threads: Sequence[threading.Thread]) -> None:
        """Block until all tasks are done. Ctrl-C gets through.

        Raises:
            GpuWorkerError: A thread is gone.
        """
        while not self._done.acquire(timeout=LOOK_S):
            dead = [thread.name for thread in threads if not thread.is_alive()]
            if dead and not self._done.acquire(blocking=False):
                raise GpuWorkerError(f"threads have ended: {', '.join(dead)}; set up again")


Inbox = SimpleQueue[tuple[Job, int] | None]


class ReplicaThreads:
    """One daemon thread for each device, which lives in its device's context.

    The threads end with :meth:`close`, when this object is collected, or when the
    interpreter exits; the last one out clears up. Used by one thread at a time.

    Args:
        devices: One for each rank; a device may stand more than once.
        at_end: Called once, in whatever thread, when they have ended.

    Attributes:
        contexts: The device of each rank as its thread sees it.

    Raises:
        Exception: A device cannot be used.
    """

    def __init__(
        self, devices: Sequence[torch.device], at_end: Callable[[], object] = lambda: None
    ) -> None:
        num_cpus = sum(device.type == "cpu" for device in devices)
        if num_cpus:
            IntraOpThreads.acquire()
        exit_ = _Exit(len(devices), at_end, bool(num_cpus))
        try:
            self.contexts = [open_device(device, num_cpus) for device in devices]
        except BaseException:
            exit_.leave(len(devices))
            raise
        lender: int | None = None
        if num_cpus:
            lender = IntraOpThreads.lend(max(1, IntraOpThreads.budget() // num_cpus))
        number = next(_numbers)
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in devices]
        self._threads: list[threading.Thread] = []
        # Holds nothing of this object, or it would never be collected. It may run anywhere,
        # in the middle of anything: it takes no lock and waits for nobody.
        self._finalizer = weakref.finalize(self, _tell_to_end, self._inboxes, lender)
        self._finalizer.atexit = False  # which waits, see below
        for rank, pair in enumerate(zip(self.contexts, self._inboxes, strict=True)):
            thread = threading.Thread(
                target=_serve, args=(*pair, exit_), name=f"replica-{number}-{rank}", daemon=True
            )
            try:
                thread.start()
            except BaseException:
                exit_.leave(len(devices) - rank)
                self._finalizer()
                raise
            self._threads.append(thread)
        _live.add(self)

    @property
    def closed(self) -> bool:
        """Whether the threads were told to end."""
        return not self._finalizer.alive

    def check_caller(self) -> None:
        """Refuse what could only block.

        Raises:
            RuntimeError: The threads have ended, or one of them calls.
        """
        if self.closed:
            raise RuntimeError(
                "the replicas' threads have ended: the model was closed; go on with model.module, "
                "or set up again"
            )
        self.check_thread()

    def check_thread(self) -> None:
        """Refuse a call by one of the threads, which others wait for.

        Raises:
            RuntimeError: One of them calls.
        """
        if threading.current_thread() in self._threads:
            raise RuntimeError("a replica cannot call the model that it is a part of")

    def run(self, tasks: Sequence[Task | None]) -> list[Outcome]:
        """Do each rank's task in its thread, all at the same time; blocks until all are done.

        Args:
            tasks: One for each rank; ``None``: nothing to do.

        Returns:
            What came of each. No task's exception is raised.

        Raises:
            RuntimeError: See :meth:`check_caller`.
        """
        self.check_caller()
        job = Job(tasks)
        for rank, task in enumerate(tasks):
            if task is not None:
                self._inboxes[rank].put((job, rank))
        job.wait(self._threads)
        return job.outcomes

    def close(self) -> None:
        """End the threads once they have done what they were given. Idempotent.

        Raises:
            GpuWorkerError: One is still alive after a while, in the user's own code.
        """
        self._finalizer()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [t.name for t in self._threads if t.is_alive()]
        if alive:
            raise GpuWorkerError(
                f"threads did not end within {END_S:g} s: {', '.join(alive)}; they are daemons "
                "and will not keep the process alive"
            )


class _Exit:
    """Where the threads leave; the last one gives back what they had together."""

    def __init__(self, num_threads: int, at_end: Callable[[], object], on_cpu: bool) -> None:
        self._left = num_threads
        self._at_end = at_end
        self._on_cpu = on_cpu
        self._lock = threading.Lock()

    def leave(self, num_threads: int = 1) -> None:
        """So many threads end, or never began."""
        with self._lock:
            self._left -= num_threads
            last = not self._left
        if not last:
            return
        try:
            self._at_end()
        except Exception:
            logger.warning("the replicas' group did not close", exc_info=True)
        if self._on_cpu:
            IntraOpThreads.release()


def _serve(context: DeviceContext, inbox: Inbox, exit_: _Exit) -> None:
    """Body of a thread."""
    try:
        with context.activate():
            _work(inbox, None)
    except BaseException as error:  # of the device itself; whoever comes is told
        _work(inbox, error)
    finally:
        exit_.leave()


def _work(inbox: Inbox, broken: BaseException | None) -> None:
    while (given := inbox.get()) is not None:
        job, rank = given
        if broken is not None:
            job._tasks[rank] = _raiser(broken)
        job.perform(rank)
        del given, job  # the last reference may be the caller's


def _raiser(error: BaseException) -> Task:
    def task() -> None:
        raise error

    return task


def _tell_to_end(inboxes: Sequence[Inbox], lender: int | None) -> None:
    for inbox in inboxes:
        inbox.put(None)
    if lender is not None:
        IntraOpThreads.take_back(lender)


_live: weakref.WeakSet[ReplicaThreads] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No thread may be inside PyTorch when the interpreter goes away."""
    for threads in list(_live):
        try:
            threads.close()
        except GpuWorkerError as error:
            logger.warning("%s", error)


def raise_first(outcomes: Sequence[Outcome], devices: Sequence[torch.device], what: str) -> None:
    """Raise for the first rank that failed on its own account.

    Args:
        outcomes: Of all ranks.
        devices: Theirs.
        what: What they did.

    Raises:
        ReplicaFailed: With the rank named, and the original as its cause.
    """
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    if not failed:
        return
    # Peers of a rank that failed are only woken by it.
    own = [f for f in failed if not isinstance(f[1], (CollectiveAborted, CollectiveTimeout))]
    rank, error = (own or failed)[0]
    raised = ReplicaFailed(rank, str(devices[rank]), what, error)
    for other, peer in own[1:]:
        raised.add_note(f"rank {other} failed too: {type(peer).__name__}: {peer}")
    raise raised from error
