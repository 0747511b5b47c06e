"""Exports of a timeline: Chrome trace, CSV, JSON and HTML."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from runtime.timeline.events import Cause, Event, IdleGap, Kind
from runtime.timeline.page import _for_page, page_text
from runtime.timeline.summary import TimelineSummary
from runtime.timeline.text import table_cell


class RecordedRun(Protocol):
    """The part of :class:`~runtime.timeline.timeline.Timeline` that exports read."""

    def summary(self) -> TimelineSummary: ...

    def events(self) -> Sequence[Event]: ...

    def idle_gaps(self) -> Sequence[IdleGap]: ...

    def epochs(self) -> Sequence[Mapping[str, Any]]: ...

    def profile(self, rank: int) -> tuple[float, Sequence[Sequence[float]]]: ...

    def anchor_curve(self) -> Sequence[Sequence[float]]: ...

    def throughput(self) -> tuple[float, Sequence[Sequence[float]]]: ...

    def resources(self) -> tuple[Sequence[str], Sequence[Sequence[float]]]: ...


# "Trace Event Format", Chromium project. Slices (``X``) of one thread must nest.

PID = 1
COORDINATOR_TID = 1
_INSTANTS = {
    Kind.RESUME,
    Kind.ANCHOR,
    Kind.TRANSPORT,
    Kind.MACHINES,
    Kind.FAILURE,
    Kind.STOP,
}
_MIB = 2.0**20


def trace_text(timeline: RecordedRun) -> str:
    """The whole timeline as a trace file."""
    summary = timeline.summary()
    events = timeline.events()
    devices = () if summary.facts is None else summary.facts.devices
    found = list(_names(devices))
    for rank in (None, *range(len(devices))):
        own = [event for event in events if event.rank == rank]
        found += _slices((e for e in own if not _is_instant(e)), _tid(rank))
        found += [_instant(event, _tid(rank)) for event in own if _is_instant(event)]
    found += _counters(timeline)
    other = {"state": summary.state, "error": summary.error, "model": summary.model}
    whole = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(whole, allow_nan=False) + "\n"


def _tid(rank: int | None) -> int:
    return COORDINATOR_TID if rank is None else COORDINATOR_TID + 1 + rank


def _is_instant(event: Event) -> bool:
    return event.kind in _INSTANTS or (event.rank is None and event.duration_s == 0)


def _names(devices: Iterable[str]) -> Iterable[dict[str, Any]]:
    yield _metadata("process_name", COORDINATOR_TID, name="gpuworker")
    yield _metadata("thread_name", COORDINATOR_TID, name="coordinator")
    yield _metadata("thread_sort_index", COORDINATOR_TID, sort_index=0)
    for rank, device in enumerate(devices):
        yield _metadata("thread_name", _tid(rank), name=f"gpu-worker-{rank} ({device})")
        yield _metadata("thread_sort_index", _tid(rank), sort_index=rank + 1)


def _metadata(what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PID, "tid": tid, "args": args}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _slices(events: Iterable[Event], tid: int) -> list[dict[str, Any]]:
    """Nested slices: one that would end after its parent ends with it.

    Computed in integer nanoseconds, so that equal times stay equal; the format has microseconds.
    """
    spans = [(_ns(event.start_s), _ns(event.end_s), event) for event in events]
    spans.sort(key=lambda span: (span[0], -span[1]))
    parents: list[int] = []
    found = []
    for start, end, event in spans:
        while parents and parents[-1] <= start:
            parents.pop()
        if parents:
            end = min(end, parents[-1])
        parents.append(end)
        found.append(
            {
                "ph": "X",
                "name": title(event),
                "cat": event.kind.value,
                "pid": PID,
                "tid": tid,
                "ts": start / 1000,
                "dur": max(0, end - start) / 1000,
                "args": dict(event.args),
            }
        )
    return found


def _instant(event: Event, tid: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": title(event),
        "cat": event.kind.value,
        "pid": PID,
        "tid": tid,
        "ts": _ns(event.end_s) / 1000,
        "args": dict(event.args),
    }


def title(event: Event) -> str:
    """A short name of an event, in printable characters."""
    args = event.args
    match event.kind:
        case Kind.EPOCH | Kind.EVALUATION | Kind.EPOCH_FN:
            return f"{event.kind.value} {args.get('epoch')}"
        case Kind.CHECKPOINT:
            details = (args.get("version"), args.get("part"))
            return " ".join(["checkpoint", *(str(one) for one in details if one is not None)])
        case Kind.AVERAGING:
            return f"averaging: {args.get('part')}"
        case Kind.PHASE:
            return str(args.get("phase"))
        case Kind.ANCHOR:
            return f"anchor {args.get('before')} to {args.get('anchor')}"
        case Kind.MACHINES:
            return f"round {args.get('round')} of {args.get('machines')}"
        case Kind.TRANSPORT:
            return f"over {args.get('backend')}"
        case Kind.FAILURE:
            return f"failure: {args.get('error')}"
        case Kind.STOP:
            return str(args.get("reason"))
        case _:
            return str(event.kind.value)


def _counters(timeline: RecordedRun) -> Iterable[dict[str, Any]]:
    for seconds, anchor in timeline.anchor_curve():
        yield _counter("anchor", seconds, {"batches": anchor})
    width_s, rates = timeline.throughput()
    for index, row in enumerate(rates):
        values = {f"rank {rank}": rate for rank, rate in enumerate(row)}
        yield _counter("samples/s", index * width_s, values)
    columns, rows = timeline.resources()
    for seconds, *numbers in rows:
        for name, value in zip(columns, numbers, strict=True):
            if not math.isfinite(value):
                continue
            if name.endswith("_bytes"):
                yield _counter(f"{name[:-6]} MiB", seconds, {"MiB": value / _MIB})
            else:
                yield _counter(name, seconds, {"percent": value})


def _counter(name: str, seconds: float, values: Mapping[str, float]) -> dict[str, Any]:
    args = {key: value for key, value in values.items() if math.isfinite(value)}
    return {"ph": "C", "name": name, "pid": PID, "tid": 0, "ts": _ns(seconds) / 1000, "args": args}


COLUMNS = ("record", "rank", "name", "start_s", "duration_s", "value", "detail")
CsvRow = tuple[object, ...]


def csv_text(timeline: RecordedRun) -> str:
    """CSV with a row for each total, epoch, scalar, event, gap and reading.

    No cell begins like a formula or has a line break; numbers stay numbers.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rows in (_totals, _epochs, _events, _gaps, _curves):
        for row in rows(timeline):
            writer.writerow([table_cell(c) if isinstance(c, str) else c for c in row])
    return text.getvalue()


def _totals(timeline: RecordedRun) -> Iterable[CsvRow]:
    for rank in timeline.summary().ranks:
        for cause, seconds in rank.causes.items():
            yield "total", rank.rank, cause, 0.0, rank.wall_s, seconds, rank.device


def _epochs(timeline: RecordedRun) -> Iterable[CsvRow]:
    for epoch in timeline.epochs():
        start, lasted = epoch["end_s"] - epoch["epoch_s"], epoch["epoch_s"]
        detail = f"epoch {epoch['epoch']}"
        yield "epoch", None, "avg_loss", start, lasted, epoch["avg_loss"], detail
        for name, value in epoch["scalars"].items():
            yield "scalar", None, name, start, lasted, value, detail


def _events(timeline: RecordedRun) -> Iterable[CsvRow]:
    for event in timeline.events():
        detail = " ".join(f"{name}={value}" for name, value in event.args.items())
        yield "event", event.rank, title(event), event.start_s, event.duration_s, None, detail


def _gaps(timeline: RecordedRun) -> Iterable[CsvRow]:
    for gap in timeline.idle_gaps():
        yield "gap", gap.rank, gap.cause.label, gap.start_s, gap.duration_s, None, None


def _curves(timeline: RecordedRun) -> Iterable[CsvRow]:
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


FORMAT = "gpuworker-timeline"
VERSION = 1
DIGITS = 9
"""Decimals of seconds: nanoseconds."""


def document(timeline: RecordedRun) -> dict[str, Any]:
    """The whole timeline as a JSON object; numbers that are not finite are ``None``.

    ``lanes`` has the seconds by cause in each bin, in the order of ``causes``.
    """
    width_s, rates = timeline.throughput()
    columns, readings = timeline.resources()
    summary = timeline.summary()
    found = {
        "format": FORMAT,
        "version": VERSION,
        "causes": [cause.label for cause in Cause],
        "summary": summary.as_dict(),
        "lanes": [_lane(timeline, rank.rank) for rank in summary.ranks],
        "epochs": timeline.epochs(),
        "curves": {
            "anchor": timeline.anchor_curve(),
            "throughput": {"bin_s": width_s, "rates": rates},
            "resources": {"columns": columns, "readings": readings},
        },
        "events": [event.as_dict() for event in timeline.events()],
        "gaps": [
            {
                "rank": gap.rank,
                "cause": gap.cause.label,
                "start_s": gap.start_s,
                "duration_s": gap.duration_s,
            }
            for gap in timeline.idle_gaps()
        ],
    }
    clean: dict[str, Any] = _plain(found)
    return clean


def _lane(timeline: RecordedRun, rank: int) -> dict[str, Any]:
    width_s, rows = timeline.profile(rank)
    return {"rank": rank, "bin_s": width_s, "bins": rows}


def _plain(value: Any) -> Any:
    """The value with numbers rounded, and ``None`` for those that JSON cannot represent."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = round(value, DIGITS)
        return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def json_text(timeline: RecordedRun) -> str:
    """The document as ASCII JSON."""
    return json.dumps(document(timeline), allow_nan=False) + "\n"


def html_text(timeline: RecordedRun) -> str:
    """The page with its data, style and script in one text.

    The data is in a block that is not executed, with every character escaped that could end it;
    the script writes names as text, never as markup. The content security policy allows no other
    script, and loads nothing.
    """
    return page_text(_for_page(document(timeline)))
