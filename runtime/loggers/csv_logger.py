"""CsvLogger: metrics as rows of a CSV file."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from coordinator.metrics import OPTIONAL_METRICS, EpochMetrics, StepMetrics
from runtime.core.checks import check_path
from runtime.loggers.base import (
    EPOCH_FIELDS,
    STEP_FIELDS,
    Number,
    RunLogger,
    ScalarNames,
    epoch_values,
    rank_values,
    step_values,
)
from runtime.timeline.text import table_cell, write_text


class CsvLogger(RunLogger):
    """Writes one row per epoch into a CSV file, for ``metrics_fn``.

    With ``metrics_every`` or ``eval_every`` a second file, ``run.steps.csv`` beside ``run.csv``,
    gets a row for each :class:`~gpuworker.StepMetrics`: ``FIRST_STEP_COLUMNS`` and a column for
    each scalar.

    Columns: ``FIRST_COLUMNS`` (``time`` is when the row was written, in UTC), three for
    each rank (``rank0/num_samples``, ``rank0/throughput``, ``rank0/batch_share``),
    ``divergence``, ``param_norm`` and ``learning_rate`` if measured, and one for each scalar under
    its own name. A value that first appears later gets a new column at the end; the whole file
    is rewritten for it, and earlier rows have an empty cell. Names are escaped if a spreadsheet
    would read them as a formula or if they have line breaks, and very long ones are cut.

    Rows are appended to an existing file; none is ever removed. Epochs that a resumed run trains
    again therefore have two rows, of which the later one is valid. An epoch cut short by
    ``max_steps`` has a row with fewer samples. The file is opened and closed for each row, so
    nothing is lost without ``close()``. A row cut off by a crash stays, and the next one starts a
    new line. Callable from any thread; two loggers must not share a file.

    Args:
        path: The file; its directory is created if needed.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: The file exists and was not written by this class.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path("CsvLogger", path)
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8"):
            pass
        self.steps_path = self.path.with_name(f"{self.path.stem}.steps.csv")
        self._epochs = _Table(self.path, FIRST_COLUMNS, OPTIONAL_METRICS)
        self._steps = _Table(self.steps_path, FIRST_STEP_COLUMNS)

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> None:
        """Append a row; on return it is written to the operating system.

        Raises:
            OSError: It could not be written; the next call continues.
        """
        scalars = metrics.scalars.copy()  # which other threads may write to
        with self._lock:
            if isinstance(metrics, StepMetrics):
                where = {"step": metrics.step, "epoch": metrics.epoch}
                self._steps.add(where | dict(step_values(metrics)), scalars)
            else:
                row = dict((*epoch_values(metrics), *rank_values(metrics)))
                self._epochs.add({"epoch": metrics.epoch, **row}, scalars)


FIRST_COLUMNS = ("epoch", "time", *EPOCH_FIELDS)
FIRST_STEP_COLUMNS = ("step", "epoch", "time", *STEP_FIELDS)
_OF_RANK = re.compile(r"rank\d+/")


class _Table:
    """A CSV file to which rows and columns are appended. Not thread-safe.

    Args:
        path: The file; created with the first row.
        first: The first columns of each such file.
        reserved: Further names that no scalar may get.

    Raises:
        ValueError: The file exists and begins with other columns.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, first: tuple[str, ...], reserved: Iterable[str] = ()) -> None:
        self._path = path
        self._first = first
        taken = {*first, *reserved}
        self._names = ScalarNames(
            table_cell, lambda column: column in taken or _OF_RANK.match(column) is not None
        )
        self._columns = self._read_columns() if path.exists() else []

    def add(self, values: Mapping[str, object], scalars: Mapping[str, Number]) -> None:
        """Append a row, with the time."""
        row = dict.fromkeys(self._first, "") | dict(values)
        row["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        row.update((self._names.of(name), value) for name, value in scalars.items())
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen([*self._columns, *new])
        self._append([row.get(name, "") for name in self._columns])

    def _read_columns(self) -> list[str]:
        with self._path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        if header and tuple(header[: len(self._first)]) != self._first:
            raise ValueError(
                f"CsvLogger({str(self._path)!r}): this file was not written by CsvLogger and is "
                "left unchanged; pass another path"
            )
        return header

    def _widen(self, columns: list[str]) -> None:
        """Rewrite the file with more columns, atomically."""
        rows: list[list[str]] = []
        if self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
        width = len(columns)
        # Empty lines, and rows cut off by a crash, are kept.
        whole = [[*row, *[""] * (width - len(row))] if row else row for row in rows]
        write_text(self._path, _lines([columns, *whole]))
        self._columns = columns

    def _append(self, row: Sequence[object]) -> None:
        with self._path.open("ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) not in b"\r\n":
                    file.write(b"\n")
            file.write(_lines([row]).encode("utf-8"))


def _lines(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
