"""WorkerValidation: a rank's part of a validation, in its thread, on the averaged weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from coordinator import messages as m
from coordinator.batch_means import BatchMeans
from runtime.core.context import worker_context
from runtime.core.errors import CollectiveAborted
from runtime.core.loss_weights import split_loss
from runtime.device.base import Device
from runtime.evaluation.pending_means import (
    EvaluationFn,
    EvaluationView,
    PendingMeans,
    drawing,
    evaluating,
)
from runtime.evaluation.validation_data import ValidationData, ValidationLoader
from runtime.replica.stepper import Stepper, TrainFns
from runtime.worker.reporter import Reporter

REPORT_INTERVAL_S = 5.0
"""Longest time between two reports of a rank: a long validation shows progress."""


class WorkerValidation:
    """Evaluates batches of the validation set with the live weights.

    The model is in evaluation mode, without gradients, under the precision of the run. Random draws
    are seeded by batch, and leave the worker's generators as they were.

    Args:
        worker: The worker.
        model: Its model.
        context: Its device.
        stepper: Has the precision.
        reporter: Sends the results.
        data: The validation set.
        fn: ``f(model, batch)``; see :class:`PendingMeans` for its result.
        rank: The worker's rank.
        world_size: Number of ranks.
        sums: True if the result of ``fn`` is a loss summed over the batch's samples.
    """

    def __init__(
        self,
        worker: Callable[[], object],
        model: nn.Module,
        context: Device,
        stepper: Stepper,
        reporter: Reporter,
        data: ValidationData,
        fn: EvaluationFn,
        rank: int,
        world_size: int,
        *,
        sums: bool = False,
    ) -> None:
        self._worker = worker
        self._model = model
        self._context = context
        self._stepper = stepper
        self._reporter = reporter
        self._data = data
        self._fn = fn
        self._rank = rank
        self._world_size = world_size
        self._sums = sums
        self._loader: ValidationLoader | None = None

    def run(self, task: m.ValidationTask) -> None:
        """Evaluate a task, and report the results.

        Raises:
            CollectiveAborted: The run has failed.
        """
        if self._loader is None:
            self._loader = self._data.make_loader(self._rank, self._worker())
        state = self._context.generator_state()
        try:
            with evaluating(self._model):
                self._evaluate(task, self._loader)
        except BaseException:
            self._loader.cancel()
            raise
        finally:
            if state is not None:
                self._context.set_generator_state(state)

    def _evaluate(self, task: m.ValidationTask, loader: ValidationLoader) -> None:
        loader.submit(m.EpochPlan(epoch=0, batches=task.batches))
        pending: list[PendingMeans] = []
        since = time.monotonic()
        for batch in (batch for span in task.batches for batch in span):
            if self._data.is_cancelled.is_set():
                raise CollectiveAborted("the run has failed")
            start, stop = loader.bounds(batch)
            try:
                pending.append(self._evaluate_batch(batch, loader.next(), stop - start))
            except Exception as error:
                error.add_note(f"in the validation of samples {start} to {stop - 1}")
                raise
            if time.monotonic() - since > REPORT_INTERVAL_S:
                since = self._report(task, pending, since)
                pending = []
        self._report(task, pending, since)

    def _evaluate_batch(self, batch: int, data: Any, num_samples: int) -> PendingMeans:
        device = self._context.device
        with drawing(device, batch) as generator:
            view = EvaluationView(
                self._model, device, generator, self._rank, self._world_size, self._worker()
            )
            with worker_context(view), self._stepper.autocast():
                result = self._fn(self._model, data)
        if self._sums:
            loss = (
                result if isinstance(result, Tensor) else split_loss(result, self._model, data)[0]
            )
            result = loss / num_samples
        return PendingMeans(
            batch, result, view.scalars, num_samples=num_samples, model=self._model, data=data
        )

    def _report(self, task: m.ValidationTask, pending: list[PendingMeans], since: float) -> float:
        """Report results; waits for the device. Returns the time."""
        results: tuple[BatchMeans, ...] = tuple(means.read() for means in pending)
        now = time.monotonic()
        self._reporter.send(
            m.ValidationReport(rank=self._rank, id=task.id, results=results, seconds=now - since)
        )
        return now

    def close(self) -> bool:
        """Close the loader; False if its thread is alive. Idempotent."""
        loader, self._loader = self._loader, None
        return loader is None or loader.close()


def validation_fn(fn: EvaluationFn | None, train_fn: TrainFns) -> EvaluationFn:
    """The evaluation function: ``fn``, else the loss of ``train_fn``, of several functions their
    sum as well.
    """
    if fn is not None:
        return fn
    if not isinstance(train_fn, Mapping):
        return train_fn

    def losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = {
            f"loss/{name}": split_loss(one(model, batch), model, batch)[0]
            for name, one in train_fn.items()
        }
        return {"loss": sum(found.values()), **found}

    return losses
