"""The thread that connects the coordinator to its inbox, the workers' inboxes and a clock.

It blocks on its inbox and never polls, since each wake-up takes the GIL from a worker. Averages are
computed on a second thread, so that dispatch and throttling continue meanwhile; user callbacks run
on neither.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import assert_never

from coordinator import messages as m
from coordinator.averaging import Averager, clone_payload
from coordinator.machine import Coordinator
from coordinator.messages import (
    AbortCollective,
    Average,
    BackendChosen,
    Command,
    PublishEpoch,
    PublishSteps,
    ReportStall,
    SaveCheckpoint,
    SaveFailed,
    Send,
)
from coordinator.metrics import EpochMetrics, StepMetrics
from coordinator.run_state import Statistics
from coordinator.stall import MessageLog, stall_report

logger = logging.getLogger(__name__)
MAX_WAIT_S = 86_400.0  # queue.get() overflows for timeouts of centuries
Observer = Callable[[m.Event, Sequence[Command], float], None]
SUSPENDED_S = 1.0
"""Delay of a wake-up that indicates a suspended process."""


class Service:
    """Runs a :class:`~coordinator.machine.Coordinator` on its own thread.

    Args:
        machine: The coordinator.
        inbox: Queue of events, from any thread.
        outboxes: The inbox of each worker.
        abort_collective: Wakes all ranks that wait in the collective of a generation, or in any
            with ``None``.
        on_metrics: Called with epoch and step metrics on the coordinator's thread; must only
            enqueue them.
        on_save: Called with each checkpoint of the run, likewise.
        on_end: Called once on the coordinator's thread, when the outcome is final.
    """

    def __init__(
        self,
        machine: Coordinator,
        inbox: queue.SimpleQueue[m.Event],
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
        self._observed_s = 0.0

    def observe(self, observer: Observer) -> None:
        """Call ``observer`` for each event from now on; from any thread.

        It is called on the coordinator's thread with the event, the resulting commands and the
        time of the event, after the commands were executed. It must be quick and must not raise.
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

    def handle_first(self, event: m.Event) -> None:
        """Handle an event on the calling thread, before :meth:`start`."""
        self._handle(event)

    @property
    def started(self) -> bool:
        """True if the threads were started."""
        return self._thread.ident is not None

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the coordinator's thread; returns True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> Statistics:
        """A snapshot of the coordinator's counters; from any thread."""
        with self._lock:
            return self._machine.statistics()

    # On the coordinator's thread.

    def _run(self) -> None:
        machine = self._machine
        try:
            machine.restart_stall_timer(time.monotonic())
            while not machine.done:
                self._handle_arrivals()
        except BaseException as error:
            # Python's queues never disconnect: waiting workers need a message.
            logger.exception("the coordinator's thread died")
            with self._lock:
                machine.outcome.fail(m.WorkerFailure(error=error))
            self._abort_collective(None)
            for outbox in self._outboxes:
                outbox.put(m.Shutdown(snapshot=False))
        finally:
            self._jobs.put(None)
            self._averager.join()
            self._on_end()

    def _handle_arrivals(self) -> None:
        """Wait for an event or the deadline, then handle all events in the inbox."""
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
                    machine.restart_stall_timer(now)
        while True:
            self._handle(event)
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _handle(self, event: m.Event) -> None:
        machine = self._machine
        now = time.monotonic()
        self._log.received(event, now)
        machine.run_state.spent_s = time.thread_time() - self._observed_s
        with self._lock:
            commands = machine.handle(event, now)
        for command in commands:
            self._execute(command, now)
        if self._observers:
            # Not a cost of averaging: observers must not change the cadence.
            start = time.thread_time()
            for observer in self._observers:
                observer(event, commands, now)
            self._observed_s += time.thread_time() - start

    def _execute(self, command: Command, now: float) -> None:
        match command:
            case Send():
                self._log.sent(command.rank, command.message, now)
                self._outboxes[command.rank].put(command.message)
            case Average():
                self._jobs.put(command)
            case AbortCollective():
                self._abort_collective(command.generation)
            case PublishEpoch() | PublishSteps():
                self._on_metrics(command.metrics)
            case BackendChosen():
                backend, reason = command.backend.name, command.reason
                if command.failed:
                    logger.warning("the run continues over %s: %s", backend, reason)
                else:
                    logger.info("averaging over %s: %s", backend, reason)
            case SaveCheckpoint() | SaveFailed():
                if self._on_save is not None:
                    self._on_save(command)
            case ReportStall():
                self._report(command, now)
            case _:
                assert_never(command)

    def _report(self, command: ReportStall, now: float) -> None:
        error = command.error
        try:
            error.report = stall_report(str(error), command.state, self._log, now)
        except Exception:
            logger.exception("the stall report failed")  # the run still ends
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
