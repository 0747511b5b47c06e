"""WorkerValidation: a rank's part of a validation, in its thread, on the averaged weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from coordinator import messages as m
from coordinator.batch_means import BatchMeans
from runtime.core.context import current_worker
from runtime.core.errors import CollectiveAborted, EvaluationFailed
from runtime.core.loss_weights import split_loss
from runtime.device.base import Device
from runtime.device.memory import is_out_of_memory
from runtime.evaluation.batch_source import BatchSource, HeldBatch, SampleRange
from runtime.evaluation.device_pool import DeviceLoop
from runtime.evaluation.pending_means import EvaluationFn, EvaluationView, PendingMeans
from runtime.evaluation.validation_data import ValidationData, ValidationLoader
from runtime.replica.error_notes import add_note_once
from runtime.replica.stepper import Stepper, TrainFns
from runtime.worker.reporter import Reporter

REPORT_INTERVAL_S = 5.0
"""Longest time between two reports of a rank: a long validation shows progress."""


class WorkerValidation:
    """Evaluates batches of the validation set with the live weights.

    Under the precision of the run, as :class:`DeviceLoop` evaluates.

    Args:
        model: The worker's model.
        context: Its device.
        stepper: Has the precision.
        reporter: Sends the results.
        data: The validation set.
        fn: ``f(model, batch)``; see :class:`PendingMeans` for its result. ``None``: ``train_fn``.
        train_fn: The function or functions that train.
        rank: The worker's rank.
        world_size: Number of ranks.
        sums: True if the result of ``fn`` is a loss summed over the batch's samples.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Device,
        stepper: Stepper,
        reporter: Reporter,
        data: ValidationData,
        fn: EvaluationFn | None,
        train_fn: TrainFns,
        rank: int,
        world_size: int,
        *,
        sums: bool = False,
    ) -> None:
        self._model = model
        self._context = context
        self._stepper = stepper
        self._reporter = reporter
        self._data = data
        self._fn = _explaining()(losses_of(train_fn)) if fn is None else fn
        self._explained = nullcontext if fn is not None else _explaining
        self._rank = rank
        self._world_size = world_size
        self._sums = sums
        self._loader: ValidationLoader | None = None

    def run(self, task: m.ValidationTask) -> None:
        """Evaluate a task, and report the results; with the worker as the current one.

        Raises:
            CollectiveAborted: The run has failed.
            Exception: The function, the model or the data set raised.
        """
        if self._loader is None:
            self._loader = self._data.make_loader(self._rank, current_worker())
        failure: EvaluationFailed | None = None
        try:
            self._evaluate(task, self._loader)
        except EvaluationFailed as error:
            failure = error
            self._loader.cancel()
        except BaseException:
            self._loader.cancel()
            raise
        if failure is not None:
            cause = failure.__cause__
            assert cause is not None, "it has the error of the user's code"
            cause.add_note(f"in the validation of samples {failure.start} to {failure.stop - 1}")
            raise cause

    def _evaluate(self, task: m.ValidationTask, loader: ValidationLoader) -> None:
        loader.submit(m.EpochPlan(epoch=0, batches=task.batches))
        pending: list[PendingMeans] = []
        since = time.monotonic()

        def receive(samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
            nonlocal since
            pending.append(self._means(samples, data, result, view))
            is_whole = samples.stop == loader.bounds(samples.batch)[1]
            if is_whole and time.monotonic() - since > REPORT_INTERVAL_S:
                since = self._report(task, pending, since)

        loop = DeviceLoop(
            self._model,
            self._context,
            self._fn,
            receive,
            rank=self._rank,
            world_size=self._world_size,
            is_stopped=self._check_live,
            worker=current_worker(),
        )
        with self._stepper.autocast():
            loop.run(_TaskBatches(task, loader))
        self._report(task, pending, since)

    def _means(
        self, samples: SampleRange, data: Any, result: Any, view: EvaluationView
    ) -> PendingMeans:
        num_samples, model = samples.stop - samples.start, view.model
        with self._explained():
            if self._sums:
                loss = result if isinstance(result, Tensor) else split_loss(result, model, data)[0]
                result = loss / num_samples
            return PendingMeans(
                samples.batch,
                result,
                view.scalars,
                num_samples=num_samples,
                model=model,
                data=data,
            )

    def _report(self, task: m.ValidationTask, pending: list[PendingMeans], since: float) -> float:
        """Report results, and forget them; waits for the device. Returns the time."""
        results: tuple[BatchMeans, ...] = tuple(means.read() for means in pending)
        pending.clear()
        now = time.monotonic()
        self._reporter.send(
            m.ValidationReport(rank=self._rank, id=task.id, results=results, seconds=now - since)
        )
        return now

    def _check_live(self) -> bool:
        """Raise ``CollectiveAborted`` if the run has failed; else the evaluation continues."""
        if self._data.is_cancelled.is_set():
            raise CollectiveAborted("the run has failed")
        return False

    def close(self) -> bool:
        """Close the loader; False if its thread is alive. Idempotent."""
        loader, self._loader = self._loader, None
        return loader is None or loader.close()


class _TaskBatches(BatchSource):
    """The batches of a task, which the loader of the rank reads ahead."""

    num_samples = None

    def __init__(self, task: m.ValidationTask, loader: ValidationLoader) -> None:
        self._batches = (batch for span in task.batches for batch in span)
        self._loader = loader

    def take(self) -> SampleRange | None:
        """The next batch; its data is read when it is loaded."""
        for batch in self._batches:
            start, stop = self._loader.bounds(batch)
            held = HeldBatch(self._loader.next, start, stop)
            return SampleRange(batch, start, stop, held.load)
        return None


def losses_of(train_fn: TrainFns) -> EvaluationFn:
    """``train_fn``, of several functions one that returns each loss and their sum."""
    if not isinstance(train_fn, Mapping):
        return train_fn

    def losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = {
            f"loss/{name}": split_loss(one(model, batch), model, batch)[0]
            for name, one in train_fn.items()
        }
        return {"loss": sum(found.values()), **found}

    return losses


@contextmanager
def _explaining() -> Iterator[None]:
    """Context of ``train_fn`` on a model in evaluation mode."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            add_note_once(error, _WITHOUT_FN)
        raise


_WITHOUT_FN = (
    "val_dataset(ds) without fn calls train_fn with the model in evaluation mode, in which a model "
    "may return something else than in training mode, such as detections in place of losses: call "
    "val_dataset(ds, fn=f) of Trainer.builder, where f(model, batch) returns a dict of means"
)
