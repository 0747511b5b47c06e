"""LoopEvaluation: a rank's part of an evaluation that the body of an own loop makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from coordinator import messages as m
from coordinator.batch_means import BatchMeans
from runtime.core.context import current_worker
from runtime.evaluation.batch_source import BatchSource, open_source
from runtime.evaluation.device_pool import DeviceLoop, Receiver
from runtime.evaluation.pending_means import EvaluationFn
from runtime.evaluation.predict import MeansCollector
from runtime.worker.evaluation_calls import EvaluationCalls, EvaluationPart
from runtime.worker.replica import WorkerReplica
from runtime.worker.worker_config import WorkerConfig
from runtime.worker.worker_validation import REPORT_INTERVAL_S

UNNUMBERED = 0
"""Id of a validation that the coordinator has not begun."""


class LoopEvaluation:
    """Evaluates batches of a data set with the replica's weights, in the worker's thread.

    Args:
        replica: The replica.
        config: The worker's settings.
        send: Sends a message to the coordinator.
        calls: Calls that wait for the average of a round, of all ranks.
    """

    def __init__(
        self,
        replica: WorkerReplica,
        config: WorkerConfig,
        send: Callable[[Any], None],
        calls: EvaluationCalls,
    ) -> None:
        self._replica = replica
        self._config = config
        self._send = send
        self._calls = calls
        self._reported = 0.0

    def open(self, dataset: Any) -> BatchSource:
        """Read a data set, in batches of the same size for any number of ranks."""
        size = None if isinstance(dataset, DataLoader) else self._config.batch_size
        lock = self._config.dataset_lock
        return open_source(dataset, size, 1, lock, call="worker.evaluate(ds, fn)")

    def run(
        self, source: BatchSource, fn: EvaluationFn, may_continue: Callable[[], bool]
    ) -> tuple[BatchMeans, ...]:
        """Evaluate batches that no other rank has taken, until none is left.

        Args:
            source: The batches.
            fn: ``f(model, batch)``.
            may_continue: Called before each batch; False: evaluate no more.

        Raises:
            EvaluationFailed: The function, the model or the data set raised.
        """
        collector = MeansCollector()
        self._run(source, fn, may_continue, collector)
        return tuple(collector.found)

    def _run(
        self,
        source: BatchSource,
        fn: EvaluationFn,
        may_continue: Callable[[], bool],
        receive: Receiver,
    ) -> None:
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

    def answer(self, callers: Sequence[int], round: int) -> None:
        """Evaluate batches for calls that a round answers, while the replica holds its average.

        Errors are raised by the callers. Returns on a caller when its call is answered.

        Args:
            callers: The calling ranks.
            round: Id of the round.
        """
        rank, is_answered = self._replica.rank, False
        for caller in callers:  # in the same order on all ranks
            part = self._calls.join(caller, rank, round)
            if part is not None:
                self._take_part(part)
                is_answered |= caller == rank
        self._send(m.EvaluationsDone(rank=rank, answered=is_answered))

    def _take_part(self, part: EvaluationPart) -> None:
        is_complete = False
        while not is_complete:
            try:
                with self._replica.stepper.autocast():
                    self._run(part, part.fn, part.may_continue, part)
            except Exception as error:
                part.fail(error)
            is_complete = part.end()

    def _is_stopped(self, may_continue: Callable[[], bool]) -> bool:
        now = time.monotonic()
        if now - self._reported > REPORT_INTERVAL_S:
            self._send(
                m.ValidationReport(
                    rank=self._replica.rank,
                    id=UNNUMBERED,
                    results=(),
                    seconds=now - self._reported,
                )
            )
            self._reported = now
        return not may_continue()


class SharedSources:
    """The data set of an evaluation, from which all ranks take batches. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[tuple[int, int], BatchSource] | None = None

    def get(self, key: tuple[int, int], make: Callable[[], BatchSource]) -> BatchSource:
        """The source of an evaluation, made by the first rank that calls.

        Args:
            key: Generation and number of the meeting.
            make: Makes the source.
        """
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = key, make()
            return self._last[1]

    def drop(self, key: tuple[int, int]) -> None:
        """Free the source of an evaluation that is complete."""
        with self._lock:
            if self._last is not None and self._last[0] == key:
                self._last = None
