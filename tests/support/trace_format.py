"""Checks that a file follows the Chrome trace-event format, written from its description.

Independent of the code that writes the file.
"""

from __future__ import annotations

import json
from collections import defaultdict

KNOWN = {"X", "B", "E", "i", "C", "M"}
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def load_trace(path):
    """Load a trace file, and check its events individually and together."""
    text = path.read_text(encoding="utf-8")
    whole = json.loads(text, parse_constant=refuse_constant)
    assert isinstance(whole, dict)
    events = whole["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        check_event(event)
    check_nesting(events)
    return events


def check_event(event):
    phase = event["ph"]
    assert phase in KNOWN, f"phase {phase!r}"
    assert isinstance(event["name"], str)
    assert event["name"]
    for name in ("pid", "tid"):
        assert type(event[name]) is int
    assert isinstance(event.get("args", {}), dict)
    if phase == "M":
        kind = METADATA[event["name"]]
        assert isinstance(event["args"][kind], str if kind == "name" else int)
        return
    assert is_number(event["ts"])
    assert event["ts"] >= 0
    if phase == "X":
        assert is_number(event["dur"])
        assert event["dur"] >= 0
    if phase == "i":
        assert event.get("s", "t") in ("g", "p", "t")
    if phase == "C":
        assert all(is_number(value) for value in event["args"].values())


def is_number(value):
    return type(value) in (int, float)


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def check_nesting(events):
    """Check that slices of one thread nest or are disjoint, and that pairs are complete."""
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for thread, own in threads.items():
        spans = [
            (nanoseconds(e["ts"]), nanoseconds(e["ts"]) + nanoseconds(e["dur"]), e["name"])
            for e in own
            if e["ph"] == "X"
        ]
        open_pairs = []
        for e in sorted((e for e in own if e["ph"] in "BE"), key=lambda e: e["ts"]):
            if e["ph"] == "B":
                open_pairs.append(e)
            else:
                begun = open_pairs.pop()
                spans.append((nanoseconds(begun["ts"]), nanoseconds(e["ts"]), begun["name"]))
        assert open_pairs == [], f"pairs without an end in {thread}"
        check_spans(spans, thread)


def check_spans(spans, thread):
    around = []
    for start, end, name in sorted(spans, key=lambda s: (s[0], -s[1])):
        while around and around[-1][1] <= start:
            around.pop()
        if around:
            assert end <= around[-1][1], f"{name} crosses the end of {around[-1][2]} in {thread}"
        around.append((start, end, name))
