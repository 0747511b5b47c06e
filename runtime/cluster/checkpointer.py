"""ClusterCheckpointer: checkpoints after rounds, whose state is equal on all machines."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.cluster.cluster_ledger import ClusterLedger
from runtime.checkpoint.content import CheckpointData, SavedCluster
from runtime.checkpoint.resume import ResumePoint, check_content
from runtime.checkpoint.store import CheckpointWriter
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 600.0
"""Longest wait for a slow disk at the end of a run, in seconds."""


class ClusterCheckpointer:
    """Writes checkpoints after rounds, and returns the state on request.

    A directory that machines share is written by the first to claim it, and by another one after
    that has left. Every method except :meth:`request` is called on the cluster's thread.
    """

    def __init__(self, options: ClusterCheckpointOptions) -> None:
        self._options = options
        self._writer = None
        if options.directory is not None:
            self._writer = CheckpointWriter(options.directory, options.keep, check=check_content)
        self._claimed = False
        self._at = time.monotonic()
        self._batches = 0
        self._epochs = 0
        self._lock = threading.Lock()
        self._requests: list[queue.SimpleQueue[CheckpointData | None]] = []
        self._last: CheckpointData | None = None
        self._closed = False

    @property
    def newest(self) -> Path | None:
        """Directory of the last checkpoint written by this machine."""
        return None if self._writer is None else self._writer.newest

    def start_from(self, ledger: ClusterLedger) -> None:
        """Count intervals from this ledger, which is saved already."""
        self._batches, self._epochs = ledger.consumed, ledger.first_open

    def request(self, timeout_s: float) -> CheckpointData:
        """The state after the next round, or after the last; blocks until it is available.

        Raises:
            TimeoutError: No round was committed in time.
            CheckpointError: The run is over and had no round.
        """
        answer: queue.SimpleQueue[CheckpointData | None] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                answer.put(self._last)
            else:
                self._requests.append(answer)
        try:
            data = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no round between machines within {timeout_s:g} s") from None
        finally:
            with self._lock:
                if answer in self._requests:  # withdrawn: the next round builds no state for it
                    self._requests.remove(answer)
        if data is None:
            raise CheckpointError("the run is over, and no round was completed")
        return data

    def after_round(self, ledger: ClusterLedger, make: Callable[[], CheckpointData]) -> None:
        """After a committed round, write a checkpoint if one is due, and answer requests.

        Args:
            ledger: The ledger after the round.
            make: Returns the state, whose tensors are never modified afterwards.

        Raises:
            CheckpointError: The first checkpoint would be refused when resuming.
        """
        self._require_readable()
        due = self._is_due(ledger) and self._may_write()
        with self._lock:
            if not due and not self._requests and not ledger.ended:
                return
            requests, self._requests = self._requests, []
        data = make()
        if ledger.ended:
            self._last = data
        for answer in requests:
            answer.put(data)
        if due and self._writer is not None:
            self._writer.submit(data)

    def _is_due(self, ledger: ClusterLedger) -> bool:
        options, now = self._options, time.monotonic()
        if self._writer is None:
            return False
        due = (
            ledger.ended
            or (options.every is not None and ledger.first_open >= self._epochs + options.every)
            or (options.every_s is not None and now >= self._at + options.every_s)
            or (
                options.every_steps is not None
                and ledger.consumed >= self._batches + options.every_steps
            )
        )
        if due:
            every = options.every or 1
            self._epochs = ledger.first_open // every * every
            self._at, self._batches = now, ledger.consumed
        return due

    def _may_write(self) -> bool:
        """True if this machine has claimed the directory."""
        assert self._writer is not None
        if not self._claimed:
            try:
                self._writer.claim()
            except CheckpointError as error:
                is_taken = error.__cause__ is None  # by the machine that writes there
                logger.log(logging.DEBUG if is_taken else logging.WARNING, "%s", error)
                return False
            self._claimed = True
        return True

    def _require_readable(self) -> None:
        if self._writer is not None and self._writer.refusal is not None:
            raise self._writer.refusal

    def close(self) -> None:
        """Answer all requests, and wait for checkpoints being written.

        Raises:
            CheckpointError: The first checkpoint would be refused when resuming.
        """
        with self._lock:
            self._closed = True
            requests, self._requests = self._requests, []
        for answer in requests:
            answer.put(self._last)
        if self._writer is not None:
            self._writer.close(CLOSE_TIMEOUT_S)
            self._require_readable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheckpointOptions:
    """Directory and intervals of checkpoints; see ``TrainerBuilder.checkpoint_dir``.

    Attributes:
        directory: Target directory; ``None``: write no checkpoints.
        every: Epochs between checkpoints.
        every_s: Seconds between checkpoints; ``None``: no such interval.
        every_steps: Batches of all machines between checkpoints; ``None``: no such interval.
    """

    directory: Path | None = None
    keep: int = 3
    every: int | None = None
    every_s: float | None = None
    every_steps: int | None = None


def resumed_cluster_state(point: ResumePoint) -> SavedCluster:
    """The cluster's part of a checkpoint.

    Raises:
        CheckpointError: A run without ``cluster()`` has written it.
    """
    found = point.data.cluster
    if found is None:
        raise CheckpointError(
            "resume(path): the checkpoint was written by a run without cluster(), and does not "
            "record which batches machines have trained: finish that run by itself, or start the "
            "cluster from its weights in model_factory"
        )
    return found
