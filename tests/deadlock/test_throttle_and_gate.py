"""Ranks that are throttled, parked at the overshoot limit, and released."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from coordinator import messages as m
from coordinator.messages import PublishEpoch
from tests.deadlock.faults import BOUND_S
from tests.deadlock.stage import running
from tests.deadlock.tap import Sent, within
from tests.simulation.harness import Hooks, Simulation
from tests.simulation.test_unequal_speeds import schedule_of
from tests.support.pairs import pairwise
from tests.support.running import (
    ASYNC,
    LOCAL_WAYS,
    OVER_CPU,
    SYNC,
    THREAD,
    Trace,
    builder,
    local_averaged_ways,
    over,
)
from tests.unit.worker.test_worker import MANY, Alone, payload, start

async_ways = over([(ASYNC, OVER_CPU), (ASYNC, THREAD)])


# -- one worker, held back at its second batch of three ------------------------------------


@contextmanager
def throttled(*messages):
    """A worker on its own thread that parks after one batch, with these messages queued."""
    trace = Trace()
    alone = Alone(train=trace)
    alone.send(m.Throttle(limit=1), *messages, start(range(3)))
    with running(alone):
        alone.take_next(m.BatchReport)  # sent because it parks
        assert (trace.steps[0], alone.worker.protocol.parked) == (1, True)
        yield alone


def test_two_throttles_need_one_release():
    """D10: one before the wait and one during it; one ``Resume`` ends both."""
    with throttled(m.Throttle(limit=1)) as alone:
        alone.send(m.Throttle(limit=1), m.Resume(budget=MANY))
        assert alone.take_next(m.EpochReport).stats.num_batches == 2
        assert alone.w == 3.0


def test_a_throttled_worker_still_answers_control_messages():
    """D12: a snapshot, and a plan that is only queued; neither releases it."""
    with throttled() as alone:
        alone.send(m.SetGlobalStep(step=7), m.RequestParams(round=3))
        snapshot = alone.take_next(m.ParamSnapshot)
        assert (snapshot.round, snapshot.num_samples) == (3, 2)
        assert (alone.worker.protocol.parked, alone.w) == (True, 1.0)


def test_a_plan_received_during_a_throttle_is_trained_afterwards():
    """D13: ``StartEpoch`` is received while the worker waits, and not lost."""
    with throttled() as alone:
        alone.send(start(range(3, 5)), m.RequestParams(round=1))
        alone.take_next(m.ParamSnapshot)
        assert alone.control.empty()  # the plan was taken before the request was answered
        alone.send(m.Resume(budget=MANY))
        assert [alone.take_next(m.EpochReport).stats.num_batches for _ in range(2)] == [2, 2]
        assert alone.w == 5.0


def test_shutdown_within_a_throttle_ends_the_worker():
    """D14: a waiting worker receives it and leaves."""
    with throttled() as alone:
        alone.send(m.Shutdown())
        final = alone.take_next(m.FinalSnapshot)
        assert final.num_samples == 2
        alone.take_next(m.Exiting)


def test_an_update_releases_a_parked_worker():
    """D27: an averaging over the CPU path ends the wait."""
    with throttled() as alone:
        alone.send(m.RequestParams(round=1))
        alone.take_next(m.ParamSnapshot)
        alone.send(m.Update(round=1, average=payload(10.0), num_samples=4, budget=MANY))
        alone.take_next(m.EpochReport)
        assert alone.w == 12.0


# -- throttled by max_batch_diff ---------------------------------------------------------


@contextmanager
def a_rank_too_far_ahead(planted, tap, way, held, mode="raise"):
    """Rank 1 is held in its first step, rank 0 is parked for its lead, no round is due."""
    planted.hold(rank=1, step=0, until=held)
    b = planted.builder(dataset=60, batch_size=1, way=way)
    b.anchor(100).max_anchor(100).max_batch_diff(1)
    handle = b.on_worker_failure(mode).run()
    tap.wait_for(lambda: tap.parked(0))
    assert planted.steps[0] == 2
    assert not tap.sent((m.RequestParams, m.SyncNow))
    yield handle


@local_averaged_ways
def test_catching_up_alone_releases_a_throttled_rank(way, faults, tap):
    """D11: no round is due soon; the slow rank's batches release the fast one."""
    held, planted = threading.Event(), faults()
    with a_rank_too_far_ahead(planted, tap, way, held) as handle:
        held.set()
        handle.join(BOUND_S)
    released = tap.where(lambda e: isinstance(e, Sent) and isinstance(e.message, m.Resume))[2]
    rounds = tap.where(
        lambda e: isinstance(e, Sent) and isinstance(e.message, m.RequestParams | m.SyncNow)
    )
    assert released < rounds[0]
    assert sum(planted.steps.values()) == 60


@local_averaged_ways
def test_a_stop_ends_a_run_with_a_throttled_rank(way, faults, tap):
    """D14: ``stop()`` while rank 0 is parked and rank 1 in a step."""
    held, planted = threading.Event(), faults()
    with a_rank_too_far_ahead(planted, tap, way, held) as handle:
        handle.stop()
        tap.await_came(m.Exiting, 0)  # it leaves while rank 1 is still held
        held.set()
        with within(5):
            assert handle.join(BOUND_S).stopped
    assert sum(planted.steps.values()) < 60


@local_averaged_ways
def test_a_rank_too_far_ahead_is_released_by_the_death_of_the_other(way, faults, tap):
    """D11: no rank can catch up any more."""
    held, planted = threading.Event(), faults()
    with a_rank_too_far_ahead(planted, tap, way, held) as handle:
        planted.fail_at(rank=1, step=0)
        held.set()
        with within(5), pytest.raises(RuntimeError, match="worker 1 failed"):
            handle.join(BOUND_S)


@local_averaged_ways
def test_an_idle_rank_does_not_throttle_the_others(way, tap):
    """D11: rank 1 has nothing to catch up with."""
    b = builder(dataset=40, batch_size=1, way=way).anchor(100).max_batch_diff(0)
    with within(5):
        state = b.partition_ratios([1, 0]).run().join(BOUND_S)
    assert state.params["w"].item() == 40.0
    # Rank 0 needs no round for each batch either.
    assert {msg.round for msg in tap.sent((m.RequestParams, m.SyncNow))} <= {1, 2}


@pairwise(
    way=[way for way in LOCAL_WAYS if way[0] is not SYNC],
    ranks=[2, 3],
    limits=[(10, 2), (10, 0), (1, 0)],
)
def test_a_lead_below_the_anchor_and_a_lead_of_0_do_not_hang(way, ranks, limits, tap):
    """S1: on equal devices."""
    anchor, max_batch_diff = limits
    b = builder(dataset=120, batch_size=2, epochs=2, ranks=ranks, way=way).anchor(anchor)
    with within(8):
        state = b.max_batch_diff(max_batch_diff).run().join(BOUND_S)
    assert [e.num_samples for e in state.metrics] == [120, 120]
    if (anchor, max_batch_diff) == (10, 0):
        # The first rank waits for the last after each of the 10 batches between two
        # rounds. The operating system decides the order.
        assert sum(r.num_throttles for r in tap.machine.statistics().ranks) > 10


class _Parked(Hooks):
    """Counts the steps of a rank while its peer is parked."""

    num_steps = 0

    def before_step(self, worker):
        self.num_steps += worker._sim.workers[1 - worker.rank].protocol.parked


@pytest.mark.parametrize(("anchor", "max_batch_diff"), [(10, 2), (10, 0)])
@local_averaged_ways
def test_a_throttled_fast_rank_keeps_the_pace_of_the_slow_one(way, anchor, max_batch_diff):
    """S1: three times faster, on the virtual clock; nothing hangs and no time is lost."""
    hooks = _Parked()
    schedule = schedule_of(
        *way, num_samples=2000, num_epochs=1, anchor=anchor, max_batch_diff=max_batch_diff
    )
    run = Simulation(schedule, hooks).run()
    assert hooks.num_steps > 50
    slow_s = schedule.paces[1][0].batch_s
    assert run.now < 1.3 * 100 * slow_s


# -- parked at the overshoot limit ------------------------------------------------------------


@async_ways
def test_a_rank_parked_at_the_overshoot_limit_replies_and_is_woken_by_the_round(way, faults, tap):
    """D12, D27: rank 0 has overshot its count and waits; the round needs its reply."""
    held, planted = threading.Event(), faults()
    planted.hold(rank=1, step=0, until=held)
    b = planted.builder(dataset=80, batch_size=1, way=way).anchor(2).max_anchor(2)
    handle = b.max_overshoot(0).run()
    tap.wait_for(lambda: tap.parked(0))
    parked_at = planted.steps[0]
    assert parked_at == 2
    assert not tap.sent((m.RequestParams, m.SyncNow))
    held.set()
    tap.await_came(m.SyncAck, 0)
    planted.wait_for(lambda: planted.steps[0] > parked_at)
    assert [e.num_samples for e in handle.join(BOUND_S).metrics] == [80]


@async_ways
def test_a_rank_parked_at_the_end_of_an_epoch_continues_in_the_next(way, faults, tap):
    """D27: it is woken when the epoch closes, by the round that closes it."""
    held, planted = threading.Event(), faults()
    planted.hold(rank=1, step=0, until=held)
    b = planted.builder(dataset=4, batch_size=1, epochs=3, way=way).anchor(3).max_anchor(3)
    handle = b.max_overshoot(0).run()
    tap.wait_for(lambda: tap.parked(0))
    assert tap.closed == []
    held.set()
    assert [e.num_samples for e in handle.join(BOUND_S).metrics] == [4, 4, 4]
    closed = tap.where(lambda e: isinstance(e, PublishEpoch))[0]
    later = tap.where(
        lambda e: isinstance(e, m.EpochReport | m.BatchReport) and e.rank == 0 and e.epoch > 0
    )
    assert later[-1] > closed


@async_ways
def test_a_stop_ends_a_run_with_a_rank_parked_at_the_overshoot_limit(way, faults, tap):
    """D14: the parked rank leaves at once, the other at its step's end."""
    held, planted = threading.Event(), faults()
    planted.hold(rank=1, step=0, until=held)
    b = planted.builder(dataset=80, batch_size=1, way=way).anchor(2).max_overshoot(0)
    handle = b.run()
    tap.wait_for(lambda: tap.parked(0))
    handle.stop()
    tap.await_came(m.Exiting, 0)
    held.set()
    assert handle.join(BOUND_S).stopped
