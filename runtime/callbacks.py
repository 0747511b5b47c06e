"""Callbacks of a run: early stopping, the best weights, a time limit."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from coordinator.metrics import EpochMetrics, StepMetrics
from runtime.checkpoint.files import save_weights
from runtime.checkpoint.format import named_weights
from runtime.checkpoint.tensor_file import TensorFileError, load_file, read_metadata
from runtime.core.checks import (
    check_flag,
    check_float,
    check_int,
    check_path,
    check_text,
    check_word,
)
from runtime.core.errors import UnknownMetric
from runtime.replica.flat import copy_values

logger = logging.getLogger(__name__)

MODES = ("min", "max")
_IN_USE_LOCK = threading.Lock()
METRIC_REMEDY = "a name, such as 'eval/loss'"


class Callback:
    """Watches a run; for :meth:`TrainerBuilder.callbacks <gpuworker.TrainerBuilder.callbacks>`.

    Subclasses override methods. An object serves one run at a time, and can be reused. Once the
    run has started, exceptions of the methods are logged.

    Attributes:
        takes_weights: If True, :meth:`weights` is called.
    """

    takes_weights = False
    _is_in_use = False  # of the class: subclasses may have an __init__ that does not call this one

    def begin(self, run: StoppableRun) -> None:
        """Called before the run starts, in the thread that starts it.

        Raises:
            RuntimeError: The callback serves another run that is not over.
        """
        with _IN_USE_LOCK:
            if self._is_in_use:
                raise RuntimeError(
                    f"{type(self).__name__} serves a run that is not over: create one for each run"
                )
            self._is_in_use = True

    def __call__(self, metrics: EpochMetrics) -> object:
        """Called on the metrics thread when an epoch has closed; ``False`` ends the run."""
        return None

    def step(self, metrics: StepMetrics) -> object:
        """Called on the metrics thread every so many batches (:meth:`TrainerBuilder.metrics_every
        <gpuworker.TrainerBuilder.metrics_every>`) and after an evaluation within an epoch
        (``eval_every``); ``False`` ends the run.
        """
        return None

    def dispatch(self, metrics: EpochMetrics | StepMetrics) -> object:
        """Call the method for the type of ``metrics``; used by the run."""
        return self.step(metrics) if isinstance(metrics, StepMetrics) else self(metrics)

    def weights(self, epoch: int, model: nn.Module) -> None:
        """Called with the averaged weights of a closing epoch, before its metrics. Runs in a
        worker's thread, which waits; copy tensors to keep them.
        """

    def final_state(self, state: Any) -> Any:
        """Called with the run's :class:`~gpuworker.TrainedState` when it is over, before
        :meth:`end`; returns the one that ``join()`` returns.
        """
        return state

    def end(self) -> None:
        """Called when the run is over."""
        with _IN_USE_LOCK:
            self._is_in_use = False


class StoppableRun(Protocol):
    """The interface of a run to its callbacks."""

    @property
    def past_metrics(self) -> Sequence[EpochMetrics]:
        """The metrics of the epochs that closed before a resume."""

    def stop(self, reason: str = "stopped") -> None:
        """Stop at a step boundary and keep the state; returns immediately."""


class MetricReader:
    """Reads one metric of each epoch.

    Args:
        owner: Name of the callback or setting, for messages.
        metric: A field of :class:`~gpuworker.EpochMetrics`, or a name in its ``scalars``.
    """

    def __init__(self, owner: str, metric: str) -> None:
        self._owner = owner
        self._metric = metric
        self._has_value = False
        self._has_warned = False

    def read(self, metrics: EpochMetrics) -> float | None:
        """The value of an epoch; ``None`` if it is missing, which is logged once.

        An epoch that ``max_steps`` has cut short is not evaluated. A metric under ``val/`` may be
        missing until the first validation.

        Raises:
            UnknownMetric: No epoch has had the metric.
        """
        value = metrics.value(self._metric)
        if value is not None:
            self._has_value = True
            return value
        if metrics.partial:
            return None
        if not self._has_value and not self._awaits_validation(metrics):
            raise UnknownMetric(self._owner, metrics.epoch, self._metric, metrics.names)
        if self._has_value and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: epoch %d has no metric %r, unlike earlier ones, and is ignored",
                self._owner,
                metrics.epoch,
                self._metric,
            )
        return None

    def _awaits_validation(self, metrics: EpochMetrics) -> bool:
        prefix = "val/"
        return self._metric.startswith(prefix) and not any(
            name.startswith(prefix) for name in metrics.scalars
        )


class MetricTracker:
    """Tracks a metric and its best value.

    Args:
        owner: Name of the callback, for messages.
        metric: A field of :class:`~gpuworker.EpochMetrics`, or a name in its ``scalars``.
        mode: ``"min"`` or ``"max"``.
        min_delta: Minimum improvement.

    Attributes:
        best: The best value so far, if any.
        best_epoch: Epoch of the best value.
    """

    def __init__(self, owner: str, metric: str, mode: str, min_delta: float = 0.0) -> None:
        check_text(f"{owner}: metric", metric, METRIC_REMEDY)
        check_word(f"{owner}: mode", mode, MODES)
        self._reader = MetricReader(owner, metric)
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self.best: float | None = None
        self.best_epoch: int | None = None

    def read(self, metrics: EpochMetrics) -> float | None:
        return self._reader.read(metrics)

    def improves(self, value: float, epoch: int) -> bool:
        """True if ``value`` is the best so far, which is recorded; NaN never is."""
        first = self.best is None and not math.isnan(value)
        if not first and not (
            self.best is not None and self._sign * (self.best - value) > self._min_delta
        ):
            return False
        self.best, self.best_epoch = value, epoch
        return True

    def reaches(self, value: float, target: float) -> bool:
        """True if ``value`` is at least as good as ``target``."""
        return self._sign * (target - value) >= 0


class _MetricCallback(Callback):
    """A callback that tracks a metric.

    Attributes:
        metric: The metric's name.
    """

    metric: str
    _tracker: MetricTracker

    @property
    def best(self) -> float | None:
        """The best value so far, if any."""
        return self._tracker.best

    @property
    def best_epoch(self) -> int | None:
        return self._tracker.best_epoch


class EarlyStopping(_MetricCallback):
    """Ends a run whose metric no longer improves, or has reached a target.

    The run ends as by ``handle.stop()``: the weights are those at the end, not those of the
    best epoch, which :class:`KeepBest` keeps. After a resume, the epochs before it count as well.

    Args:
        metric: A field of :class:`~gpuworker.EpochMetrics`, or a name in its ``scalars``:
            ``"avg_loss"``, ``"accuracy"`` of ``record_scalar``, ``"eval/loss"`` of ``eval_fn``.
        patience: Consecutive epochs without improvement after which the run ends.
        mode: ``"min"``: lower is better; ``"max"``: higher.
        min_delta: Minimum improvement, which must be exceeded.
        target: Value at which the run ends.

    Attributes:
        best: The best value, if any.
        best_epoch: Epoch of the best value.
        stopped_epoch: The epoch after which the run was ended, if it was.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        metric: str = "avg_loss",
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        check_float("EarlyStopping: min_delta", min_delta, 0.0)
        self._make_tracker = partial(MetricTracker, "EarlyStopping", metric, mode, min_delta)
        self._tracker = self._make_tracker()
        self.metric = metric
        self._patience = check_int("EarlyStopping: patience", patience, 1)
        self._target = target
        self._num_worse = 0
        self.stopped_epoch: int | None = None

    def begin(self, run: StoppableRun) -> None:
        """See :meth:`Callback.begin`."""
        super().begin(run)
        self._tracker, self._num_worse, self.stopped_epoch = self._make_tracker(), 0, None
        for metrics in run.past_metrics:
            value = metrics.value(self.metric)
            if value is not None and not metrics.partial:
                self._count(value, metrics.epoch)

    def _count(self, value: float, epoch: int) -> None:
        self._num_worse = 0 if self._tracker.improves(value, epoch) else self._num_worse + 1

    def __call__(self, metrics: EpochMetrics) -> bool:
        """Return ``False`` to end the run."""
        value = self._tracker.read(metrics)
        if value is None or metrics.partial:
            return True  # an epoch that is cut ends the run by itself, and cannot be compared
        self._count(value, metrics.epoch)
        reached = self._target is not None and self._tracker.reaches(value, self._target)
        if not reached and self._num_worse < self._patience:
            return True
        if self.stopped_epoch is None:
            self.stopped_epoch = metrics.epoch
            why = "has reached its target" if reached else f"{self._num_worse} epochs no better"
            logger.info("the run ends after epoch %d: %g, %s", metrics.epoch, value, why)
        return False


class TimeLimit(Callback):
    """Ends a run at a step boundary after a time limit, also within an epoch.

    Args:
        limit: Seconds, or a ``timedelta``; a resumed run starts from 0.

    Raises:
        TypeError, ValueError: Not a number above 0.
    """

    def __init__(self, limit: float | timedelta) -> None:
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self._limit_s = check_float("TimeLimit", seconds, 0.0, above=True)
        self._timer: threading.Timer | None = None

    def begin(self, run: StoppableRun) -> None:
        """Start the timer's thread."""
        super().begin(run)

        def stop() -> None:
            logger.info("the run ends after %g s", self._limit_s)
            run.stop("out_of_time")

        self._timer = threading.Timer(self._limit_s, stop)
        self._timer.name, self._timer.daemon = "time-limit", True
        self._timer.start()

    def end(self) -> None:
        """Stop the timer's thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        super().end()


class KeepBest(_MetricCallback):
    """Keeps the averaged weights of the epoch with the best metric, in a safetensors file, in the
    state that ``join()`` returns, or in both.

    A bare module loads the file: ``Net().load_state_dict(safetensors.torch.load_file(path))``. It
    is written in the metrics thread, whole or not at all. Until an epoch's metrics are known, one
    copy of its weights is held in host memory; with ``restore`` also one of the best ones. After
    a resume the file is replaced by better weights only, if it holds the best epoch of the
    resumed run.

    Args:
        path: The file; its directory is created if needed. ``None``: none is written.
        metric: As for :class:`EarlyStopping`.
        mode: ``"min"``: lower is better; ``"max"``: higher.
        restore: The state of the run has the best weights in place of the last ones; so has a
            module that was passed in place of a factory.

    Attributes:
        path: The file, if any.
        best: The best value, if any.
        best_epoch: Epoch of the best value, whose weights are kept.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, or there is
            neither a path nor ``restore``.
    """

    takes_weights = True

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        metric: str = "avg_loss",
        mode: str = "min",
        restore: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._restores = check_flag("KeepBest: restore", restore)
        if path is None and not restore:
            raise ValueError(
                "KeepBest() keeps nothing: pass a path for the best weights, or restore=True to "
                "have them in the state that join() returns"
            )
        self.path: Path | None = None if path is None else check_path("KeepBest", path)
        self.metric = metric
        self._make_tracker = partial(MetricTracker, "KeepBest", metric, mode)
        self._tracker = self._make_tracker()
        self._weights: dict[int, _EpochWeights] = {}
        self._best_values: dict[str, Any] | None = None

    def begin(self, run: StoppableRun) -> None:
        """Make the directory, and find the best epoch before a resume.

        Raises:
            OSError: The directory cannot be created.
        """
        super().begin(run)
        self._tracker = self._make_tracker()
        self._weights, self._best_values = {}, None
        if self.path is None:
            return  # the weights of earlier epochs are not kept
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for metrics in run.past_metrics:
            value = metrics.value(self.metric)
            if value is not None:
                self._tracker.improves(value, metrics.epoch)
        if self.best is None or not self.path.exists():
            self._tracker = self._make_tracker()
        elif _read_metadata(self.path).get(_BEST) != self._described():
            logger.warning(
                "KeepBest: %s does not hold the weights of epoch %s, the best of the resumed run: "
                "the next epoch replaces them",
                self.path,
                self.best_epoch,
            )
            self._tracker = self._make_tracker()

    def _described(self) -> str:
        """The metric, the best epoch and its value, for the file."""
        return json.dumps([self.metric, self.best_epoch, self.best])

    def weights(self, epoch: int, model: nn.Module) -> None:
        """Copy an epoch's weights until its metrics arrive."""
        values = copy_values(model) if self._restores else {}
        in_file: dict[str, Tensor] = {}
        if self.path is not None:
            for name, t in named_weights(model).items():
                in_file[name] = values.get(name, t).detach().to("cpu", copy=name not in values)
        with self._lock:
            self._weights[epoch] = _EpochWeights(values, in_file)

    def __call__(self, metrics: EpochMetrics) -> None:
        """Keep the epoch's weights if it is the best."""
        with self._lock:
            weights = self._weights.pop(metrics.epoch, None)
        value = self._tracker.read(metrics)
        if weights is None or value is None or not self._tracker.improves(value, metrics.epoch):
            return
        if self._restores:
            self._best_values = weights.values
        if self.path is not None:
            save_weights(self.path, weights.in_file, {_BEST: self._described()})

    def final_state(self, state: Any) -> Any:
        """The state with the best weights, if ``restore``."""
        if self.best_epoch is None:
            logger.warning(
                "KeepBest(metric=%r): no closed epoch had a value of this metric: the state has "
                "the last weights%s. Train until an epoch closes, with val_dataset(every=n) one "
                "that is validated, or choose a metric that each epoch has, such as 'avg_loss'",
                self.metric,
                "" if self.path is None else f", and {self.path} was not written",
            )
            return state
        if not self._restores:
            return state
        values = self._best_values
        if values is None:  # of an epoch before the resume
            assert self.path is not None, "only a file outlasts a run"
            values = load_file(self.path)
        logger.info("the state has the weights of epoch %d, the best", self.best_epoch)
        return state.with_values(values)

    def end(self) -> None:
        """Release the weights."""
        self._weights, self._best_values = {}, None
        super().end()


class _EpochWeights(NamedTuple):
    """The values of a model in its state, and in a file of its weights."""

    values: dict[str, Any]
    in_file: dict[str, Tensor]


_BEST = "gpuworker_best"
"""Key in the metadata of a file of :class:`KeepBest`."""


def _read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it cannot be read."""
    try:
        return read_metadata(path)
    except (OSError, TensorFileError):
        return {}
