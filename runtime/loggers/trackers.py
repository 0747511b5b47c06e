"""WandbLogger and MlflowLogger: metrics in Weights & Biases and MLflow."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from coordinator.metrics import EpochMetrics, StepMetrics
from runtime.core.checks import require_modules
from runtime.loggers.base import (
    Number,
    RunLogger,
    ScalarNames,
    epoch_values,
    rank_values,
    step_values,
)

_OWN = re.compile(r"(epoch|step|rank\d+)(/|$)")
_UNSAFE = re.compile(r"[^\w\-. /]")  # characters that MLflow does not accept in a name
MAX_NAME, MAX_BATCH = 200, 1000
"""MLflow's limits: length of a name, and values per batch."""


class _TrackerLogger(RunLogger):
    """Base class of loggers of experiment trackers. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names = ScalarNames(_clean, lambda name: _OWN.match(name) is not None)

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> None:
        """Pass the metrics of an epoch or of some steps to the tracker."""
        with self._lock:
            if isinstance(metrics, StepMetrics):
                self._write(dict(self._of_steps(metrics)), "step", metrics.step, metrics.epoch)
            else:
                self._write(dict(self._of_epoch(metrics)), "epoch", metrics.epoch, metrics.epoch)

    def _of_steps(self, metrics: StepMetrics) -> Iterator[tuple[str, Number]]:
        for name, value in (*step_values(metrics), *self._scalars(metrics)):
            yield f"step/{name}", value

    def _of_epoch(self, metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
        for name, value in epoch_values(metrics):
            yield f"epoch/{name}", value
        yield from rank_values(metrics)
        yield from self._scalars(metrics)

    def _scalars(self, metrics: EpochMetrics | StepMetrics) -> list[tuple[str, Number]]:
        scalars = metrics.scalars.copy()  # which other threads may write to
        return [(self._names.of(name), value) for name, value in scalars.items()]

    def _write(self, values: dict[str, Number], axis: str, position: int, epoch: int) -> None:
        raise NotImplementedError


def _clean(name: str) -> str:
    return _UNSAFE.sub("_", name)[:MAX_NAME]


class WandbLogger(_TrackerLogger):
    """Writes metrics to a run of Weights & Biases, for ``metrics_fn``.

    ``epoch/avg_loss`` and the other numbers of an epoch, ``rank0/throughput`` and so on, and each
    scalar under its own name are plotted over ``epoch``. Metrics within an epoch
    (``metrics_every``, ``eval_every``) are plotted over ``step``, the batches of all ranks, as
    ``step/avg_loss``, ``step/<scalar>`` and so on.

    Args:
        run: A run that you started with ``wandb.init``, and finish yourself. ``None``: the run
            that is active at the first metrics. Without one, the logger starts a run,
            and finishes it with the training run or by :meth:`close`.
        settings: Arguments of ``wandb.init`` for a run started here: ``project="digits"``.

    Raises:
        ImportError: ``wandb`` is not installed.
        TypeError: Settings were given together with ``run``.
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        require_modules("WandbLogger", ("wandb",), "wandb")
        if run is not None and settings:
            raise TypeError(
                f"WandbLogger(run, {', '.join(settings)}=...): pass the settings to wandb.init, "
                "which starts the run"
            )
        super().__init__()
        self._passed_run = run
        self._settings = settings
        self._run: Any = None
        self._is_own = False
        self._defined: set[str] = set()

    def _write(self, values: dict[str, Number], axis: str, position: int, epoch: int) -> None:
        run = self._run or self._open()
        for name in values.keys() - self._defined:
            run.define_metric(name, step_metric=axis)
            self._defined.add(name)
        run.log({**values, "epoch": epoch, axis: position})

    def _open(self) -> Any:
        wandb = import_module("wandb")
        self._run = self._passed_run or wandb.run
        self._is_own = self._run is None
        if self._is_own:
            self._run = wandb.init(**self._settings)
        self._defined.clear()
        return self._run

    def close(self) -> None:
        """Finish the run that was started here. Idempotent; a later call starts another."""
        with self._lock:
            run, self._run = self._run, None
            # Under the lock: until it ends it is wandb.run, which a write would take over.
            if run is not None and self._is_own:
                run.finish()


class MlflowLogger(_TrackerLogger):
    """Writes metrics to a run of MLflow, for ``metrics_fn``.

    Names are those of :class:`WandbLogger`. The step of an epoch's numbers is the epoch; the
    step of numbers within an epoch is the number of batches of all ranks.

    Args:
        run_id: A run that you started, and end yourself. ``None``: the active run of the thread
            that creates the logger. Without one, the logger starts a run with the first metrics
            and ends it with the training run or by :meth:`close`; a later call resumes it.
        experiment: Experiment of a run started here; created if needed.
        tracking_uri: Address of the server or store; ``None``: MLflow's default.

    Raises:
        ImportError: ``mlflow`` is not installed.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        experiment: str = "Default",
        tracking_uri: str | None = None,
    ) -> None:
        require_modules("MlflowLogger", ("mlflow",), "mlflow")
        super().__init__()
        mlflow = import_module("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri)
        self._metric = mlflow.entities.Metric
        if run_id is None and (active := mlflow.active_run()) is not None:
            run_id = active.info.run_id
        self.run_id = run_id
        self._experiment = experiment
        self._is_open = False

    def _write(self, values: dict[str, Number], axis: str, position: int, epoch: int) -> None:
        if self.run_id is None:
            self.run_id = self._client.create_run(self._experiment_id()).info.run_id
            self._is_open = True
        now_ms = int(time.time() * 1000)
        entries = [self._metric(name, float(v), now_ms, position) for name, v in values.items()]
        for first in range(0, len(entries), MAX_BATCH):
            self._client.log_batch(self.run_id, metrics=entries[first : first + MAX_BATCH])

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            return str(self._client.create_experiment(self._experiment))
        return str(found.experiment_id)

    def close(self) -> None:
        """End the run that was started here. Idempotent."""
        with self._lock:
            is_open, self._is_open = self._is_open, False
        if is_open:
            self._client.set_terminated(self.run_id)
