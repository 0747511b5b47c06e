"""TensorBoardLogger: metrics as scalars of event files."""

from __future__ import annotations

import os
import re
import threading
import weakref
from typing import TYPE_CHECKING

from coordinator.metrics import EpochMetrics, StepMetrics
from runtime.core.checks import check_directory, check_path, require_modules
from runtime.loggers.base import RunLogger, ScalarNames, epoch_values, rank_values, step_values
from runtime.timeline.text import one_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_OWN_TAG = re.compile(r"(epoch|step|rank\d+)/")


class TensorBoardLogger(RunLogger):
    """Writes the metrics of each epoch as scalars for TensorBoard, for ``metrics_fn``.

    Tags: ``epoch/avg_loss`` and the other numbers of the epoch, ``rank0/throughput`` and so
    on, and each scalar under its own name; the step is the epoch. Metrics within an epoch
    (``metrics_every``, ``eval_every``) go to ``steps`` in the directory, which TensorBoard shows as
    a separate run, under ``step/avg_loss`` and so on, over the batches of all ranks. Line breaks
    and control characters in names are escaped, and long names are cut.

    Each epoch is flushed when it is written, so nothing is lost without :meth:`close`. The
    writers' threads end with the run whose ``metrics_fn`` this is, alone or in a
    :class:`CombinedLogger`; with several runs at once, with the last. If a function of your own
    calls the logger, they end with :meth:`close`, the ``with`` block, the object or the process.
    A later call opens a new file. A resumed run adds its own file to the directory, and
    TensorBoard shows its epochs instead of those after the checkpoint. Callable from any thread.

    Args:
        log_dir: Directory of the event files; created if needed.

    Raises:
        ImportError: ``tensorboard`` is not installed.
        TypeError: ``log_dir`` is not a path.
        ValueError: ``log_dir`` is a file.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        require_modules("TensorBoardLogger", ("tensorboard",), "monitor")
        self.log_dir = check_path("TensorBoardLogger", log_dir)
        check_directory("TensorBoardLogger", self.log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._names = ScalarNames(one_line, lambda tag: _OWN_TAG.match(tag) is not None)
        self._writers: dict[str, SummaryWriter] = {}
        self._finalizers: list[weakref.finalize[[], TensorBoardLogger]] = []

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> None:
        """Write the scalars of an epoch or of some steps, and flush them.

        Raises:
            OSError: They could not be written.
        """
        scalars = metrics.scalars.copy()  # which other threads may write to
        with self._lock:
            # Hides what an earlier run wrote after the checkpoint from which this one resumes.
            if isinstance(metrics, StepMetrics):
                step, before = metrics.step, metrics.step - max(1, metrics.num_batches)
                writer = self._open("steps", before + 1 if before else None)
                values = [(f"step/{name}", value) for name, value in step_values(metrics)]
            else:
                step = metrics.epoch
                writer = self._open("", step or None)
                values = [(f"epoch/{name}", value) for name, value in epoch_values(metrics)]
                values += rank_values(metrics)
            values += [(self._names.of(name), value) for name, value in scalars.items()]
            for tag, value in values:
                writer.add_scalar(tag, value, step)
            writer.flush()

    def _open(self, folder: str, purge_step: int | None) -> SummaryWriter:
        """The writer of a folder; opening it hides earlier events from ``purge_step`` on."""
        if folder not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(self.log_dir / folder), purge_step=purge_step)
            self._writers[folder] = writer
            self._finalizers.append(weakref.finalize(self, writer.close))
        return self._writers[folder]

    def close(self) -> None:
        """Write everything to disk and end the writers' threads. Idempotent."""
        with self._lock:
            finalizers, self._finalizers, self._writers = self._finalizers, [], {}
        for finalizer in finalizers:
            finalizer()
