"""TrainerHandle: the caller's handle on a running training job."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

import torch

from coordinator.config import AverageBackend
from coordinator.metrics import EpochMetrics
from coordinator.run_state import Statistics
from runtime.callbacks import Callback
from runtime.checkpoint.resume import check_content
from runtime.checkpoint.store import write_checkpoint
from runtime.cluster.checkpointer import ClusterCheckpointOptions
from runtime.cluster.cluster_run import ClusterRun
from runtime.core.checks import check_float, check_path
from runtime.core.context import fold
from runtime.core.errors import CheckpointError
from runtime.core.launchers import refuse_launcher
from runtime.core.signals import INTERRUPTS, InterruptibleWait
from runtime.core.tracebacks import print_briefly
from runtime.data.dataset import DatasetAdapter, adapt_dataset
from runtime.data.process_loader import refuse_import_of_main
from runtime.data.stream import StreamAdapter, is_stream
from runtime.monitor.control import CONTROL, ControlledRun, ListedRun, program_name
from runtime.monitor.monitor import Monitor
from runtime.monitor.run_view import RunEnd
from runtime.replica.build import ModelT_co
from runtime.replica.error_notes import add_note_once
from runtime.results import TrainedState, load_given
from runtime.run import Run
from runtime.settings import RunSettings
from runtime.timeline.recent_progress import RecentProgress
from runtime.timeline.run_summary import RunSummary

logger = logging.getLogger(__name__)

SAVE_S = 600.0
"""Default timeout of :meth:`TrainerHandle.save`, in seconds."""


class TrainerHandle(Generic[ModelT_co]):
    """A run in progress. Every method may be called from any thread.

    As a context manager it waits for the run at the end of the block; if the block raises, it
    stops the run first.

    While the main thread waits in :meth:`join`, :meth:`next_metrics`, :meth:`metrics` or at
    the end of the block, the handle handles Ctrl-C, SIGTERM and SIGHUP, unless they are ignored.
    The first signal stops every run of the process at a step boundary; the call waits until its
    own run is over, regardless of its timeout, and raises ``KeyboardInterrupt`` with the state
    kept on the handle. The second, if it follows after more than a second, aborts the runs:
    :meth:`join` called again raises ``RunAborted``, unless the state was complete. The third ends
    the wait. Afterwards the
    previous handlers are restored and called. The default action of SIGTERM and SIGHUP follows at
    interpreter exit: code that catches the ``KeyboardInterrupt`` can save the state before it.
    """

    def __init__(self, run: Run | ClusterRun, checkpoint_dir: Path | None = None) -> None:
        self._run = run
        self._checkpoint_dir = checkpoint_dir
        self._condition = threading.Condition()
        self._unread: deque[EpochMetrics] = deque()
        self._ended = False
        self._state: TrainedState[ModelT_co] | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._note = ""
        self._is_abandoned = False
        self._started = time.monotonic()
        self._ended_at = 0.0
        self._monitors: list[Monitor] = []
        self.callbacks: list[Callback] = []
        self._controlled: ControlledRun | None = None
        self._attaching = threading.Lock()  # never acquired with the condition held
        self.past_metrics = run.past_metrics
        self.world_size = len(run.devices)
        self.devices: tuple[torch.device, ...] = run.devices
        self.total_batches = run.total_batches

    # Called by the run.

    def publish(self, metrics: EpochMetrics) -> None:
        """Queue the metrics of an epoch that has closed; called by the run."""
        with self._condition:
            self._unread.append(metrics)
            self._condition.notify_all()

    def finish(
        self, state: TrainedState[Any] | None, error: BaseException | None, note: str = ""
    ) -> None:
        """Store the trained state and the error, and wake all waiters; called by the run."""
        if state is not None and error is None:
            state = self._final_state(state)
        self.end_callbacks()  # before a waiter returns and may reuse them in another run
        self.unlist_run()
        with self._condition:
            self._ended_at = time.monotonic()
            self._traceback = None if error is None else error.__traceback__
            # _ended last: it publishes the others to readers without the lock.
            self._note = note
            self._state, self._error, self._ended = state, error, True
            self._condition.notify_all()
            monitors = list(self._monitors)
        for monitor in monitors:
            monitor.run_ended()

    def _final_state(self, state: TrainedState[Any]) -> TrainedState[Any]:
        """The state that the callbacks make of the run's last one."""
        final = state
        for callback in self.callbacks:
            try:
                final = callback.final_state(final)
            except Exception:
                logger.exception("%r failed at the end of the run", callback)
        if final is not state:
            load_given(final)
        return final

    def list_run(self, settings: RunSettings) -> None:
        """Show the run to other processes of this user until it ends, and in a cluster at its
        lighthouse.
        """
        saved, name, num_epochs = settings.checkpoint_dir, program_name(), settings.num_epochs

        def describe() -> dict[str, Any]:
            newest = self._run.newest_checkpoint
            return {
                "name": name,
                "devices": [str(device) for device in self.devices],
                "policy": settings.policy.name,
                "checkpoint_dir": None if saved is None else str(saved.absolute()),
                "last_checkpoint": None if newest is None else str(newest.absolute()),
            }

        self._controlled = ControlledRun(
            describe=describe,
            statistics=self.statistics,
            measure=lambda: RecentProgress(self.statistics, self.total_batches, num_epochs).read,
            stop=self.stop,
            total_batches=self.total_batches,
            num_epochs=num_epochs,
        )
        CONTROL.add(self._controlled)
        if isinstance(self._run, ClusterRun):
            self._run.read_status = ListedRun(self._controlled).read

    def unlist_run(self) -> None:
        """End :meth:`list_run`. Idempotent."""
        if self._controlled is not None:
            CONTROL.remove(self._controlled)

    def end_callbacks(self) -> None:
        """End the callbacks that have begun; errors are logged."""
        while self.callbacks:
            callback = self.callbacks.pop()
            try:
                callback.end()
            except Exception:
                logger.exception("%r failed at the end of the run", callback)

    # Called by the user.

    @property
    def state(self) -> TrainedState[ModelT_co] | None:
        """The trained state once the run is over, else ``None``.

        After a failure it is the last consistent one, with ``reason`` ``"failed"`` or
        ``"stalled"``: the average of the ranks that could still send their state between two
        steps; ``None`` if there is no such rank.
        """
        return self._state

    @property
    def backend(self) -> AverageBackend:
        """The transport in use, which ``AUTO`` may change during the run."""
        return self._run.report.statistics().backend

    @property
    def backend_reason(self) -> str:
        """The reason for the transport in use, in one sentence, with measured figures if any."""
        return self._run.report.statistics().backend_reason

    def stop(self, reason: str = "stopped", *, everywhere: bool = False) -> None:
        """End the run at a step boundary and keep its state. Returns at once; idempotent.

        In a cluster this machine leaves: its training results are handed over, and the others
        continue with its part of the data.

        Args:
            reason: Kept as ``TrainedState.reason``.
            everywhere: In a cluster, end the run on all machines.
        """
        if self._ended:
            return
        if isinstance(self._run, ClusterRun):
            self._run.stop(reason, everywhere=everywhere)
        else:
            self._run.stop(reason)

    def save(self, path: str | os.PathLike[str], timeout: float = SAVE_S) -> Path:
        """Write a checkpoint of the whole run into the directory ``path``; ``resume(path)``
        resumes from it. No older checkpoint is removed.

        Blocks until the files are on disk; training waits only while the state is copied. During
        the run the state is that of the next step boundary; after the run it is the final state,
        of a failed run the last consistent one. It is kept only if ``checkpoint_dir`` is set,
        since the ranks' optimizers may not fit into host memory. Without it only the weights are
        kept; ``state.save(path)`` writes them.

        Args:
            path: A directory; created if needed.
            timeout: Seconds to wait for a step boundary.

        Returns:
            The checkpoint's own directory.

        Raises:
            RuntimeError: Called in a worker's thread, which would wait for itself.
            TimeoutError: No boundary was reached in time.
            CheckpointError: The run is over and kept no full state, because ``checkpoint_dir``
                was not set or a failure left no consistent one; or no run could resume from it.
            OSError: The files could not be written.
        """
        target = check_path("save", path)
        data = self._run.save(check_float("timeout", timeout, 0.0))
        try:
            check_content(data)
        except ValueError as error:
            raise CheckpointError(f"no run could resume from this state: {error}") from error
        return write_checkpoint(target, data)

    def statistics(self) -> Statistics:
        """A frozen snapshot of the coordinator's counters."""
        return self._run.report.statistics()

    def summary(self) -> RunSummary:
        """The throughput of the run and its lost time by cause, so far or as a whole.

        It prints as a table, which a notebook shows for the handle as well. In a cluster it covers
        this machine.
        """
        return self._run.report.summary()

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def attach(self, monitor: Monitor) -> Self:
        """Show the run, which may be over, on the page of a :class:`~gpuworker.Monitor`. Returns
        this handle.

        The monitor continues to serve after the end of the run, until it is closed; the handle
        holds a reference to it. Attaching it again has no effect.

        Raises:
            TypeError: ``monitor`` is not a :class:`~gpuworker.Monitor`.
            RuntimeError: The monitor is closed.
            ValueError: The monitor shows another run that is not over.
        """
        if not isinstance(monitor, Monitor):
            raise TypeError(f"attach({monitor!r:.80}): pass a gpuworker.Monitor()")
        with self._attaching:  # two threads may attach the same monitor
            if monitor in self._monitors:
                return self
            monitor.watch(self._run.report.view(self._started, self._end))
            with self._condition:
                self._monitors.append(monitor)
                ended = self._ended
        if ended:  # possibly since watch(): finish() may have missed this monitor
            monitor.run_ended()
        return self

    def _end(self) -> RunEnd | None:
        if not self._ended:
            return None
        if self._error is not None:
            return RunEnd(state="failed", at=self._ended_at, error=self._error)
        stopped = self._state is not None and self._state.stopped
        return RunEnd(state="stopped" if stopped else "finished", at=self._ended_at)

    def join(self, timeout: float | None = None) -> TrainedState[ModelT_co]:
        """Wait for the end of the run.

        Args:
            timeout: Seconds to wait; ``None``: without limit.

        Returns:
            The trained state; the same object on every call.

        Raises:
            RuntimeError: Called in a callback of this run, which would wait for itself.
            TimeoutError: The run is not over; it continues.
            WorkerFailed: A worker raised the exception in ``__cause__``.
            RunStalled: There was no progress for ``stall_timeout`` seconds.
            KeyboardInterrupt: A signal stopped the run.
            ValueError: The model factory gave ranks different models.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._await(lambda: self._ended, deadline):
            raise TimeoutError(f"the run is not over after {timeout} s; it continues")
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        assert self._state is not None
        return self._state

    def _await(self, ready: Callable[[], object], deadline: float | None) -> bool:
        """Wait while handling signals; returns False if the deadline passed first."""
        try:
            return self._await_signals(ready, deadline)
        except KeyboardInterrupt as error:
            self._describe(error)
            raise

    def _describe(self, error: KeyboardInterrupt) -> None:
        """Set what Python prints if the interrupt ends the process."""
        if self._state is None:
            lines = ["KeyboardInterrupt: the run was aborted, and its state is lost"]
        else:
            num = self.statistics().global_step
            lines = [
                f"KeyboardInterrupt: the run was stopped after {num:,} of {self.total_batches:,} "
                "batches; handle.state has the trained state"
            ]
        saved, newest = self._checkpoint_dir, self._run.newest_checkpoint
        if saved is None:
            lines.append("checkpoint_dir(path) would save it for resume(path)")
        elif self._note:
            lines.append(self._note)
        else:
            where = "its last checkpoint" if newest is None else newest
            lines.append(f"resume({str(saved)!r}) continues it from {where}")
        if self._note:
            add_note_once(error, self._note)
        print_briefly(error, *(part for line in lines for part in fold(line)))

    def _await_signals(self, ready: Callable[[], object], deadline: float | None) -> bool:
        with INTERRUPTS.waiting() as period:
            try:
                in_time = self._wait(ready, deadline, period)
                if self._ended:
                    self._run.wait_threads()
            except KeyboardInterrupt:
                if not self._is_abandoned:  # raised by a handler of the user's
                    period.add()
                    self._stop_and_wait(period)
                raise
            return in_time

    def _stop_and_wait(self, period: InterruptibleWait) -> None:
        self.stop("signalled" if period.interrupted else "stopped")
        self._wait(lambda: self._ended, None, period)
        self._run.wait_threads()

    def _wait(
        self, ready: Callable[[], object], deadline: float | None, period: InterruptibleWait
    ) -> bool:
        if self._run.owns_current_thread():
            raise RuntimeError(
                "a callback of a run cannot wait for that run, which waits for the callback; "
                "call handle.stop() to end it, or return False from metrics_fn"
            )
        with self._condition:
            while not self._ended and (period.interrupted or not ready()):
                left = None
                if deadline is not None and not period.interrupted:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                if period.is_abandoned:
                    # Raised here, where no invariant is broken; the handler may run anywhere.
                    self._is_abandoned = True
                    raise KeyboardInterrupt
                period.wait(self._condition, left)
        return True

    def metrics(self) -> Iterator[EpochMetrics]:
        """Iterate over the metrics of closed epochs not yet read, until the run is over.

        Raises:
            WorkerFailed: As :meth:`join`, after the last epoch.
        """
        while (metrics := self.next_metrics()) is not None:
            yield metrics

    def next_metrics(self, timeout: float | None = None) -> EpochMetrics | None:
        """Wait for the metrics of the next closed epoch; ``None`` after the last.

        Raises:
            TimeoutError: No epoch closed in time; the run continues.
            KeyboardInterrupt: A signal stopped the run.
            WorkerFailed: As :meth:`join`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._await(lambda: self._unread, deadline):
            with self._condition:
                if self._unread:
                    return self._unread.popleft()
                if self._ended:
                    break  # else another reader took it
        else:
            raise TimeoutError(f"no epoch closed within {timeout} s; the run continues")
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return None

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return the metrics of closed epochs not yet read, without waiting."""
        with self._condition:
            found = list(self._unread)
            self._unread.clear()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.join()
            return
        if self._is_abandoned:
            return
        with INTERRUPTS.waiting() as period:
            if isinstance(error, KeyboardInterrupt):
                period.add()  # the first signal
            self._stop_and_wait(period)
        if isinstance(error, KeyboardInterrupt):
            self._describe(error)


def _make_adapter(settings: RunSettings) -> DatasetAdapter:
    """The adapter that reads the data set or stream."""
    if not is_stream(settings.dataset):
        return adapt_dataset(
            settings.dataset, collate_fn=settings.collate_fn, lock=settings.dataset_lock
        )
    return StreamAdapter(
        settings.dataset,
        settings.dataset_length,
        batch_size=settings.batches(len(settings.resolved_devices())).unit,
        collate_fn=settings.collate_fn,
        seed=settings.seed or 0,
        lock=settings.dataset_lock,
    )


def _make_run(settings: RunSettings, adapter: DatasetAdapter) -> Run | ClusterRun:
    """The run, or in a cluster this machine's part of it."""
    if settings.cluster is None:
        return Run(settings, adapter)
    data = settings.cluster_facts(adapter.num_samples)
    keep = ClusterCheckpointOptions(
        directory=settings.checkpoint_dir,
        keep=settings.checkpoint_dir_keep,
        every=settings.save_every,
        every_s=settings.save_every_s,
        every_steps=settings.save_every_steps,
    )
    part = replace(
        settings,
        granted=True,
        machine=settings.cluster.engine.machine,
        max_steps=None,
        checkpoint_dir=None,
        save_every=None,
        save_every_s=None,
        save_every_steps=None,
    )
    return ClusterRun(settings.cluster, data, lambda hooks: Run(part, adapter, hooks), keep)


def start_run(settings: RunSettings) -> TrainerHandle[Any]:
    """Check the settings, start all threads and return a handle."""
    refuse_import_of_main()
    if settings.cluster is None:
        refuse_launcher("run()")
    settings.check_combination()
    settings = settings.with_steps()
    run = _make_run(settings.with_callbacks(), _make_adapter(settings))
    handle = TrainerHandle(run, settings.checkpoint_dir)
    try:
        for callback in settings.callbacks:
            callback.begin(handle)
            handle.callbacks.append(callback)
        handle.list_run(settings)
        run.start(handle)
    except BaseException:
        handle.end_callbacks()
        handle.unlist_run()
        raise
    return handle
