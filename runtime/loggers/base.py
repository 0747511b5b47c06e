"""What loggers tell of an epoch and how a run closes them; tables of it, and several at once."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.metrics import MEASURED, EpochMetrics, StepMetrics
from runtime.core.checks import check_path
from runtime.core.threads import Closing
from runtime.timeline.text import table_cell, write_text

logger = logging.getLogger(__name__)

Number = int | float

EPOCH_FIELDS = (
    "avg_loss",
    "epoch_s",
    "num_samples",
    "num_retrained",
    "num_skipped",
    "num_averagings",
)
STEP_FIELDS = ("avg_loss", "learning_rate", "throughput")
RANK_FIELDS = ("num_samples", "throughput", "batch_share")


def epoch_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of an epoch itself, by name."""
    for name in EPOCH_FIELDS:
        yield name, getattr(metrics, name)
    for name in MEASURED:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def step_values(metrics: StepMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of some steps, by name; unknown ones are left out."""
    for name in STEP_FIELDS:
        if not math.isnan(value := getattr(metrics, name)):
            yield name, value


def rank_values(metrics: EpochMetrics) -> Iterator[tuple[str, Number]]:
    """The numbers of each rank, by name; throughput in samples per second of computing."""
    for rank in metrics.per_rank:
        share = metrics.per_rank_batch_share[rank.rank]
        values = (rank.num_samples, rank.throughput, share)
        for name, value in zip(RANK_FIELDS, values, strict=True):
            yield f"rank{rank.rank}/{name}", value


_RUNS = threading.Lock()  # of the counts of all loggers, for a moment each


class RunLogger(Closing):
    """A logger that the run closes at its end, if passed as ``metrics_fn``.

    A logger shared by several runs is closed with the last of them. Any thread may call it.
    """

    _num_runs = 0

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> object:
        """Write the metrics of an epoch or of some steps; ``False`` ends the run."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """Register a run that will use the logger; called by the run."""
        with _RUNS:
            self._num_runs += 1

    def end_run(self) -> None:
        """A run has called it for the last time; called by the run, once."""
        with _RUNS:
            self._num_runs -= 1
            last = self._num_runs == 0
        if last:
            self.close()

    def close(self) -> None:
        """Close what is open. Idempotent; the next metrics open it again."""


class Names:
    """Names for scalars: harmless, and different for what differs.

    Args:
        clean: Makes a name harmless; it may make two names the same.
        reserved: Whether no scalar may get a name.
    """

    def __init__(self, clean: Callable[[str], str], reserved: Callable[[str], bool]) -> None:
        self._clean = clean
        self._reserved = reserved
        self._given: dict[str, str] = {}
        self._used: set[str] = set()

    def of(self, name: str) -> str:
        """The name to use; always the same for the same one."""
        given = self._given.get(name)
        if given is None:
            given = self._clean(name)
            if given in self._used or self._reserved(given):
                digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()
                given = f"{given}#{digest[:8]}"
            self._given[name] = given
            self._used.add(given)
        return given


class CombinedLogger(RunLogger):
    """Passes metrics to several loggers or functions, for ``metrics_fn``.

    If one raises, the error is logged and the others are still called. The end of the run, or
    :meth:`close`, closes the loggers of this package and of classes derived from them; other
    functions and objects are left as they are.

    Args:
        functions: Functions as for ``metrics_fn``, called in this order.

    Raises:
        TypeError: One of them is not callable.
    """

    def __init__(self, *functions: Callable[[Any], object]) -> None:
        for function in functions:
            if not callable(function):
                raise TypeError(
                    f"CombinedLogger({function!r:.80}): pass loggers or functions f(EpochMetrics)"
                )
        self._functions = functions

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> bool:
        """Call all of them; return ``False``, which ends the run, if one returned ``False``."""
        goes_on = True
        for function in self._functions:
            try:
                goes_on = function(metrics) is not False and goes_on
            except Exception:
                logger.exception("%r failed for epoch %d", function, metrics.epoch)
        return goes_on

    def begin_run(self) -> None:
        """Register a run with each logger; called by the run."""
        for log in self._loggers():
            log.begin_run()

    def end_run(self) -> None:
        """A run has called it for the last time; called by the run, once."""
        self._each(lambda log: log.end_run())

    def close(self) -> None:
        """Close each logger; an error is logged. Idempotent."""
        self._each(lambda log: log.close())

    def _loggers(self) -> list[RunLogger]:
        return [function for function in self._functions if isinstance(function, RunLogger)]

    def _each(self, close: Callable[[RunLogger], None]) -> None:
        for log in self._loggers():
            try:
                close(log)
            except Exception:
                logger.exception("%r could not be closed", log)


FIRST_COLUMNS = ("epoch", "time", *EPOCH_FIELDS)
FIRST_STEP_COLUMNS = ("step", "epoch", "time", *STEP_FIELDS)
_OF_RANK = re.compile(r"rank\d+/")


class _Table:
    """A CSV file that gets rows, and columns at its end. Not thread-safe.

    Args:
        path: The file; made with the first row.
        first: The columns that each such file begins with.
        reserved: Others that no scalar may have.

    Raises:
        ValueError: The file is there and begins otherwise.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path, first: tuple[str, ...], reserved: Iterable[str] = ()) -> None:
        self._path = path
        self._first = first
        taken = {*first, *reserved}
        self._names = Names(
            table_cell, lambda column: column in taken or _OF_RANK.match(column) is not None
        )
        self._columns = self._read_columns() if path.exists() else []

    def add(self, values: Mapping[str, object], scalars: Mapping[str, Number]) -> None:
        """Write a row; the time is added."""
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
                f"CsvLogger({str(self._path)!r}): this file was written by something else and is "
                "left as it is; pass another path"
            )
        return header

    def _widen(self, columns: list[str]) -> None:
        """Write the file anew with more columns; the old one is there until then."""
        rows: list[list[str]] = []
        if self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
        width = len(columns)
        # Empty lines, and rows that a crash cut off, are kept too.
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


class CsvLogger(RunLogger):
    """Writes one row per epoch into a CSV file, for ``metrics_fn``.

    With ``metrics_every`` or ``eval_every`` a second file, ``run.steps.csv`` beside ``run.csv``,
    gets a row for each :class:`~runtime.StepMetrics`: ``FIRST_STEP_COLUMNS`` and a column for
    each scalar.

    Columns: ``FIRST_COLUMNS`` (``time`` is when the row was written, in UTC), three for
    each rank (``rank0/num_samples``, ``rank0/throughput``, ``rank0/batch_share``),
    ``divergence``, ``param_norm`` and ``learning_rate`` if known, and one for each scalar under
    its own name. A value that first appears later gets a new column at the end; the whole file
    is rewritten for it, and earlier rows have an empty cell. Names are escaped if a spreadsheet
    would read them as a formula or if they have line breaks, and very long ones are cut.

    An existing file is continued: rows are added, none is ever removed. Epochs that a resumed
    run trains again therefore have two rows, and the later one counts. An epoch cut short by
    ``max_steps`` has a row like any other, with fewer samples. The file is opened and closed for
    each row, so nothing is lost without ``close()``. A row cut off by a crash stays, and the next
    one starts a new line. Any thread may call it; two loggers must not share a file.

    Args:
        path: The file; its directory is made if needed.

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
        self._epochs = _Table(self.path, FIRST_COLUMNS, MEASURED)
        self._steps = _Table(self.steps_path, FIRST_STEP_COLUMNS)

    def __call__(self, metrics: EpochMetrics | StepMetrics) -> None:
        """Write a row; on return it has been passed to the operating system.

        Raises:
            OSError: It could not be written; the next call tries again.
        """
        scalars = metrics.scalars.copy()  # which others may write to meanwhile
        with self._lock:
            if isinstance(metrics, StepMetrics):
                where = {"step": metrics.step, "epoch": metrics.epoch}
                self._steps.add(where | dict(step_values(metrics)), scalars)
            else:
                row = dict((*epoch_values(metrics), *rank_values(metrics)))
                self._epochs.add({"epoch": metrics.epoch, **row}, scalars)


def _lines(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
