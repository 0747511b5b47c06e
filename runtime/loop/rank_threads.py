"""A persistent thread for each rank, and the tasks that a loop of the user's own runs on all."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from coordinator.config import ApplyPolicy, AverageBackend, choose_backend
from coordinator.errors import GpuWorkerError
from runtime.collective import Collective
from runtime.collective.nccl_library import shared_gpu_fault
from runtime.core.errors import CollectiveAborted, CollectiveTimeout, ReplicaFailed
from runtime.core.nested import flatten
from runtime.core.threads import IntraOpThreads, LiveRegistry, prepare_threads
from runtime.device.cuda import open_device
from runtime.device.cuda_api import StreamSync
from runtime.loop.loop_replica import LoopReplica
from runtime.timeline.events import AVERAGING, COMPUTE, IDLE, SYNC, Kind, RunFacts
from runtime.timeline.recorder import Lane
from runtime.timeline.timeline import Timeline

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long threads may take to end; only user code that does not return takes that long."""
EXIT_S = 5.0
LOOK_S = 0.2
"""A signal that comes in the instant before a wait is seen by Python only when it ends, so
no wait is longer than this."""


Task = Callable[[], Any]


class Work(Protocol):
    """What the threads of some ranks do, each its part."""

    def carry_out(self, rank: int, broken: BaseException | None) -> None:
        """Do a rank's part, in its thread; ``broken`` is why it cannot be done. Never raises."""


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
        is_begun: Whether a rank may have it.
    """

    def __init__(self, tasks: Sequence[Task | None]) -> None:
        self._tasks = list(tasks)  # each is its own rank's thread's
        self.outcomes = [TaskOutcome() for _ in tasks]
        self.ranks = [rank for rank, task in enumerate(tasks) if task is not None]
        self.is_begun = False
        self._lock = threading.Lock()
        self._num_left = len(self.ranks)
        # Not an Event: its methods are Python code, which Ctrl-C may leave in the middle with
        # the lock inside it held for good.
        self._done = threading.Lock()
        self._done.acquire()

    def carry_out(self, rank: int, broken: BaseException | None) -> None:
        """Do a rank's task, in its thread, once; ``broken`` is why it cannot be done."""
        outcome, task = self.outcomes[rank], self._tasks[rank]
        if task is None:
            return
        outcome.start_s = time.monotonic()
        try:
            if broken is not None:
                raise broken
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
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            # Taken by whoever waits first, who leaves it to the others.
            if self._done.acquire(timeout=left):
                self._done.release()
            elif threads is not None:
                dead = [name for rank, name in threads.dead().items() if self._tasks[rank]]
                if dead:
                    raise GpuWorkerError(f"threads have ended: {', '.join(dead)}; set up again")
        return True


def own_failures(outcomes: Sequence[TaskOutcome]) -> list[tuple[int, BaseException]]:
    """Rank and error of those that failed on their own account; else of the first woken one."""
    failed = [(rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
    # Peers of a rank that failed are only woken by it.
    own = [f for f in failed if not isinstance(f[1], (CollectiveAborted, CollectiveTimeout))]
    return own or failed[:1]


def first_failure(outcomes: Sequence[TaskOutcome]) -> tuple[int, BaseException] | None:
    """Rank and error of the first that failed on its own account, if one did."""
    failed = own_failures(outcomes)
    return failed[0] if failed else None


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
        prepare_threads()
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

    def start(self, work: Callable[[int], Any]) -> Job:
        """Let every rank's thread call ``work(rank)``, behind earlier jobs. Does not block.

        For whoever must know, if Ctrl-C comes meanwhile, that all ranks do it or none does:
        make a :class:`Job`, and :meth:`deliver` it.

        Raises:
            RuntimeError: They are closed, or were left behind in a fork.
        """
        job = Job([partial(work, rank) for rank in range(len(self._inboxes))])
        self.deliver(job)
        return job

    def deliver(self, job: Job) -> None:
        """Give a job to the threads of its ranks. Does not block.

        Where an exception left this in the middle, the next try completes it: each rank does
        its part once, however often it gets the job.

        Raises:
            RuntimeError: As :meth:`start`; no rank has the job.
        """
        self.post(job, job.ranks)

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
            if isinstance(work, Job):
                work.is_begun = True
            for rank in ranks:
                self._inboxes[rank].put(work)

    def has_caller(self) -> bool:
        """Whether one of the threads calls this."""
        # Not current_thread(), which keeps an object for each thread of autograd; the number
        # of a thread that has ended may be another's by now.
        return any(t.ident == threading.get_ident() and t.is_alive() for t in self._threads)

    def dead(self) -> dict[int, str]:
        """Rank and name of each thread that has ended."""
        return {rank: t.name for rank, t in enumerate(self._threads) if not t.is_alive()}

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


_OPEN: LiveRegistry[RankThreads] = LiveRegistry()


def _close_at_exit() -> None:
    for threads in _OPEN.all():
        try:
            threads.close(EXIT_S)
        except RuntimeError as error:
            logger.warning("%s", error)


atexit.register(_close_at_exit)


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
        shared_gpu_fault=shared_gpu_fault(),
    )


_TRAINING = {"forward", "backward", "accumulate", "step"}


class LoopRecorder:
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


class CollectiveGroup:
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
        ends: CollectiveGroup,
        journal: LoopRecorder,
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
