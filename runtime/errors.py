"""Every exception that the runtime raises on its own account."""

from __future__ import annotations

from coordinator.errors import AveragingFailed

__all__ = [
    "AveragingFailed",
    "CollectiveAborted",
    "CollectiveTimeout",
    "GpuWorkerError",
    "ReplicaMismatch",
    "RunStalled",
    "WorkerFailed",
]


class GpuWorkerError(RuntimeError):
    """Base of the errors below."""


class WorkerFailed(GpuWorkerError):
    """A worker died of an exception, which stands in ``__cause__``.

    Attributes:
        rank: The worker's rank.
        epoch: Epoch it was in, counted from 0.
        step: Batches it had trained.
    """

    def __init__(self, rank: int, epoch: int, step: int, error: BaseException) -> None:
        super().__init__(
            f"worker {rank} failed in epoch {epoch} at step {step}: {type(error).__name__}: {error}"
        )
        self.rank = rank
        self.epoch = epoch
        self.step = step


class ReplicaMismatch(ValueError):
    """The model factory gave one rank another model than rank 0."""


class RunStalled(GpuWorkerError):
    """A run made no progress for ``stall_timeout`` seconds."""


class CollectiveAborted(GpuWorkerError):
    """A collective was aborted, by this rank or by another; its buffers hold garbage."""


class CollectiveTimeout(GpuWorkerError):
    """A peer did not join a collective in time; the group is aborted."""
