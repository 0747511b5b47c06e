"""Metrics of each epoch for TensorBoard."""

from __future__ import annotations

import os
import re
import threading
import weakref
from typing import TYPE_CHECKING

from coordinator.metrics import EpochMetrics
from runtime.core.checks import check_directory, check_path, need
from runtime.loggers.base import Names, RunLogger, epoch_values, rank_values
from runtime.timeline.export import one_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_OWN = re.compile(r"(epoch|rank\d+)/")


class TensorBoardLogger(RunLogger):
    """Writes the metrics of each epoch as scalars for TensorBoard, for ``metrics_fn``.

    Tags: ``epoch/avg_loss`` and the other numbers of the epoch, ``rank0/throughput`` and so
    on, and each scalar under its own name; the step is the epoch. Names with line breaks or
    control characters are written with escapes, long ones are cut.

    Each epoch is flushed when it is written, so that one that is never closed loses nothing.
    The end of the run that has it as ``metrics_fn``, alone or in a :class:`CombinedLogger`,
    ends the writer's thread; of several runs at once, the end of the last. So do :meth:`close`,
    leaving a ``with`` block, the end of the object and of the process, which is for a logger
    that a function of your own calls. A later call opens a file anew. A resumed run adds a
    file of its own to the directory, and TensorBoard shows its epochs instead of those that
    came after the checkpoint. Any thread may call it.

    Args:
        log_dir: Directory of the event files; made if needed.

    Raises:
        ImportError: ``tensorboard`` is not installed.
        TypeError: The path is no path.
        ValueError: It is a file.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        need("TensorBoardLogger", ("tensorboard",), "monitor")
        self.log_dir = check_path("TensorBoardLogger", log_dir)
        check_directory("TensorBoardLogger", self.log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._names = Names(one_line, lambda tag: _OWN.match(tag) is not None)
        self._writer: SummaryWriter | None = None
        self._finalizer: weakref.finalize[[], TensorBoardLogger] | None = None

    def __call__(self, metrics: EpochMetrics) -> None:
        """Write the scalars of an epoch and flush them.

        Raises:
            OSError: They could not be written.
        """
        scalars = metrics.scalars.copy()  # which others may write to meanwhile
        with self._lock:
            writer = self._open(metrics.epoch)
            values = [(f"epoch/{name}", value) for name, value in epoch_values(metrics)]
            values += rank_values(metrics)
            values += [(self._names.of(name), value) for name, value in scalars.items()]
            for tag, value in values:
                writer.add_scalar(tag, value, metrics.epoch)
            writer.flush()

    def _open(self, epoch: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What a run wrote after the checkpoint that this one goes on from is hidden.
            self._writer = SummaryWriter(str(self.log_dir), purge_step=epoch or None)
            self._finalizer = weakref.finalize(self, self._writer.close)
        return self._writer

    def close(self) -> None:
        """End the writer's thread, which waits for the disk. Idempotent."""
        with self._lock:
            finalizer, self._finalizer, self._writer = self._finalizer, None, None
        if finalizer is not None:
            finalizer()
