"""Runs a function on each rank in the ranks' threads and returns the outcomes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from coordinator.errors import GpuWorkerError
from runtime.collective import Collective
from runtime.core.errors import (
    ReplicaFailed,
)
from runtime.core.threads import IntraOpThreads
from runtime.device.cuda import open_device
from runtime.device.cuda_api import StreamSync
from runtime.loop.collective_group import CollectiveGroup
from runtime.loop.loop_recorder import LoopRecorder
from runtime.loop.loop_replica import LoopReplica
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
"""How long the end waits for all threads together."""
INTERRUPT_TIMEOUT_S = 30.0
"""How long Ctrl-C waits for replicas that must come to the end of what they are doing."""
_numbers = count()


class Runner:
    """Gives tasks to the ranks and brings back what came of them. For one thread at a time.

    A caller that leaves before its tasks are done, by Ctrl-C say, which may come between any
    two lines, leaves them running: the group is aborted, and the next call has to :meth:`drain`.
    With ``waits_on_interrupt`` it leaves once they are done: each piece of work is done by all
    replicas or by none.

    The threads, daemons, end with :meth:`close`, when this object is collected, or when the
    interpreter exits; the last one out closes the journal and the group.

    Args:
        devices: One for each rank; a device may stand more than once.
        group: Where the ranks meet.
        journal: Takes down what happens.
        sync: Orders their streams and the caller's; ``None``: by events.
        name: What the threads are called; ``None``: ``replica-<number of the loop>``.
        patient: Whether tasks that were begun are always waited for.

    Attributes:
        contexts: The device of each rank as its thread sees it.
        interrupted: Whether a caller left before its tasks were done.
        fault: Why the replicas may differ for good, where it was ``waits_on_interrupt``.

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
        waits_on_interrupt: bool = False,
    ) -> None:
        self._devices = devices
        self._group = group
        self._recorder = recorder
        self._sync = sync or StreamSync(devices)
        self._patient = waits_on_interrupt
        self._changing: Job | None = None
        self.interrupted = False
        self.fault: str | None = None
        num_cpus = sum(device.type == "cpu" for device in devices)
        if num_cpus:
            IntraOpThreads.acquire()

        def clean_up() -> None:
            try:
                recorder.finish()  # of a model that was dropped, not closed
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
        # From here on the threads clear up, even if not all of them could be started.
        contexts = [context.activate for context in self.contexts]
        name = name or f"replica-{next(_numbers)}"
        self._threads = RankThreads(name, contexts, clean_up, num_cpu_ranks=num_cpus)

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
        self.check_not_replica_thread()

    def check_not_replica_thread(self) -> None:
        """Refuse a call by one of the threads, which others wait for.

        Raises:
            RuntimeError: One of them calls.
        """
        if self._threads.is_current_thread():
            raise RuntimeError("a replica cannot call the model that it is a part of")

    def collectives(self) -> Sequence[Collective]:
        """Each rank's end of the group."""
        return self._group.get()

    def run(
        self,
        tasks: Sequence[Task | None],
        what: str,
        tensors: Sequence[Tensor] = (),
        reducing: Sequence[LoopReplica] = (),
        *,
        changes: bool = False,
    ) -> list[TaskOutcome]:
        """Do each rank's task in its thread; blocks until all are done.

        Args:
            tasks: One for each rank; ``None``: nothing to do.
            what: What they do.
            tensors: What the tasks read of the caller's.
            reducing: Replicas that may exchange gradients in it, for the timeline.
            changes: Whether the replicas differ for good if one of them fails in it.

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
        outcomes = self.execute(tasks, changes=changes)
        if events:
            self._join_streams(outcomes, tensors)
        self._recorder.record_tasks(what, outcomes, reducing)
        raise_replica_failure(outcomes, self._devices, what)
        return outcomes

    def execute(self, tasks: Sequence[Task | None], *, changes: bool = False) -> list[TaskOutcome]:
        """As :meth:`run`, but no task's exception is raised, and no stream waits."""
        self.check_caller()
        job = Job(tasks)
        self._changing = job if changes else None
        before = self.fault
        try:
            self._threads.submit(job)
            job.wait(None, self._threads)
        except BaseException:
            if self._patient:
                self._wait_for_started(job, before)
            else:
                self.interrupted = not self.closed
                self._group.abort()
            raise
        if changes:
            self.record_fault()
        return job.outcomes

    def _wait_for_started(self, job: Job, before: str | None) -> None:
        """Leave no thread at work on the replicas."""
        self.fault = "it was interrupted, and a replica did not come to an end"
        if job.is_posted:
            self._threads.submit(job)  # to those that it has not reached
            if not job.wait(INTERRUPT_TIMEOUT_S, self._threads):
                return
        self.fault = before

    def record_fault(self) -> None:
        """Take note if the last change failed; Ctrl-C may have come before that was seen."""
        if self._changing is not None:
            failure = first_failure(self._changing.outcomes)
            if failure is not None:
                self.fault = f"rank {failure[0]} failed while the replicas were changed"
            self._changing = None

    def drain(self) -> None:
        """After an interruption: wait for what the ranks still do."""
        self.run([_no_op] * len(self._devices), "settle")
        self.interrupted = False

    def close(self) -> None:
        """End the threads once they have done what they were given. Idempotent.

        Raises:
            GpuWorkerError: One is still alive after a while, in the user's own code.
        """
        alive = self._threads.stop(STOP_TIMEOUT_S)
        if alive:
            raise GpuWorkerError(
                f"threads did not end within {STOP_TIMEOUT_S:g} s: {', '.join(alive)}; they are "
                "daemons and will not keep the process alive"
            )

    @contextmanager
    def aborting_on_error(self) -> Iterator[None]:
        """Around a task with a collective: who fails before it wakes those who wait there."""
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


def _no_op() -> None:
    return


def raise_replica_failure(
    outcomes: Sequence[TaskOutcome], devices: Sequence[torch.device], what: str
) -> None:
    """Raise for the first rank that failed on its own account.

    Args:
        outcomes: Of all ranks.
        devices: Theirs.
        what: What they did.

    Raises:
        ReplicaFailed: With the rank named, and the original as its cause.
    """
    failures = root_failures(outcomes)
    if not failures:
        return
    rank, error = failures[0]
    raised = ReplicaFailed(rank, str(devices[rank]), what, error)
    for other, peer in failures[1:]:
        raised.add_note(f"rank {other} failed too: {type(peer).__name__}: {peer}")
    raise raised from error
