"""Faults planted in steps over several batches that are in progress at the end of a plan."""

from __future__ import annotations

import pytest

from coordinator import messages as m
from coordinator.config import ApplyPolicy
from coordinator.epochs import EpochScheduler
from coordinator.ledger import BatchLedger
from runtime.worker.flow import WorkerFlow
from runtime.worker.protocol import WorkerProtocol
from tests.simulation.finding import STUCK, assert_is_found, drawn
from tests.simulation.harness import simulate
from tests.simulation.schedule import Schedule, draw_late_schedule
from tests.simulation.sim_rank import OpenStep, SimRank
from tests.support.pairs import SCALE


def opens(schedule: Schedule) -> bool:
    return schedule.window_chance > 0


def averages(schedule: Schedule) -> bool:
    c = schedule.config
    return opens(schedule) and c.policy is not ApplyPolicy.SYNC and c.world_size > 1


def saves(schedule: Schedule) -> bool:
    return averages(schedule) and bool(schedule.config.save_every or schedule.saves_at_s)


def pauses(schedule: Schedule) -> bool:
    c = schedule.config
    return opens(schedule) and c.policy is ApplyPolicy.SYNC and c.eval_every is not None


def dies(schedule: Schedule) -> bool:
    return opens(schedule) and schedule.deaths and schedule.config.policy is ApplyPolicy.SYNC


def stops(schedule: Schedule) -> bool:
    return opens(schedule) and schedule.stop_at_s is not None


def draw_late(seed: int) -> Schedule:
    schedule = draw_late_schedule(seed)
    while not opens(schedule):
        seed += 10**6
        schedule = draw_late_schedule(seed)
    return schedule


def test_every_sample_of_steps_over_several_batches_is_in_the_result_once():
    for seed in range(60 if SCALE == 1 else 300 * SCALE):
        simulate(seed, draw=drawn(opens))
        simulate(seed, draw=draw_late if seed % 2 else drawn(saves))


@pytest.fixture
def no_wait(monkeypatch):
    """Messages are handled within a step."""

    def answer(self):
        return False
        yield

    monkeypatch.setattr(WorkerFlow, "_continues_step", answer)


def test_messages_handled_within_a_step_are_found(no_wait):
    assert_is_found("within a step", drawn(opens))


def test_batches_counted_at_the_end_of_the_plan_are_found(no_wait, monkeypatch):
    """Their effect comes with the step; rounds and checkpoints between do not have it."""
    end, make = SimRank.end_steps, SimRank._make_step

    def count(self, *, closes):
        made = self._open
        num_samples = sum(size for _, size in made.batches)
        self._reporter.meter.add(len(made.batches), num_samples)
        weights = [self._sim.weight_of(batch) for batch, _ in made.batches]
        self.protocol.on_trained(len(made.batches), num_samples, sum(weights))
        self.early = [*getattr(self, "early", []), *made.batches]
        end(self, closes=closes)
        self._open = OpenStep(num_steps=made.num_steps)

    def train(self, made):
        for batch, size in getattr(self, "early", []):
            self.local += self._sim.checks.on_trained_own(self.rank, batch, size)
        self.early = []
        yield from make(self, made)

    monkeypatch.setattr(SimRank, "end_steps", count)
    monkeypatch.setattr(SimRank, "_make_step", train)
    monkeypatch.setattr(SimRank, "before_message", lambda self, message: None)
    own = drawn(lambda s: saves(s) and s.config.batch_sizes is None)
    assert_is_found("samples for the batches", own)
    assert_is_found("recorded, not trained", own, first=323)


def test_ranks_that_wait_for_a_plan_in_vain_are_found(monkeypatch):
    monkeypatch.setattr(EpochScheduler, "_continue_step", lambda self, rank, number: None)
    assert_is_found(STUCK, drawn(averages))


def test_a_step_without_an_end_at_the_end_of_the_epoch_is_found(monkeypatch):
    monkeypatch.setattr(BatchLedger, "may_assign", lambda self, rank, number: True)
    assert_is_found(STUCK, drawn(averages))


def test_a_pause_within_a_step_is_found(monkeypatch):
    assign = EpochScheduler._assign_next

    def blind(self, pause_at):
        for rank in self._run.ranks:
            rank.open_epoch = None
        return assign(self, pause_at)

    monkeypatch.setattr(EpochScheduler, "_assign_next", blind)
    assert_is_found(STUCK, drawn(pauses))


@pytest.mark.parametrize(
    ("kind", "accepts", "first"), [(m.Shutdown, stops, 124), (m.Halt, dies, 20)]
)
def test_a_step_that_its_end_does_not_reach_is_found(kind, accepts, first, monkeypatch):
    ends = WorkerProtocol.ends_step
    monkeypatch.setattr(
        WorkerProtocol,
        "ends_step",
        staticmethod(lambda message: ends(message) and not isinstance(message, kind)),
    )
    assert_is_found(STUCK, drawn(accepts), first=first)


def test_a_stop_that_waits_for_a_step_is_found(monkeypatch):
    monkeypatch.setattr(EpochScheduler, "starve_steps", lambda self: None)
    assert_is_found(STUCK, drawn(stops), first=86)


def test_a_worker_that_waits_for_a_plan_after_one_without_a_batch_is_found(monkeypatch):
    starved = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(WorkerFlow, "_is_starved", starved, raising=False)
    assert_is_found(STUCK, drawn(stops), first=86)
