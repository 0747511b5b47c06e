"""Rank, epoch and step in log records."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest
import torch

from runtime import WorkerLogFilter, current_worker
from runtime.core.context import CurrentWorker, LoaderView, worker_context
from tests.support.running import WAIT_S, builder, count_up

FORMAT = "%(levelname)s %(worker)s%(message)s"


class RecordingHandler(logging.Handler):
    """Stores records, and their formatted text."""

    def __init__(self):
        super().__init__()
        self.addFilter(WorkerLogFilter())
        self.setFormatter(logging.Formatter(FORMAT))
        self.records, self.lines = [], []

    def emit(self, record):
        self.records.append(record)
        self.lines.append(self.format(record))


@pytest.fixture
def log():
    logger, handler = logging.getLogger("tests.worker_log"), RecordingHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger, handler
    logger.removeHandler(handler)


def test_records_of_workers_have_rank_epoch_and_step(log):
    logger, handler = log

    def fit(model, batch):
        logger.info("batch of %s", threading.current_thread().name)
        return count_up(model, batch)

    builder(train=fit, epochs=2).run().join(WAIT_S)
    assert len(handler.records) == 20
    for record in handler.records:
        assert record.getMessage() == f"batch of gpu-worker-{record.rank}"
    steps = [record.step for record in handler.records if record.rank == 0]
    assert steps == list(range(len(steps)))
    assert {record.epoch for record in handler.records} == {0, 1}
    first = next(record for record in handler.records if (record.rank, record.step) == (1, 0))
    line = handler.lines[handler.records.index(first)]
    assert line == f"INFO [rank 1 epoch {first.epoch} step 0] batch of gpu-worker-1"


def test_records_of_other_threads_have_no_rank(log):
    logger, handler = log
    logger.info("hello")
    (record,) = handler.records
    assert (record.rank, record.epoch, record.step) == (None, None, None)
    assert handler.lines == ["INFO hello"]


def test_attributes_set_by_the_record_are_kept(log):
    logger, handler = log
    logger.info("hello", extra={"rank": 7})
    assert handler.records[0].rank == 7


def test_records_of_loader_processes_have_the_rank_only(log):
    logger, handler = log
    with worker_context(LoaderView(3, torch.Generator())):
        logger.info("loading")
        assert current_worker().rank == 3
    assert handler.lines == ["INFO [rank 3] loading"]
    assert (handler.records[0].rank, handler.records[0].step) == (3, None)


def test_records_can_be_pickled(log):
    logger, handler = log
    builder(train=lambda m, b: logger.info("x") or count_up(m, b)).run().join(WAIT_S)
    assert pickle.loads(pickle.dumps(handler.records[0])).rank == handler.records[0].rank


def test_the_current_worker_implements_its_protocol():
    promised = {*vars(CurrentWorker), *CurrentWorker.__annotations__}
    promised = {name for name in promised if not name.startswith("_")}
    missing = []

    def train_fn(model, batch):
        missing.extend(name for name in promised if not hasattr(current_worker(), name))
        return count_up(model, batch)

    builder(train=train_fn, ranks=1).run().join(WAIT_S)
    assert missing == []
    assert promised >= {"rank", "generator", "record_scalar", "forget_graphs", "current_lr"}
