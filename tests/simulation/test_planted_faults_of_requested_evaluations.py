"""Faults planted in evaluations that bodies request, each of which the simulator must find."""

from __future__ import annotations

from coordinator.average_tasks import AverageTasks
from runtime.worker.protocol import WorkerProtocol
from tests.simulation.finding import STUCK, assert_is_found, drawn
from tests.simulation.harness import simulate
from tests.simulation.schedule import Schedule
from tests.support.pairs import SCALE


def calls(schedule: Schedule) -> bool:
    return schedule.call_chance > 0


def dies(schedule: Schedule) -> bool:
    return calls(schedule) and schedule.deaths and schedule.config.continue_on_failure


def test_every_call_is_answered():
    for seed in range(40 if SCALE == 1 else 100 * SCALE):
        simulate(seed, draw=drawn(calls))


class Unseen(set):
    """Requests that the next round answers, but that force none."""

    def __bool__(self):
        return False


def test_a_request_that_forces_no_round_is_found(monkeypatch):
    init = AverageTasks.__init__

    def unseen(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.callers = Unseen()

    monkeypatch.setattr(AverageTasks, "__init__", unseen)
    assert_is_found(STUCK, drawn(calls))


def test_a_request_lost_with_its_round_is_found(monkeypatch):
    cancel = AverageTasks.cancel

    def losing(self, tasks, averaged):
        before = set(self.callers)
        cancel(self, tasks, averaged)
        self.callers = before

    monkeypatch.setattr(AverageTasks, "cancel", losing)
    assert_is_found(STUCK, drawn(dies))


def test_a_wait_for_a_dead_rank_is_found(monkeypatch):
    monkeypatch.setattr(AverageTasks, "lose", lambda self, rank: self.callers.discard(rank))
    assert_is_found(STUCK, drawn(dies))


def test_an_average_without_the_steps_before_the_call_is_found(monkeypatch):
    monkeypatch.setattr(WorkerProtocol, "pending_snapshot", 0)
    assert_is_found("evaluates an average without", drawn(calls), first=112)
