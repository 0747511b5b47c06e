"""Consistency of objects that several threads use at once, with and without the GIL."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest

from runtime.collective.barrier import Rendezvous
from runtime.core.errors import CollectiveAborted
from runtime.core.threads import LiveRegistry
from runtime.replica.graphs import GraphFallbacks
from tests.support.running import WAIT_S

STRESS_S = 0.15


class Item:
    """An object for the registry."""


@pytest.fixture
def many_switches():
    """Make the interpreter switch threads as often as possible, if it has a GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_live_registry_lists_objects_without_keeping_them_alive():
    living, item, other = LiveRegistry(), Item(), Item()
    living.add(item)
    living.add(other)
    living.add(item)
    assert sorted(map(id, living.all())) == sorted(map(id, (item, other)))
    del other
    gc.collect()
    assert living.all() == [item]
    assert len(living._refs) == 1


@pytest.mark.usefixtures("many_switches")
def test_a_live_registry_is_read_while_objects_are_added_and_freed():
    living, item, errors = LiveRegistry(), Item(), []
    living.add(item)
    deadline = time.monotonic() + STRESS_S

    def come_and_go():
        try:
            while time.monotonic() < deadline:
                kept = [Item() for _ in range(30)]
                for each in kept:
                    living.add(each)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while time.monotonic() < deadline:
            assert item in living.all()
    finally:
        for thread in threads:
            thread.join(WAIT_S)
    assert not errors
    gc.collect()
    assert living.all() == [item]


def test_a_fallback_for_all_ranks_is_not_lost_to_one_of_a_single_rank():
    class Interrupted(GraphFallbacks):
        """Another rank writes as soon as one has read the state of all."""

        value, other = False, None

        @property
        def _all(self):
            found, other = self.value, self.other
            if other is not None:
                self.other = None
                other()
            return found

        @_all.setter
        def _all(self, value):
            self.value = value

    fallbacks = Interrupted()
    fallbacks.other = lambda: fallbacks.give_up(0, "for all")
    fallbacks.give_up(1, "for itself", everywhere=False)
    if fallbacks.other is not None:  # it was not read: no rank could interfere
        fallbacks.other()
    assert fallbacks.without_graphs is True


def test_a_slow_rank_gets_the_plan_of_its_exchange_although_the_next_one_was_refused():
    """An orderly end does not affect exchanges that every rank has joined."""
    refused, woken, group = threading.Event(), threading.Event(), Rendezvous(3, WAIT_S)
    wait, plans = group.barrier.wait, {}

    def wait_slowly(rank, *args):
        wait(rank, *args)
        if rank == 2:
            woken.set()
            assert refused.wait(WAIT_S)

    group.barrier.wait = wait_slowly

    def meet(rank):
        plans[rank] = group.meet(rank, f"of rank {rank}", "; ".join)

    def meet_again():
        meet(1)
        assert woken.wait(WAIT_S)
        with pytest.raises(CollectiveAborted) as refusal:
            group.meet(1, "once more", "; ".join)
        group.fail(refusal.value)
        refused.set()

    def meet_and_leave():
        meet(0)
        group.barrier.leave(0)

    ranks = [threading.Thread(target=work, daemon=True) for work in (meet_and_leave, meet_again)]
    for thread in ranks:
        thread.start()
    try:
        meet(2)
    finally:
        refused.set()
        for thread in ranks:
            thread.join(WAIT_S)
    assert plans == dict.fromkeys(range(3), "of rank 0; of rank 1; of rank 2")
    assert group._plans == [None] * 3


def test_no_rank_keeps_a_plan_that_an_abort_made_void():
    group = Rendezvous(1, WAIT_S)

    def plan(requests):
        group.barrier.abort()
        return requests[0]

    with pytest.raises(CollectiveAborted):
        group.meet(0, "a tensor", plan)
    assert group._plans == [None]


def test_the_last_rank_to_arrive_notices_one_that_an_abort_woke():
    left = threading.Event()

    class Aborted(Rendezvous):
        """Is aborted when all ranks have arrived and the last is about to read their requests."""

        def requests(self):
            self.barrier.abort()
            assert left.wait(WAIT_S)
            return super().requests()

    group, planned = Aborted(2, WAIT_S), []

    def first():
        with pytest.raises(CollectiveAborted):
            group.meet(0, "of rank 0", planned.append)
        group.slots[0] = None  # as a collective does when it ends
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while group.barrier._waiting != [0]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(CollectiveAborted):
            group.meet(1, "of rank 1", planned.append)
    finally:
        left.set()
        thread.join(WAIT_S)
    assert planned == []
