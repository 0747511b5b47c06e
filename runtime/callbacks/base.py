"""What a callback is, and how it reads a metric."""

from __future__ import annotations

import logging
import math
import threading
from typing import Protocol

from torch import nn

from coordinator.metrics import EpochMetrics, StepMetrics

logger = logging.getLogger(__name__)

MODES = ("min", "max")


class Running(Protocol):
    """What a callback may do to its run."""

    def stop(self) -> None:
        """End it at a step boundary and keep its state; returns at once."""


class Callback:
    """Watches a run; for :meth:`TrainerBuilder.callbacks <runtime.TrainerBuilder.callbacks>`.

    A subclass overrides what it needs. One object serves one run at a time, and may serve
    another one afterwards. What a method raises once the run goes on is logged.

    Attributes:
        takes_weights: Whether :meth:`weights` is called.
    """

    takes_weights = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_in_use = False

    def begin(self, run: Running) -> None:
        """The run is about to start; in the thread that starts it.

        Raises:
            RuntimeError: The callback watches another run, which is not over.
        """
        with self._lock:
            if self._is_in_use:
                raise RuntimeError(
                    f"{type(self).__name__} watches a run that is not over: make one for each run"
                )
            self._is_in_use = True

    def __call__(self, metrics: EpochMetrics) -> object:
        """An epoch has closed; ``False`` ends the run. On the metrics thread."""
        return None

    def step(self, metrics: StepMetrics) -> object:
        """Some batches are trained, with :meth:`TrainerBuilder.metrics_every
        <runtime.TrainerBuilder.metrics_every>`; ``False`` ends the run. On the metrics thread."""
        return None

    def tell(self, metrics: EpochMetrics | StepMetrics) -> object:
        """Hand metrics to the method of their kind; called by the run."""
        return self.step(metrics) if isinstance(metrics, StepMetrics) else self(metrics)

    def weights(self, epoch: int, model: nn.Module) -> None:
        """The averaged weights of an epoch that closes; its metrics come afterwards. On the thread
        of a worker, which waits: copy what is to be kept."""

    def end(self) -> None:
        """The run is over."""
        with self._lock:
            self._is_in_use = False


class Watched:
    """A metric of each epoch, and the best one so far.

    Args:
        owner: Whose it is, for messages.
        metric: A field of :class:`~runtime.EpochMetrics`, or a name in its ``scalars``.
        mode: Whether less or more is better.
        min_delta: What a value has to be better by.

    Attributes:
        best: The best value so far; ``None``: there was none.
        best_epoch: Its epoch.
    """

    def __init__(self, owner: str, metric: str, mode: str, min_delta: float = 0.0) -> None:
        if not isinstance(metric, str):
            raise TypeError(f"{owner}(metric={metric!r}): pass a name, such as 'eval/loss'")
        if mode not in MODES:
            raise ValueError(f"{owner}(mode={mode!r}): pass one of {', '.join(MODES)}")
        self._owner = owner
        self._metric = metric
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self._has_told = False
        self.best: float | None = None
        self.best_epoch: int | None = None

    def read(self, metrics: EpochMetrics) -> float | None:
        """The value of an epoch; ``None``, and once an error in the log: it has none. One that
        ``max_steps`` has cut was not evaluated."""
        value = metrics.value(self._metric)
        if value is not None:
            return value
        if not (self._has_told or metrics.partial):
            self._has_told = True
            logger.error(
                "%s: epoch %d has no metric %r; there are avg_loss and %s",
                self._owner,
                metrics.epoch,
                self._metric,
                ", ".join(sorted(metrics.scalars)) or "no scalars",
            )
        return None

    def improves(self, value: float, epoch: int) -> bool:
        """Whether this is better than all before; NaN never is."""
        first = self.best is None and not math.isnan(value)
        if not first and not (
            self.best is not None and self._sign * (self.best - value) > self._min_delta
        ):
            return False
        self.best, self.best_epoch = value, epoch
        return True

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as this."""
        return self._sign * (target - value) >= 0
