"""Several functions where one is expected."""

from __future__ import annotations

import logging
from collections.abc import Callable

from coordinator.metrics import EpochMetrics

logger = logging.getLogger(__name__)


class CombinedLogger:
    """Hands each epoch to several loggers or functions, for ``metrics_fn``.

    One that raises is logged, and the others are called all the same.

    Args:
        functions: Each as ``metrics_fn`` takes it, called in this order.

    Raises:
        TypeError: One of them cannot be called.
    """

    def __init__(self, *functions: Callable[[EpochMetrics], object]) -> None:
        for function in functions:
            if not callable(function):
                raise TypeError(
                    f"CombinedLogger({function!r:.80}): pass loggers or functions f(EpochMetrics)"
                )
        self._functions = functions

    def __call__(self, metrics: EpochMetrics) -> bool:
        """Call all of them; ``False``, which ends the run, if one returned ``False``."""
        goes_on = True
        for function in self._functions:
            try:
                goes_on = function(metrics) is not False and goes_on
            except Exception:
                logger.exception("%r failed for epoch %d", function, metrics.epoch)
        return goes_on
