"""A timeline in the Chrome trace-event format, as JSON, which Perfetto opens.

The format: "Trace Event Format", Chromium project. Slices (``X``) of one thread must nest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from runtime.timeline.events import Event, Kind

if TYPE_CHECKING:
    from runtime.timeline.timeline import Timeline

PID = 1
COORDINATOR_TID = 1
_INSTANTS = {
    Kind.RESUME,
    Kind.ANCHOR,
    Kind.FAILURE,
    Kind.STOP,
}
_MIB = 2.0**20


def trace_text(timeline: Timeline) -> str:
    """All that a timeline holds, as the text of a trace file."""
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
    """Slices that nest: one that would end behind the slice around it ends with it.

    Whole nanoseconds, so that equal times stay equal; the format wants microseconds.
    """
    spans = [(_ns(event.start_s), _ns(event.end_s), event) for event in events]
    spans.sort(key=lambda span: (span[0], -span[1]))
    around: list[int] = []
    found = []
    for start, end, event in spans:
        while around and around[-1] <= start:
            around.pop()
        if around:
            end = min(end, around[-1])
        around.append(end)
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
    """A short name for an event, in harmless characters."""
    args = event.args
    match event.kind:
        case Kind.EPOCH | Kind.EVALUATION | Kind.EPOCH_FN:
            return f"{event.kind.value} {args.get('epoch')}"
        case Kind.CHECKPOINT:
            told = (args.get("version"), args.get("part"))
            return " ".join(["checkpoint", *(str(one) for one in told if one is not None)])
        case Kind.AVERAGING:
            return f"averaging: {args.get('part')}"
        case Kind.PHASE:
            return str(args.get("phase"))
        case Kind.ANCHOR:
            return f"anchor {args.get('before')} to {args.get('anchor')}"
        case Kind.FAILURE:
            return f"failure: {args.get('error')}"
        case Kind.STOP:
            return str(args.get("reason"))
        case _:
            return str(event.kind.value)


def _counters(timeline: Timeline) -> Iterable[dict[str, Any]]:
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
