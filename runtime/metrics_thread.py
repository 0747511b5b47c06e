"""The thread that calls ``metrics_fn`` and shows progress.

It is separate from the coordinator and the workers, so a slow or failing function blocks nobody.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from coordinator.metrics import EpochMetrics, StepMetrics
from runtime.core.context import announce
from runtime.core.errors import UnknownMetric
from runtime.core.threads import in_own_context
from runtime.loggers.base import RunLogger

logger = logging.getLogger(__name__)

REFRESH_S = 0.2

ABANDONED_S = 0.1  # join timeout of an abandoned thread


class MetricsThread:
    """Delivers the metrics of closed epochs and of steps to the user.

    Args:
        metrics_fn: ``f(EpochMetrics)`` and ``f(StepMetrics)``; ``False`` stops the run. A logger
            is closed after the last epoch, on this thread, unless another run uses it, too.
        on_stop: Called when ``metrics_fn`` has returned ``False``.
        on_error: Called with an error of ``metrics_fn`` that ends the run.
        progress: Progress bar on a terminal or in a notebook unless ``False``. Elsewhere, ``True``:
            one line an epoch in the log, or on stderr if no handler is configured; ``None``: one
            line if the logger is enabled for INFO.
        total_batches: Batches in the whole run.
        trained: Returns the batches trained so far; thread-safe.
    """

    def __init__(
        self,
        *,
        metrics_fn: Callable[[Any], object] | None,
        on_stop: Callable[[], None],
        on_error: Callable[[BaseException], None],
        progress: bool | None,
        total_batches: int,
        trained: Callable[[], int],
    ) -> None:
        self._metrics_fn = metrics_fn
        self._on_stop = on_stop
        self._on_error = on_error
        kind = _bar_kind()
        self._bar_kind = None if progress is False else kind
        self._is_requested = progress is True
        self._with_lines = kind is None and (
            self._is_requested or (progress is None and logger.isEnabledFor(logging.INFO))
        )
        self._bar: Any = None
        self._total = total_batches
        self._trained = trained
        self._queue: queue.SimpleQueue[EpochMetrics | StepMetrics | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if there is a function or progress to show."""
        if self._metrics_fn is not None or self._bar_kind is not None or self._with_lines:
            thread = threading.Thread(target=in_own_context(self._run), name="metrics", daemon=True)
            if isinstance(self._metrics_fn, RunLogger):
                self._metrics_fn.begin_run()
            try:
                if self._bar_kind is not None:
                    # In this thread: a notebook shows it below the cell that creates it.
                    self._bar = self._bar_kind(total=self._total, unit="batch", leave=True)
                thread.start()
            except BaseException:
                self._end_logger()
                raise
            self._thread = thread

    def owns(self, thread: threading.Thread) -> bool:
        """True if ``thread`` is the metrics thread."""
        return thread is self._thread

    def put(self, metrics: EpochMetrics | StepMetrics) -> None:
        """Queue metrics; returns immediately."""
        if self._thread is not None:
            self._queue.put(metrics)

    def abandon(self) -> None:
        """End a wait in :meth:`close`; acquires no lock."""
        self._ends.put(False)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until all metrics are delivered, then end the thread.

        Args:
            timeout_s: Maximum wait for a function that does not return.
        """
        if self._thread is None:
            return
        self._queue.put(None)
        ended = False
        with suppress(queue.Empty):
            ended = self._ends.get(timeout=timeout_s)
        self._thread.join(None if ended else ABANDONED_S)
        if self._thread.is_alive():
            logger.warning("metrics_fn has not returned; its thread is abandoned")
        else:
            self._thread = None

    def _run(self) -> None:
        try:
            self._deliver()
        finally:
            self._end_logger()
            self._ends.put(True)

    def _end_logger(self) -> None:
        if isinstance(self._metrics_fn, RunLogger):
            try:
                self._metrics_fn.end_run()
            except BaseException:  # does not affect the run's result
                logger.exception("%r could not be closed", self._metrics_fn)

    def _deliver(self) -> None:
        bar = self._bar
        try:
            while True:
                try:
                    metrics = self._queue.get(timeout=REFRESH_S if bar is not None else None)
                except queue.Empty:
                    self._refresh(bar)
                    continue
                if metrics is None:
                    return
                if isinstance(metrics, EpochMetrics):
                    self._show(bar, metrics)
                self._call(metrics)
        finally:
            if bar is not None:
                self._refresh(bar)
                bar.close()

    def _refresh(self, bar: Any) -> None:
        bar.update(self._trained() - bar.n)

    def _show(self, bar: Any, metrics: EpochMetrics) -> None:
        if bar is not None:
            bar.set_postfix(epoch=metrics.epoch, loss=f"{metrics.avg_loss:.4g}", refresh=False)
            self._refresh(bar)
        elif self._with_lines:
            line = (
                f"epoch {metrics.epoch}: loss {metrics.avg_loss:.4g}, {metrics.num_samples} "
                f"samples in {metrics.epoch_s:.2f} s"
            )
            announce(logger, line, silent=not self._is_requested)

    def _call(self, metrics: EpochMetrics | StepMetrics) -> None:
        if self._metrics_fn is None:
            return
        try:
            if self._metrics_fn(metrics) is False:
                self._on_stop()
        except UnknownMetric as error:
            self._on_error(error)
        except BaseException:  # SystemExit would end the thread
            logger.exception("metrics_fn failed for epoch %d; training continues", metrics.epoch)


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no monitor thread


def _bar_kind() -> type[Any] | None:
    """The progress bar's class for a terminal or a notebook; ``None`` elsewhere."""
    if sys.stderr is not None and sys.stderr.isatty():
        return _Bar
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    if importlib.util.find_spec("ipywidgets") is None:
        return _Bar  # as text, below the cell
    from tqdm.notebook import tqdm_notebook

    return type("_NotebookBar", (tqdm_notebook,), {"monitor_interval": 0})
