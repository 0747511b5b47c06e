"""What the caller of ``run()`` holds."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch

from coordinator.config import AverageBackend
from coordinator.metrics import EpochMetrics
from coordinator.state import Statistics
from runtime.callbacks import Callback
from runtime.checkpoint.store import save_once
from runtime.cluster.checkpointer import ClusterCheckpointOptions
from runtime.cluster.cluster_run import ClusterRun
from runtime.core.checks import check_float, check_path
from runtime.core.signals import INTERRUPTS, InterruptibleWait
from runtime.data.dataset import DatasetAdapter, adapt_dataset
from runtime.data.stream import StreamAdapter, is_stream
from runtime.monitor.monitor import Monitor
from runtime.monitor.run_view import RunEnd
from runtime.results import TrainedState
from runtime.run import Run
from runtime.settings import RunSettings

logger = logging.getLogger(__name__)

SAVE_S = 600.0
"""How long a step boundary may take to come, unless another bound is given."""


class TrainerHandle:
    """A run in progress. Every method may be called from any thread.

    As a context manager it stops the run when the block is left on an exception, and
    waits for it in any case.

    While the main thread waits in :meth:`join`, :meth:`next_metrics`, :meth:`metrics` or at
    the end of the block, Ctrl-C, SIGTERM and SIGHUP are answered here, unless they are ignored. The
    first stops every run of the process at a step boundary; the call waits until its own
    run is over, whatever its timeout, and raises ``KeyboardInterrupt`` with the state kept
    on the handle. The second aborts the runs: :meth:`join` called again raises
    ``RunAborted``, unless the state was there already. The third no longer waits. At last
    the handlers found before are put back and act: after SIGTERM by default the process
    ends by it.
    """

    def __init__(self, run: Run | ClusterRun) -> None:
        self._run = run
        self._condition = threading.Condition()
        self._unread: deque[EpochMetrics] = deque()
        self._ended = False
        self._state: TrainedState | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._started = time.monotonic()
        self._ended_at = 0.0
        self._monitors: list[Monitor] = []
        self.callbacks: list[Callback] = []
        self._attaching = threading.Lock()  # never taken with the condition held
        self.past_metrics = run.past_metrics
        self.world_size = len(run.devices)
        self.devices: tuple[torch.device, ...] = run.devices
        self.total_batches = run.total_batches

    # Called by the run.

    def publish(self, metrics: EpochMetrics) -> None:
        """An epoch has closed; called by the run."""
        with self._condition:
            self._unread.append(metrics)
            self._condition.notify_all()

    def finish(self, state: TrainedState | None, error: BaseException | None) -> None:
        """The run is over; called by the run."""
        self.end_callbacks()  # before anybody knows, who may use them again
        with self._condition:
            self._ended_at = time.monotonic()
            # The last makes the others true for who reads without the lock.
            self._state, self._error, self._ended = state, error, True
            self._condition.notify_all()
            monitors = list(self._monitors)
        for monitor in monitors:
            monitor.run_ended()

    def end_callbacks(self) -> None:
        """Tell those that were told of the beginning."""
        while self.callbacks:
            callback = self.callbacks.pop()
            try:
                callback.end()
            except Exception:
                logger.exception("%r failed at the end of the run", callback)

    # Called by the user.

    @property
    def state(self) -> TrainedState | None:
        """The trained state once the run is over, else ``None``."""
        return self._state

    @property
    def backend(self) -> AverageBackend:
        """The transport in use, which ``AUTO`` may change while the run goes on."""
        return self._run.backend

    @property
    def backend_reason(self) -> str:
        """Why this transport is in use, in one sentence; with the figures once measured."""
        return self._run.backend_reason

    def stop(self, *, everywhere: bool = False) -> None:
        """End the run at a step boundary and keep its state. Returns at once; idempotent.

        In a cluster this machine leaves: what it has trained is handed over, and the others go
        on with its part of the data.

        Args:
            everywhere: In a cluster, end the run on all machines.
        """
        if self._ended:
            return
        if isinstance(self._run, ClusterRun):
            self._run.stop(everywhere=everywhere)
        else:
            self._run.stop()

    def save(self, path: str | os.PathLike[str], timeout: float = SAVE_S) -> Path:
        """Write a checkpoint of the whole run into the directory ``path``; ``resume(path)``
        resumes from it. No older checkpoint is removed.

        Blocks until the files are on disk; training waits only while the state is copied. During
        the run the state is that of the next boundary. After it, it is the final state, which is
        kept only if ``checkpoint_dir`` is set, since the ranks' optimizers may not fit into host
        memory. Without it only the weights are kept, which ``state.save(path)`` writes.

        Args:
            path: A directory; made if needed.
            timeout: Seconds that a boundary may take to come.

        Returns:
            The checkpoint's own directory.

        Raises:
            RuntimeError: Called in a worker's thread, which would wait for itself.
            TimeoutError: No boundary came in time.
            CheckpointError: The run is over and left no full state, because ``checkpoint_dir``
                was not set or the run failed.
            OSError: The files could not be written.
        """
        target = check_path("save", path)
        return save_once(target, self._run.save(check_float("timeout", timeout, 0.0)))

    def statistics(self) -> Statistics:
        """A frozen snapshot of the coordinator's counters."""
        return self._run.statistics()

    def attach(self, monitor: Monitor) -> TrainerHandle:
        """Show the run on the page of a :class:`~gpuworker.Monitor`, from now on; also when it
        is over. Returns this handle.

        The monitor goes on serving after the end of the run, until it is closed; the handle
        keeps it. Attaching it again changes nothing.

        Raises:
            TypeError: ``monitor`` is no :class:`~gpuworker.Monitor`.
            RuntimeError: The monitor is closed.
            ValueError: The monitor shows another run that is not over.
        """
        if not isinstance(monitor, Monitor):
            raise TypeError(f"attach({monitor!r:.80}): pass a gpuworker.Monitor()")
        with self._attaching:  # two threads may attach the same monitor
            if monitor in self._monitors:
                return self
            monitor.watch(self._run.monitor_view(self._started, self._end))
            with self._condition:
                self._monitors.append(monitor)
                ended = self._ended
        if ended:  # perhaps since watch(): then finish() has not seen this monitor
            monitor.run_ended()
        return self

    def _end(self) -> RunEnd | None:
        if not self._ended:
            return None
        if self._error is not None:
            return RunEnd(state="failed", at=self._ended_at, error=self._error)
        stopped = self._state is not None and self._state.stopped
        return RunEnd(state="stopped" if stopped else "finished", at=self._ended_at)

    def join(self, timeout: float | None = None) -> TrainedState:
        """Wait for the end of the run.

        Args:
            timeout: Seconds to wait; ``None``: as long as it takes.

        Returns:
            The trained state; the same again when called again.

        Raises:
            RuntimeError: Called in a callback of this run, which would wait for itself.
            TimeoutError: The run is not over; it continues.
            WorkerFailed: A worker died of the exception in ``__cause__``.
            RunStalled: There was no progress for ``stall_timeout`` seconds.
            KeyboardInterrupt: A signal stopped the run.
            ValueError: The model factory gave ranks different models.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._await(lambda: self._ended, deadline):
            raise TimeoutError(f"the run is not over after {timeout} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self._state is not None
        return self._state

    def _await(self, ready: Callable[[], object], deadline: float | None) -> bool:
        """Wait with signals answered; returns False if the deadline passed first."""
        with INTERRUPTS.waiting() as period:
            try:
                in_time = self._wait(ready, deadline, period)
                if self._ended:
                    self._run.wait_threads()
            except KeyboardInterrupt:
                if not self._is_abandoned:  # a handler of the user's raised it
                    period.count += 1
                    self._stop_and_wait(period)
                raise
            return in_time

    def _stop_and_wait(self, period: InterruptibleWait) -> None:
        self.stop()
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
                    # Raised here, not by the handler: wherever that runs, it breaks nothing.
                    self._is_abandoned = True
                    raise KeyboardInterrupt
                period.wait(self._condition, left)
        return True

    def metrics(self) -> Iterator[EpochMetrics]:
        """Iterate over closed epochs not read yet, until the run is over.

        Raises:
            WorkerFailed: What :meth:`join` would raise, after the last epoch.
        """
        while (metrics := self.next_metrics()) is not None:
            yield metrics

    def next_metrics(self, timeout: float | None = None) -> EpochMetrics | None:
        """Wait for the next closed epoch; ``None`` after the last.

        Raises:
            TimeoutError: None closed in time; the run goes on.
            KeyboardInterrupt: A signal stopped the run.
            WorkerFailed: What :meth:`join` would raise.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._await(lambda: self._unread, deadline):
            with self._condition:
                if self._unread:
                    return self._unread.popleft()
                if self._ended:
                    break  # else another reader was faster
        else:
            raise TimeoutError(f"no epoch closed within {timeout} s; the run goes on")
        if self._error is not None:
            raise self._error
        return None

    def poll_metrics(self) -> list[EpochMetrics]:
        """Return closed epochs not read yet, without waiting."""
        with self._condition:
            found = list(self._unread)
            self._unread.clear()
        return found

    def __enter__(self) -> TrainerHandle:
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
            period.count += isinstance(error, KeyboardInterrupt)  # the first of its kind
            self._stop_and_wait(period)


def _make_adapter(config: RunSettings) -> DatasetAdapter:
    """What reads the data set."""
    if not is_stream(config.dataset):
        return adapt_dataset(config.dataset, collate_fn=config.collate_fn, lock=config.dataset_lock)
    config.check_stream()
    return StreamAdapter(
        config.dataset,
        config.dataset_length,
        batch_size=config.coordinator.batch_size,
        collate_fn=config.collate_fn,
        seed=config.worker.seed,
    )


def _make_run(config: RunSettings, adapter: DatasetAdapter) -> Run | ClusterRun:
    """The run, or this machine's part of one."""
    if config.cluster is None:
        return Run(config, adapter)
    config.check_cluster()
    data = config.cluster_facts(adapter.num_samples)

    c = config.coordinator
    keep = ClusterCheckpointOptions(
        directory=config.checkpoint_dir,
        keep=config.checkpoint_dir_keep,
        every=c.save_every,
        every_s=c.save_every_s,
        every_steps=c.save_every_steps,
    )
    part = config.with_values(
        granted=True,
        machine=config.cluster.engine.machine,
        max_steps=None,
        checkpoint_dir=None,
        save_every=None,
        save_every_s=None,
        save_every_steps=None,
    )
    return ClusterRun(config.cluster, data, lambda hooks: Run(part, adapter, hooks), keep)


def start_run(config: RunSettings) -> TrainerHandle:
    """Check the settings, start every thread and return a handle."""
    if config.dataset is None:
        raise ValueError("dataset is not set: call .dataset(ds) before .run()")
    config = config.with_ledger_batch_size()
    run = _make_run(config.with_callbacks(), _make_adapter(config))
    handle = TrainerHandle(run)
    try:
        for callback in config.callbacks:
            callback.begin(handle)
            handle.callbacks.append(callback)
        run.start(handle)
    except BaseException:
        handle.end_callbacks()
        raise
    return handle
