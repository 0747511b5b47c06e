"""Carries batches from a loader's thread to the worker, and sets how many may wait."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from runtime.data.batches import batch_bytes
from runtime.data.budget import host_depth
from runtime.data.slots import DeviceSlot
from runtime.device.base import available_host_bytes

logger = logging.getLogger(__name__)

# A loader's thread reads a batch and *puts* it on the stage; the worker *takes* it. When the
# worker asks for the next one, the batch before is used up (:meth:`Stage.advance`).

CALIBRATION_STEPS = 3
"""Optimizer steps whose memory is watched before batches are loaded ahead by measure."""

SIZING_BATCHES = 64
"""Batches between two sizings of a run at least: asking for the memory costs part of a step."""


class Stage:
    """Carries nothing and keeps one depth: batches wait as the data set gave them.

    The thread that a method belongs to stands in its first word.

    Args:
        depth: See ``depth``.
        pace: Says when a depth is sized that does not stay; not shared.

    Attributes:
        depth: How many batches may wait; 0: each is loaded when it is asked for. Written
            by the worker's thread.
        brings: Whether ``take`` puts batches on the worker's device.
    """

    brings = False

    def __init__(self, depth: int, pace: PlanLengths | None = None) -> None:
        self.depth = depth
        self._pace = pace or PlanLengths(0)

    def submitted(self, num_batches: int) -> None:
        """Worker: a plan follows those before it."""
        self._pace.submitted(num_batches)

    def advance(self) -> None:
        """Worker: the batch taken last is used up, and the next one is asked for."""

    def taken(self) -> None:
        """Worker: a batch, or the error in its place, was taken."""
        self._pace.taken()

    def take(self, loaded: LoadedBatch) -> None:
        """Worker: make ``loaded.data`` ready for use in the current stream."""

    def cancelled(self) -> None:
        """Worker: all that was submitted is forgotten."""
        self._pace.cancelled()

    def put(self, loaded: LoadedBatch) -> None:
        """Loader: take over a batch that was read."""

    def drop(self, loaded: LoadedBatch) -> None:
        """Any thread: a batch that was put will not be taken."""

    def close(self, timeout_s: float) -> bool:
        """Worker or run: the loader's thread has ended; let go of all memory.

        Returns:
            Whether nothing is on its way any more.
        """
        return True


class HostStage(Stage):
    """Batches on the host, as many ahead as its available memory allows.

    One until the first steps have shown what the model takes, then up to ``MAX_DEPTH``,
    by the largest batch so far; sized anew where a plan ends.

    Args:
        num_workers: Workers that load into this memory.
        pace: Says when.
    """

    def __init__(self, num_workers: int, pace: PlanLengths) -> None:
        super().__init__(1, pace)
        self._num_workers = num_workers
        self._batch_bytes = 0  # written by the loader's thread

    def advance(self) -> None:
        """Worker: size the depth where it is due."""
        plan_batches = self._pace.due()
        if plan_batches is None:
            return
        self.depth = host_depth(
            available_host_bytes(), self._num_workers, self._batch_bytes, plan_batches
        )
        logger.debug("%d batches of %d bytes ahead", self.depth, self._batch_bytes)

    def put(self, loaded: LoadedBatch) -> None:
        """Loader: measure the batch."""
        self._batch_bytes = max(self._batch_bytes, batch_bytes(loaded.data))


@dataclass(slots=True)
class LoadedBatch:
    """One batch, on the worker's device.

    Attributes:
        data: What the data set gave.
        num_samples: Samples in it.
        epoch: Epoch it belongs to.
        batch: Its position in the epoch's permutation.
        slot: The memory that it lies in, if that is used again for a later batch.
    """

    data: Any
    num_samples: int
    epoch: int
    batch: int
    slot: DeviceSlot | None = None


class PlanLengths:
    """Says when a depth is to be sized: after the first steps, then where a plan ends.

    Used by the worker's thread alone.

    Args:
        calibration_batches: Batches in the first steps.
        spacing: Batches between two sizings at least.
    """

    def __init__(self, calibration_batches: int, spacing: int = 0) -> None:
        self._num_left = calibration_batches
        self._spacing = spacing
        self._plans: deque[list[int]] = deque()  # size, and batches not taken yet
        self._is_due = False
        self._num_since = spacing  # batches since the last sizing

    def submitted(self, num_batches: int) -> None:
        """A plan follows those before it."""
        if num_batches:
            self._plans.append([num_batches, num_batches])

    def taken(self) -> None:
        """The worker has a batch."""
        if self._num_left:
            self._num_left -= 1
            self._is_due = self._num_left == 0
        self._num_since += 1
        if self._plans:
            self._plans[0][1] -= 1
            if self._plans[0][1] == 0:
                self._plans.popleft()
                self._is_due = self._num_left == 0

    def cancelled(self) -> None:
        """All plans are forgotten."""
        self._plans.clear()
        self._is_due = self._num_left == 0

    def due(self) -> int | None:
        """The batches of the plan in progress where the depth is to be sized now, once."""
        if not self._is_due or not self._plans or self._num_since < self._spacing:
            return None
        self._is_due, self._num_since = False, 0
        return self._plans[0][0]
