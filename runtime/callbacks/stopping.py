"""Callbacks that end a run."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from functools import partial

from coordinator.metrics import EpochMetrics
from runtime.callbacks.base import Callback, Running, Watched
from runtime.core.checks import check_float, check_int

logger = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Ends a run whose metric gets no better, or has reached a target.

    The run ends as by ``handle.stop()``: the weights are those at the end, not those of the
    best epoch, which :class:`KeepBest` keeps. Epochs before a resume are not known.

    Args:
        metric: A field of :class:`~runtime.EpochMetrics`, or a name in its ``scalars``:
            ``"avg_loss"``, ``"accuracy"`` of ``record_scalar``, ``"eval/loss"`` of ``eval_fn``.
        patience: Epochs in a row without a better value after which the run ends.
        mode: ``"min"``: less is better; ``"max"``: more.
        min_delta: What a value has to be better by.
        target: Ends the run as soon as the metric is as good as this.

    Attributes:
        best: The best value; ``None``: there was none.
        best_epoch: Its epoch.
        stopped_epoch: The epoch after which the run was ended; ``None``: it was not.

    Raises:
        TypeError, ValueError: An argument of the wrong type, or out of range.
    """

    def __init__(
        self,
        metric: str = "avg_loss",
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        super().__init__()
        check_float("EarlyStopping: min_delta", min_delta, 0.0)
        self._make = partial(Watched, "EarlyStopping", metric, mode, min_delta)
        self._watched = self._make()
        self._patience = check_int("EarlyStopping: patience", patience, 1)
        self._target = target
        self._num_worse = 0
        self.stopped_epoch: int | None = None

    @property
    def best(self) -> float | None:
        """The best value of the run."""
        return self._watched.best

    @property
    def best_epoch(self) -> int | None:
        """Its epoch."""
        return self._watched.best_epoch

    def begin(self, run: Running) -> None:
        """See :meth:`Callback.begin`."""
        super().begin(run)
        self._watched, self._num_worse, self.stopped_epoch = self._make(), 0, None

    def __call__(self, metrics: EpochMetrics) -> bool:
        """``False`` if the run is to end."""
        value = self._watched.read(metrics)
        if value is None:
            return True
        self._num_worse = 0 if self._watched.improves(value, metrics.epoch) else self._num_worse + 1
        reached = self._target is not None and self._watched.reaches(value, self._target)
        if not reached and self._num_worse < self._patience:
            return True
        if self.stopped_epoch is None:
            self.stopped_epoch = metrics.epoch
            why = "has reached its target" if reached else f"{self._num_worse} epochs no better"
            logger.info("the run ends after epoch %d: %g, %s", metrics.epoch, value, why)
        return False


class TimeLimit(Callback):
    """Ends a run at a step boundary once it has lasted so long, in mid-epoch too.

    Args:
        limit: Seconds, or a ``timedelta``; counted anew in a run that was resumed.

    Raises:
        TypeError, ValueError: No number above 0.
    """

    def __init__(self, limit: float | timedelta) -> None:
        super().__init__()
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self._limit_s = check_float("TimeLimit", seconds, 0.0, above=True)
        self._timer: threading.Timer | None = None

    def begin(self, run: Running) -> None:
        """Start a thread that waits for the time, or for the end of the run."""
        super().begin(run)

        def stop() -> None:
            logger.info("the run ends after %g s", self._limit_s)
            run.stop()

        self._timer = threading.Timer(self._limit_s, stop)
        self._timer.name, self._timer.daemon = "time-limit", True
        self._timer.start()

    def end(self) -> None:
        """End the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        super().end()
