"""Exceptions of the runtime."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TypeVar

from coordinator.messages import WorkerFailure
from coordinator.run_errors import (
    AveragingFailed,
    ClusterError,
    GpuWorkerError,
    RunAborted,
    RunStalled,
)

__all__ = [
    "AveragingFailed",
    "CheckpointError",
    "ClusterError",
    "CollectiveAborted",
    "CollectiveTimeout",
    "EvaluationFailed",
    "GpuWorkerError",
    "NonFiniteError",
    "ReplicaFailed",
    "ReplicaMismatch",
    "RunAborted",
    "RunStalled",
    "UnknownMetric",
    "WorkerFailed",
    "error_of_run",
]


class WorkerFailed(GpuWorkerError):
    """A worker raised an exception, which is the ``__cause__``.

    Attributes:
        rank: The worker's rank.
        epoch: Epoch of the failure, counted from 0.
        step: Batches that the worker had trained.
    """

    def __init__(self, rank: int, epoch: int, step: int, error: BaseException) -> None:
        super().__init__(f"worker {rank} failed in epoch {epoch} at step {step}: {text_of(error)}")
        self.rank = rank
        self.epoch = epoch
        self.step = step
        self._error = error

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[object, ...]]:
        return type(self), (self.rank, self.epoch, self.step, self._error)


_REMEDY = (
    "Lower the learning rate, set max_grad_norm, drop such batches with "
    'on_non_finite("skip"), or guard the loss against them'
)
PART_WITHOUT_UNITS = (
    ". A mean over labels that are not ignored, or over chosen samples, is NaN where the part of a "
    "worker has none of them: with their number as the weight, {}, such a part adds nothing"
)


class NonFiniteError(GpuWorkerError, ArithmeticError):
    """A loss, a gradient or a parameter is NaN or infinite; see ``on_non_finite``.

    Args:
        remedy: Advice in the message; ``None``: that for runs.

    Attributes:
        rank: The worker's rank.
        step: Number of the batch, counted from 0 like ``worker.local_step``: the batch of the loss,
            the first batch of a gradient's step, or the last batch trained before a parameter
            was checked.
        what: ``"loss"``, ``"gradient"`` or ``"parameter"``.
        parameter: Name of the first affected parameter, if any.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        what: str,
        parameter: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self._remedy = remedy
        if remedy is None:
            remedy = _REMEDY
            if what == "loss":
                weighed = "return (loss, weight) or worker.step(loss, weight=weight)"
                remedy += PART_WITHOUT_UNITS.format(weighed)
        hit = "" if parameter is None else f"; first affected parameter: {parameter!r}"
        super().__init__(
            f"rank {rank}, step {step}: a {what} is not finite (NaN or infinite){hit}. {remedy}"
        )
        self.rank = rank
        self.step = step
        self.what = what
        self.parameter = parameter

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[object, ...]]:
        return type(self), (self.rank, self.step, self.what, self.parameter, self._remedy)


class UnknownMetric(GpuWorkerError, ValueError):
    """A callback or a schedule follows a metric that no epoch has.

    Attributes:
        metric: Its name.
        available: Names of the metrics of the epoch.
    """

    def __init__(self, owner: str, epoch: int, metric: str, available: Sequence[str]) -> None:
        near = difflib.get_close_matches(metric, available, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        super().__init__(
            f"{owner}: epoch {epoch} has no metric {metric!r}{hint}; it has "
            f"{', '.join(available)}. Others are recorded in train_fn by "
            'record_scalar("name", value), or returned by eval_fn, as "eval/name"'
        )
        self.metric = metric
        self.available = tuple(available)
        self._arguments = (owner, epoch, metric, self.available)

    def __reduce__(self) -> tuple[type[UnknownMetric], tuple[object, ...]]:
        return type(self), self._arguments


class ReplicaMismatch(ValueError):
    """A rank's model differs from rank 0's."""


class ReplicaFailed(GpuWorkerError):
    """A replica raised in the user's own loop; its exception is the ``__cause__``.

    Made by :meth:`of` it is an instance of the exception's class, too, with its attributes: what
    catches an exception on one device catches it on several.

    Attributes:
        rank: The replica's rank.
        device: Its device.
        what: The operation: ``"forward"``, ``"backward"``, ``"accumulate"``, ``"step"``, ...
    """

    def __init__(self, rank: int, device: str, what: str, error: BaseException) -> None:
        # Not by super(): the exception's class may have an __init__ with other arguments.
        Exception.__init__(self, f"rank {rank} on {device} failed in {what}: {text_of(error)}")
        self.rank = rank
        self.device = device
        self.what = what
        self._error = error

    @classmethod
    def of(cls, rank: int, device: str, what: str, error: BaseException) -> ReplicaFailed:
        """The failure, where possible as an instance of the exception's class."""
        try:
            made = _replica_failure_class(type(error))(rank, device, what, error)
        except Exception:  # of the class's own __new__
            return cls(rank, device, what, error)
        if type(made) is not cls:
            made.__dict__.update(
                (name, value)
                for name, value in vars(error).items()
                if name not in vars(made) and not name.startswith("__")
            )
        return made

    def __str__(self) -> str:  # that of KeyError would quote the message
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Callable[..., ReplicaFailed], tuple[object, ...]]:
        return ReplicaFailed.of, (self.rank, self.device, self.what, self._error)


def _replica_failure_class(kind: type[BaseException]) -> type[ReplicaFailed]:
    """The subclass of both, if there can be one.

    Errors of this package stay causes, and what ends a loop or the program is no failure.
    """
    excluded = (GpuWorkerError, StopIteration, StopAsyncIteration)
    if not issubclass(kind, Exception) or issubclass(kind, excluded):
        return ReplicaFailed
    if issubclass(ReplicaFailed, kind):
        return ReplicaFailed
    try:
        return type(
            "ReplicaFailed", (ReplicaFailed, kind), {"__module__": ReplicaFailed.__module__}
        )
    except TypeError:  # their layouts differ
        return ReplicaFailed


class EvaluationFailed(GpuWorkerError):
    """The model or a function raised for samples being evaluated; that is the ``__cause__``.

    Attributes:
        start: Index of the first sample of the batch.
        stop: Index after its last sample.
        device: The device.
    """

    def __init__(self, start: int, stop: int, device: str, error: BaseException) -> None:
        super().__init__(f"samples {start} to {stop - 1} on {device}: {text_of(error)}")
        self.start = start
        self.stop = stop
        self.device = device
        self._error = error

    def __reduce__(self) -> tuple[type[EvaluationFailed], tuple[object, ...]]:
        return type(self), (self.start, self.stop, self.device, self._error)


class CheckpointError(GpuWorkerError):
    """A checkpoint could not be written or read, or does not match the settings."""


CollectiveError = TypeVar("CollectiveError", "CollectiveAborted", "CollectiveTimeout")


class CollectiveAborted(GpuWorkerError):
    """A collective was aborted by this rank or another; the content of its buffers is undefined.

    Attributes:
        failed: True if the exchange itself failed on this rank, and no other rank was late,
            left or died.
    """

    failed = False


class PieceTooLarge(CollectiveAborted):
    """A rank had no memory for its piece of a global batch; the step is repeated."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(f"no memory for a piece of {num_samples} samples")
        self.num_samples = num_samples


class CollectiveTimeout(GpuWorkerError):
    """A peer did not join a collective in time; the group is aborted.

    Attributes:
        failed: True if all ranks had joined, and the exchange did not complete in time.
    """

    failed = False


FRAMES_NOTE = "gpuworker: "
"""Beginning of the note on frames that were left out of a traceback."""


def text_of(error: BaseException) -> str:
    """Type and message of an error, with its notes, which hold the remedy."""
    notes = [n for n in getattr(error, "__notes__", ()) if not n.startswith(FRAMES_NOTE)]
    return ". ".join([f"{type(error).__name__}: {error}", *notes])


def mark_failed(error: CollectiveError) -> CollectiveError:
    """Mark the exchange itself as failed; return the error."""
    error.failed = True
    return error


def without_tracebacks(error: BaseException) -> BaseException:
    """Remove the tracebacks of an error and its causes, whose frames would keep tensors alive.

    For errors that are stored for long; their traceback is in the log.
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


def error_of_run(failure: WorkerFailure | None, stuck: Sequence[str]) -> BaseException | None:
    """The exception that ``join()`` raises, or ``None``.

    Args:
        failure: The run's failure, if any.
        stuck: Names of threads that did not return from user code.
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
