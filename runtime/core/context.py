"""Worker context of a thread: ``current_worker()``, scalars, gathering and log records."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

_local = threading.local()


class CurrentWorker(Protocol):
    """Interface of the :class:`~gpuworker.GpuWorker` for the user's functions.

    Attributes:
        rank: The worker's rank.
        world_size: Number of ranks.
        device: The worker's device.
        generator: Seeded by ``(seed, rank, epoch)``, in a data set by
            ``(seed, epoch, batch position)``.
        model: The worker's replica.
        optimizer: The replica's optimizer.
        current_epoch: Epoch being trained.
        local_step: Batches trained by this rank.
    """

    rank: int
    world_size: int
    device: torch.device
    generator: torch.Generator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    current_epoch: int
    local_step: int

    @property
    def current_lr(self) -> float:
        """The learning rate of the first parameter group."""

    @property
    def current_version(self) -> int:
        """Number of averages applied."""

    def set_lr(self, lr: float) -> None:
        """See :meth:`gpuworker.GpuWorker.set_lr`."""

    def scale_lr(self, factor: float) -> None:
        """See :meth:`gpuworker.GpuWorker.scale_lr`."""

    def set_lr_scale(self, scale: float) -> None:
        """See :meth:`gpuworker.GpuWorker.set_lr_scale`."""

    def set_scheduler(self, factory: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
        """See :meth:`gpuworker.GpuWorker.set_scheduler`."""

    def record_scalar(self, name: str, value: float | torch.Tensor) -> None:
        """See :func:`record_scalar`."""

    def all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """See :func:`all_gather`."""

    def forget_graphs(self) -> None:
        """Discard captured CUDA graphs; the step is captured again after a few eager steps."""


class LoaderView:
    """``current_worker()`` inside a data set, while a loader reads for the worker.

    Delegates to the worker, except for ``generator`` and ``record_scalar``. The generator is seeded
    by ``(seed, epoch, batch position)``, so draws do not depend on prefetching.

    Attributes:
        rank: The worker's rank.
        generator: CPU generator of the batch being loaded.
    """

    def __init__(self, rank: int, generator: torch.Generator, worker: object = None) -> None:
        self.rank = rank
        self.generator = generator
        self._worker = worker

    def record_scalar(self, name: str, value: float | torch.Tensor) -> None:
        """Not available: no batch is being trained.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"record_scalar({name!r}, ...) is for the batch being trained: call it in train_fn (a "
            "data set is read ahead), or return the value as part of the batch"
        )

    def all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Not available: a data set is read ahead, at different times on each rank.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "all_gather is for the batch being trained, and a data set is read ahead: call it in "
            "train_fn"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._worker is None:
            raise AttributeError(f"current_worker().{name} is not available in a loader process")
        return getattr(self._worker, name)


def current_worker() -> CurrentWorker:
    """The worker of the calling thread, loader thread or loader process.

    PyTorch's draws on the CPU come from ``current_worker().generator`` in data sets and, for
    workers on the CPU, in ``train_fn``. Seed other generators from it, since Python's and NumPy's
    are shared by all threads. On a GPU pass it as ``generator=``.

    Raises:
        RuntimeError: The calling thread belongs to no worker.
    """
    worker = getattr(_local, "worker", None)
    if worker is None:
        raise RuntimeError(
            "current_worker() is only defined inside train_fn, epoch_fn, eval_fn and data sets, in "
            "a thread of a run"
        )
    return cast("CurrentWorker", worker)


@contextmanager
def worker_context(worker: object) -> Iterator[None]:
    """Make ``current_worker()`` return ``worker`` in this thread."""
    before = getattr(_local, "worker", None)
    _local.worker = worker
    try:
        yield
    finally:
        _local.worker = before


def record_scalar(name: str, value: float | torch.Tensor) -> None:
    """Record a scalar for the current batch. Epoch means are weighted by samples, or by the weights
    that ``train_fn`` returns with its losses.

    Args:
        name: Key in ``EpochMetrics.scalars``.
        value: A number or a tensor with one element. A tensor is read later, without
            synchronisation here.

    Raises:
        RuntimeError: Called outside a worker's thread, in a data set, ``eval_fn`` or
            ``checkpoint_fn``; ``eval_fn`` returns its values.
        TypeError: The name is not a string, or the value not a number.
        ValueError: A tensor with more than one element.
    """
    if not isinstance(name, str):
        raise TypeError(f"record_scalar({name!r}, ...): the name must be a string")
    if not hasattr(value, "__float__"):
        raise TypeError(f"record_scalar({name!r}, {value!r:.80}): pass a number or a tensor")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"record_scalar({name!r}) needs one element, got shape {tuple(value.shape)}: "
            "reduce it first, for instance with .mean()"
        )
    current_worker().record_scalar(str.__str__(name), value)


def all_gather(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """Gather rows of all ranks in ``train_fn``.

    For losses over pairs of samples of the global batch, such as those of CLIP and SimCLR. Requires
    ``all_gather(True)`` on the builder, and ``policy("sync")`` with more than one device::

        def train_fn(model, batch):
            images, texts = model(*batch)           # (n, d) each: this rank's piece
            all_texts, own = gpuworker.all_gather(texts)  # (N, d): the global batch
            logits = images @ all_texts.T           # (n, N)
            labels = torch.arange(own.start, own.stop, device=logits.device)
            return F.cross_entropy(logits, labels)

    Gradients flow back to every rank's rows. The step equals that of one device computing the loss
    of the global batch, whether each rank returns the mean over its own rows, as above, or the
    loss of the whole batch: the gradient is that of the weighted mean of the ranks' losses. Ranks
    may have different numbers of rows; a rank without a batch contributes none. With
    ``accumulate(n)`` each micro-batch is gathered separately. A rank whose loss has weight 0
    still receives gradients of the other ranks' losses, except for a weight that is a tensor on a
    GPU, and with ``sync_batchnorm``: its gradients are then zero.

    All ranks with a batch must make the same calls in the same order: each call blocks until
    all have arrived, in the forward and in the backward pass.

    Args:
        tensor: Rows in dimension 0, shape ``(n, ...)``, on the worker's device, of any dtype. ``n``
            may differ from rank to rank and may be 0; the rest may not.

    Returns:
        The rows of all ranks in rank order, shape ``(N, ...)``, and the slice of this rank's rows.
        With one row per sample this is the order of the global batch. With one rank the rows are
        ``tensor`` itself. Double backward is not supported.

    Raises:
        RuntimeError: Outside ``train_fn``, or without ``all_gather(True)``.
        TypeError, ValueError: Not a tensor, or a 0-dimensional one.
        ValueError: Ranks made different calls; raised on every rank.
        CollectiveAborted: Another rank has failed; do not catch it in ``train_fn``.
    """
    return current_worker().all_gather(tensor)


class WorkerLogFilter(logging.Filter):
    """Adds rank, epoch and step of the logging worker to each record.

    Add it to a handler, so that it sees records of all loggers; on a logger it sees only records
    logged there directly, not those of child loggers. With a ``QueueHandler``, add it to that
    handler, which runs in the logging thread. Passes every record. Thread-safe::

        handler = logging.StreamHandler()
        handler.addFilter(WorkerLogFilter())
        handler.setFormatter(logging.Formatter("%(levelname)s %(worker)s%(message)s"))

    Adds ``rank``, ``epoch`` and ``step`` (batches trained by the rank) as numbers, and ``worker``,
    a text such as ``"[rank 0 epoch 1 step 12] "``, to records of a worker's thread or its loader.
    In other threads the first three are ``None`` and ``worker`` is empty. Attributes that a
    record already has, such as from ``extra={"rank": 3}``, are kept. Reads nothing from a device.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; always ``True``."""
        values: dict[str, object] = {"rank": None, "epoch": None, "step": None}
        text = ""
        try:
            worker: object = current_worker()
        except RuntimeError:
            worker = None
        if worker is not None:
            # In a loader process only the rank is available.
            values["rank"] = getattr(worker, "rank", None)
            values["epoch"] = getattr(worker, "current_epoch", None)
            values["step"] = getattr(worker, "local_step", None)
            present = [f"{name} {value}" for name, value in values.items() if value is not None]
            text = f"[{' '.join(present)}] " if present else ""
        for name, value in {**values, "worker": text}.items():
            record.__dict__.setdefault(name, value)
        return True


def announce(
    log: logging.Logger, text: str, *, silent: bool = False, level: int = logging.INFO
) -> None:
    """Log a line, or write it to stderr if no handler is configured, folded.

    Nothing is written if the logger or one of its parents is disabled or has a level above
    ``level`` (except for the root logger, whose default level is WARNING).

    Args:
        silent: Never write to stderr.
    """
    if log.hasHandlers():
        log.log(level, "%s", text)
    elif not silent and is_announced(log, level):
        folded = "\n".join(fold(text))
        record = log.makeRecord(log.name, level, "", 0, folded, (), None)
        logging.StreamHandler().handle(record)


LINE_WIDTH = 79
"""Columns of a line: a terminal of 80 may wrap after the last."""


def fold(text: str) -> list[str]:
    """Lines of at most ``LINE_WIDTH`` columns; all but the first are indented.

    They are broken after semicolons, else after commas, else between words.
    """
    lines = [""]

    def add(part: str, separator: str) -> None:
        if not lines[-1].strip():
            lines[-1] += part
        elif len(lines[-1]) + len(separator) + 1 + len(part) < LINE_WIDTH:
            lines[-1] += f"{separator} {part}"
        else:
            lines[-1] += separator
            lines.append(f"  {part}")

    for part in text.split("; "):
        if len(part) < LINE_WIDTH - 2:
            add(part, ";")
            continue
        for number, piece in enumerate(part.split(", ")):
            separator = "," if number else ";"
            for word in piece.split(" ") if len(piece) > LINE_WIDTH - 4 else [piece]:
                add(word, separator)
                separator = ""
    return lines


def is_announced(log: logging.Logger, level: int = logging.INFO) -> bool:
    """True if :func:`announce` writes lines of this logger, to its handlers or to stderr."""
    if log.hasHandlers():
        return log.isEnabledFor(level)
    if sys.stderr is None or logging.root.manager.disable >= level:
        return False
    at: logging.Logger | None = log
    while at is not None and at is not logging.root:
        if at.disabled or at.level > level:
            return False
        at = at.parent
    return True
