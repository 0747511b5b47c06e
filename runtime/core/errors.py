"""All exceptions that the runtime itself raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from coordinator.errors import AveragingFailed, GpuWorkerError, RunAborted, RunStalled
from coordinator.state import Failure

__all__ = [
    "AveragingFailed",
    "CheckpointError",
    "ClusterError",
    "CollectiveAborted",
    "CollectiveTimeout",
    "GpuWorkerError",
    "NonFiniteError",
    "ReplicaFailed",
    "ReplicaMismatch",
    "RunAborted",
    "RunStalled",
    "WorkerFailed",
    "error_of_run",
]


class WorkerFailed(GpuWorkerError):
    """A worker raised an exception, which is the ``__cause__``.

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
        self._error = error

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[object, ...]]:
        return type(self), (self.rank, self.epoch, self.step, self._error)


class NonFiniteError(GpuWorkerError, ArithmeticError):
    """A loss, a gradient or a parameter is NaN or infinite; see ``on_non_finite``.

    Args:
        remedy: What to do, where the default, for runs, does not hold.

    Attributes:
        rank: The worker where it arose.
        step: Number of the batch, counted from 0 as ``worker.local_step`` counts them: that
            of the loss; for a gradient the first of its step; for a parameter, which is
            looked at late, the last one trained.
        what: ``"loss"``, ``"gradient"`` or ``"parameter"``.
        parameter: Name of the first parameter hit; ``None`` where none was.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        what: str,
        parameter: str | None = None,
        remedy: str = (
            "Lower the learning rate, set max_grad_norm, drop such batches with "
            'on_non_finite("skip"), or guard the loss against them'
        ),
    ) -> None:
        hit = "" if parameter is None else f"; first parameter hit: {parameter!r}"
        super().__init__(
            f"rank {rank}, step {step}: a {what} is not finite (NaN or infinite){hit}. {remedy}"
        )
        self.rank = rank
        self.step = step
        self.what = what
        self.parameter = parameter
        self._remedy = remedy

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[object, ...]]:
        return type(self), (self.rank, self.step, self.what, self.parameter, self._remedy)


class ClusterError(GpuWorkerError):
    """This machine cannot take part in the cluster, or not any longer; the message says why."""


class ReplicaMismatch(ValueError):
    """A rank's model differs from rank 0's."""


class ReplicaFailed(GpuWorkerError):
    """A replica raised in the user's own loop; its exception is the ``__cause__``.

    Attributes:
        rank: The replica's rank.
        device: Its device.
        what: What it did: ``"forward"``, ``"backward"``, ``"accumulate"``, ``"step"``, ...
    """

    def __init__(self, rank: int, device: str, what: str, error: BaseException) -> None:
        super().__init__(
            f"rank {rank} on {device} failed in {what}: {type(error).__name__}: {error}"
        )
        self.rank = rank
        self.device = device
        self.what = what
        self._error = error

    def __reduce__(self) -> tuple[type[ReplicaFailed], tuple[object, ...]]:
        return type(self), (self.rank, self.device, self.what, self._error)


class CheckpointError(GpuWorkerError):
    """A checkpoint could not be written, read, or continued with these settings."""


CollectiveError = TypeVar("CollectiveError", "CollectiveAborted", "CollectiveTimeout")


class CollectiveAborted(GpuWorkerError):
    """A collective was aborted, by this rank or by another; its buffers hold garbage.

    Attributes:
        failed: Whether the exchange itself failed on this rank, and no other rank was late,
            left or died.
    """

    failed = False


class PieceTooLarge(CollectiveAborted):
    """A rank had no memory for its piece of a global batch, and makes the step again.

    Attributes:
        num_samples: Samples in the piece.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__(f"no memory for a piece of {num_samples} samples")
        self.num_samples = num_samples


class CollectiveTimeout(GpuWorkerError):
    """A peer did not join a collective in time; the group is aborted.

    Attributes:
        failed: Whether all had joined, and the exchange did not end in time.
    """

    failed = False


def mark_failed(error: CollectiveError) -> CollectiveError:
    """The error, which says that the exchange itself has failed."""
    error.failed = True
    return error


def without_tracebacks(error: BaseException) -> BaseException:
    """The error, its causes too, without tracebacks, whose frames would keep tensors alive.

    For an error that is kept for long; the log has the traceback where it may be needed.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = None
        waiting += [found.__cause__, found.__context__]
    return error


def error_of_run(failure: Failure | None, stuck: Sequence[str]) -> BaseException | None:
    """What ``join()`` raises, if anything.

    Args:
        failure: Why the run failed.
        stuck: Names of threads that did not come back from the user's code.
    """
    named = f"threads stuck in user code: {', '.join(stuck)}"
    if failure is None:
        return GpuWorkerError(f"the run is over; {named}") if stuck else None
    error = failure.error
    if failure.rank >= 0 and not isinstance(error, (ReplicaMismatch, CheckpointError)):
        error = WorkerFailed(failure.rank, failure.epoch, failure.step, failure.error)
        error.__cause__ = failure.error
    if stuck:
        error.add_note(named)
    return error
