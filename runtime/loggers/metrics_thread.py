"""The thread that calls ``metrics_fn`` and shows progress.

It is separate from the coordinator and the workers, so a slow or failing function blocks neither.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from coordinator.metrics import EpochMetrics, StepMetrics
from runtime.core.errors import UnknownMetric
from runtime.core.threads import in_own_context
from runtime.loggers.base import RunLogger
from runtime.loggers.progress import ProgressDisplay

logger = logging.getLogger(__name__)

ABANDONED_S = 0.1  # join timeout of an abandoned thread


class MetricsThread:
    """Delivers the metrics of closed epochs and of steps to the user.

    Args:
        metrics_fn: ``f(EpochMetrics)`` and ``f(StepMetrics)``; ``False`` stops the run. A logger
            is closed after the last epoch, on this thread, unless another run uses it, too.
        on_stop: Called when ``metrics_fn`` has returned ``False``.
        on_error: Called with an error of ``metrics_fn`` or ``check`` that ends the run.
        make_display: Makes the display of the progress, in the thread that starts the run;
            ``None``: none is shown.
        check: Called with each epoch's metrics, on the coordinator's thread.
    """

    def __init__(
        self,
        *,
        metrics_fn: Callable[[Any], object] | None,
        on_stop: Callable[[], None],
        on_error: Callable[[BaseException], None],
        make_display: Callable[[], ProgressDisplay | None],
        check: Callable[[EpochMetrics], object] | None = None,
    ) -> None:
        self._metrics_fn = metrics_fn
        self._on_stop = on_stop
        self._on_error = on_error
        self._make_display = make_display
        self._check = check
        self._display: ProgressDisplay | None = None
        self._queue: queue.SimpleQueue[EpochMetrics | StepMetrics | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if there is a function or progress to show."""
        if isinstance(self._metrics_fn, RunLogger):
            self._metrics_fn.begin_run()
        try:
            # In this thread: a notebook shows a bar below the cell that creates it.
            self._display = self._make_display()
            if self._metrics_fn is None and self._display is None:
                return
            thread = threading.Thread(target=in_own_context(self._run), name="metrics", daemon=True)
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
        if self._check is not None and isinstance(metrics, EpochMetrics):
            try:
                self._check(metrics)
            except UnknownMetric as error:
                self._on_error(error)
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
        display = self._display
        due = math.inf if display is None else time.monotonic() + display.refresh_s
        try:
            while True:
                try:
                    left = None if display is None else max(0.0, due - time.monotonic())
                    metrics = self._queue.get(timeout=left)
                except queue.Empty:
                    assert display is not None
                    display.refresh()
                    due = time.monotonic() + display.refresh_s
                    continue
                if metrics is None:
                    return
                if display is not None and isinstance(metrics, EpochMetrics):
                    display.epoch_closed(metrics)
                self._call(metrics)
        finally:
            if display is not None:
                display.close()

    def _call(self, metrics: EpochMetrics | StepMetrics) -> None:
        if self._metrics_fn is None:
            return
        try:
            if _is_false(self._metrics_fn(metrics)):
                self._on_stop()
        except UnknownMetric as error:
            self._on_error(error)
        except BaseException:  # SystemExit would end the thread
            logger.exception("metrics_fn failed for epoch %d; training continues", metrics.epoch)


def _is_false(result: object) -> bool:
    """True for ``False``, also of NumPy or as a tensor, as comparisons of metrics return."""
    if isinstance(result, Tensor | np.generic) and result.ndim == 0:
        result = result.item()
    return result is False
