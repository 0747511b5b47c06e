"""What an averaging round teaches the cadence."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from coordinator import messages as m
from coordinator.config import ApplyPolicy, AverageBackend, CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.messages import Send
from coordinator.rounds import OWN_SHARE, RATED_PER_S, OwnTime
from coordinator.state import Core, Phase
from tests.simulation.harness import Simulation
from tests.simulation.schedule import Pace, Schedule

ANCHOR = 10
EVENT_S = 1e-4
BATCH_S = 1e-3
ROUND_S = 6 * EVENT_S
"""A report, two snapshots, an average and two acknowledgements."""


def schedule_of(paces_s, happens=None, **settings):
    """One rank for each pace, in seconds a batch."""
    config = CoordinatorConfig(devices=("cpu",) * len(paces_s), batch_size=1, **settings)
    paces = tuple((Pace(start_s=0.0, batch_s=batch_s),) for batch_s in paces_s)
    return Schedule(config=config, paces=paces, **(happens or {}))


def statistics_with(monkeypatch, event_s, batch_s=BATCH_S, **settings):
    """Two ranks whom averaging costs nothing, and a coordinator whom each event costs time."""
    handle = Coordinator.handle

    def clocked(machine, event, now):
        commands = handle(machine, event, now)
        machine.core.spent_s += event_s
        return commands

    monkeypatch.setattr(Coordinator, "handle", clocked)
    settings |= {"num_samples": 2000, "num_epochs": 1, "divergence_threshold": None}
    schedule = schedule_of((batch_s, batch_s), anchor=ANCHOR, **settings)
    assert schedule.sync_s == schedule.average_s == 0.0
    statistics = Simulation(schedule).run().machine.statistics()
    assert statistics.num_averagings >= 5
    assert all(rank.sync_s == 0.0 for rank in statistics.ranks)
    return statistics


@pytest.mark.parametrize("target", [0.02, 0.10, 0.50])
def test_rounds_come_so_seldom_that_the_coordinator_takes_its_part_of_a_core(monkeypatch, target):
    """Whatever averaging may cost the ranks."""
    anchor = statistics_with(monkeypatch, EVENT_S, overhead_target=target).anchor
    assert 2 / BATCH_S > RATED_PER_S
    assert ROUND_S / (anchor * BATCH_S) == pytest.approx(OWN_SHARE, rel=0.3)


def test_with_fewer_batches_it_may_take_more(monkeypatch):
    batch_s = 4 * BATCH_S
    anchor = statistics_with(monkeypatch, 10 * EVENT_S, batch_s, overhead_target=0.5).anchor
    assert 10 * ROUND_S / (anchor * batch_s) == pytest.approx(2 * OWN_SHARE, rel=0.3)


def test_rounds_of_long_steps_come_until_the_ranks_would_notice(monkeypatch):
    """What the coordinator takes is taken from the ranks' cores, like the averaging."""
    target, factor, batch_s = 0.02, 500, 100 * BATCH_S
    anchor = statistics_with(monkeypatch, factor * EVENT_S, batch_s, overhead_target=target).anchor
    assert factor * ROUND_S / 2 / (anchor * batch_s) == pytest.approx(target, rel=0.3)


def test_a_coordinator_that_costs_nothing_leaves_the_cadence_alone(monkeypatch):
    assert statistics_with(monkeypatch, 0.0).anchor == ANCHOR


def rounds_of(policy="cadence", backend="cpu", happens=None, slow=1, anchor=ANCHOR, **settings):
    """Whether the acknowledgements of each round may wait, and what was known of it then."""
    found = []
    handle = Coordinator.handle

    def noted(machine, event, now):
        commands = handle(machine, event, now)
        if any(isinstance(c, Send) and isinstance(c.message, ASKED) for c in commands):
            idle = any(r.num_queued == 0 for r in machine.core.live)
            rnd = machine.rounds.round
            found.append(
                Asked(machine.rounds.acks_may_wait, rnd.epoch, idle, rnd.capture, machine.phase)
            )
        return commands

    settings |= {"policy": ApplyPolicy(policy), "backend": AverageBackend(backend)}
    settings |= {"num_samples": 300, "num_epochs": 2, "anchor": anchor}
    schedule = schedule_of((BATCH_S, slow * BATCH_S), happens, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "handle", noted)
        Simulation(schedule).run()
    return found


ASKED = (m.Update, m.SyncNow)


class Asked(NamedTuple):
    """What was known when the ranks were asked to acknowledge a round."""

    may_wait: bool
    epoch: object
    idle: bool
    capture: bool
    phase: Phase


def test_acknowledgements_may_wait_while_every_rank_trains():
    found = rounds_of()
    assert sum(asked.may_wait for asked in found) >= 10
    for asked in found:
        assert asked.may_wait == (asked.epoch is None and not asked.idle)
    assert any(asked.epoch for asked in found), "the end of an epoch waits for them"


def test_acknowledgements_of_a_collective_may_not_wait():
    """The global step, which the learning rate follows, is only known from them."""
    assert not any(asked.may_wait for asked in rounds_of(backend="thread"))


@pytest.mark.parametrize("settings", [{"policy": "async"}, {"max_batch_diff": 3}], ids=str)
def test_acknowledgements_may_not_wait_where_ranks_are_limited(settings):
    """A limit may be lifted by what they tell."""
    assert not any(asked.may_wait for asked in rounds_of(**settings))


def test_nobody_waits_for_the_report_of_a_rank_that_has_nothing_left():
    """At the end of the run a slow one gets no batch that the others finish before it."""
    found = [asked for asked in rounds_of(slow=2, anchor=1) if asked.idle and not asked.epoch]
    assert found, "no round began while a rank had nothing left"
    assert not any(asked.may_wait for asked in found)


def test_a_checkpoint_does_not_wait_for_a_report():
    found = rounds_of(happens={"saves_at_s": (0.035, 0.105)})
    captured = [asked for asked in found if asked.capture and asked.epoch is None]
    assert captured, "no checkpoint was made within an epoch"
    assert not any(asked.may_wait for asked in captured)


def test_a_run_that_is_to_stop_does_not_wait_for_a_report():
    """The average of its last round may come after the request."""
    for stop_at_s in (0.05, 0.06, 0.07):
        happens = {"average_s": 10 * BATCH_S, "stop_at_s": stop_at_s}
        late = [a for a in rounds_of(happens=happens) if a.phase is Phase.STOPPING]
        if late:
            assert not late[0].may_wait
            return
    pytest.fail("no average came after the request")


def core_with(since_round):
    core = Core(CoordinatorConfig(devices=("cpu",) * 2, num_samples=9, batch_size=1, num_epochs=1))
    core.ranks[0].since_round = since_round
    return core


ACK = m.SyncAck(rank=0, round=1)
REPORT = m.BatchReport(rank=0, epoch=0, tally=m.Tally())
CHUNK = m.EpochReport(rank=0, epoch=0, tally=m.Tally())


@pytest.mark.parametrize(
    ("event", "since_round", "charged"),
    [(ACK, 0, True), (REPORT, 10, True), (REPORT, 9, False), (CHUNK, 10, False)],
    ids=["answer", "count-reached", "count-not-reached", "chunk"],
)
def test_rounds_are_charged_what_comes_with_them(event, since_round, charged):
    """The count is 10. What an event took is known with the next one."""
    core = core_with(since_round)
    own_time = OwnTime(core)
    core.spent_s = 1.0
    own_time.note(event)
    core.spent_s = 3.0
    own_time.note(m.Tick())
    core.spent_s = 7.0
    own_time.note(m.Tick())
    assert own_time.take() == (2.0 if charged else 0.0)
    assert own_time.take() == 0.0
