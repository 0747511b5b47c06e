"""CombinedLogger: passes metrics to several loggers or functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator.metrics import EpochMetrics, StepMetrics
from runtime.core.errors import UnknownMetric
from runtime.loggers.base import RunLogger, logger


class CombinedLogger(RunLogger):
    """Passes metrics to several loggers or functions, for ``metrics_fn``.

    If one raises, the error is logged and the others are still called. The end of the run, or
    :meth:`close`, closes those that are loggers of this package or of derived classes.

    Args:
        functions: Loggers or functions for ``metrics_fn``, called in this order.

    Raises:
        TypeError: One is not callable.
    """

    def __init__(self, *functions: Callable[[EpochMetrics], object]) -> None:
        for function in functions:
            if not callable(function):
                raise TypeError(
                    f"CombinedLogger({function!r:.80}): pass loggers or functions f(EpochMetrics)"
                )
        self._functions: tuple[Callable[[Any], object], ...] = functions

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> bool:
        """Call all of them; return ``False``, which ends the run, if one returned ``False``.

        Raises:
            UnknownMetric: A callback follows a metric that does not exist; raised after all calls.
        """
        continues, unknown = True, None
        for function in self._functions:
            try:
                continues = function(metrics) is not False and continues
            except UnknownMetric as error:
                unknown = unknown or error
            except Exception:
                logger.exception("%r failed for epoch %d", function, metrics.epoch)
        if unknown is not None:
            raise unknown
        return continues

    def begin_run(self) -> None:
        """Register a run with each logger; called by the run."""
        for log in self._loggers():
            log.begin_run()

    def end_run(self) -> None:
        """Unregister a run with each logger; called by the run, once."""
        self._each(lambda log: log.end_run())

    def close(self) -> None:
        """Close each logger; an error is logged. Idempotent."""
        self._each(lambda log: log.close())

    def _loggers(self) -> list[RunLogger]:
        return [function for function in self._functions if isinstance(function, RunLogger)]

    def _each(self, close: Callable[[RunLogger], None]) -> None:
        for log in self._loggers():
            try:
                close(log)
            except Exception:
                logger.exception("%r could not be closed", log)
