"""The threads in which replicas run: one for each device, idle until they are given work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from coordinator.errors import GpuWorkerError
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, ReplicaFailed
from runtime.core.threads import IntraOpThreads
from runtime.device.base import open_device
from runtime.loop.rank_threads import RankThreads

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

    def carry_out(self, rank: int, broken: BaseException | None) -> None:
        """Do a rank's task, in its thread; ``broken`` is why it cannot be done. Never raises."""
        outcome, task = self.outcomes[rank], self._tasks[rank]
        assert task is not None, "a rank without a task is given no job"
        outcome.start_s = time.perf_counter()
        try:
            if broken is not None:
                raise broken
            outcome.value = task()
        except BaseException as error:
            outcome.error = error
        self._tasks[rank] = task = None  # what it holds is the caller's alone from here on
        outcome.end_s = time.perf_counter()
        with self._mutex:
            self._left -= 1
            if not self._left:
                self._done.release()

    def wait(self, threads: RankThreads) -> None:
        """Block until all tasks are done. Ctrl-C gets through.

        Raises:
            GpuWorkerError: A thread is gone.
        """
        while not self._done.acquire(timeout=LOOK_S):
            dead = threads.dead()
            if dead and not self._done.acquire(blocking=False):
                raise GpuWorkerError(f"threads have ended: {', '.join(dead)}; set up again")


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

        def clear_up() -> None:
            try:
                at_end()
            except Exception:
                logger.warning("the replicas' group did not close", exc_info=True)
            if num_cpus:
                IntraOpThreads.release()

        try:
            self.contexts = [open_device(device, num_cpus) for device in devices]
        except BaseException:
            clear_up()
            raise
        # From here on the threads clear up, even if not all of them could be started.
        contexts = [context.activate for context in self.contexts]
        self._threads = RankThreads(f"replica-{next(_numbers)}", contexts, clear_up, lend=num_cpus)

    @property
    def closed(self) -> bool:
        """Whether the threads were told to end."""
        return self._threads.closed

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
        if self._threads.has_caller():
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
        self._threads.post(job, [rank for rank, task in enumerate(tasks) if task is not None])
        job.wait(self._threads)
        return job.outcomes

    def close(self) -> None:
        """End the threads once they have done what they were given. Idempotent.

        Raises:
            GpuWorkerError: One is still alive after a while, in the user's own code.
        """
        alive = self._threads.end(END_S)
        if alive:
            raise GpuWorkerError(
                f"threads did not end within {END_S:g} s: {', '.join(alive)}; they are daemons "
                "and will not keep the process alive"
            )


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
