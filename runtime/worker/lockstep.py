"""Progress of ranks, in lockstep and of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


class LockstepProgress:
    """Counters of a ``SYNC`` run that have equal values on all ranks.

    Attributes:
        step: Optimizer steps since the start of the run. The last ones may still fail, until they
            are confirmed; see :class:`~runtime.worker.step.WorkerSteps`.
        buffer_samples: Samples of this rank since the last averaging of buffers.
        equal_step: The last step after which the replicas were compared and equal.
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_syncs = 0
        self.buffer_samples = 0
        self.equal_step = 0

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.num_syncs

    @property
    def num_uncompared(self) -> int:
        """Steps since the replicas were last compared."""
        return self.step - self.equal_step

    def stepped(self, num_samples: int, num_steps: int = 1) -> None:
        self.step += num_steps
        self.buffer_samples += num_samples

    def step_undone(self, num_samples: int, num_steps: int = 1) -> None:
        """Uncount the last steps, which have failed."""
        self.step -= num_steps
        self.buffer_samples -= num_samples

    def synced(self) -> None:
        self.num_syncs += 1
        self.buffer_samples = 0

    def compared(self) -> None:
        """Count a comparison of equal replicas, as an averaging: a peer without it is behind."""
        self.equal_step = self.step
        self.num_syncs += 1

    def copy_from(self, other: LockstepProgress) -> None:
        """Copy the progress of a peer."""
        self.step, self.num_syncs = other.step, other.num_syncs
        self.buffer_samples = other.buffer_samples
        self.equal_step = other.equal_step


class EpochStarts:
    """The epochs that ranks in lockstep have begun.

    What ``epoch_fn`` changes on one rank may decide what another one reads, so that no rank reads
    an epoch before all have called it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, int] = {}
        self._wake: dict[int, Callable[[], None]] = {}

    def join(self, rank: int, wake: Callable[[], None]) -> None:
        """Wait for a rank from here on; ``wake`` is called when a rank begins or leaves."""
        with self._lock:
            self._begun[rank], self._wake[rank] = -1, wake

    def begin(self, rank: int, epoch: int) -> None:
        """A rank has called ``epoch_fn``."""
        with self._lock:
            self._begun[rank] = epoch
            others = list(self._wake.values())
        for wake in others:
            wake()

    def leave(self, rank: int) -> None:
        """A rank has died or ended. Idempotent."""
        with self._lock:
            self._begun.pop(rank, None)
            self._wake.pop(rank, None)
            others = list(self._wake.values())
        for wake in others:
            wake()

    def all_begun(self, epoch: int) -> bool:
        """True if every rank has begun an epoch or a later one."""
        with self._lock:
            return all(begun >= epoch for begun in self._begun.values())


@dataclass(slots=True)
class WorkerProgress:
    """Progress of a worker.

    Attributes:
        local_step: Batches trained by it.
        epoch: Epoch of the plan in progress, or of the last one.
        begun_epoch: The last epoch that it has begun.
        body_steps: Optimizer steps that the body of its own loop has made.
    """

    local_step: int = 0
    epoch: int = 0
    begun_epoch: int = -1
    body_steps: int = 0
