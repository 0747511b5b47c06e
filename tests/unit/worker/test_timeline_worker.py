"""Events that a worker records: steps, messages, checkpoints and graphs."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter

import pytest
import torch

from coordinator import messages as m
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.machine import Coordinator
from runtime import CheckpointError, Kind, Timeline
from runtime.timeline.coordinator_lane import CoordinatorLane
from runtime.timeline.events import COMPUTE, CONTROL, STARTUP
from runtime.timeline.events import SYNC as WAITING
from runtime.timeline.summary import RunFacts
from runtime.worker import recorder
from runtime.worker.rank_checkpoint import RankCheckpoint
from runtime.worker.recorder import RunRecorder, WorkerRecorder
from tests.support.graphing import DATA, loss_of, net, posing, sgd  # noqa: F401
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Gate,
    builder,
    over,
)
from tests.support.trace_format import load_trace
from tests.unit.coordinator.test_machine import at_a_round
from tests.unit.timeline.test_runs import causes_of, check_totals
from tests.unit.worker.test_worker import Alone, plan

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)]
ways = over(WAYS)


class Counting(WorkerRecorder):
    """Counts the calls of its methods."""

    def __init__(self):
        self.calls = Counter()
        super().__init__()

    def __getattribute__(self, name):
        if not name.startswith("_") and name not in ("calls", "lane"):
            self.calls[name] += 1
        return super().__getattribute__(name)


def test_a_recorder_receives_plans_and_messages_but_no_steps():
    """A step of a run without a timeline must not pay for the recorder."""
    calls = []
    for num_batches in (2, 20):
        alone = Alone(recorder=(recorder := Counting()))
        alone.worker.run_epoch_plan(plan(range(num_batches)))
        assert alone.w == num_batches
        calls.append(recorder.calls)
    assert calls[0] == calls[1] == {"wrap": 1, "plan": 1, "last_report": 1}


def test_a_run_without_a_timeline_keeps_seconds_by_cause_and_no_events():
    recorder = RunRecorder(None, 2)
    recorder.begin(RunFacts(devices=("cpu",) * 2, policy="SYNC", backend="THREAD"), (), None, None)
    lane = recorder.recorder(1).lane
    start = lane.since
    lane.enter(COMPUTE, start + 5.0)
    lane.end_step(CONTROL, start + 5.0, [2])
    lane.enter(WAITING, start + 100.0)
    assert lane.seconds(start + 100.0)[STARTUP] == 5.0
    assert lane.events(start) == lane.gaps(start, start + 100.0) == []


def test_causes_of_time_are_of_messages_to_workers():
    assert set(recorder._MESSAGE_CAUSES) <= set(typing.get_args(m.ToWorker))


def make_machine(ranks=2):
    return Coordinator(
        CoordinatorConfig(
            devices=("cpu",) * ranks,
            num_samples=8,
            batch_size=2,
            num_epochs=1,
            policy=ApplyPolicy.CADENCE,
        )
    )


def test_each_report_to_the_coordinator_is_counted():
    report = m.BatchReport(rank=1, epoch=0, stats=m.ReportStats(num_batches=1, num_samples=2))
    carriers = [
        kind
        for kind in typing.get_args(m.FromWorker)
        if "report" in {f.name for f in dataclasses.fields(kind)}
    ]
    assert len(carriers) >= 4
    lane = CoordinatorLane(make_machine(), 0.0, 16)
    for kind in carriers:
        wanted = [f.name for f in dataclasses.fields(kind) if f.name != "report"]
        lane.observe(kind(**dict.fromkeys(wanted, 1), report=report), [], 1.0)
        lane.observe(kind(**dict.fromkeys(wanted, 1), report=None), [], 1.0)
    assert lane.num_samples == [0, 2 * len(carriers)]


def test_a_round_ends_when_its_last_rank_was_done_not_when_the_rank_reported():
    """Acknowledgements that complete nothing are recorded with the next report."""
    run = at_a_round(THREAD)
    lane = CoordinatorLane(run.machine, 0.0, 16)

    def tell(event, now):
        run.machine.handle(event, now)
        lane.observe(event, [], now)

    tell(m.Tick(), 1.0)
    tell(m.SyncAck(rank=1, round=1, done_at=1.5), 9.0)
    tell(m.SyncAck(rank=0, round=1, done_at=2.0), 9.0)
    events = lane._ring.read()[0]
    ended = [(start, end) for _, kind, start, end, _ in events if kind is Kind.AVERAGING]
    assert ended == [(1.0, 2.0)]


# -- checkpoints -----------------------------------------------------------------------


def of_kind(timeline, kind, rank):
    return [event for event in timeline.events() if event.kind is kind and event.rank == rank]


def record(timeline, way, tmp_path, ranks=2, **kwargs):
    return (
        builder(way=way, ranks=ranks, dataset=120, epochs=3, **kwargs)
        .timeline(timeline)
        .checkpoint_dir(tmp_path / "kept")
    )


@ways
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_are_events_and_count_as_callbacks(way, ranks, tmp_path):
    timeline, gate = Timeline(poll_s=0.02), Gate()
    handle = record(timeline, way, tmp_path, ranks, train=gate).run()
    gate.await_entry()
    ticket = handle._run._saves.ticket()[0]
    handle._run._inbox.put(m.SaveRequested(ticket=ticket))
    gate.opened.set()
    handle.join(WAIT_S)
    events = of_kind(timeline, Kind.CHECKPOINT, None)
    parts = [event.args["part"] for event in events]
    assert parts.count("requested") == 1
    assert parts[-1] == "saved at the end"
    assert events[-1].args["version"] == 3
    num_saved = sum(part.startswith("saved") for part in parts)
    assert num_saved >= 2
    for rank in range(ranks):
        states = of_kind(timeline, Kind.CHECKPOINT, rank)
        assert len(states) >= num_saved
        assert {event.args["part"] for event in states} == {"state"}
        taken = sum(event.duration_s for event in states)
        assert 0 < taken <= causes_of(timeline, rank)["callbacks"] + 1e-6
    check_totals(timeline)
    timeline.save_trace(tmp_path / "t.json")
    names = {e["name"] for e in load_trace(tmp_path / "t.json") if e.get("cat") == "checkpoint"}
    assert {"checkpoint state", "checkpoint requested", "checkpoint 3 saved at the end"} <= names


def test_a_failed_checkpoint_is_logged_in_one_line(monkeypatch, tmp_path):
    def refuse(self, **where):
        raise CheckpointError(f"<script>\n{'x' * 10_000}")

    monkeypatch.setattr(RankCheckpoint, "capture", refuse)
    timeline = Timeline()
    with pytest.raises(CheckpointError, match="<script>"):
        record(timeline, (CADENCE, OVER_CPU), tmp_path).run().join(WAIT_S)
    parts = [event.args["part"] for event in of_kind(timeline, Kind.CHECKPOINT, None)]
    assert parts
    assert all(part.startswith("failed: CheckpointError: <script>\\n") for part in parts)
    assert all(len(part) < 250 for part in parts)
    check_totals(timeline)


@ways
def test_a_resumed_run_is_recorded_from_its_checkpoint_on(way, tmp_path):
    record(Timeline(), way, tmp_path).run().join(WAIT_S)
    timeline = Timeline()
    b = record(timeline, way, tmp_path).num_epochs(5).resume(tmp_path / "kept")
    b.run().join(WAIT_S)
    summary = timeline.summary()
    assert summary.num_epochs == 2
    assert sum(rank.num_samples for rank in summary.ranks) == 2 * 120
    assert summary.ranks[0].causes["startup"] > 0
    check_totals(timeline)


# -- graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (SYNC, THREAD)], ids=["cadence", "sync"])
def test_a_cpu_run_with_cuda_graphs_is_recorded_as_one_without(way, tmp_path):
    timeline = Timeline()
    b = builder(way=way, dataset=120).timeline(timeline).cuda_graphs(True)
    b.run().join(WAIT_S)
    assert sum(rank.num_samples for rank in timeline.summary().ranks) == 120
    check_totals(timeline)


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (SYNC, THREAD)], ids=["cadence", "sync"])
def test_steps_that_are_captured_and_replayed_are_recorded(way, posing, tmp_path):  # noqa: F811
    timeline = Timeline(step_interval_s=0.0)
    b = builder(model=net, optim=sgd, train=loss_of, dataset=(DATA,), batch_size=6, epochs=4)
    b.policy(way[0]).backend(way[1]).cuda_graphs(True).timeline(timeline).run().join(WAIT_S)
    assert sum(posing.num_replays) > 0
    for rank in timeline.summary().ranks:
        assert len(of_kind(timeline, Kind.STEP, rank.rank)) == rank.num_steps > 0
        assert rank.causes["compute"] > 0
    check_totals(timeline)
    timeline.save_trace(tmp_path / "t.json")
    load_trace(tmp_path / "t.json")


# -- the end -------------------------------------------------------------------------------


def test_a_stuck_rank_changes_nothing_when_it_continues():
    timeline = Timeline(min_gap_s=0.0)
    facts = RunFacts(devices=("cpu", "cpu"), policy="CADENCE", backend="CPU")
    timeline.begin(facts, [torch.device("cpu")] * 2, make_machine())
    stuck, left = timeline.lane(0), timeline.lane(1)
    left.close()
    timeline.finish(stopped=False, error=RuntimeError("rank 0 is stuck"))
    before = timeline.summary(), timeline.events(), timeline.idle_gaps(), timeline.profile(0)
    stuck.record(Kind.CHUNK, stuck.since, 0, 1)
    stuck.end_step(stuck.enter(2), stuck.since, [2])
    timeline.lane(0).close()
    assert before == (
        timeline.summary(),
        timeline.events(),
        timeline.idle_gaps(),
        timeline.profile(0),
    )
    check_totals(timeline)


def test_a_rank_that_gets_no_work_is_idle_once_the_run_has_begun():
    def wait(model, batch):
        torch.randn(200, 200) @ torch.randn(200, 200)
        return -model.w.sum()

    timeline = Timeline()
    builder(train=wait, dataset=2, batch_size=2, epochs=30).timeline(timeline).run().join(WAIT_S)
    shares = [rank.causes for rank in timeline.summary().ranks]
    assert max(causes["idle"] for causes in shares) > 0
    check_totals(timeline)
