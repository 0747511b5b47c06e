"""Faults planted in evaluations that bodies request, each of which the simulator must find."""

from __future__ import annotations

from coordinator.requested_evaluations import RequestedEvaluations
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


def test_a_request_that_forces_no_round_is_found(monkeypatch):
    begin = RequestedEvaluations.begin

    def request(self, rank):
        self.__dict__.setdefault("later", set()).add(rank)

    def answer_later(self, ranks):
        self.callers |= self.__dict__.pop("later", set())
        return begin(self, ranks)

    monkeypatch.setattr(RequestedEvaluations, "request", request)
    monkeypatch.setattr(RequestedEvaluations, "begin", answer_later)
    assert_is_found(STUCK, drawn(calls))


def test_a_request_lost_with_its_round_is_found(monkeypatch):
    monkeypatch.setattr(RequestedEvaluations, "cancel", lambda self, averaged: None)
    assert_is_found(STUCK, drawn(dies))


def test_a_wait_for_a_dead_rank_is_found(monkeypatch):
    monkeypatch.setattr(RequestedEvaluations, "drop", lambda self, rank: None)
    monkeypatch.setattr(
        RequestedEvaluations, "waits_for", lambda self, live: bool(self._evaluating)
    )
    assert_is_found(STUCK, drawn(dies), first=630)


def test_an_average_without_the_steps_before_the_call_is_found(monkeypatch):
    monkeypatch.setattr(WorkerProtocol, "pending_snapshot", 0)
    assert_is_found("evaluates an average without", drawn(calls), first=112)
