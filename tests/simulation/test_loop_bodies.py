"""Random bodies of a user's own loop, on real threads: no hang, and no sample twice."""

from __future__ import annotations

import threading

import pytest

from runtime.worker.meetings import LoopPeers, Meetings
from runtime.worker.own_loop import OwnLoop
from tests.simulation.loop_bodies import POLICIES, BodyFailed, draw_bodies
from tests.support.pairs import SCALE

NUM_BODIES = 12 if SCALE == 1 else 200
MAX_BODIES = 2000
"""Limit for finding a planted fault."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.timeout(600)
def test_no_body_hangs_and_no_sample_counts_twice(policy):
    ends, seen = set(), set()
    for seed in range(NUM_BODIES):
        bodies = draw_bodies(seed, policy)
        ends.add(bodies.run())
        sizes = {len(firsts) for firsts in bodies.ran.values()}
        seen |= {"a rank without samples"} if bodies.ranks in sizes and len(sizes) > 1 else set()
        seen |= {"an evaluation"} if any(map(any, bodies.due.values())) else set()
    assert ends >= {"finished", "WorkerFailed"}
    assert ("ReplicaMismatch" in ends) == (policy == "sync")
    assert "an evaluation" in seen
    assert policy != "sync" or "a rank without samples" in seen


def assert_is_found(expected, first=0):
    """Assert that the bodies of some seed under ``SYNC`` fail with the expected message."""
    first = first if SCALE == 1 else 0
    for seed in range(first, MAX_BODIES):
        try:
            draw_bodies(seed, "sync").run()
        except BodyFailed as error:
            if expected in str(error):
                return
    pytest.fail(f"{MAX_BODIES} bodies found nothing")


def test_posts_dropped_at_the_next_meeting_are_found(monkeypatch):
    post = Meetings.post

    def dropping(self, generation, ranks, rank, number, what):
        post(self, generation, ranks, rank, number, what)
        with self._condition:
            self._group(generation).posts.pop(number - 1, None)

    draw_bodies(0, "sync").run()  # the first run of a process starts slowly
    monkeypatch.setattr(Meetings, "post", dropping)
    assert_is_found("bodies that act alike differ", first=39)  # a seed that finds it


def test_a_first_rank_that_idles_is_found(monkeypatch):
    monkeypatch.setattr(LoopPeers, "first", lambda self, ranks, epoch: min(self._live))
    assert_is_found("0 of the ranks that ran the body", first=90)


def test_steps_counted_by_each_rank_are_found(monkeypatch):
    grant = LoopPeers.grant

    def own(self, key, *args):
        return grant(self, (key, threading.current_thread().name), *args)

    monkeypatch.setattr(LoopPeers, "grant", own)
    assert_is_found("then evaluate()")


def test_a_rate_kept_from_ranks_without_samples_is_found(monkeypatch):
    monkeypatch.setattr(OwnLoop, "_adopt", lambda self, lr: None)
    assert_is_found("replicas differ")
