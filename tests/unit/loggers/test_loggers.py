"""Loggers for ``metrics_fn``: CSV, TensorBoard, and several at once."""

from __future__ import annotations

import csv
import importlib.util
import logging
import math
import threading
from dataclasses import replace

import pytest

from coordinator.metrics import EpochMetrics, RankMetrics
from runtime import CombinedLogger, CsvLogger, TensorBoardLogger, record_scalar
from runtime.loggers.csv_logger import FIRST_COLUMNS
from tests.support.running import WAIT_S, Gate, builder, count_up

HOSTILE = [
    "</script><script>alert(1)</script>",
    "two\nlines\r\n\u2028",
    "x" * 10_000,
    '=HYPERLINK("http://localhost")',
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "a,b;c\"d'e",
    "\x00\ud800",
    "",
    "__proto__",
    "epoch",
    "time",
    "rank0/throughput",
    "two\\nlines\\r\\n\\u2028",  # the escaped form of the one above
]


def epoch_metrics(number=0, named=None, **scalars):
    ranks = tuple(
        RankMetrics(
            rank=rank, num_batches=2, num_samples=4, compute_s=0.5, avg_loss=1.5, throughput=8.0
        )
        for rank in range(2)
    )
    return EpochMetrics(
        epoch=number,
        avg_loss=1.25 + number,
        scalars={**scalars, **(named or {})},
        per_rank=ranks,
        epoch_s=0.75,
        num_samples=8,
        num_retrained=0,
        num_skipped=0,
        num_averagings=3,
        per_rank_throughput=(8.0, 8.0),
        per_rank_batch_share=(0.5, 0.5),
        devices=("cpu", "cpu"),
    )


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# -- the table ------------------------------------------------------------------------------


def test_a_run_writes_a_row_for_each_epoch(tmp_path):
    def fit(model, batch):
        record_scalar("accuracy", 0.5)
        return count_up(model, batch)

    log = CsvLogger(tmp_path / "deep" / "run.csv")
    state = builder(train=fit, epochs=3).metrics_fn(log).run().join(WAIT_S)
    rows = rows_of(tmp_path / "deep" / "run.csv")
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    for row, metrics in zip(rows, state.metrics, strict=True):
        assert float(row["avg_loss"]) == metrics.avg_loss
        assert int(row["num_samples"]) == metrics.num_samples
        assert float(row["accuracy"]) == 0.5
        assert float(row["rank1/throughput"]) == metrics.per_rank_throughput[1]
        assert float(row["rank0/batch_share"]) == metrics.per_rank_batch_share[0]


def test_changes_of_metrics_by_a_metrics_fn_stay_in_its_copy():
    def note(metrics):
        metrics.scalars["mine"] = 1.0

    state = builder(epochs=2).metrics_fn(note).run().join(WAIT_S)
    assert [dict(metrics.scalars) for metrics in state.metrics] == [{}, {}]


def test_a_later_scalar_gets_a_new_column(tmp_path):
    path = tmp_path / "run.csv"
    log = CsvLogger(path)
    log(epoch_metrics(0, a=1.0))
    log(epoch_metrics(1, a=2.0, b=3.0))
    log(epoch_metrics(2, b=4.0))
    rows = rows_of(path)
    assert [(row["a"], row["b"]) for row in rows] == [("1.0", ""), ("2.0", "3.0"), ("", "4.0")]
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_appended_to_an_existing_file(tmp_path):
    path = tmp_path / "run.csv"
    CsvLogger(path)(epoch_metrics(0, a=1.0))
    CsvLogger(path)(epoch_metrics(0, b=2.0))
    assert [(row["epoch"], row["a"], row["b"]) for row in rows_of(path)] == [
        ("0", "1.0", ""),
        ("0", "", "2.0"),
    ]


def test_a_cut_off_row_affects_no_other(tmp_path):
    path = tmp_path / "run.csv"
    log = CsvLogger(path)
    log(epoch_metrics(0, a=1.0))
    with path.open("a") as file:
        file.write("1,2026-")
    log = CsvLogger(path)
    log(epoch_metrics(1, a=2.0))
    log(epoch_metrics(2, a=3.0, b=4.0))
    rows = rows_of(path)
    assert [row["epoch"] for row in rows] == ["0", "1", "1", "2"]
    assert [row["a"] for row in rows if row["a"]] == ["1.0", "2.0", "3.0"]


def test_a_foreign_file_is_left_unchanged(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("date,amount\n1,2\n")
    with pytest.raises(ValueError, match="pass another path"):
        CsvLogger(path)
    assert path.read_text() == "date,amount\n1,2\n"


def test_an_unwritable_path_raises_at_once(tmp_path):
    with pytest.raises(OSError, match="directory"):
        CsvLogger(tmp_path)
    with pytest.raises(TypeError, match="pass a path"):
        CsvLogger(7)


def test_hostile_names_are_escaped_in_csv(tmp_path):
    path = tmp_path / "run.csv"
    log = CsvLogger(path)
    log(epoch_metrics(0, {name: float(i) for i, name in enumerate(HOSTILE)}))
    log(epoch_metrics(1, {name: float(i) for i, name in enumerate(HOSTILE)}))
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 3
    assert len(text) < 10_000
    header, first, second = csv.reader(text.splitlines())
    assert header[: len(FIRST_COLUMNS)] == list(FIRST_COLUMNS)
    assert len(set(header)) == len(header), "no two scalars share a column"
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@")) for cell in header)
    assert all(cell.isprintable() for cell in header)
    assert first[0] == "0"
    for row in (first, second):
        assert [float(cell) for cell in row[-len(HOSTILE) :]] == list(range(len(HOSTILE)))


def test_non_finite_values_are_written(tmp_path):
    log = CsvLogger(tmp_path / "run.csv")
    log(replace(epoch_metrics(0, low=-math.inf), avg_loss=math.nan))
    (row,) = rows_of(tmp_path / "run.csv")
    assert (row["avg_loss"], row["low"]) == ("nan", "-inf")


# -- TensorBoard --------------------------------------------------------------------------------

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def scalars_of(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


@needs_tensorboard
def test_tensorboard_has_the_metrics_of_each_epoch(tmp_path):
    with TensorBoardLogger(tmp_path) as log:
        state = builder(epochs=3).metrics_fn(log).run().join(WAIT_S)
    found = scalars_of(tmp_path)
    assert [step for step, _ in found["epoch/avg_loss"]] == [0, 1, 2]
    assert [value for _, value in found["epoch/num_samples"]] == [
        metrics.num_samples for metrics in state.metrics
    ]
    assert {"rank0/throughput", "rank1/batch_share"} <= set(found)


@needs_tensorboard
def test_each_epoch_is_flushed_before_close(tmp_path):
    log = TensorBoardLogger(tmp_path)
    log(epoch_metrics(0, a=1.5))
    assert scalars_of(tmp_path)["a"] == [(0, 1.5)]
    log.close()
    log.close()
    assert "_AsyncWriterThread" not in {type(t).__name__ for t in threading.enumerate()}


@needs_tensorboard
def test_a_garbage_collected_logger_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    log = TensorBoardLogger(tmp_path)
    log(epoch_metrics(0))
    assert {type(t).__name__ for t in set(threading.enumerate()) - before} == {"_AsyncWriterThread"}
    del log
    assert set(threading.enumerate()) <= before


@needs_tensorboard
def test_a_resumed_run_hides_the_epochs_it_trains_again(tmp_path):
    with TensorBoardLogger(tmp_path) as log:
        for epoch in range(3):
            log(epoch_metrics(epoch, a=float(epoch)))
    with TensorBoardLogger(tmp_path) as log:
        log(epoch_metrics(2, a=7.0))
    assert scalars_of(tmp_path)["a"] == [(0, 0.0), (1, 1.0), (2, 7.0)]


@needs_tensorboard
def test_hostile_names_are_escaped_in_tensorboard(tmp_path):
    with TensorBoardLogger(tmp_path) as log:
        log(epoch_metrics(0, {name: float(i) for i, name in enumerate(HOSTILE)}))
    found = scalars_of(tmp_path)
    assert all(tag.isprintable() and len(tag) <= 220 for tag in found)
    values = sorted(
        value
        for tag, [(_, value)] in found.items()
        if not tag.startswith(("epoch/", "rank0/", "rank1/")) or "#" in tag
    )
    assert values == list(range(len(HOSTILE)))


def test_without_tensorboard_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'gpuworker\[monitor\]'"):
        TensorBoardLogger(tmp_path)


# -- several ------------------------------------------------------------------------------------


def test_combined_loggers_get_each_epoch_even_if_one_fails(caplog):
    got = []

    def broken(metrics):
        raise OSError("planted: no space left")

    log = CombinedLogger(broken, got.append)
    with caplog.at_level(logging.ERROR, "runtime.loggers"):
        assert log(epoch_metrics(4)) is True
    assert [metrics.epoch for metrics in got] == [4]
    assert "planted: no space left" in caplog.text


def test_one_of_several_loggers_may_end_the_run():
    seen = []
    log = CombinedLogger(lambda metrics: metrics.epoch < 1, seen.append)
    state = builder(epochs=200, dataset=200).metrics_fn(log).run().join(WAIT_S)
    assert state.stopped
    assert [metrics.epoch for metrics in seen][:2] == [0, 1]


def test_an_object_that_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="pass loggers or functions"):
        CombinedLogger("run.csv")


# -- the end of a run ----------------------------------------------------------------------------


def writers():
    """Threads of TensorBoard's writers."""
    return [t for t in threading.enumerate() if type(t).__name__ == "_AsyncWriterThread"]


class Closes(CsvLogger):
    """Counts its closes, and its epochs before each."""

    def __init__(self, path, error=None):
        super().__init__(path)
        self.error = error
        self.num_epochs = 0
        self.closed_after = []

    def __call__(self, metrics):
        super().__call__(metrics)
        self.num_epochs += 1

    def close(self):
        self.closed_after.append(self.num_epochs)
        if self.error is not None:
            raise self.error


@needs_tensorboard
@pytest.mark.parametrize("end", ["finished", "stopped", "refused", "failed", "aborted"])
def test_a_run_closes_its_logger(tmp_path, end):
    log, opened = TensorBoardLogger(tmp_path), threading.Event()

    def note(metrics):
        opened.set()
        return end != "refused"

    def fit(model, batch):
        if opened.is_set() and end == "failed":
            raise RuntimeError("planted")
        return count_up(model, batch)

    handle = (
        builder(train=fit, epochs=3 if end == "finished" else 10_000)
        .metrics_fn(CombinedLogger(log, note))
        .run()
    )
    assert opened.wait(WAIT_S)
    if end == "stopped":
        handle.stop()
    elif end == "aborted":
        handle._run.abort()
    if end in ("failed", "aborted"):
        with pytest.raises(RuntimeError):
            handle.join(WAIT_S)
    else:
        handle.join(WAIT_S)
    assert writers() == []
    assert scalars_of(tmp_path)["epoch/avg_loss"][0][0] == 0


@needs_tensorboard
def test_a_logger_of_two_runs_is_closed_with_the_last_one(tmp_path):
    log, gate = TensorBoardLogger(tmp_path), Gate()
    slow = builder(train=gate, epochs=2).metrics_fn(log).run()
    gate.await_entry()
    builder(epochs=3).metrics_fn(CombinedLogger(log)).run().join(WAIT_S)
    assert len(writers()) == 1
    gate.opened.set()
    slow.join(WAIT_S)
    assert writers() == []
    assert len(scalars_of(tmp_path)["epoch/avg_loss"]) == 5


@needs_tensorboard
def test_a_logger_can_be_used_again_after_a_run(tmp_path):
    with TensorBoardLogger(tmp_path) as log:
        builder(epochs=2).metrics_fn(log).run().join(WAIT_S)
        builder(epochs=2).metrics_fn(log).run().join(WAIT_S)
        assert writers() == []
        log(epoch_metrics(7))
        assert len(writers()) == 1
    assert writers() == []
    assert len(scalars_of(tmp_path)["epoch/avg_loss"]) == 5


def test_every_logger_is_closed_once_even_if_another_raises(tmp_path, caplog):
    one = Closes(tmp_path / "1.csv", OSError("planted: no space left"))
    two, three = Closes(tmp_path / "2.csv"), Closes(tmp_path / "3.csv")
    log = CombinedLogger(one, CombinedLogger(two), three)
    with caplog.at_level(logging.ERROR, "runtime"):
        state = builder(epochs=3).metrics_fn(log).run().join(WAIT_S)
    assert [log.closed_after for log in (one, two, three)] == [[3], [3], [3]]
    assert len(state.metrics) == 3
    assert caplog.text.count("planted: no space left") == 1


def test_an_exit_in_close_is_logged_and_the_run_keeps_its_result(tmp_path, caplog):
    log = Closes(tmp_path / "1.csv", SystemExit("planted"))
    with caplog.at_level(logging.ERROR, "runtime"):
        state = builder(epochs=2).metrics_fn(log).run().join(WAIT_S)
    assert len(state.metrics) == 2
    assert log.closed_after == [2]
    assert "could not be closed" in caplog.text


def test_foreign_objects_are_not_closed():
    class Mine:
        closed = False

        def __call__(self, metrics):
            pass

        def close(self):
            self.closed = True

    alone, among = Mine(), Mine()
    builder().metrics_fn(alone).run().join(WAIT_S)
    with CombinedLogger(among) as log:
        builder().metrics_fn(log).run().join(WAIT_S)
    assert not alone.closed
    assert not among.closed


def test_a_run_that_cannot_start_leaves_the_logger_open(tmp_path, monkeypatch):
    log = Closes(tmp_path / "1.csv")
    real = threading.Thread.start
    for name in ("metrics", "coordinator"):

        def start(thread, name=name):
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            real(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                builder().metrics_fn(log).run()
    log.closed_after.clear()
    builder(epochs=2).metrics_fn(log).run().join(WAIT_S)
    assert log.closed_after == [2]


def test_a_blocked_metrics_fn_delays_the_close_but_not_an_abort(tmp_path):
    log, entered, opened = Closes(tmp_path / "1.csv"), threading.Event(), threading.Event()

    def stuck(metrics):
        entered.set()
        assert opened.wait(WAIT_S)

    handle = builder(epochs=10_000).metrics_fn(CombinedLogger(log, stuck)).run()
    assert entered.wait(WAIT_S)
    (thread,) = (t for t in threading.enumerate() if t.name == "metrics")
    handle._run.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        handle.join(WAIT_S)
    assert log.closed_after == []
    opened.set()
    thread.join(WAIT_S)
    assert log.closed_after == [log.num_epochs]
