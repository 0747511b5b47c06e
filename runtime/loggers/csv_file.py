"""Metrics of each epoch as a table."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

from coordinator.metrics import EpochMetrics
from runtime.core.checks import check_path
from runtime.loggers.base import EPOCH_FIELDS, NORMS, Names, RunLogger, epoch_values, rank_values
from runtime.timeline.export import table_cell
from runtime.timeline.timeline import write_text

FIRST_COLUMNS = ("epoch", "time", *EPOCH_FIELDS)
_OF_RANK = re.compile(r"rank\d+/")


class CsvLogger(RunLogger):
    """Writes one row an epoch into a CSV file, for ``metrics_fn``.

    Columns: ``FIRST_COLUMNS`` (``time`` is when the row was written, in UTC), three for
    each rank (``rank0/num_samples``, ``rank0/throughput``, ``rank0/batch_share``),
    ``divergence`` and ``param_norm`` where they were measured, and one for each scalar under
    its own name. What appears later gets a new column at the end, for which the file is written
    anew as a whole; rows without it have an empty cell. A name that a spreadsheet would take
    for a formula, that has line breaks or is very long is made harmless.

    A file that exists is gone on with: rows are added, none is ever taken away. Epochs that a
    resumed run trains again therefore stand twice, and the later row counts. The file is
    opened for each row and closed again, so that ``close()`` has nothing to do and nothing is
    lost; a row that a crash cut off is left, and the next one begins a line of its own. Any
    thread may call it; two loggers must not share a file.

    Args:
        path: The file; its directory is made if needed.

    Raises:
        TypeError: The path is no path.
        ValueError: The file is there and was not written by this class.
        OSError: It cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path("CsvLogger", path)
        self._lock = threading.Lock()
        self._names = Names(table_cell, _is_taken)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8"):
            pass
        self._columns = self._read_columns()

    def __call__(self, metrics: EpochMetrics) -> None:
        """Write the row of an epoch; on the disk, as far as the system goes, on return.

        Raises:
            OSError: It could not be written; the next call tries anew.
        """
        row: dict[str, object] = {
            "epoch": metrics.epoch,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        row.update(epoch_values(metrics))
        row.update(rank_values(metrics))
        scalars = metrics.scalars.copy()  # which others may write to meanwhile
        with self._lock:
            row.update((self._names.of(name), value) for name, value in scalars.items())
            new = [name for name in row if name not in self._columns]
            if new:
                self._widen([*self._columns, *new])
            self._append([row.get(name, "") for name in self._columns])

    def _read_columns(self) -> list[str]:
        with self.path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        if header and tuple(header[: len(FIRST_COLUMNS)]) != FIRST_COLUMNS:
            raise ValueError(
                f"CsvLogger({str(self.path)!r}): this file was written by something else and is "
                "left as it is; pass another path"
            )
        return header

    def _widen(self, columns: list[str]) -> None:
        """Write the file anew with more columns; the old one is there until then."""
        with self.path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
        width = len(columns)
        # Empty lines, and rows that a crash cut off, are kept too.
        whole = [[*row, *[""] * (width - len(row))] if row else row for row in rows]
        write_text(self.path, _lines([columns, *whole]))
        self._columns = columns

    def _append(self, row: Sequence[object]) -> None:
        with self.path.open("ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) not in b"\r\n":
                    file.write(b"\n")
            file.write(_lines([row]).encode("utf-8"))


def _is_taken(column: str) -> bool:
    return column in (*FIRST_COLUMNS, *NORMS) or _OF_RANK.match(column) is not None


def _lines(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
