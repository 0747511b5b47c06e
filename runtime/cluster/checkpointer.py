"""Checkpoints of a cluster: the state after a round, which every machine has alike."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coordinator.cluster.ledger import ClusterLedger
from coordinator.messages import Payload
from runtime.checkpoint.format import CheckpointData
from runtime.checkpoint.resume import ResumePoint
from runtime.checkpoint.store import CheckpointWriter
from runtime.cluster.tensors import to_tensors
from runtime.core.errors import CheckpointError

logger = logging.getLogger(__name__)


KEY = "cluster"
"""Under which name the coordinator's part of a checkpoint holds the state of the cluster."""


CLOSE_S = 600.0
"""How long the end of a run waits for a slow disk, in seconds."""


class ClusterCheckpointer:
    """Writes checkpoints after rounds, and gives the state to those who ask for it.

    Of machines that name the same directory, the first writes there; when it is gone, another
    one does. Every method but :meth:`ask` is called on the cluster's thread.

    Args:
        options: When, and where.
    """

    def __init__(self, options: KeepOptions) -> None:
        self._options = options
        self._writer = None
        if options.directory is not None:
            self._writer = CheckpointWriter(options.directory, options.keep)
        self._claimed = False
        self._at = time.monotonic()
        self._batches = 0
        self._epochs = 0
        self._lock = threading.Lock()
        self._asked: list[queue.SimpleQueue[CheckpointData | None]] = []
        self._last: CheckpointData | None = None
        self._over = False

    def begin(self, ledger: ClusterLedger) -> None:
        """What is saved already."""
        self._batches, self._epochs = ledger.consumed, ledger.first_open

    def ask(self, timeout_s: float) -> CheckpointData:
        """The state after the next round, or the last one; blocks until it is there.

        Raises:
            TimeoutError: There was no round in time.
            CheckpointError: The run is over and has no state.
        """
        answer: queue.SimpleQueue[CheckpointData | None] = queue.SimpleQueue()
        with self._lock:
            if self._over:
                answer.put(self._last)
            else:
                self._asked.append(answer)
        try:
            data = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no round between machines within {timeout_s:g} s") from None
        if data is None:
            raise CheckpointError("the run is over, and no round was completed")
        return data

    def after_round(self, ledger: ClusterLedger, make: Callable[[], CheckpointData]) -> None:
        """A round is committed: write it where one is due.

        Args:
            ledger: What all machines agree on.
            make: Gives the state, whose tensors nobody writes to any more.
        """
        due = self._is_due(ledger) and self._may_write()
        with self._lock:
            if not due and not self._asked and not ledger.ended:
                return
            asked, self._asked = self._asked, []
        data = make()
        if ledger.ended:
            self._last = data
        for answer in asked:
            answer.put(data)
        if due and self._writer is not None:
            self._writer.submit(data)

    def _is_due(self, ledger: ClusterLedger) -> bool:
        c, now = self._options, time.monotonic()
        if self._writer is None:
            return False
        due = (
            ledger.ended
            or (c.every is not None and ledger.first_open >= self._epochs + c.every)
            or (c.every_s is not None and now >= self._at + c.every_s)
            or (c.every_steps is not None and ledger.consumed >= self._batches + c.every_steps)
        )
        if due:
            every = c.every or 1
            self._epochs = ledger.first_open // every * every
            self._at, self._batches = now, ledger.consumed
        return due

    def _may_write(self) -> bool:
        """Whether this machine has the directory."""
        assert self._writer is not None
        if not self._claimed:
            try:
                self._writer.claim()
            except CheckpointError as error:
                is_taken = error.__cause__ is None  # by the machine that writes
                logger.log(logging.DEBUG if is_taken else logging.WARNING, "%s", error)
                return False
            self._claimed = True
        return True

    def close(self) -> None:
        """The run is over: answer everybody, and wait for what is being written."""
        with self._lock:
            self._over = True
            asked, self._asked = self._asked, []
        for answer in asked:
            answer.put(self._last)
        if self._writer is not None:
            self._writer.close(CLOSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """When a checkpoint is written, and where; see ``TrainerBuilder.checkpoint_dir``.

    Attributes:
        directory: Where; ``None``: nowhere.
        keep: How many stay there.
        every: Epochs between two.
        every_s: Seconds between two; ``None``: none by time.
        every_steps: Batches of all machines between two; ``None``: none by count.
    """

    directory: Path | None = None
    keep: int = 3
    every: int | None = None
    every_s: float | None = None
    every_steps: int | None = None


def cluster_state(ledger: ClusterLedger, state: Payload, outer: Sequence[Tensor]) -> dict[str, Any]:
    """What of a checkpoint belongs to the cluster; a single machine goes on without it."""
    return {"ledger": ledger.state_dict(), "tensors": to_tensors(state, outer)}


def of_resumed(point: ResumePoint) -> Mapping[str, Any]:
    """What of a checkpoint belongs to the cluster.

    Raises:
        CheckpointError: It was written by a machine alone.
    """
    found = point.run.get(KEY)
    if not isinstance(found, Mapping) or set(found) != {"ledger", "tensors"}:
        raise CheckpointError(
            "resume(path): the checkpoint was written by a run without cluster(), which does not "
            "say what machines have trained: finish that run by itself, or begin the cluster from "
            "its weights in model_factory"
        )
    return found
