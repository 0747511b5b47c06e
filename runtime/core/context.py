"""The thread that a user's function runs in: what it can ask, and what is logged there."""

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
    """What the user's functions may ask of the :class:`~gpuworker.GpuWorker` that calls them.

    Attributes:
        rank: Its rank.
        world_size: Number of ranks.
        device: Where it trains.
        generator: Keyed by ``(seed, rank, epoch)``, in a data set by
            ``(seed, epoch, batch position)``.
        model: Its replica.
        optimizer: That of the replica.
        current_epoch: Epoch in training.
        local_step: Batches that this rank has trained.
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
        """Averaging rounds taken."""

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
        """Capture the step anew, after some eager ones."""


class LoaderView:
    """The worker as a data set sees it while a loader reads for it.

    Everything but ``generator`` is the worker's own, and scalars cannot be recorded. The
    generator is keyed by ``(seed, epoch, batch position)``, so that reading ahead changes no draw.

    Attributes:
        rank: The worker's rank.
        generator: CPU generator of the batch being loaded.
    """

    def __init__(self, rank: int, generator: torch.Generator, worker: object = None) -> None:
        self.rank = rank
        self.generator = generator
        self._worker = worker

    def record_scalar(self, name: str, value: float | torch.Tensor) -> None:
        """Refused: no batch is being trained that the value could belong to.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"record_scalar({name!r}, ...) belongs to the batch being trained: call it in train_fn "
            "(a data set is read ahead); return the value with the batch, if it is the batch's"
        )

    def all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Refused: a data set is read ahead, on each rank when it needs a batch.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "all_gather belongs to the batch being trained, and a data set is read ahead: call it "
            "in train_fn"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._worker is None:
            raise AttributeError(f"current_worker().{name} is not available in a loader process")
        return getattr(self._worker, name)


def current_worker() -> CurrentWorker:
    """The worker whose thread, loader thread or loader process is running.

    PyTorch's draws on the CPU come from ``current_worker().generator`` in data sets and, for
    workers on the CPU, in ``train_fn``. Seed other generators from it: those of Python and NumPy
    are shared by all threads. On a GPU pass it as ``generator=``.

    Raises:
        RuntimeError: The calling thread belongs to no worker.
    """
    worker = getattr(_local, "worker", None)
    if worker is None:
        raise RuntimeError(
            "current_worker() is only defined inside train_fn, epoch_fn, eval_fn and data sets, "
            "in a thread of a run"
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
    """Record a scalar for the current batch, averaged over the epoch by samples, or by the
    weights that ``train_fn`` returns with its losses.

    Args:
        name: Key in ``EpochMetrics.scalars``.
        value: A number or a tensor with one element. A tensor is kept and read
            later; it is not synchronised here.

    Raises:
        RuntimeError: Called outside a worker's thread, or in a data set.
        TypeError: The name is no string, or the value no number.
        ValueError: A tensor with more than one element.
    """
    if not isinstance(name, str):
        raise TypeError(f"record_scalar({name!r}, ...): the name must be a string")
    if not hasattr(value, "__float__"):
        raise TypeError(f"record_scalar({name!r}, {value!r:.80}): pass a number or a tensor")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"record_scalar({name!r}) takes one element, got shape {tuple(value.shape)}: "
            "reduce it first, for instance with .mean()"
        )
    current_worker().record_scalar(name, value)


def all_gather(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """Gather rows of all ranks in ``train_fn``, for a loss that relates the samples of the whole
    global batch to each other, such as those of CLIP and SimCLR. Needs ``all_gather(True)`` on the
    builder, and ``policy("sync")`` if there is more than one device::

        def train_fn(model, batch):
            images, texts = model(*batch)           # (n, d) each: this rank's piece
            all_texts, own = gpuworker.all_gather(texts)  # (N, d): the global batch
            logits = images @ all_texts.T           # (n, N)
            labels = torch.arange(own.start, own.stop, device=logits.device)
            return F.cross_entropy(logits, labels)

    Gradients go back to every rank's rows. A step is that of one device that computes the loss
    of the global batch, whether each rank returns the mean over its own rows, as above, or all
    of them return that of the whole: it is the gradient of the weighted mean of the ranks'
    losses. Pieces may be of any size; a rank without a batch in a step gives no rows. With
    ``accumulate(n)`` each micro-batch is gathered by itself. A rank whose loss has the weight 0
    still gets the gradients of the others' losses for its rows, but for a weight that is a
    tensor on a GPU, and with ``sync_batchnorm``: its gradients are zeros then.

    All ranks that have a batch make the same calls in the same order, for each waits there for
    the others, and once more in its backward pass.

    Args:
        tensor: Rows in dimension 0, shape ``(n, ...)``, on the worker's device, of any dtype. ``n``
            may differ from rank to rank and may be 0; the rest may not.

    Returns:
        The rows of all ranks in order of rank, shape ``(N, ...)``, which is the order of the
        global batch where a row belongs to a sample; and where this rank's own are. With one rank
        they are ``tensor`` itself. Gradients of gradients do not pass.

    Raises:
        RuntimeError: Outside ``train_fn``, or without ``all_gather(True)``.
        TypeError, ValueError: No tensor, or one without dimensions.
        ValueError: Ranks called it in different ways; on every rank.
        CollectiveAborted: Another rank has failed; let it pass through ``train_fn``.
    """
    return current_worker().all_gather(tensor)


class WorkerLogFilter(logging.Filter):
    """Gives each record the rank, the epoch and the step of the worker that logged it.

    Add it to a handler, then every record that the handler gets has them, whichever logger
    it came through; added to a logger it sees what is logged there directly, and nothing of
    that logger's children. With a ``QueueHandler`` it belongs on that handler, which runs in
    the thread that logs. It lets every record pass, and may be used by several threads::

        handler = logging.StreamHandler()
        handler.addFilter(WorkerLogFilter())
        handler.setFormatter(logging.Formatter("%(levelname)s %(worker)s%(message)s"))

    Attributes of a record that was made in a worker's thread, or in a loader that reads for
    it: ``rank``, ``epoch`` and ``step`` (batches that the rank has trained) as numbers, and
    ``worker``, a text such as ``"[rank 0 epoch 1 step 12] "``. In other threads the first
    three are ``None`` and ``worker`` is empty. Attributes that a record already has, such as
    from ``extra={"rank": 3}``, are kept. Nothing is read from a device.
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
            # A loader's process knows the rank alone.
            values["rank"] = getattr(worker, "rank", None)
            values["epoch"] = getattr(worker, "current_epoch", None)
            values["step"] = getattr(worker, "local_step", None)
            known = [f"{name} {value}" for name, value in values.items() if value is not None]
            text = f"[{' '.join(known)}] " if known else ""
        for name, value in {**values, "worker": text}.items():
            record.__dict__.setdefault(name, value)
        return True


def announce(log: logging.Logger, text: str, *, silent: bool = False) -> None:
    """Log a line at INFO; where no handler would take it, write it to stderr.

    A logger that was made quiet stays so: one that is disabled, or of a level above INFO, here
    or above it but for the root, whose level is WARNING unless it is set.

    Args:
        log: The logger.
        text: What is said.
        silent: Write nothing to stderr in any case.
    """
    log.info("%s", text)
    if silent or log.hasHandlers() or _is_quiet(log) or sys.stderr is None:
        return
    record = log.makeRecord(log.name, logging.INFO, "", 0, text, (), None)
    logging.StreamHandler().handle(record)


def _is_quiet(log: logging.Logger) -> bool:
    if logging.root.manager.disable >= logging.INFO:
        return True
    at: logging.Logger | None = log
    while at is not None and at is not logging.root:
        if at.disabled or at.level > logging.INFO:
            return True
        at = at.parent
    return False
