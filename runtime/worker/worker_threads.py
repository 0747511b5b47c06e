"""WorkerThreads: the threads of a run's workers."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from coordinator import messages as m
from runtime.core.errors import (
    CheckpointError,
    CollectiveAborted,
    NonFiniteError,
    ReplicaMismatch,
)
from runtime.core.threads import in_own_context
from runtime.core.tracebacks import fold_tracebacks
from runtime.device.affinity import near
from runtime.device.base import Device
from runtime.worker.recorder import RunRecorder
from runtime.worker.run_peers import RunPeers
from runtime.worker.worker import GpuWorker
from runtime.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

_STOP_IN_GENERATOR = "generator raised StopIteration"
"""Python's message."""


class WorkerThreads:
    """The threads of a run's workers: each builds its worker, runs it and reports its end.

    Args:
        config: Settings of the workers, without rank and device.
        contexts: Device context of each rank.
        inbox: The coordinator's.
        outboxes: The inbox of each worker.
        build: Builds the worker of a rank, in its thread.
        explain: Adds what is known to an error of a rank.
        pin: Run each thread on the cores near its device.
    """

    def __init__(
        self,
        config: WorkerConfig,
        contexts: Sequence[Device],
        inbox: queue.SimpleQueue[m.Event],
        outboxes: Sequence[queue.SimpleQueue[Any]],
        peers: RunPeers,
        recording: RunRecorder,
        build: Callable[[int], GpuWorker],
        explain: Callable[[int, BaseException], BaseException],
        *,
        pin: bool,
    ) -> None:
        self._survives = config.survives
        self._contexts = contexts
        self._inbox = inbox
        self._outboxes = outboxes
        self._peers = peers
        self._recording = recording
        self._build = build
        self._explain = explain
        self._pin = pin
        self._workers: list[GpuWorker | None] = [None] * len(contexts)
        self._threads: list[threading.Thread] = []
        self._started = threading.Event()

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._threads

    def start(self) -> None:
        """Start all threads; on failure some may be running."""
        try:
            for rank in range(len(self._contexts)):
                thread = threading.Thread(
                    target=in_own_context(self._main),
                    args=(rank,),
                    name=f"gpu-worker-{rank}",
                    daemon=True,
                )
                self._threads.append(thread)
            for thread in self._threads:
                thread.start()
        finally:
            self._started.set()

    def end_missing(self) -> None:
        """Report the threads that could not be started as ended, and abort the others."""
        self._inbox.put(m.AbortRequested())  # also with on_worker_failure("continue")
        self._peers.order.fail()
        for rank, thread in enumerate(self._threads):
            if thread.ident is None:
                self._inbox.put(m.ThreadEnded(rank=rank))

    def join(self, timeout_s: float) -> list[str]:
        """Wait for all threads together; returns the names of those still alive."""
        self._started.wait()  # a run can end before its last worker has started
        self._peers.order.fail()
        deadline = time.monotonic() + timeout_s
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in started if thread.is_alive()]

    def ended_workers(self) -> list[GpuWorker]:
        """The workers whose threads have ended; others are stuck in user code."""
        pairs = zip(self._workers, self._threads, strict=True)
        return [w for w, thread in pairs if w is not None and not thread.is_alive()]

    def forget(self) -> None:
        """Drop the workers; a stuck one may still write its own."""
        self._workers = [None] * len(self._workers)

    # On the workers' threads.

    def _main(self, rank: int) -> None:
        worker: GpuWorker | None = None
        try:
            context = self._contexts[rank]
            pinned = near(context.device) if self._pin else nullcontext()
            with pinned, context.activate():
                worker = self._build(rank)
                self._workers[rank] = worker
                self._recording.built(rank, worker.model)
                self._run(worker)
        except CollectiveAborted:
            # Rank 0 failed to build and reports that itself.
            while not isinstance(self._outboxes[rank].get(), m.Shutdown):
                pass
            self._inbox.put(m.Exiting(rank=rank))
        except _Reported as reported:
            # The frames of the user's error lead to that of _run, which holds the worker.
            traceback.clear_frames(reported.__traceback__)
        except BaseException as error:
            frames = error.__traceback__
            self._report(rank, worker, error)
            self._forget(rank, error, frames)
        finally:
            try:
                if worker is not None:
                    worker.close()
                worker = None
                self._recording.left(rank)
            finally:
                self._inbox.put(m.ThreadEnded(rank=rank))

    def _run(self, worker: GpuWorker) -> None:
        """Run a worker. After an exception, report it and send the state of before the failed
        step, while the device is still current in this thread.

        Raises:
            _Reported: There was an exception.
        """
        try:
            worker.run()
        except CollectiveAborted:
            raise
        except BaseException as error:
            rank, frames, has_answered = worker.rank, error.__traceback__, False
            self._report(rank, worker, error)
            if can_answer(worker, error):
                try:
                    has_answered = worker.answer_after_failure()
                except Exception:  # of a broken device, or of values that are not finite
                    logger.debug("rank %d left no state", rank, exc_info=True)
            if not has_answered:
                self._forget(rank, error, frames)
            del frames
            raise _Reported from None  # else the frames of this project join its traceback

    def _report(self, rank: int, worker: GpuWorker | None, error: BaseException) -> None:
        """Report an exception of a worker to the coordinator."""
        if isinstance(error.__cause__, StopIteration) and str(error) == _STOP_IN_GENERATOR:
            error = error.__cause__  # of the user's code, which a generator of this project called
        error = fold_tracebacks(self._explain(rank, error))
        if self._peers.loop is not None:
            self._peers.loop.leave(rank)
        self._peers.evaluations.leave(rank)
        self._inbox.put(failure_message(rank, worker, error))

    def _forget(self, rank: int, error: BaseException, frames: TracebackType | None) -> None:
        """Free the memory that a dead rank and its frames hold, if other ranks continue.

        Args:
            rank: The dead rank.
            error: Its exception.
            frames: The whole traceback.
        """
        if self._survives:
            logger.warning("rank %d died; the others continue if possible", rank, exc_info=error)
            self._workers[rank] = None
            self._peers.replicas.pop(rank, None)
            traceback.clear_frames(frames)


class _Reported(Exception):
    """A worker's exception was reported."""


def failure_message(rank: int, worker: GpuWorker | None, error: BaseException) -> m.Failed:
    """The message that reports a worker's death to the coordinator.

    Args:
        rank: The worker's rank.
        worker: The worker; ``None`` if it was not built.
        error: Its exception.
    """
    return m.Failed(
        rank=rank,
        epoch=worker.current_epoch if worker else 0,
        step=worker.local_step if worker else 0,
        error=error,
        fatal=isinstance(error, (ReplicaMismatch, NonFiniteError, CheckpointError)),
        answers=can_answer(worker, error),
        unsafe=isinstance(error, ReplicaMismatch),
    )


def can_answer(worker: GpuWorker | None, error: BaseException) -> bool:
    """True if a worker that raised can send its state of before the failed step.

    Without lockstep it cannot if a value is not finite: that is found in a report, whose batches
    the coordinator then does not count.
    """
    if worker is None or worker.steps.is_torn:
        return False
    return worker.replica.is_lockstep or not isinstance(error, NonFiniteError)
