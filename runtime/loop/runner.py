"""Runs tasks on all ranks: in their threads, in order with streams, and past failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from coordinator.config import ApplyPolicy, AverageBackend, choose_backend
from coordinator.errors import GpuWorkerError
from runtime.collective import Collective
from runtime.core.errors import ReplicaFailed
from runtime.core.nested import flatten
from runtime.core.threads import IntraOpThreads
from runtime.device.cuda import open_device
from runtime.device.sync import StreamSync
from runtime.loop.rank_threads import (
    Job,
    RankThreads,
    Task,
    TaskOutcome,
    first_failure,
    own_failures,
)
from runtime.loop.replica import LoopReplica
from runtime.timeline.events import AVERAGING, COMPUTE, IDLE, SYNC, Kind, RunFacts
from runtime.timeline.recorder import Lane
from runtime.timeline.timeline import Timeline

logger = logging.getLogger(__name__)


END_S = 10.0
"""How long the end waits for all threads together."""
SETTLE_S = 30.0
"""How long Ctrl-C waits for replicas that must come to the end of what they are doing."""

_numbers = count()


def raise_first(
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
    failures = own_failures(outcomes)
    if not failures:
        return
    rank, error = failures[0]
    raised = ReplicaFailed(rank, str(devices[rank]), what, error)
    for other, peer in failures[1:]:
        raised.add_note(f"rank {other} failed too: {type(peer).__name__}: {peer}")
    raise raised from error


def resolve_backend(
    backend: AverageBackend, devices: Sequence[torch.device]
) -> tuple[AverageBackend, str]:
    """The transport of gradients between replicas on these devices, and why it is that one.

    Raises:
        ValueError: The backend does not serve the devices.
    """
    return choose_backend(
        backend,
        ApplyPolicy.SYNC,
        [str(device) for device in devices],
        nccl_available=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
    )


_TRAINING = {"forward", "backward", "accumulate", "step"}


class Journal:
    """Writes a loop's work on its timeline; without one, every call does nothing.

    For the caller that has its turn: replicas are timed in their own threads, and noted here
    once all of them are done. So what a rank waits for its peers is known at once: from its
    own end, or from when it joined a reduction, until the last one got there. Between two
    calls of the module a replica is idle: it waits for the loop.

    Args:
        timeline: ``None``: nothing is recorded.

    Attributes:
        step: Optimizer steps made so far.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._lanes: list[Lane] = []
        self._sizes: list[list[int]] = []
        self.step = 0

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._timeline is not None

    def begin(self, devices: Sequence[torch.device], backend: str, reason: str) -> None:
        """The replicas are about to be built.

        Raises:
            ValueError: The timeline has recorded another run.
        """
        if self._timeline is None:
            return
        facts = RunFacts(
            devices=tuple(map(str, devices)),
            policy="own loop",
            backend=backend,
            backend_reason=reason,
        )
        self._timeline.begin(facts, devices, None)
        self._lanes = [self._timeline.lane(rank) for rank in range(len(devices))]
        self._sizes = [[] for _ in devices]

    def built(self, model: nn.Module) -> None:
        """All replicas are there."""
        if self._timeline is not None:
            self._timeline.built(model)
            for lane in self._lanes:
                lane.enter(IDLE)

    def finish(self, error: BaseException | None = None) -> None:
        """The loop is over. Idempotent."""
        if self._timeline is not None:
            for lane in self._lanes:
                lane.close()
            self._timeline.finish(stopped=False, error=error)
            self._timeline = None

    def outcomes(
        self, what: str, outcomes: Sequence[TaskOutcome], replicas: Sequence[LoopReplica] = ()
    ) -> None:
        """Each rank has done its task; with a reduction in it where it took one."""
        if self._timeline is None or what not in _TRAINING:
            return
        spans = {r: o for r, o in enumerate(outcomes) if o.end_s and o.error is None}
        if not spans:
            return
        last_s = max(outcome.end_s for outcome in spans.values())
        reduced = {
            replica.rank: replica.reduced_s
            for replica in replicas
            if replica.rank in spans and replica.reduced_s[0] >= spans[replica.rank].start_s
        }
        met_s = max((start_s for start_s, _ in reduced.values()), default=0.0)
        for rank, outcome in spans.items():
            self._enter(rank, COMPUTE, outcome.start_s)
            if rank in reduced:
                start_s, end_s = reduced[rank]
                self._enter(rank, SYNC, start_s)
                self._enter(rank, AVERAGING, min(met_s, end_s))
                self._enter(rank, COMPUTE, end_s)
                self._lanes[rank].note(Kind.AVERAGING, start_s, self.step, "gradients", end=end_s)
            self._enter(rank, SYNC, outcome.end_s)
            self._enter(rank, IDLE, last_s)
            self._lanes[rank].note(Kind.PHASE, outcome.start_s, self.step, what, end=outcome.end_s)
        if reduced:
            self._timeline.count_averaging()
        if what == "step":
            self._stepped(spans)

    def reductions(self, replicas: Sequence[LoopReplica]) -> None:
        """The caller's thread has brought the gradients together, while the replicas rested."""
        if self._timeline is None:
            return
        for replica in replicas:
            start_s, end_s = replica.reduced_s
            self._enter(replica.rank, AVERAGING, start_s)
            self._enter(replica.rank, IDLE, end_s)
            self._lanes[replica.rank].note(
                Kind.AVERAGING, start_s, self.step, "gradients", end=end_s
            )
        self._timeline.count_averaging()

    def given(self, rank: int, batches: Sequence[Any]) -> None:
        """A rank trains these batches, or pieces of one; they count with the next step."""
        if self._timeline is not None:
            self._sizes[rank] += [_num_samples(batch) for batch in batches]

    def record(self, what: str, start_s: float) -> None:
        """The one device has done something, in the caller's thread."""
        if self._timeline is not None:
            self.outcomes(what, [TaskOutcome(start_s=start_s, end_s=time.monotonic())])

    def watch_backward(self, output: Any) -> None:
        """Record the backward pass through what the one device has computed."""
        tensors: list[Tensor] = []
        if self._timeline is None:
            return
        flatten(output, tensors, strict=False)
        started: list[float] = []

        def finished() -> None:
            if started:
                self.record("backward", started.pop())

        def begun(_: Tensor) -> None:
            if not started:
                started.append(time.monotonic())
                torch.autograd.Variable._execution_engine.queue_callback(finished)

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(begun)  # type: ignore[no-untyped-call]

    def _stepped(self, spans: dict[int, TaskOutcome]) -> None:
        assert self._timeline is not None, "checked by the caller"
        for rank, lane in enumerate(self._lanes):
            sizes, self._sizes[rank] = self._sizes[rank], []
            start_s = spans[rank].start_s if rank in spans else lane.since
            lane.end_step(IDLE, start_s, sizes)
            self._timeline.count(rank, len(sizes), sum(sizes))

    def _enter(self, rank: int, cause: int, at_s: float) -> None:
        lane = self._lanes[rank]
        lane.enter(cause, max(at_s, lane.since))


def _num_samples(batch: Any) -> int:
    """Size of a batch; one that is a number of samples is its own."""
    if isinstance(batch, int):
        return batch
    tensors: list[Tensor] = []
    flatten(batch, tensors, strict=False)
    return next((t.size(0) for t in tensors if t.dim()), 1)


class Ends:
    """The ranks' ends of one group, made when they are first needed.

    Args:
        make: Makes one end for each rank.
    """

    def __init__(self, make: Callable[[], Sequence[Collective]]) -> None:
        self._make = make
        self._ends: Sequence[Collective] = ()
        self._aborted = False

    def get(self) -> Sequence[Collective]:
        """The ends, new ones after an abort. Blocks until the group is connected."""
        if self._aborted:
            self.close()
        if not self._ends:
            self._ends = self._make()
        return self._ends

    def abort(self) -> None:
        """Wake whoever waits in a collective. From any thread."""
        self._aborted = True
        for end in self._ends:
            end.abort()

    def close(self) -> None:
        """Close the group; nobody is in it any more."""
        ends, self._ends, self._aborted = self._ends, (), False
        for end in ends:
            end.close()


class Runner:
    """Gives tasks to the ranks and brings back what came of them. For one thread at a time.

    A caller that leaves before its tasks are done, by Ctrl-C say, which may come between any
    two lines, leaves them behind: whoever waits in a collective is woken, and the next call
    has to :meth:`settle`. With ``patient`` it leaves once they are done: each piece of work is
    done by all replicas or by none.

    The threads, daemons, end with :meth:`close`, when this object is collected, or when the
    interpreter exits; the last one out closes the journal and the group.

    Args:
        devices: One for each rank; a device may stand more than once.
        ends: Where the ranks meet.
        journal: Takes down what happens.
        sync: Orders their streams and the caller's; ``None``: by events.
        name: What the threads are called; ``None``: ``replica-<number of the loop>``.
        patient: Whether tasks that were begun are always waited for.

    Attributes:
        contexts: The device of each rank as its thread sees it.
        interrupted: Whether a caller left before its tasks were done.
        fault: Why the replicas may differ for good, where it was ``patient``.

    Raises:
        Exception: A device cannot be used.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        ends: Ends,
        journal: Journal,
        sync: StreamSync | None = None,
        *,
        name: str | None = None,
        patient: bool = False,
    ) -> None:
        self._devices = devices
        self._ends = ends
        self._journal = journal
        self._sync = sync or StreamSync(devices)
        self._patient = patient
        self._changing: Job | None = None
        self.interrupted = False
        self.fault: str | None = None
        num_cpus = sum(device.type == "cpu" for device in devices)
        if num_cpus:
            IntraOpThreads.acquire()

        def clear_up() -> None:
            try:
                journal.finish()  # of a model that was dropped, not closed
                ends.close()
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
        name = name or f"replica-{next(_numbers)}"
        self._threads = RankThreads(name, contexts, clear_up, lend=num_cpus)

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

    def ends(self) -> Sequence[Collective]:
        """Each rank's end of the group."""
        return self._ends.get()

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
                None if task is None else partial(self._ordered, device, events, task)
                for device, task in zip(self._devices, tasks, strict=True)
            ]
        outcomes = self.execute(tasks, changes=changes)
        if events:
            self._rejoin(outcomes)
        self._journal.outcomes(what, outcomes, reducing)
        raise_first(outcomes, self._devices, what)
        return outcomes

    def execute(self, tasks: Sequence[Task | None], *, changes: bool = False) -> list[TaskOutcome]:
        """As :meth:`run`, but no task's exception is raised, and no stream waits."""
        self.check_caller()
        job = Job(tasks)
        self._changing = job if changes else None
        before = self.fault
        try:
            self._threads.deliver(job)
            job.wait(None, self._threads)
        except BaseException:
            if self._patient:
                self._finish(job, before)
            else:
                self.interrupted = not self.closed
                self._ends.abort()
            raise
        if changes:
            self.judge()
        return job.outcomes

    def _finish(self, job: Job, before: str | None) -> None:
        """Leave no thread at work on the replicas."""
        self.fault = "it was interrupted, and a replica did not come to an end"
        if job.is_begun:
            self._threads.deliver(job)  # to those that it has not reached
            if not job.wait(SETTLE_S, self._threads):
                return
        self.fault = before

    def judge(self) -> None:
        """Take note if the last change failed; Ctrl-C may have come before that was seen."""
        if self._changing is not None:
            failure = first_failure(self._changing.outcomes)
            if failure is not None:
                self.fault = f"rank {failure[0]} failed while the replicas were changed"
            self._changing = None

    def settle(self) -> None:
        """After an interruption: wait for what the ranks still do."""
        self.run([_nothing] * len(self._devices), "settle")
        self.interrupted = False

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

    @contextmanager
    def waking_peers(self) -> Iterator[None]:
        """Around a task with a collective: who fails before it wakes those who wait there."""
        try:
            yield
        except BaseException:
            self._ends.abort()
            raise

    def _ordered(self, device: torch.device, events: Sequence[Any], task: Task) -> Any:
        self._sync.wait(device, events)
        value = task()
        return value, self._sync.mark(device)

    def _rejoin(self, outcomes: Sequence[TaskOutcome]) -> None:
        done = [outcome for outcome in outcomes if outcome.value is not None]
        marks = []
        for outcome in done:
            outcome.value, mark = outcome.value
            marks.append(mark)
        self._sync.join(marks)


def _nothing() -> None:
    return
