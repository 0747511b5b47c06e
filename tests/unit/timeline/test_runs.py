"""Timelines of real runs: time by cause, and events."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref

import pytest
import torch
from torch.utils.data import Dataset

from runtime import Cause, Kind, Timeline, WorkerFailed, current_worker
from runtime.timeline.resources import THREAD_NAME
from runtime.worker.flow import WorkerFlow
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Counter,
    Gate,
    builder,
    count_up,
    every_way,
    until,
)
from tests.support.signalling import Waits

pytestmark = pytest.mark.usefixtures("no_garbage_collection")

MAX_UNATTRIBUTED = 0.01
HICCUP_S = 0.05
"""Of a run that is over in no time, this may be the time in which others had the core."""
WAITS = {Cause.DATA, Cause.SYNC, Cause.PARKED, Cause.IDLE, Cause.GONE}
policies = pytest.mark.parametrize(
    "way",
    [(CADENCE, OVER_CPU), (SYNC, THREAD), (ASYNC, THREAD)],
    ids=["cadence", "sync", "async"],
)


def record(*, change=lambda b: b, **kwargs):
    """Run to the end with a timeline; returns it, the state and the duration."""
    timeline = Timeline(poll_s=0.005, step_interval_s=0.0)
    start = time.monotonic()
    state = change(builder(**kwargs).timeline(timeline)).run().join(WAIT_S)
    return timeline, state, time.monotonic() - start


def causes_of(timeline, rank):
    return timeline.summary().ranks[rank].causes


def kinds_of(timeline, rank):
    return {event.kind for event in timeline.events() if event.rank == rank}


def check_totals(timeline, wall_s=None, hiccup_s=HICCUP_S):
    """Check that each rank's causes sum to the time of the run, with almost none unattributed."""
    summary = timeline.summary()
    assert summary.ranks
    for rank in summary.ranks:
        assert sum(rank.causes.values()) == pytest.approx(summary.wall_s, rel=1e-6)
        assert rank.wall_s == pytest.approx(summary.wall_s, rel=1e-6)
        assert rank.unattributed_share <= max(MAX_UNATTRIBUTED, hiccup_s / rank.wall_s)
        assert min(rank.causes.values()) >= 0
        assert rank.idle_share == pytest.approx(
            sum(rank.causes[c.label] for c in WAITS) / rank.wall_s
        )
        width_s, bins = timeline.profile(rank.rank)
        sums = [sum(column) for column in zip(*bins, strict=True)]
        assert sums == pytest.approx(list(rank.causes.values()), abs=1e-4)
        assert len(bins) <= 1025
        assert width_s > 0
    if wall_s is not None:
        assert summary.wall_s <= wall_s
        assert summary.wall_s >= wall_s - 0.5  # settings are checked before the start


@every_way
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_causes_of_each_rank_sum_to_the_wall_time(way, ranks):
    own = [0.0] * ranks

    def fit(model, batch):
        start = time.monotonic()
        loss = count_up(model, batch)
        own[current_worker().rank] += time.monotonic() - start
        return loss

    timeline, state, wall_s = record(
        way=way,
        ranks=ranks,
        dataset=240,
        batch_size=4,
        epochs=2,
        train=fit,
        change=lambda b: b.eval_fn(lambda model, epoch: {"a": 1.0}),
    )
    check_totals(timeline, wall_s)
    summary = timeline.summary()
    assert summary.state == "finished"
    assert (summary.num_epochs, summary.model) == (2, "Counter")
    assert sum(rank.num_samples for rank in summary.ranks) == 480
    assert sum(rank.num_steps for rank in summary.ranks) >= 120
    for rank in summary.ranks:
        assert rank.causes["compute"] >= own[rank.rank]
        assert Kind.EPOCH in kinds_of(timeline, rank.rank)
        assert Kind.CHUNK in kinds_of(timeline, rank.rank)
        assert Kind.STEP in kinds_of(timeline, rank.rank)
    assert summary.num_averagings == sum(m.num_averagings for m in state.metrics)
    assert {Kind.RUN, Kind.EPOCH} <= kinds_of(timeline, None)
    assert (Kind.AVERAGING in kinds_of(timeline, None)) == (ranks > 1 and way[0] is not SYNC)


@policies
def test_chunks_have_the_batches_of_their_rank(way):
    timeline, *_ = record(way=way, ranks=2, dataset=240, batch_size=4, epochs=2)
    chunks = [event for event in timeline.events() if event.kind is Kind.CHUNK]
    assert sum(event.args["batches"] for event in chunks) == 120


@policies
def test_at_most_one_percent_of_a_longer_run_is_unattributed(way):
    def fit(model, batch):
        time.sleep(0.001)
        return count_up(model, batch)

    timeline, _, wall_s = record(way=way, train=fit, dataset=800, epochs=2)
    assert wall_s > 0.4
    check_totals(timeline, wall_s, hiccup_s=0.0)
    for rank in timeline.summary().ranks:
        assert rank.causes["compute"] >= 0.001 * rank.num_steps
        assert rank.causes["control"] < 0.5 * (rank.wall_s - rank.causes["startup"])


def test_time_without_a_cause_is_unattributed(monkeypatch):
    train_plan = WorkerFlow.train_plan

    def wander(self, plan, *args):
        time.sleep(0.02)
        return train_plan(self, plan, *args)

    monkeypatch.setattr(WorkerFlow, "train_plan", wander)
    timeline, _, _ = record(epochs=3, ranks=1)
    assert causes_of(timeline, 0)["unattributed"] >= 3 * 0.02


class SlowData(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.tensor(index)


class BrokenData(SlowData):
    """Slow, then raises; records the lane's cause meanwhile."""

    def __init__(self, timeline):
        self.timeline = timeline
        self.seen = []

    def __getitem__(self, index):
        time.sleep(0.1)
        self.seen.append(self.timeline.lane(0).cause)
        raise OSError("no such sample")


@pytest.mark.parametrize("accumulate", [1, 4])
def test_reading_a_data_set_that_fails_is_data(accumulate):
    timeline = Timeline()
    data = BrokenData(timeline)
    made = builder(dataset=data, ranks=1).prefetch(0).accumulate(accumulate).timeline(timeline)
    with pytest.raises(WorkerFailed, match="no such sample"):
        made.run().join(WAIT_S)
    assert data.seen == [Cause.DATA]
    assert causes_of(timeline, 0)["data"] >= 0.1
    check_totals(timeline)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_waiting_for_a_slow_data_set_is_data(prefetch):
    timeline, _, _ = record(dataset=SlowData(), ranks=1, change=lambda b: b.prefetch(prefetch))
    assert causes_of(timeline, 0)["data"] >= 0.15
    assert Kind.DATA in kinds_of(timeline, 0)
    gaps = [gap for gap in timeline.idle_gaps(0.005) if gap.cause is Cause.DATA]
    assert gaps
    check_totals(timeline)


def slow_rank(rank, seconds):
    def fit(model, batch):
        if current_worker().rank == rank:
            time.sleep(seconds)
        return count_up(model, batch)

    return fit


def test_waiting_for_a_slow_peer_in_each_step_is_sync():
    timeline, _, _ = record(train=slow_rank(1, 0.01), way=(SYNC, THREAD), dataset=80)
    causes = causes_of(timeline, 0)
    assert causes["sync"] >= 20 * 0.005
    assert causes["sync"] > 2 * causes_of(timeline, 1)["sync"]
    assert [gap for gap in timeline.idle_gaps(0.005) if gap.cause is Cause.SYNC]
    check_totals(timeline)


def test_waiting_for_a_peer_that_has_not_joined_a_round_is_sync():
    """The slow rank is in a step of 30 ms when the other one joins, or has just ended one."""
    timeline, _, _ = record(
        train=slow_rank(1, 0.03),
        way=(CADENCE, THREAD),
        dataset=80,
        change=lambda b: b.anchor(2).max_anchor(2).partition_ratios([3, 1]),
    )
    assert timeline.summary().num_averagings > 2
    assert causes_of(timeline, 0)["sync"] > causes_of(timeline, 1)["sync"]
    found = [e for e in timeline.events() if e.kind is Kind.SYNC and e.rank == 0]
    assert found
    check_totals(timeline)


def test_a_throttled_rank_is_parked_until_it_is_resumed():
    timeline, _, _ = record(
        train=slow_rank(1, 0.01), dataset=80, change=lambda b: b.max_batch_diff(1)
    )
    rank = timeline.summary().ranks[0]
    assert rank.causes["parked"] >= 0.1
    throttles = [e for e in timeline.events() if e.kind is Kind.THROTTLE and e.rank == 0]
    resumes = [e for e in timeline.events() if e.kind is Kind.RESUME and e.rank == 0]
    assert rank.num_throttles == len(throttles) == len(resumes) > 1
    assert sum(e.duration_s for e in throttles) >= rank.causes["parked"] - 1e-6
    steps = [e for e in timeline.events() if e.kind is Kind.STEP and e.rank == 0]
    assert steps
    assert not any(t.start_s < s.start_s < t.end_s for s in steps for t in throttles)
    check_totals(timeline)


def test_callbacks_are_counted_and_are_events():
    def change(b):
        b.epoch_fn(lambda epoch, worker: time.sleep(0.01))
        b.eval_fn(lambda model, epoch: (time.sleep(0.02), {"a": 1.0})[1])
        return b.eval_rank(0).checkpoint_fn(lambda version, model: time.sleep(0.03))

    timeline, _, _ = record(change=change, epochs=3)
    assert causes_of(timeline, 0)["callbacks"] >= 3 * (0.01 + 0.02 + 0.03)
    events = [e for e in timeline.events() if e.rank == 0]
    found = {
        kind: [tuple(e.args.values()) for e in events if e.kind is kind]
        for kind in (Kind.EPOCH_FN, Kind.EVALUATION, Kind.CHECKPOINT)
    }
    assert found == {
        Kind.EPOCH_FN: [(0,), (1,), (2,)],
        Kind.EVALUATION: [(0,), (1,), (2,)],
        Kind.CHECKPOINT: [(1,), (2,), (3,)],
    }
    check_totals(timeline)


def test_building_the_models_is_startup():
    def slow(device):
        time.sleep(0.05)
        return Counter()

    timeline, _, _ = record(model=slow)
    assert causes_of(timeline, 1)["startup"] >= 0.1  # one at a time
    assert causes_of(timeline, 0)["startup"] >= 0.1  # rank 0 waits for rank 1
    check_totals(timeline)


def test_anchor_changes_are_events_and_a_curve():
    timeline, _, _ = record(
        way=(CADENCE, THREAD), dataset=600, change=lambda b: b.anchor(1).overhead_target(0.01)
    )
    changes = [e for e in timeline.events() if e.kind is Kind.ANCHOR]
    assert changes
    curve = timeline.anchor_curve()
    assert curve[0] == (0.0, 1.0)
    assert [row[1] for row in curve[1:]] == [e.args["anchor"] for e in changes]
    assert timeline.summary().anchor == curve[-1][1]


def test_the_throughput_sums_to_the_samples():
    timeline, _, _ = record(dataset=400, epochs=3)
    width_s, rates = timeline.throughput()
    ends = [min((i + 1) * width_s, timeline.summary().wall_s) for i in range(len(rates))]
    lasted = [max(width_s, b - a) for a, b in zip([0.0, *ends], ends, strict=False)]
    assert len(rates) <= 62
    for rank in timeline.summary().ranks:
        sums = sum(row[rank.rank] * s for row, s in zip(rates, lasted, strict=True))
        assert sums == pytest.approx(rank.num_samples, rel=0.25)


def test_the_load_of_the_machine_is_read():
    gate = Gate()
    timeline = Timeline(poll_s=0.002)
    handle = builder(train=gate).timeline(timeline).run()
    gate.await_entry()
    until(lambda: len(timeline.resources()[1]) >= 5)
    gate.opened.set()
    handle.join(WAIT_S)
    columns, rows = timeline.resources()
    assert columns[:2] == ("process_cpu_percent", "process_rss_bytes")
    assert all(row[0] >= 0 and row[2] > 1e6 for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@policies
@pytest.mark.parametrize("mode", ["raise", "continue"])
def test_a_failure_is_an_event_and_the_record_is_kept(way, mode):
    def fit(model, batch):
        worker = current_worker()
        if worker.rank == 1 and worker.local_step >= 3:
            raise RuntimeError("planted\n<script>")
        time.sleep(0.001)
        return count_up(model, batch)

    timeline = Timeline()
    b = builder(train=fit, way=way, dataset=80).timeline(timeline).on_worker_failure(mode)
    b.partition_ratios([1, 1])  # so that rank 1 reaches its step
    handle = b.run()
    if mode == "raise":
        with pytest.raises(WorkerFailed):
            handle.join(WAIT_S)
    else:
        handle.join(WAIT_S)
    (failure,) = [e for e in timeline.events() if e.kind is Kind.FAILURE]
    assert failure.rank == 1
    assert failure.args["error"] == "RuntimeError: planted\\n<script>"
    summary = timeline.summary()
    assert summary.state == ("failed" if mode == "raise" else "finished")
    assert (summary.error is not None) == (mode == "raise")
    if mode == "continue":
        assert summary.ranks[1].causes["gone"] > 0
    check_totals(timeline)


@policies
def test_a_stopped_run_keeps_its_record(way, tmp_path):
    gate = Gate()
    timeline = Timeline()
    handle = builder(train=gate, way=way, epochs=50).timeline(timeline).run()
    gate.await_entry()
    assert timeline.summary().state == "running"
    handle.stop()
    gate.opened.set()
    assert handle.join(WAIT_S).stopped
    assert timeline.summary().state == "stopped"
    assert [e.args["reason"] for e in timeline.events() if e.kind is Kind.STOP] == [
        "stop requested"
    ]
    timeline.save_json(tmp_path / "t.json")
    check_totals(timeline)


def test_a_run_in_progress_can_be_read_and_saved(tmp_path):
    gate = Gate(rank=1)
    timeline = Timeline()
    handle = builder(train=gate, dataset=80).timeline(timeline).run()
    gate.await_entry()
    first, second = timeline.summary(), timeline.summary()
    assert second.wall_s >= first.wall_s
    for rank in second.ranks:
        assert sum(rank.causes.values()) == pytest.approx(rank.wall_s)
        assert rank.wall_s == pytest.approx(second.wall_s, abs=0.5)
    for name in ("trace", "json", "csv", "html"):
        getattr(timeline, f"save_{name}")(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
    gate.opened.set()
    handle.join(WAIT_S)


def test_following_a_run_returns_each_event_once():
    timeline = Timeline()
    handle = builder(dataset=200, epochs=3).timeline(timeline).run()
    seen, cursor = [], None
    while handle.state is None:
        events, cursor = timeline.read(cursor)
        seen += events
        time.sleep(0.001)
    handle.join(WAIT_S)
    events, cursor = timeline.read(cursor)
    seen += events
    assert timeline.read(cursor)[0] == []

    def key(event):
        return (event.kind.value, event.rank or -1, event.start_s, event.end_s, str(event.args))

    wanted = [event for event in timeline.events() if event.kind is not Kind.RUN]
    assert sorted(map(key, seen)) == sorted(map(key, wanted))


def test_a_timeline_records_one_run():
    timeline, _, _ = record()
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="new Timeline"):
        builder().timeline(timeline).run()
    assert set(threading.enumerate()) == before


def test_a_run_that_cannot_start_leaves_no_thread_and_an_unused_timeline():
    timeline = Timeline()
    with pytest.raises(ValueError, match="num_epochs"):
        (builder().timeline(timeline)._set(num_epochs=None)).run()
    assert timeline.summary().state == "empty"
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("way", [(SYNC, THREAD), (ASYNC, OVER_CPU)], ids=["sync", "async"])
def test_a_timeline_keeps_nothing_of_the_run_alive(way):
    kept = []

    def model(device):
        built = Counter()
        kept.append(weakref.ref(built))
        return built

    timeline = Timeline()
    handle = builder(model=model, way=way).timeline(timeline).run()
    handle.join(WAIT_S)
    kept += [weakref.ref(handle._run), weakref.ref(handle._run.machine.run_state)]
    del handle
    # join() returns before the thread has ended.
    until(lambda: gc.collect() >= 0 and all(ref() is None for ref in kept))
    assert timeline.summary().num_epochs == 1


def test_a_fault_in_the_observer_ends_the_observation_and_not_the_run(monkeypatch, caplog):
    from runtime.timeline.coordinator_lane import CoordinatorLane

    def broken(self, *args):
        raise RuntimeError("planted")

    monkeypatch.setattr(CoordinatorLane, "_observe", broken)
    timeline, state, _ = record(epochs=2)
    assert len(state.metrics) == 2
    assert [r.message for r in caplog.records if "timeline" in r.message] == [
        "the timeline failed to observe the coordinator, and stops"
    ]
    check_totals(timeline)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"poll_s": 0}, ValueError),
        ({"poll_s": float("nan")}, ValueError),
        ({"poll_s": "1"}, TypeError),
        ({"poll_s": True}, TypeError),
        ({"max_events": 0}, ValueError),
        ({"max_events": 1.5}, TypeError),
        ({"min_gap_s": -1}, ValueError),
        ({"step_interval_s": float("inf")}, ValueError),
    ],
)
def test_invalid_settings_raise(settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        Timeline(**settings)


def test_the_builder_accepts_only_a_timeline():
    with pytest.raises(TypeError, match=r"gpuworker\.Timeline"):
        builder().timeline("run.json")


def test_an_empty_timeline_can_be_read_and_saved(tmp_path):
    timeline = Timeline()
    assert timeline.summary().state == "empty"
    assert timeline.events() == []
    assert timeline.idle_gaps() == []
    for name in ("trace", "json", "csv", "html"):
        getattr(timeline, f"save_{name}")(tmp_path / name)


@pytest.mark.parametrize("signals", [1, 2], ids=["stopped", "aborted"])
def test_an_interrupted_run_keeps_its_record(signals, tmp_path, monkeypatch):
    timeline = Timeline()
    raised, waits = threading.Event(), Waits(monkeypatch)

    def fit(model, batch):
        worker = current_worker()
        if worker.rank == 0 and worker.local_step >= 5 and not raised.is_set():
            raised.set()
            assert waits.entered.wait(WAIT_S)
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return count_up(model, batch)

    handle = builder(train=fit, dataset=100_000).timeline(timeline).run()
    with pytest.raises(KeyboardInterrupt):
        handle.join(WAIT_S)
    summary = timeline.summary()
    assert summary.state == ("stopped" if handle.state is not None else "failed")
    assert summary.ranks[0].num_steps >= 5
    assert Kind.STOP in kinds_of(timeline, None)
    timeline.save_html(tmp_path / "t.html")
    check_totals(timeline)
