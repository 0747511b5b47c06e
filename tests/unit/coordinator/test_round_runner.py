"""The effect of a round's cost on the cadence."""

from __future__ import annotations

import pytest

from coordinator import messages as m
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.rounds import COORDINATOR_SHARE, REFERENCE_RATE_PER_S, RoundCpuTime
from coordinator.run_state import RunState
from tests.simulation.harness import Simulation
from tests.simulation.schedule import Pace, Schedule

ANCHOR = 10
EVENT_S = 1e-4
BATCH_S = 1e-3
ROUND_S = 6 * EVENT_S
"""A report, two snapshots, an average and two acknowledgements."""


def statistics_with(monkeypatch, event_s, batch_s=BATCH_S, **settings):
    """Two ranks without averaging cost, and a coordinator with a CPU time per event."""
    handle = Coordinator.handle

    def clocked(machine, event, now):
        commands = handle(machine, event, now)
        machine.run_state.spent_s += event_s
        return commands

    monkeypatch.setattr(Coordinator, "handle", clocked)
    settings |= {"num_samples": 2000, "num_epochs": 1, "divergence_threshold": None}
    settings.setdefault("policy", ApplyPolicy.CADENCE)
    config = CoordinatorConfig(devices=("cpu",) * 2, batch_size=1, anchor=ANCHOR, **settings)
    schedule = Schedule(config=config, paces=((Pace(start_s=0.0, batch_s=batch_s),),) * 2)
    assert schedule.sync_s == schedule.average_s == 0.0
    statistics = Simulation(schedule).run().machine.statistics()
    assert statistics.num_averagings >= 5
    assert all(rank.sync_s == 0.0 for rank in statistics.ranks)
    return statistics


@pytest.mark.parametrize("target", [0.02, 0.10, 0.50])
def test_rounds_are_rare_enough_for_the_coordinators_share_of_a_core(monkeypatch, target):
    """For any overhead_target."""
    anchor = statistics_with(monkeypatch, EVENT_S, overhead_target=target).anchor
    assert 2 / BATCH_S > REFERENCE_RATE_PER_S
    assert ROUND_S / (anchor * BATCH_S) == pytest.approx(COORDINATOR_SHARE, rel=0.3)


def test_the_coordinators_share_is_larger_at_lower_rates(monkeypatch):
    batch_s = 4 * BATCH_S
    anchor = statistics_with(monkeypatch, 10 * EVENT_S, batch_s, overhead_target=0.5).anchor
    assert 10 * ROUND_S / (anchor * batch_s) == pytest.approx(2 * COORDINATOR_SHARE, rel=0.3)


def test_rounds_of_long_steps_are_limited_by_their_cost_to_the_ranks(monkeypatch):
    """The coordinator's CPU time takes cores from the ranks, like the average."""
    target, factor, batch_s = 0.02, 500, 100 * BATCH_S
    anchor = statistics_with(monkeypatch, factor * EVENT_S, batch_s, overhead_target=target).anchor
    assert factor * ROUND_S / 2 / (anchor * batch_s) == pytest.approx(target, rel=0.3)


def test_a_coordinator_without_cost_does_not_change_the_cadence(monkeypatch):
    assert statistics_with(monkeypatch, 0.0).anchor == ANCHOR


def run_with(since_round):
    run = RunState(
        CoordinatorConfig(devices=("cpu",) * 2, num_samples=9, batch_size=1, num_epochs=1)
    )
    run.ranks[0].since_round = since_round
    return run


ACK = m.SyncAck(rank=0, round=1)
REPORT = m.BatchReport(rank=0, epoch=0, stats=m.ReportStats())
CHUNK = m.EpochReport(rank=0, epoch=0, stats=m.ReportStats())


@pytest.mark.parametrize(
    ("event", "since_round", "charged"),
    [(ACK, 0, True), (REPORT, 10, True), (REPORT, 9, False), (CHUNK, 10, False)],
    ids=["answer", "count-reached", "count-not-reached", "chunk"],
)
def test_rounds_are_charged_with_their_events(event, since_round, charged):
    """The count is 10. The time of an event is measured at the next one."""
    run = run_with(since_round)
    cpu_time = RoundCpuTime(run)
    run.spent_s = 1.0
    cpu_time.record(event)
    run.spent_s = 3.0
    cpu_time.record(m.Tick())
    run.spent_s = 7.0
    cpu_time.record(m.Tick())
    assert cpu_time.take() == (2.0 if charged else 0.0)
    assert cpu_time.take() == 0.0
