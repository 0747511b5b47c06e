"""Runs a function on each rank, in the ranks' threads, and returns the outcomes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from coordinator.run_errors import GpuWorkerError
from runtime.collective import Collective
from runtime.core.errors import ReplicaFailed
from runtime.core.process_state import CompileLimits, ProcessState, import_dynamo
from runtime.core.threads import IntraOpThreads
from runtime.core.tracebacks import fold_tracebacks, print_briefly
from runtime.device.cuda import open_device
from runtime.device.cuda_api import StreamSync
from runtime.loop.collective_group import CollectiveGroup
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.rank_threads import (
    Job,
    RankThreads,
    Task,
    TaskOutcome,
    first_failure,
    root_failures,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""Seconds that close() waits for all threads together."""
INTERRUPT_TIMEOUT_S = 30.0
"""Seconds that a KeyboardInterrupt waits for the tasks that have started."""
_loop_numbers = count()


class Runner:
    """Runs one task per rank in the ranks' threads. Used by one thread at a time.

    A ``KeyboardInterrupt`` may occur between any two lines. Then the group is aborted, and the
    call ends once the tasks that have started have ended, or after a timeout: the next call then
    has to :meth:`drain`. The caller undoes what the tasks have done.

    The daemon threads end with :meth:`close`, when this object is garbage-collected, or when the
    interpreter exits; the last thread to end closes the recorder and the group.

    Args:
        devices: One per rank; a device may be listed more than once.
        sync: Orders the ranks' streams and the caller's; ``None``: by events.
        name: Prefix of the threads' names; ``None``: ``replica-<number of the loop>``.

    Attributes:
        contexts: Each rank's device context.
        is_busy: True if tasks may be running.

    Raises:
        Exception: A device cannot be used.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        group: CollectiveGroup,
        recorder: LoopRecorder,
        sync: StreamSync | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self._devices = devices
        self._group = group
        self._recorder = recorder
        self._sync = sync or StreamSync(devices)
        self.is_busy = False
        import_dynamo()
        CompileLimits.extend(len(devices))
        num_cpus = sum(device.type == "cpu" for device in devices)
        if num_cpus:
            IntraOpThreads.acquire()

        def clean_up() -> None:
            try:
                recorder.finish()  # for a model that was not closed
                group.close()
            except Exception:
                logger.warning("the replicas' group did not close", exc_info=True)
            if num_cpus:
                IntraOpThreads.release()

        try:
            self.contexts = [open_device(device, num_cpus) for device in devices]
        except BaseException:
            clean_up()
            raise
        # From here on the threads clean up, even if not all of them started.
        contexts = [context.activate for context in self.contexts]
        name = name or f"replica-{next(_loop_numbers)}"
        self._threads = RankThreads(name, contexts, clean_up, num_cpu_ranks=num_cpus)
        self._await_contexts()

    def _await_contexts(self) -> None:
        """Block until each thread has entered its context, whose streams the caller uses, too."""
        try:
            entered = self._threads.start(lambda rank: None)
            entered.wait(threads=self._threads)
            failure = first_failure(entered.outcomes)
            if failure is not None:
                raise failure[1]
        except BaseException:
            self._threads.stop(0.0)
            raise

    @property
    def closed(self) -> bool:
        """True once the threads have been stopped."""
        return self._threads.closed

    def check_caller(self) -> None:
        """Refuse a call that could not complete.

        Raises:
            RuntimeError: The threads have ended, or the caller is one of them.
        """
        if self.closed:
            raise RuntimeError(
                "the replicas' threads have ended: the model was closed; use model.module, or set "
                "up again"
            )
        self.check_not_replica_thread()

    def check_not_replica_thread(self) -> None:
        """Refuse a call from a replica's thread, which would wait for itself.

        Raises:
            RuntimeError: The caller is one of the threads.
        """
        if self._threads.is_current_thread():
            raise RuntimeError("a replica cannot call the model that it is a part of")

    def collectives(self) -> Sequence[Collective]:
        return self._group.get()

    def run(
        self,
        tasks: Sequence[Task | None],
        operation: str,
        tensors: Sequence[Tensor] = (),
    ) -> list[TaskOutcome]:
        """Run each rank's task in its thread; blocks until all are done.

        Args:
            tasks: One per rank; ``None``: no task.
            tensors: The caller's tensors that the tasks read; their streams are waited for.

        Raises:
            ReplicaFailed: A task raised.
            RuntimeError: The threads have ended.
        """
        events = self._sync.marks(tensors)
        if events:
            tasks = [
                None if task is None else partial(self._after_events, device, events, tensors, task)
                for device, task in zip(self._devices, tasks, strict=True)
            ]
        with ProcessState.held():
            outcomes = self.execute(tasks)
        if events:
            self._join_streams(outcomes, tensors)
        self._recorder.record_tasks(operation, outcomes)
        raise_replica_failure(outcomes, self._devices, operation)
        return outcomes

    def execute(self, tasks: Sequence[Task | None]) -> list[TaskOutcome]:
        """Like :meth:`run`, but raise no task's exception and order no streams."""
        self.check_caller()
        job = Job(tasks)
        self.is_busy = True
        try:
            self._threads.submit(job)
            job.wait(None, self._threads)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                print_briefly(
                    error, "KeyboardInterrupt: interrupted in a call of the model's replicas"
                )
            self._group.abort()
            with suppress(RuntimeError):  # the threads have ended
                self.drain(INTERRUPT_TIMEOUT_S)
            raise
        self.is_busy = False
        return job.outcomes

    def run_first(self, task: Task) -> Any:
        """Run a task in rank 0's thread alone; returns its value, or raises its exception."""
        outcome = self.execute([task, *[None] * (len(self._devices) - 1)])[0]
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait for the tasks of an interrupted call; they may be busy still after a timeout."""
        last = self._threads.start(lambda rank: self._sync.mark(self._devices[rank]))
        self.is_busy = not last.wait(timeout_s, self._threads)
        if not self.is_busy:
            self._sync.join(outcome.value for outcome in last.outcomes)

    def close(self) -> None:
        """End the threads after their tasks. Idempotent.

        Raises:
            GpuWorkerError: A thread is still alive after a timeout, inside user code.
        """
        alive = self._threads.stop(STOP_TIMEOUT_S)
        if alive:
            raise GpuWorkerError(
                f"threads did not end within {STOP_TIMEOUT_S:g} s: {', '.join(alive)}; they are "
                "daemons and will not keep the process alive"
            )

    @contextmanager
    def aborting_on_error(self) -> Iterator[None]:
        """Abort the group if the context raises, so that waiting peers raise too."""
        try:
            yield
        except BaseException:
            self._group.abort()
            raise

    def _after_events(
        self, device: torch.device, events: Sequence[Any], tensors: Sequence[Tensor], task: Task
    ) -> Any:
        self._sync.receive(device, events, tensors)
        value = task()
        return value, self._sync.mark(device)

    def _join_streams(self, outcomes: Sequence[TaskOutcome], tensors: Sequence[Tensor]) -> None:
        done = [outcome for outcome in outcomes if outcome.value is not None]
        marks = []
        for outcome in done:
            outcome.value, mark = outcome.value
            marks.append(mark)
        # The caller may free what was copied from, on a GPU that is none of the replicas', too.
        self._sync.join(marks, tensors)


def raise_replica_failure(
    outcomes: Sequence[TaskOutcome], devices: Sequence[torch.device], operation: str
) -> None:
    """Raise for the first rank that caused a failure, if any did.

    Args:
        outcomes: One per rank.
        devices: One per rank.

    Raises:
        ReplicaFailed: With the rank and the original exception as its cause.
    """
    failures = root_failures(outcomes)
    if not failures:
        return
    rank, error = failures[0]
    raised = ReplicaFailed.of(rank, str(devices[rank]), operation, fold_tracebacks(error))
    for other, peer in failures[1:]:
        raised.add_note(f"rank {other} failed too: {type(peer).__name__}: {peer}")
    raise raised from error
