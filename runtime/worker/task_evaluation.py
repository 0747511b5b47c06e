"""TaskEvaluation: a rank's part of the evaluations that ranks share, in its thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from coordinator import messages as m
from runtime.core.context import current_worker
from runtime.core.errors import EvaluationFailed
from runtime.core.loss_weights import split_loss
from runtime.device.memory import is_out_of_memory
from runtime.evaluation.batch_source import BatchSource, HeldBatch, SampleRange, open_source
from runtime.evaluation.device_pool import DeviceLoop, Receiver
from runtime.evaluation.pending_means import EvaluationFn, EvaluationView
from runtime.evaluation.predict import MeansCollector, means_in_order
from runtime.evaluation.shared_evaluation import (
    EvaluationCall,
    EvaluationPart,
    SharedEvaluations,
)
from runtime.evaluation.validation_data import ValidationData, ValidationLoader
from runtime.replica.build import TrainFns
from runtime.replica.error_notes import add_note_once
from runtime.worker.replica import WorkerReplica
from runtime.worker.worker_config import UserFunctions, WorkerConfig

REPORT_INTERVAL_S = 5.0
"""Longest time between two reports of a rank: a long evaluation shows progress."""


class TaskEvaluation:
    """Evaluates batches with the weights of the replica, in the precision of the run.

    Args:
        send: Sends a message to the coordinator.
        data: The validation set; ``None``: there is none.
    """

    def __init__(
        self,
        replica: WorkerReplica,
        config: WorkerConfig,
        functions: UserFunctions,
        send: Callable[[Any], None],
        shared: SharedEvaluations,
        data: ValidationData | None,
    ) -> None:
        self.shared = shared
        self._replica = replica
        self._config = config
        self._send = send
        self._data = data
        self._val_fn = functions.val_fn
        self._train_fn = functions.train_fn
        self._loader: ValidationLoader | None = None
        self._reported = 0.0

    def open(self, dataset: Any) -> BatchSource:
        """Read a data set, in batches of the same size for any number of ranks."""
        size = None if isinstance(dataset, DataLoader) else self._config.batch_size
        lock = self._config.dataset_lock
        return open_source(dataset, size, 1, lock, call="worker.evaluate(ds, fn)")

    def alone(self, dataset: Any, fn: EvaluationFn) -> dict[str, float]:
        """Evaluate all batches of a data set on this rank.

        Raises:
            EvaluationFailed: The function, the model or the data set raised.
        """
        collector = MeansCollector()
        self._run(self.open(dataset), fn, lambda: True, collector)
        return means_in_order(collector.found)

    def _run(
        self,
        source: BatchSource,
        fn: EvaluationFn,
        may_continue: Callable[[], bool],
        receive: Receiver,
    ) -> None:
        """Evaluate batches that no other rank has taken, until none is left."""
        self._reported = time.monotonic()
        loop = DeviceLoop(
            self._replica.model,
            self._replica.context,
            fn,
            receive,
            rank=self._replica.rank,
            world_size=self._config.world_size,
            is_stopped=lambda: self._is_stopped(may_continue),
            worker=current_worker(),
        )
        with self._replica.at_eval_point():
            loop.run(source)

    def _is_stopped(self, may_continue: Callable[[], bool]) -> bool:
        now = time.monotonic()
        if now - self._reported > REPORT_INTERVAL_S:
            self._send(m.Evaluating(rank=self._replica.rank))
            self._reported = now
        return not may_continue()

    def validate(self, task: m.Task, round: int) -> tuple[tuple[str, float], ...] | None:
        """Evaluate batches of the validation set; with the worker as the current one.

        Returns:
            The means on the rank that ends the task; ``None`` on others, and if the run has failed.

        Raises:
            Exception: The function, the model or the data set raised.
        """
        assert self._data is not None, "there is a validation set"
        rank = self._replica.rank
        part = self.shared.join(task, rank, round, self._data.batches())
        if part is None:
            return None
        if self._loader is None:
            self._loader = self._data.make_loader(rank, current_worker())
        failure: EvaluationFailed | None = None
        try:
            self._take_part(part, self._validate, raises=True)
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
        if rank != task.rank or not part.is_complete:
            return None
        return tuple(means_in_order(part.results()).items())

    def _validate(self, part: EvaluationPart) -> None:
        assert self._loader is not None, "made by the caller"
        fn, explains = self._val_fn, self._val_fn is None
        sums = explains and self._config.loss_reduction == "sum"

        def receive(samples: SampleRange, data: Any, result: Any, view: EvaluationView) -> None:
            with _explaining(explains):
                if sums:
                    loss = result
                    if not isinstance(result, Tensor):
                        loss = split_loss(result, view.model, data)[0]
                    result = loss / (samples.stop - samples.start)
                part(samples, data, result, view)

        if fn is None:
            fn = _explaining(True)(losses_of(self._train_fn))
        source = _ReadAhead(part, self._loader)
        self._run(source, fn, part.may_continue, receive)
        source.close()

    def request(self, dataset: Any, fn: EvaluationFn, after: int) -> EvaluationCall:
        """Request an evaluation on the average of a round after this one."""
        call = self.shared.call(self._replica.rank, dataset, fn, self.open, after=after)
        self._send(m.EvaluationRequested(rank=self._replica.rank))
        return call

    def answer(self, task: m.Task, round: int) -> tuple[tuple[str, float], ...] | None:
        """Evaluate batches for a call in the body of an own loop, which raises the errors.

        Returns:
            Nothing on the caller, once its call is answered; ``None`` on others.
        """
        part = self.shared.join(task, self._replica.rank, round)
        if part is None:
            return None
        call = part.call
        assert call is not None, "the task answers it"
        self._take_part(part, lambda part: self._run(part, call.fn, part.may_continue, part))
        return () if self._replica.rank == task.rank else None

    def together(
        self, key: tuple[int, int], num_ranks: int, dataset: Any, fn: EvaluationFn
    ) -> dict[str, float]:
        """Evaluate in lockstep, together with all ranks of the group, which call this as well.

        Args:
            key: As for :meth:`SharedEvaluations.meet`.
            num_ranks: Likewise.
            fn: ``f(model, batch)``.

        Raises:
            EvaluationFailed: The function, the model or the data set raised on this rank.
            CollectiveAborted: Another rank failed.
        """
        read = partial(self.open, dataset)
        part = self.shared.meet(key, self._replica.rank, num_ranks, read)
        self._run(part, fn, part.may_continue, part)
        part.end()
        return means_in_order(part.results())

    def wait(self, key: tuple[int, int], num_ranks: int) -> None:
        """Wait for an evaluation of the other ranks in lockstep.

        Raises:
            CollectiveAborted: Another rank failed.
        """
        part = self.shared.meet(key, self._replica.rank, num_ranks, None)
        part.end()
        part.results()

    def _take_part(
        self, part: EvaluationPart, run: Callable[[EvaluationPart], None], *, raises: bool = False
    ) -> None:
        is_complete = False
        while not is_complete:
            try:
                with self._replica.precision.autocast():
                    run(part)
            except Exception as error:
                if raises:
                    raise
                part.fail(error)
            is_complete = part.end()

    def close(self) -> bool:
        """Close the loader of the validation set; False if its thread is alive. Idempotent."""
        loader, self._loader = self._loader, None
        return loader is None or loader.close()


class _ReadAhead(BatchSource):
    """The batches of a validation, which the loader of the rank reads ahead."""

    num_samples = None

    def __init__(self, part: EvaluationPart, loader: ValidationLoader) -> None:
        self._part = part
        self._loader = loader
        self._claimed: deque[SampleRange] = deque()

    def take(self) -> SampleRange | None:
        """The next batch; its data is read when it is loaded."""
        while len(self._claimed) <= self._loader.num_ahead:
            if (samples := self._part.take()) is None:
                break
            self._loader.submit(samples.batch)
            self._claimed.append(samples)
        if not self._claimed:
            return None
        samples = self._claimed.popleft()
        held = HeldBatch(self._loader.next, samples.start, samples.stop)
        return SampleRange(samples.batch, samples.start, samples.stop, held.load)

    def close(self) -> None:
        """Drop the claimed batches of an evaluation that has ended early."""
        if self._claimed:
            self._loader.cancel()


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
def _explaining(is_train_fn: bool) -> Iterator[None]:
    """Context of ``train_fn`` on a model in evaluation mode."""
    try:
        yield
    except Exception as error:
        if is_train_fn and not is_out_of_memory(error):
            add_note_once(error, _WITHOUT_FN)
        raise


_WITHOUT_FN = (
    "val_dataset(ds) without fn calls train_fn with the model in evaluation mode, in which a model "
    "may return something else than in training mode, such as detections in place of losses: call "
    "val_dataset(ds, fn=f) of Trainer.builder, where f(model, batch) returns a dict of means"
)
