"""Exports of a timeline: trace, JSON and CSV, also with hostile names."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter as Count

import pytest

from runtime import Event, Kind, Timeline, current_worker, record_scalar
from runtime.timeline import export
from runtime.timeline import text as text_module
from runtime.timeline.export import _slices
from runtime.timeline.page import embedded
from tests.support.running import (
    ASYNC,
    OVER_CPU,
    THREAD,
    WAIT_S,
    Counter,
    builder,
    count_up,
    every_way,
)
from tests.support.trace_format import check_nesting, load_trace

SCRIPT = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
HOSTILE = [
    SCRIPT,
    "two\nlines\r\n\u2028and\u202eback",
    "x" * 10_000,
    '=HYPERLINK("http://localhost","click")',
    "-->&lt;!--",
    "\x00\x1b[31m\ud800",
    "",
    "__proto__",
]


class Hostile(Counter):
    """A model with a hostile name."""


Hostile.__name__ = f"{SCRIPT}\n{'y' * 10_000}"


def run_hostile(timeline):
    def fit(model, batch):
        for name in HOSTILE:
            record_scalar(name, 1.5)
        record_scalar("broken", float("nan"))
        if current_worker().local_step >= 4 and current_worker().rank == 1:
            raise RuntimeError(f"=1+1\n{SCRIPT}{'z' * 10_000}")
        return count_up(model, batch)

    b = builder(train=fit, model=lambda device: Hostile(), epochs=2)
    b.partition_ratios([1, 1])  # so that rank 1 reaches its step
    b.on_worker_failure("continue").on_non_finite("ignore").timeline(timeline)
    return b.run()


@pytest.fixture(scope="module")
def hostile():
    timeline = Timeline(poll_s=0.002)
    run_hostile(timeline).join(WAIT_S)
    return timeline


@pytest.fixture(scope="module")
def busy():
    """A run with rounds, throttles, callbacks and several chunks."""
    timeline = Timeline(poll_s=0.002, min_gap_s=0.0, step_interval_s=0.0)
    b = builder(way=(ASYNC, OVER_CPU), ranks=3, dataset=300, epochs=3).timeline(timeline)
    b.eval_fn(lambda model, epoch: {"a": 1.0}).checkpoint_fn(lambda version, model: None)
    b.epoch_fn(lambda epoch, worker: None).run().join(WAIT_S)
    return timeline


@every_way
def test_the_trace_of_every_policy_is_valid_and_nested(way, tmp_path):
    timeline = Timeline(poll_s=0.002, min_gap_s=0.0, step_interval_s=0.0)
    b = builder(way=way, ranks=3, dataset=120, epochs=2).timeline(timeline)
    b.eval_fn(lambda model, epoch: {"a": 1.0}).run().join(WAIT_S)
    timeline.save_trace(tmp_path / "t.json")
    events = load_trace(tmp_path / "t.json")
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"coordinator", *(f"gpu-worker-{rank} (cpu)" for rank in range(3))}
    steps = Count(e["tid"] for e in events if e.get("cat") == "step")
    expected = {rank.rank + 2: rank.num_steps for rank in timeline.summary().ranks}
    assert steps == {tid: count for tid, count in expected.items() if count}


def test_slices_are_within_their_parent_slices(busy, tmp_path):
    busy.save_trace(tmp_path / "t.json")
    slices = [e for e in load_trace(tmp_path / "t.json") if e["ph"] == "X"]

    def inside(inner, outer):
        wide = [e for e in slices if e["cat"] == outer]
        for e in (e for e in slices if e["cat"] == inner):
            yield any(
                w["tid"] == e["tid"]
                and w["ts"] <= e["ts"]
                and e["ts"] + e["dur"] <= w["ts"] + w["dur"] + 1e-3
                for w in wide
            )

    for inner, outer in [("step", "chunk"), ("chunk", "epoch"), ("epoch_fn", "chunk")]:
        found = list(inside(inner, outer))
        assert found
        assert all(found), f"{inner} outside {outer}"
    rounds = {e["args"]["round"] for e in slices if e["tid"] == 1 and e["cat"] == "averaging"}
    assert rounds == set(range(1, len(rounds) + 1))


def test_the_export_clips_no_event_of_a_real_run(busy):
    """Apart from rounding."""
    for rank in (None, 0, 1, 2):
        own = [e for e in busy.events() if e.rank == rank and e.duration_s > 0]
        found = _slices(own, 1)
        assert sum(e["dur"] for e in found) == pytest.approx(
            sum(e.duration_s for e in own) * 1e6, abs=1e-2 * len(own) + 1
        )


def test_a_slice_that_would_cross_another_is_clipped():
    spans = [(0.0, 10.0), (1.0, 5.0), (4.0, 12.0), (5.0, 5.0), (10.0, 11.0)]
    events = [Event(kind=Kind.CHUNK, rank=0, start_s=a, end_s=b) for a, b in spans]
    found = _slices(events, 7)
    check_nesting(found)
    assert [e["dur"] for e in found] == [10e6, 4e6, 1e6, 0.0, 1e6]
    crossing = [dict(e, dur=(b - a) * 1e6) for e, (a, b) in zip(found, spans, strict=True)]
    with pytest.raises(AssertionError, match="crosses"):
        check_nesting(crossing)


def test_full_rings_drop_events_but_no_time(tmp_path):
    timeline = Timeline(max_events=16, min_gap_s=0.0, step_interval_s=0.0)
    builder(dataset=2000, epochs=2).timeline(timeline).run().join(WAIT_S)
    summary = timeline.summary()
    assert summary.num_dropped > 100
    assert sum(rank.num_dropped for rank in summary.ranks) <= summary.num_dropped
    assert len(timeline.events()) <= 2 * 2 * 16 + 16 + 1
    for rank in summary.ranks:
        assert sum(rank.causes.values()) == pytest.approx(summary.wall_s)
    assert sum(rank.num_steps for rank in summary.ranks) == 2000
    timeline.save_trace(tmp_path / "t.json")
    load_trace(tmp_path / "t.json")


def test_the_json_file_equals_the_results_of_the_methods(busy, tmp_path):
    busy.save_json(tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())
    summary = busy.summary()
    assert found["summary"]["num_averagings"] == summary.num_averagings
    for rank, expected in zip(summary.ranks, found["summary"]["ranks"], strict=True):
        assert expected["causes"] == pytest.approx(dict(rank.causes), abs=1e-8)
    assert len(found["events"]) == len(busy.events())
    assert len(found["gaps"]) == len(busy.idle_gaps())
    assert [e["epoch"] for e in found["epochs"]] == [0, 1, 2]
    assert len(found["curves"]["anchor"]) == len(busy.anchor_curve())


def test_the_csv_file_has_a_row_for_every_item(busy, tmp_path):
    busy.save_csv(tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = Count(row["record"] for row in rows)
    summary = busy.summary()
    assert kinds["total"] == sum(len(rank.causes) for rank in summary.ranks)
    assert kinds["event"] == len(busy.events())
    assert kinds["gap"] == len(busy.idle_gaps())
    assert kinds["epoch"] == 3
    for rank in summary.ranks:
        own = [r for r in rows if r["record"] == "total" and int(r["rank"]) == rank.rank]
        assert sum(float(r["value"]) for r in own) == pytest.approx(rank.wall_s)


def test_hostile_names_are_escaped_in_the_csv_file(hostile, tmp_path):
    hostile.save_csv(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert {len(row) for row in rows} == {7}
    assert len(rows) == len(text.splitlines())  # no cell has a line break
    for cell in (cell for row in rows for cell in row):
        assert len(cell) <= 300
        try:
            float(cell)
        except ValueError:
            assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    scalars = {row[2] for row in rows if row[0] == "scalar"}
    assert len(scalars) == len(HOSTILE) + 1


def test_hostile_names_are_escaped_in_trace_and_json(hostile, tmp_path):
    hostile.save_trace(tmp_path / "t.json")
    load_trace(tmp_path / "t.json")
    hostile.save_json(tmp_path / "j.json")
    found = json.loads((tmp_path / "j.json").read_text(encoding="ascii"))
    assert len(found["epochs"][0]["scalars"]) == len(HOSTILE) + 1
    assert found["epochs"][0]["scalars"]["broken"] is None
    assert found["summary"]["model"].startswith("</script><script>")
    for text in texts_in(found):
        assert len(text) <= 200
        assert text.isprintable()


def texts_in(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def test_the_page_contains_no_foreign_markup(hostile, tmp_path):
    hostile.save_html(tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script") == 2
    assert "<img" not in text
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "").replace(
        "http://localhost", ""
    )
    assert "https:" not in text
    for character in "<>&":
        assert character not in embedded({f"a{character}": [character]})
    assert json.loads(embedded({"<": ["&>"]})) == {"<": ["&>"]}


def test_a_file_is_replaced_atomically(busy, tmp_path, monkeypatch):
    target = tmp_path / "t.json"
    target.write_text("before")

    def full(text):
        raise OSError("planted")

    monkeypatch.setattr(text_module.os, "replace", lambda a, b: full(a))
    with pytest.raises(OSError, match="planted"):
        busy.save_json(target)
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["t.json"]


def test_non_finite_numbers_become_null():
    plain = export._plain({"a": [float("nan"), float("inf"), 1.5, 2.0, -0.0, 3]})
    assert plain == {"a": [None, None, 1.5, 2, 0, 3]}
    assert json.dumps(plain, allow_nan=False)


def test_averagings_over_a_thread_collective_have_their_round():
    timeline = Timeline()
    builder(way=(ASYNC, THREAD), dataset=200).timeline(timeline).run().join(WAIT_S)
    for rank in (0, 1):
        rounds = [
            e.args["round"]
            for e in timeline.events()
            if e.kind is Kind.AVERAGING and e.rank == rank
        ]
        assert rounds == sorted(set(rounds))
        assert len(rounds) == timeline.summary().num_averagings
