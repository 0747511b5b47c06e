"""Longer runs: the inbox holds answers back, and the coordinator's thread is late."""

from __future__ import annotations

from collections import Counter

from coordinator.config import ApplyPolicy
from coordinator.service import Inbox
from tests.simulation.finding import STUCK, assert_is_found
from tests.simulation.harness import simulate
from tests.simulation.schedule import draw_late_schedule
from tests.support.pairs import SCALE

NUM_SCHEDULES = 300 * SCALE


def test_every_schedule_ends_with_nothing_held_back_that_everybody_waits_for(monkeypatch):
    seen = Counter()
    handled, put = Inbox.handled, Inbox.put

    def noted(inbox, event, commands, *, acks_wait=False):
        seen["acknowledgements may wait"] += acks_wait
        handled(inbox, event, commands, acks_wait=acks_wait)

    def noted_put(inbox, event):
        waited = inbox._acks_wait
        put(inbox, event)
        seen["a report came before them"] += waited and not inbox._acks_wait

    monkeypatch.setattr(Inbox, "handled", noted)
    monkeypatch.setattr(Inbox, "put", noted_put)
    for seed in range(NUM_SCHEDULES):
        run = simulate(seed, draw=draw_late_schedule)
        seen["late"] += run.schedule.busy_s > 0
        seen["died"] += bool(run.dead)
        seen["saved"] += bool(run.saved)
        seen[run.schedule.config.policy] += 1
    for what in ("acknowledgements may wait", "a report came before them", "late"):
        assert seen[what] >= 50, what
    for what in ("died", "saved", ApplyPolicy.CADENCE, ApplyPolicy.ASYNC):
        assert seen[what] >= 20, what


def test_a_last_answer_that_is_held_back_is_found(monkeypatch):
    """Nothing is lost by it but time, of which a run of its own clock has enough."""
    may_wait = Inbox._may_wait
    monkeypatch.setattr(Inbox, "_may_wait", lambda self, e: may_wait(self, e) or hasattr(e, "ok"))
    assert_is_found("was held back", draw_late_schedule)


def test_a_held_answer_that_is_lost_is_found(monkeypatch):
    release = Inbox._release

    def losing(self):
        if len(self._held) > 1:
            self._held.pop()
        release(self)

    monkeypatch.setattr(Inbox, "_release", losing)
    assert_is_found(STUCK, draw_late_schedule)
