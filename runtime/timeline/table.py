"""A timeline as one table in CSV, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime.timeline.text import table_cell
from runtime.timeline.trace import title

if TYPE_CHECKING:
    from runtime.timeline.timeline import Timeline

COLUMNS = ("record", "rank", "name", "start_s", "duration_s", "value", "detail")
Row = tuple[object, ...]


def csv_text(timeline: Timeline) -> str:
    """A header and a row for each total, epoch, scalar, event, gap and reading.

    No cell begins like a formula, and none holds a line break; numbers stay numbers.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rows in (_totals, _epochs, _events, _gaps, _curves):
        for row in rows(timeline):
            writer.writerow([table_cell(c) if isinstance(c, str) else c for c in row])
    return text.getvalue()


def _totals(timeline: Timeline) -> Iterable[Row]:
    for rank in timeline.summary().ranks:
        for cause, seconds in rank.causes.items():
            yield "total", rank.rank, cause, 0.0, rank.wall_s, seconds, rank.device


def _epochs(timeline: Timeline) -> Iterable[Row]:
    for epoch in timeline.epochs():
        start, lasted = epoch["end_s"] - epoch["epoch_s"], epoch["epoch_s"]
        detail = f"epoch {epoch['epoch']}"
        yield "epoch", None, "avg_loss", start, lasted, epoch["avg_loss"], detail
        for name, value in epoch["scalars"].items():
            yield "scalar", None, name, start, lasted, value, detail


def _events(timeline: Timeline) -> Iterable[Row]:
    for event in timeline.events():
        detail = " ".join(f"{name}={value}" for name, value in event.args.items())
        yield "event", event.rank, title(event), event.start_s, event.duration_s, None, detail


def _gaps(timeline: Timeline) -> Iterable[Row]:
    for gap in timeline.idle_gaps():
        yield "gap", gap.rank, gap.cause.label, gap.start_s, gap.duration_s, None, None


def _curves(timeline: Timeline) -> Iterable[Row]:
    for seconds, anchor in timeline.anchor_curve():
        yield "anchor", None, "anchor", seconds, None, anchor, None
    width_s, rates = timeline.throughput()
    for index, row in enumerate(rates):
        for rank, rate in enumerate(row):
            yield "throughput", rank, "samples/s", index * width_s, width_s, rate, None
    columns, readings = timeline.resources()
    for seconds, *values in readings:
        for name, value in zip(columns, values, strict=True):
            yield "resource", None, name, seconds, None, value, None
