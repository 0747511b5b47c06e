"""Intervals that a collective records on its ranks' lanes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from runtime import CollectiveAborted
from runtime.collective import create_collectives
from runtime.collective.base import LONG, Meeting
from runtime.timeline.events import AVERAGING, COMPUTE, SYNC
from runtime.timeline.rank_lane import RankLane

WAIT_S = 0.05


SHORT = LONG // 2
"""Too many elements for the last rank to reduce alone."""


def computing_lane(rank):
    lane = RankLane(rank, time.monotonic(), max_events=100, min_gap_s=0.001, step_interval_s=1.0)
    lane.enter(COMPUTE)
    return lane


@pytest.fixture
def lanes():
    return [computing_lane(rank) for rank in (0, 1)]


def averaged(lanes, num_elements):
    """Rank 1 arrives last, once rank 0 waits."""
    ends = create_collectives(2, "thread", [torch.device("cpu")] * 2)
    arrived = threading.Event()

    def late():
        assert arrived.wait(10)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            pass
        ends[1].weighted_mean_([torch.ones(num_elements)], 1.0)

    for end, lane in zip(ends, lanes, strict=True):
        end.lane = lane
    thread = threading.Thread(target=late)
    thread.start()
    watch = threading.Thread(target=lambda: _when(lambda: lanes[0].cause == SYNC, arrived))
    watch.start()
    ends[0].weighted_mean_([torch.zeros(num_elements)], 1.0)
    thread.join(10)
    watch.join(10)
    for end in ends:
        end.close()


def _when(condition, event):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        pass
    event.set()


@pytest.mark.parametrize("num_elements", [8, SHORT, LONG])
def test_the_wait_recorded_is_that_of_the_first_and_the_exchange_that_of_both(lanes, num_elements):
    averaged(lanes, num_elements)
    first, last = (lane.seconds() for lane in lanes)
    assert first[SYNC] >= WAIT_S
    assert last[SYNC] < first[SYNC] / 2
    assert last[AVERAGING] > 0
    assert [lane.cause for lane in lanes] == [COMPUTE, COMPUTE]


@pytest.mark.parametrize(("num_elements", "noted"), [(SHORT, False), (LONG, True)])
def test_only_a_long_exchange_is_recorded_when_it_begins(lanes, num_elements, noted, monkeypatch):
    seen = []
    met = Meeting.met

    def look(meeting, *, is_long):
        met(meeting, is_long=is_long)
        seen.append(meeting._lane.cause == AVERAGING)

    monkeypatch.setattr(Meeting, "met", look)
    averaged(lanes, num_elements)
    assert seen == [noted, noted]


def test_a_failed_collective_restores_the_cause(lanes):
    ends = create_collectives(2, "thread", [torch.device("cpu")] * 2)
    ends[0].lane = lanes[0]
    ends[1].abort()
    with pytest.raises(CollectiveAborted):
        ends[0].weighted_mean_([torch.zeros(4)], 1.0)
    assert lanes[0].cause == COMPUTE
    for end in ends:
        end.close()
