"""Parts of a timeline: rings, curves, texts and a rank's lane, with a manual clock."""

from __future__ import annotations

import threading
import time
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Cause, Kind
from runtime.timeline import rank_lane, resources
from runtime.timeline.buffers import Decimated, Ring, TimeBins
from runtime.timeline.coordinator_lane import spread
from runtime.timeline.rank_lane import RankLane
from runtime.timeline.text import one_line, table_cell

WAIT_S = 60.0
COMPUTE, DATA, SYNC, PARKED, IDLE = Cause.COMPUTE, Cause.DATA, Cause.SYNC, Cause.PARKED, Cause.IDLE


class Clock:
    """A clock set by the test."""

    def __init__(self, at=100.0):
        self.at = at

    def __call__(self):
        return self.at


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(rank_lane, "now", made)
    return made


def make_lane(clock, **settings):
    wanted = {"max_events": 100, "min_gap_s": 0.001, "step_interval_s": 0.0, **settings}
    return RankLane(3, clock.at, **wanted)


def test_a_ring_keeps_the_newest_items_and_counts_the_dropped_ones():
    ring = Ring(4)
    for number in range(10):
        ring.add((f"item {number}",))
    items, after = ring.read()
    assert items == [(n, f"item {n}") for n in range(6, 10)]
    assert (after, ring.num_dropped) == (10, 6)
    assert ring.read(after) == ([], 10)
    assert ring.read(8)[0] == [(8, "item 8"), (9, "item 9")]


def test_a_ring_read_during_writes_returns_whole_items_in_order():
    ring, stop = Ring(64), threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            ring.add((number, number * 7))
            number += 1

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        cursor, num_seen = 0, 0
        for _ in range(2000):
            items, after = ring.read(cursor)
            assert all(n == first and second == first * 7 for n, first, second in items)
            assert [item[0] for item in items] == sorted({item[0] for item in items})
            assert all(cursor <= item[0] < after for item in items)
            cursor, num_seen = after, num_seen + len(items)
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert num_seen > 0
    assert len(ring._slots) == 64


@settings(max_examples=60)
@given(st.lists(st.floats(0.0, 5.0), max_size=60))
def test_bins_keep_every_second_when_they_merge(steps):
    bins, total, at = TimeBins(10.0, num_bins=8, width_s=0.01), 0.0, 10.0
    for step in steps:
        at += step
        total += step
        bins.close(at, [total], 0)
    assert len(bins._rows) < 8
    width_s, rows = bins.read(at)
    assert len(rows) < 8
    for index, (value,) in enumerate(rows):
        assert value == pytest.approx((index + 1) * width_s, abs=1e-9)
    assert at - 10.0 <= (len(rows) + 1) * width_s + 1e-9


@settings(max_examples=60)
@given(st.integers(0, 500))
def test_a_decimated_curve_is_bounded_and_keeps_its_ends(num_points):
    curve = Decimated(16)
    for number in range(num_points):
        curve.add((float(number), float(number * 2)))
    rows = curve.read()
    assert len(rows) <= 17
    assert rows == sorted(set(rows))
    assert [row[0] for row in rows[:1] + rows[-1:]] == ([0.0, num_points - 1.0] if rows else [])
    gaps = {b[0] - a[0] for a, b in pairwise(rows[:-1])}
    assert len(gaps) <= 1


def test_totals_reported_in_jumps_are_interpolated():
    assert spread([0, 0, 0, 40, 40, 60], 10) == [10, 20, 30, 40, 50, 60]
    assert spread([0, 0, 0, 40, 40, 40], 2) == [0, 0, 20, 40, 40, 40]
    assert spread([5, 6, 7], 3) == [5, 6, 7]
    assert spread([], 3) == []


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 9))
def test_interpolation_keeps_the_reported_totals(increments, reach):
    totals = list(accumulate(increments))
    smooth = spread(totals, reach)
    assert all(b >= a - 1e-9 for a, b in pairwise(smooth))
    assert all(s >= t for s, t in zip(smooth, totals, strict=True))
    for index, increment in enumerate(increments):
        if increment or index == len(increments) - 1:
            assert smooth[index] == totals[index]


@settings(max_examples=60)
@given(st.text())
def test_a_text_becomes_one_short_printable_line(text):
    shown = one_line(text)
    assert len(shown) <= 200
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert len(shown.splitlines()) <= 1


def test_cut_texts_stay_different():
    long = "x" * 10_000
    assert one_line(f"{long}1") != one_line(f"{long}2")
    assert one_line("short") == "short"
    assert one_line("two\nlines\u202e\ud800") == "two\\nlines\\u202e\\ud800"


def test_an_object_without_text_is_shown_by_its_class():
    class Mute:
        def __str__(self):
            raise ValueError("planted")

    assert one_line(Mute()) == "<Mute>"


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "|x", " =1", "%0", "\t=1", "\r=1"]
)
def test_a_cell_is_not_a_formula(text):
    assert table_cell(text)[0] not in "=+-@|%\t\r "


def test_every_second_belongs_to_one_cause(clock):
    lane = make_lane(clock)
    clock.at += 2.0
    assert lane.enter(COMPUTE) == Cause.STARTUP
    clock.at += 3.0
    assert lane.enter(DATA) == COMPUTE
    clock.at += 0.5
    lane.enter(COMPUTE)
    clock.at += 1.0
    seconds = lane.seconds()
    assert sum(seconds) == pytest.approx(6.5)
    assert (seconds[Cause.STARTUP], seconds[COMPUTE], seconds[DATA]) == (2.0, 4.0, 0.5)
    lane.close()
    assert lane.seconds(end=clock.at + 4.0)[Cause.GONE] == pytest.approx(4.0)


def test_a_total_is_written_before_the_cause_changes(clock):
    """With the new cause and the old total a reader would attribute the interval wrongly."""

    class Watched(list):
        def __setitem__(self, index, value):
            assert lane.cause == index
            written.append(index)
            super().__setitem__(index, value)

    written, lane = [], make_lane(clock)
    lane.totals = Watched(lane.totals)
    for cause in (COMPUTE, DATA, COMPUTE):
        clock.at += 1.0
        lane.enter(cause)
    assert written == [Cause.STARTUP, COMPUTE, DATA]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(*[st.floats(0.0, 0.03)] * 3), max_size=30))
def test_a_recorded_interval_equals_two_changes_of_cause(clock, intervals):
    at_once, apart = make_lane(clock, min_gap_s=0.01), make_lane(clock, min_gap_s=0.01)
    for before, past, after in intervals:
        clock.at += before
        start = clock.at
        apart.enter(DATA)
        clock.at += past
        apart.enter(COMPUTE)
        at_once.record_interval(DATA, start, COMPUTE)
        clock.at += after
        for lane in (at_once, apart):
            lane.enter(Cause.CONTROL)
    assert at_once.seconds() == pytest.approx(apart.seconds())
    assert [(gap.cause, gap.start_s) for gap in at_once.gaps(100.0)] == [
        (gap.cause, gap.start_s) for gap in apart.gaps(100.0)
    ]
    assert at_once.bins(clock.at) == (apart.bins(clock.at)[0], approx_rows(apart.bins(clock.at)[1]))


def approx_rows(rows):
    return [pytest.approx(row, abs=1e-9) for row in rows]


def test_the_present_interval_counts_up_to_now(clock):
    lane = make_lane(clock)
    lane.enter(PARKED)
    clock.at += 7.0
    assert lane.seconds()[PARKED] == 7.0
    (gap,) = [gap for gap in lane.gaps(100.0) if gap.cause is PARKED]
    assert (gap.start_s, gap.duration_s, gap.rank) == (0.0, 7.0, 3)


def test_short_gaps_are_counted_but_are_not_events(clock):
    lane = make_lane(clock, min_gap_s=0.01)
    for _ in range(1000):
        lane.enter(DATA)
        clock.at += 0.005
        lane.enter(COMPUTE)
        clock.at += 0.005
    assert lane.gaps(100.0) == []
    assert lane.seconds()[DATA] == pytest.approx(5.0)
    assert lane.num_dropped == 0


def test_totals_include_the_time_of_dropped_events(clock):
    lane = make_lane(clock, max_events=16)
    for number in range(5000):
        lane.enter(DATA)
        clock.at += 0.002
        lane.enter(COMPUTE)
        start = lane.since
        clock.at += 0.002
        lane.enter(DATA)
        lane.end_step(lane.cause, start, [8])
        lane.record(Kind.CHUNK, start, number, 1)
    assert lane.num_steps == 5000
    assert lane.seconds()[DATA] == pytest.approx(10.0)
    assert len(lane.events(100.0)) <= 32
    assert lane.num_dropped == 3 * 5000 - 32
    assert lane.events(100.0)[-1].args["step"] == 5000


def test_steps_are_sampled_but_all_are_counted(clock):
    lane = make_lane(clock, step_interval_s=1.0)
    for _ in range(100):
        lane.enter(COMPUTE)
        start = lane.since
        clock.at += 0.1
        lane.enter(Cause.CONTROL)
        lane.end_step(lane.cause, start, [8])
    steps = [event for event in lane.events(100.0) if event.kind is Kind.STEP]
    assert lane.num_steps == 100
    assert 9 <= len(steps) <= 11
    assert {event.rank for event in steps} == {3}


def test_the_bins_of_a_lane_sum_to_its_totals(clock):
    lane = make_lane(clock)
    for number in range(300):
        lane.enter(Cause(number % len(Cause)))
        clock.at += 0.0101 * (1 + number % 7)
    lane.enter(IDLE)
    clock.at += 40.0
    width_s, rows = lane.bins(clock.at)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    assert sums == pytest.approx(lane.seconds(), abs=1e-6)
    assert all(sum(row) == pytest.approx(width_s, abs=1e-6) for row in rows[:-1])
    assert len(rows) <= 1025


def test_a_cursor_returns_only_new_events(clock):
    lane = make_lane(clock)
    for epoch in range(3):
        lane.enter(COMPUTE)
        clock.at += 0.1
        lane.record(Kind.EPOCH, lane.since, epoch)
    first, cursor = lane.read((0, 0), 100.0)
    assert [e.args["epoch"] for e in first if e.kind is Kind.EPOCH] == [0, 1, 2]
    assert lane.read(cursor, 100.0)[0] == []
    lane.record(Kind.EPOCH, lane.since, 3)
    (event,), _ = lane.read(cursor, 100.0)
    assert event.args == {"epoch": 3}


def test_a_lane_read_during_writes_loses_no_time():
    lane = RankLane(0, rank_lane.now(), max_events=64, min_gap_s=0.0, step_interval_s=0.0)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            lane.enter(COMPUTE)
            lane.enter(DATA)
            lane.enter(SYNC)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        before = 0.0
        for _ in range(500):
            low = rank_lane.now() - lane._start
            whole = sum(lane.seconds())
            high = rank_lane.now() - lane._start
            assert low - 1e-3 <= whole <= high + 1e-3
            assert whole >= before - 1e-3
            before = whole
            end = rank_lane.now()
            assert sum(map(sum, lane.bins(end)[1])) == pytest.approx(end - lane._start, abs=5e-3)
    finally:
        stop.set()
        thread.join(WAIT_S)


def test_the_values_of_the_machine_are_read_at_most_at_their_interval(monkeypatch):
    calls = []

    def used():
        calls.append(None)
        return SimpleNamespace(used=len(calls))

    monkeypatch.setattr(resources.psutil, "virtual_memory", used)
    load, now = resources.HostLoad(machine_s=10.0), time.monotonic()
    rows = [load.read(now + second) for second in range(1, 25)]
    assert [row[3] for row in rows] == [1.0] * 10 + [2.0] * 10 + [3.0] * 4
    assert all(len(row) == len(resources.RESOURCE_COLUMNS) for row in rows)
    assert all(row[0] >= 0 and row[1] > 1e6 for row in rows)


def test_the_memory_of_the_process_is_read_at_most_at_its_interval():
    load, now, calls = resources.HostLoad(memory_s=10.0), time.monotonic(), []

    def info():
        calls.append(None)
        return SimpleNamespace(rss=len(calls))

    load._process = SimpleNamespace(memory_info=info)
    rows = [load.read(now + second) for second in range(1, 25)]
    assert [row[1] for row in rows] == [1.0] * 10 + [2.0] * 10 + [3.0] * 4


def test_the_load_of_the_process_is_measured_since_the_previous_reading():
    load = resources.HostLoad()
    start, before = load._at, time.process_time()
    while time.process_time() - before < 0.02:
        pass
    now = time.monotonic()
    used = time.process_time() - before
    (percent, *_) = load.read(now)
    assert percent >= 99 * used / (now - start)
    assert load.read(now + 1000.0)[0] < 10.0
