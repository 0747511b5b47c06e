"""The thread that joins the machine to its inbox, the workers' inboxes and a clock.

It blocks on its inbox: no polling, since each wake-up takes the interpreter from a
worker. Averages that take long are computed on a second thread, so that dispatch and
throttling go on meanwhile; user callbacks run on neither.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, assert_never

from coordinator import messages as m
from coordinator.averaging import Averager, clone_payload
from coordinator.failures import MessageLog, stall_report
from coordinator.machine import Coordinator
from coordinator.messages import (
    AbortCollective,
    Average,
    Command,
    PublishEpoch,
    PublishSteps,
    ReportStall,
    SaveCheckpoint,
    SaveFailed,
    Send,
    TransportChosen,
)
from coordinator.metrics import EpochMetrics, StepMetrics
from coordinator.state import Failure, Statistics

logger = logging.getLogger(__name__)


# A thread that wakes up takes the interpreter from a worker, finds its code gone from the
# caches, and costs several times what it does. The answers to a request that went to every
# rank bring nothing on before the last of them, so the first ones wait for it.

if TYPE_CHECKING:
    _Queue = queue.SimpleQueue[m.Event]
else:
    _Queue = queue.SimpleQueue

HELD_S = 1.0
"""Nothing is held back for longer, in seconds."""

_ANSWERS: dict[type, type] = {
    m.RequestParams: m.ParamSnapshot,
    m.Update: m.SyncAck,
    m.SyncNow: m.SyncAck,
}
"""What is asked of every rank of a round, and what each of them says to it."""
_USUAL = (m.BatchReport, m.EpochReport, *set(_ANSWERS.values()))
"""What comes while ranks train and answer; after anything else one may never answer."""
_FROM_OUTSIDE = (m.StopRequested, m.SaveRequested, m.AbortRequested)


class Inbox(_Queue):
    """A queue that holds the answers of a round back until the last one, or anything else.

    Acknowledgements may all wait for the next report, if nothing can follow from them before
    it. What a rank puts is taken in that order: it takes along what was held. ``put`` may be
    called from any thread, and for what comes from outside the run in a signal handler, as it
    then takes no lock; all else from one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[m.Event] = []
        self._missing: dict[tuple[type, int], int] = {}
        self._acks_wait = False

    def handled(
        self, event: m.Event, commands: Sequence[Command], *, acks_wait: bool = False
    ) -> None:
        """An event was handled, and these commands are about to be carried out.

        Whether more answers are awaited is decided here and not where events are put: what
        ends a round may have been put before the round began.

        Args:
            event: The event.
            commands: What follows from it.
            acks_wait: If ranks are asked to acknowledge something, whether the last of them
                brings nothing on either, and every rank will report after it.
        """
        asked: list[tuple[type, int]] = []
        for command in commands:
            if isinstance(command, Send):
                answer = _ANSWERS.get(type(command.message))
                if answer is not None:
                    asked.append((answer, command.message.round))  # type: ignore[union-attr]
        if asked or not isinstance(event, _USUAL):
            with self._lock:
                self._release()
                self._missing = dict(Counter(asked))
                self._acks_wait = acks_wait
        elif self._acks_wait and isinstance(event, m.EpochReport):
            # It may have been a rank's last word before its acknowledgement.
            with self._lock:
                self._acks_wait = False
                if not self._missing:
                    self._release()

    def put(self, item: m.Event, block: bool = True, timeout: float | None = None) -> None:
        """Put an event; wakes whoever waits in ``get`` unless others are yet to answer."""
        if isinstance(item, _FROM_OUTSIDE):
            super().put(item)
            return
        with self._lock:
            if isinstance(item, m.BatchReport) and any(self._missing.values()):
                # The count that makes the next round due may be reached: no other report comes.
                self._acks_wait = False
            holds = self._may_wait(item)
            if holds:
                self._held.append(item)
            if not any(self._missing.values()):
                self._missing.clear()
            if not holds:
                self._release()
                super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> m.Event:
        """The next event; what is held if none comes for a while.

        Raises:
            queue.Empty: None came in time.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            wait = min(left, HELD_S) if self.waits else left
            try:
                return super().get(block, None if wait == math.inf else max(0.0, wait))
            except queue.Empty:
                if not block:
                    raise
            if not self.let_go() and wait == left:
                raise queue.Empty

    @property
    def waits(self) -> bool:
        """Whether something is held back, or may be."""
        with self._lock:
            return bool(self._missing or self._held)

    def let_go(self) -> bool:
        """Hold nothing back any longer; returns whether anything was."""
        with self._lock:
            held = bool(self._held)
            self._missing.clear()
            self._release()
        return held

    def _may_wait(self, event: Any) -> bool:
        """Whether this is an answer that brings nothing on yet; counts it."""
        kind = type(event)
        if kind is m.SyncAck and not event.ok:
            self._missing.clear()
            return False
        left = self._missing.get((kind, getattr(event, "round", -1)), 0) - 1
        if left < 0:
            return False
        self._missing[kind, event.round] = left
        return left > 0 or (self._acks_wait and kind is m.SyncAck)

    def _release(self) -> None:
        for event in self._held:
            super().put(event)
        self._held.clear()


MAX_WAIT_S = 86_400.0  # a queue takes no timeout of more than some centuries
Observer = Callable[[m.Event, Sequence[Command], float], None]
INLINE_BYTES = 1 << 22
"""State of all ranks together up to which an average is computed in the coordinator's own thread:
in about a millisecond, while waking another thread and being woken by it cost as much."""
SUSPENDED_S = 1.0
"""Waking up so much too late means that the whole process was stopped meanwhile."""


class Service:
    """Runs a :class:`~coordinator.machine.Coordinator` on a thread of its own.

    Args:
        machine: The machine.
        inbox: Where events arrive, from any thread.
        outboxes: The inbox of each worker.
        abort_collective: Wakes all ranks that wait in the collective of a generation, or,
            given ``None``, in any.
        on_metrics: Called with those of each closed epoch and of steps, on the coordinator's
            thread: it must only hand the value on.
        on_save: Called with each checkpoint of the run, likewise.
        on_end: Called once, when the outcome is final, on the coordinator's thread.
    """

    def __init__(
        self,
        machine: Coordinator,
        inbox: Inbox,
        outboxes: Sequence[queue.SimpleQueue[m.ToWorker]],
        *,
        abort_collective: Callable[[int | None], None],
        on_metrics: Callable[[EpochMetrics | StepMetrics], None],
        on_end: Callable[[], None],
        on_save: Callable[[SaveCheckpoint | SaveFailed], None] | None = None,
    ) -> None:
        self._machine = machine
        self._inbox = inbox
        self._outboxes = outboxes
        self._abort_collective = abort_collective
        self._on_metrics = on_metrics
        self._on_end = on_end
        self._on_save = on_save
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Average | None] = queue.SimpleQueue()
        self._averager = threading.Thread(target=self._average_loop, name="averager", daemon=True)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._log = MessageLog()
        self._observers: tuple[Observer, ...] = ()
        self._inline = Averager(serial=True)
        self._averaged: deque[m.Averaged] = deque()
        self._apart_s = 0.0
        self.cpu_s = 0.0

    def observe(self, observer: Observer) -> None:
        """Show ``observer`` each event from here on, with what the machine decided on it.

        It is called in the coordinator's thread with the event, the commands and the time at
        which the event was taken, after the commands were carried out: it must be quick
        and must not raise. From any thread.
        """
        with self._lock:
            self._observers = (*self._observers, observer)

    def start(self) -> None:
        """Start both threads."""
        self._averager.start()
        try:
            self._thread.start()
        except BaseException:
            self._jobs.put(None)
            raise

    def take_first(self, event: m.Event) -> None:
        """Take an event in the calling thread, before :meth:`start`."""
        self._handle(event)

    @property
    def started(self) -> bool:
        """Whether the threads were started."""
        return self._thread.ident is not None

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the coordinator's thread; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> Statistics:
        """A snapshot of the machine's counters; from any thread."""
        with self._lock:
            return self._machine.statistics()

    # On the coordinator's thread.

    def _run(self) -> None:
        machine = self._machine
        try:
            machine.watch(time.monotonic())
            while not machine.done:
                self._turn()
        except BaseException as error:
            # Python's queues never disconnect: whoever waits must be told.
            logger.exception("the coordinator's thread died")
            with self._lock:
                machine.outcome.failure = Failure(error=error)
            self._abort_collective(None)
            for outbox in self._outboxes:
                outbox.put(m.Shutdown(snapshot=False))
        finally:
            self._jobs.put(None)
            self._averager.join()
            self.cpu_s = time.thread_time() - self._apart_s
            self._on_end()

    def _turn(self) -> None:
        """Wait for an event or the deadline, then handle all that has arrived."""
        machine = self._machine
        deadline = machine.deadline
        event: m.Event
        if deadline is None:
            event = self._inbox.get()
        else:
            try:
                left = min(max(0.0, deadline - time.monotonic()), MAX_WAIT_S)
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                event = m.Tick()
                if (now := time.monotonic()) - deadline > SUSPENDED_S:
                    machine.watch(now)
        while True:
            self._handle(event)
            if self._averaged:
                event = self._averaged.popleft()
                continue
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _handle(self, event: m.Event) -> None:
        """Have the machine take an event, and do what it decides."""
        machine = self._machine
        now = time.monotonic()
        self._log.received(event, now)
        machine.core.spent_s = time.thread_time() - self._apart_s
        with self._lock:
            commands = machine.handle(event, now)
        acks_wait = bool(commands) and machine.rounds.acks_may_wait
        self._inbox.handled(event, commands, acks_wait=acks_wait)
        for command in commands:
            self._execute(command, now)
        if self._observers:
            # Not a cost of averaging: whoever looks on must not change the cadence.
            with self._apart():
                for observer in self._observers:
                    observer(event, commands, now)

    def _execute(self, command: Command, now: float) -> None:
        match command:
            case Send():
                self._log.sent(command.rank, command.message, now)
                self._outboxes[command.rank].put(command.message)
            case Average():
                if sum(p.num_bytes for p in command.payloads) > INLINE_BYTES:
                    self._jobs.put(command)
                    return
                with self._apart():
                    self._averaged.append(self._average(self._inline, command))
            case AbortCollective():
                self._abort_collective(command.generation)
            case PublishEpoch() | PublishSteps():
                self._on_metrics(command.metrics)
            case TransportChosen():
                told = (command.backend.name, command.reason)
                if command.failed:
                    logger.warning("the run goes on over %s: %s", *told)
                else:
                    logger.info("averaging over %s: %s", *told)
            case SaveCheckpoint() | SaveFailed():
                if self._on_save is not None:
                    self._on_save(command)
            case ReportStall():
                self._report(command, now)
            case _:
                assert_never(command)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is done here is none of the thread's own time."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._apart_s += time.thread_time() - start

    def _report(self, command: ReportStall, now: float) -> None:
        error = command.error
        try:
            error.report = stall_report(str(error), command.state, self._log, now)
        except Exception:
            logger.exception("no report could be made")  # the run still ends as it must
        error.add_note(error.report)
        logger.error("%s", error.report)

    # On the averaging thread.

    def _average_loop(self) -> None:
        averager = Averager()
        while (job := self._jobs.get()) is not None:
            self._inbox.put(self._average(averager, job))
            del job

    @staticmethod
    def _average(averager: Averager, job: Average) -> m.Averaged:
        start = time.monotonic()
        try:
            result = averager.average(job.payloads, job.weights, job.squares)
        except BaseException as error:
            logger.exception("averaging round %d failed", job.round)
            return m.Averaged(round=job.round, average=None, error=error)
        return m.Averaged(
            round=job.round,
            average=result.average,
            num_samples=result.num_samples,
            divergences=tuple(zip(job.ranks, result.divergences, strict=True)),
            norm=None if math.isnan(result.norm) else result.norm,
            compute_s=time.monotonic() - start,
            kept=_copy(result.average) if job.keep else None,
        )


def _copy(average: m.Payload) -> m.Payload | None:
    try:
        return clone_payload(average)
    except (MemoryError, RuntimeError):  # torch's is a RuntimeError
        logger.exception("an average could not be copied for a checkpoint")
        return None
