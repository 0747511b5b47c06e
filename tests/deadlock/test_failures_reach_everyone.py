"""A fault anywhere ends the run in bounded time, with its error."""

from __future__ import annotations

import queue
import threading

import pytest

from coordinator import messages as m
from coordinator.averaging import Averager
from coordinator.machine import Coordinator
from runtime import CollectiveAborted, WorkerFailed, current_worker
from runtime.collective import AbortableBarrier, process_group
from tests.deadlock.faults import BOUND_S, Planted
from tests.deadlock.tap import within
from tests.support.pairs import diagonal, pairwise
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAYS,
    builder,
    count_up,
    every_way,
    local_ways,
    over,
)

FAST_S = 4.0
"""Far more than a failure takes to reach all ranks, far less than any timeout of a run."""

RANKS, STEPS = 3, 4


def run_with(planted, way):
    """Three ranks with four steps each, so that every planted step is reached."""
    b = planted.builder(dataset=24, ranks=RANKS, way=way).anchor(2)
    return b.partition_ratios([1] * RANKS).run()


# -- a worker dies --------------------------------------------------------------------


@pairwise(way=WAYS, rank=range(RANKS), step=range(STEPS))
def test_join_raises_an_exception_of_any_step(way, rank, step, faults):
    """S2, D1, D23: in any wait of the others."""
    error = Planted(f"rank {rank}, step {step}")
    handle = run_with(faults().fail_at(rank=rank, step=step, error=error), way)
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert (failed.value.rank, failed.value.step, failed.value.epoch) == (rank, step, 0)
    assert failed.value.__cause__ is error
    assert handle.state is None or handle.state.reason == "failed"
    with pytest.raises(WorkerFailed):
        handle.next_metrics(BOUND_S)


@pairwise(way=WAYS, rank=range(RANKS), step=range(STEPS))
def test_a_vanished_worker_is_detected_at_any_step(way, rank, step, faults):
    """S2, D22: it sends no message, and the others may wait for it in a collective."""
    handle = run_with(faults().vanish_at(rank=rank, step=step), way)
    with within(FAST_S), pytest.raises(WorkerFailed, match="without a message") as failed:
        handle.join(BOUND_S)
    assert failed.value.rank == rank


def rank_0_waits_for_a_dying_peer(planted, way, how, monkeypatch, mode="raise", **settings):
    """Start a run in which rank 1 dies once rank 0 sleeps in a collective.

    Returns its handle, and the event that lets rank 1 die.
    """
    waiting, held = threading.Event(), threading.Event()
    wait = AbortableBarrier.wait

    def seen(barrier, rank, *args):
        if rank == 0 and barrier.parties == 2:
            waiting.set()
        wait(barrier, rank, *args)

    monkeypatch.setattr(AbortableBarrier, "wait", seen)
    step = 0 if way[0] is SYNC else 1
    # In lockstep no rank can be ahead, and none loads a batch before all have begun the epoch.
    (planted.hold if step else planted.stall_at)(rank=1, step=step, until=held)
    getattr(planted, how)(rank=1, step=step)
    if step:
        planted.slow(rank=1, seconds=0.01)
    b = planted.builder(way=way, **({"dataset": 40, "batch_size": 1} | settings)).anchor(1)
    handle = b.on_worker_failure(mode).run()
    assert waiting.wait(BOUND_S), "rank 0 never came to the collective"
    return handle, held


@pytest.mark.parametrize("how", ["fail_at", "vanish_at"])
@over([w for w in WAYS if OVER_CPU not in w])
def test_a_peer_inside_the_collective_is_woken(way, how, faults, tap, monkeypatch):
    """S2, D23: rank 0 sleeps in the collective when rank 1 dies; its abort comes first."""
    handle, held = rank_0_waits_for_a_dying_peer(faults(), way, how, monkeypatch)
    with within(FAST_S):
        held.set()
        with pytest.raises(WorkerFailed) as failed:
            handle.join(BOUND_S)
    assert failed.value.rank == 1
    assert tap.came(m.Exiting, 0)
    if way[0] is not SYNC:
        assert [ack.ok for ack in tap.came(m.SyncAck, 0)] == [False]


@every_way
def test_join_raises_the_first_of_two_deaths(way, faults, tap):
    """S2: rank 1 dies while the others are held; then rank 2 dies as well."""
    held = threading.Event()
    planted = faults().meet_at(ranks=(1, 2), step=0).fail_at(rank=1, step=0)
    planted.stall_at(rank=2, step=0, until=held).fail_at(rank=2, step=0)
    handle = run_with(planted, way)
    tap.await_came(m.Failed, 1)
    held.set()
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert failed.value.rank == 1


@local_ways
def test_a_failure_after_the_last_step_fails_the_run(way, faults):
    """S2: in the evaluation of the last epoch, when every sample is trained."""
    planted = faults().fail_in_eval(epoch=1)
    handle = planted.builder(epochs=2, way=way).eval_fn(planted.evaluate).run()
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert isinstance(failed.value.__cause__, Planted)


# -- a worker is never built ------------------------------------------------------------


@pairwise(
    way=[(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, GLOO)],
    rank=range(RANKS),
    what=["fail_in_build", "fail_in_optimizer"],
)
def test_a_failed_build_is_raised_and_ends_the_peers(way, rank, what, faults):
    """D32: those that are built wait for a plan, the others for their turn."""
    planted = getattr(faults(), what)(rank=rank)
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        run_with(planted, way).join(BOUND_S)
    assert (failed.value.rank, failed.value.step) == (rank, 0)
    assert isinstance(failed.value.__cause__, Planted)
    assert not planted.steps


@every_way
def test_peers_of_a_slow_factory_wait_for_its_rank(way, faults, tap):
    """D7: no rank begins before all are built, and a stop does not wait for them."""
    held = threading.Event()
    planted = faults().stall_in_build(rank=2, until=held)
    handle = run_with(planted, way)
    tap.await_came(m.Ready, 0)
    planted.await_all()
    assert not planted.steps
    handle.stop()
    held.set()
    assert handle.join(BOUND_S).stopped


# -- the collective cannot be made --------------------------------------------------------


def test_a_group_that_does_not_connect_is_an_error_of_run(monkeypatch):
    """D29: all ranks are connected in one place, with a timeout, before any worker starts."""
    connect, release, workers = process_group._connect_gloo, threading.Event(), []

    def connect_late(rank, *args):
        workers.extend(t.name for t in threading.enumerate() if t.name.startswith("gpu-worker"))
        if rank == 1:
            release.wait(BOUND_S)
            raise RuntimeError("no route")
        return connect(rank, *args)

    monkeypatch.setattr(process_group, "_connect_gloo", connect_late)
    timer = threading.Timer(0.05, release.set)
    timer.start()
    b = builder(way=(CADENCE, GLOO)).collective_timeout(0.1)
    with within(FAST_S), pytest.raises(CollectiveAborted, match="could not connect"):
        b.run()
    timer.join()
    assert workers == []


# -- threads that cannot be ended -----------------------------------------------------------


@pytest.mark.leaks_thread
def test_stuck_workers_are_waited_for_once_and_named(faults):
    """D22, S25: four ranks are stuck in user code; the bound is for all, not for each."""
    held, planted = threading.Event(), faults().meet_at(ranks=range(5), step=0)
    planted.fail_at(rank=4, step=0)
    for rank in range(4):
        planted.stall_at(rank=rank, step=0, until=held)
    b = planted.builder(dataset=400, ranks=5, way=(CADENCE, OVER_CPU))
    handle = b._set(grace_s=1.0).run()
    planted.await_all()
    with within(2.5), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    (note,) = failed.value.__notes__
    assert [name for name in ("0", "1", "2", "3", "4") if f"gpu-worker-{name}" in note] == [
        "0",
        "1",
        "2",
        "3",
    ]
    held.set()


@local_ways
def test_dead_ranks_are_not_waited_for(way, faults):
    """D22: two of three ranks are dead; the last one ends the run."""
    held, planted = threading.Event(), faults().meet_at(ranks=range(3), step=0)
    planted.fail_at(rank=0, step=0).vanish_at(rank=2, step=0)
    planted.stall_at(rank=1, step=0, until=held)
    handle = run_with(planted, way)
    planted.await_all()
    held.set()
    with within(FAST_S), pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert failed.value.rank in (0, 2)


# -- the coordinator's thread -----------------------------------------------------------------


class _Broken(Exception):
    """The coordinator's planted error."""


@diagonal(way=WAYS, num_events=[0, 2, 6, 12], times=3)
def test_the_death_of_the_coordinator_wakes_every_worker_and_waiter(way, num_events, monkeypatch):
    """D35: Python's queues never disconnect, so every worker needs a message."""
    handle_event, left = Coordinator.handle, [num_events]

    def breaking(machine, event, now):
        left[0] -= 1
        if left[0] == -1:
            raise _Broken("planted")
        return handle_event(machine, event, now)

    monkeypatch.setattr(Coordinator, "handle", breaking)
    handle = builder(dataset=4000, batch_size=1, ranks=RANKS, way=way).anchor(1).run()
    raised = queue.SimpleQueue()

    def wait(how):
        try:
            how()
        except BaseException as error:
            raised.put(error)

    ways_to_wait = (handle.join, handle.next_metrics, lambda: list(handle.metrics()))
    waiters = [threading.Thread(target=wait, args=(how,)) for how in ways_to_wait]
    with within(FAST_S):
        for waiter in waiters:
            waiter.start()
        errors = [raised.get(timeout=BOUND_S) for _ in waiters]
        for waiter in waiters:
            waiter.join(BOUND_S)
    assert [type(error) for error in errors] == [_Broken] * 3
    assert left[0] == -1


def test_a_parked_and_an_idle_worker_are_woken_by_the_death_of_the_coordinator(
    faults, tap, monkeypatch
):
    """D35: only the coordinator can release them."""
    held = threading.Event()
    planted = faults().hold(rank=1, step=0, until=held)
    b = planted.builder(dataset=60, batch_size=1, way=(CADENCE, OVER_CPU)).anchor(100)
    handle = b.max_batch_diff(1).run()
    tap.wait_for(lambda: tap.parked(0))
    monkeypatch.setattr(Coordinator, "_on_report", None)
    held.set()
    with within(FAST_S), pytest.raises(TypeError, match="'NoneType' object is not callable"):
        handle.join(BOUND_S)


# -- the averaging thread ---------------------------------------------------------------------


def test_no_averaging_thread_outlives_the_run(tap, monkeypatch):
    """D20: a rank dies while an average is computed; the run ends once it is."""
    computing, held = threading.Event(), threading.Event()
    average = Averager.average

    def slow(averager, payloads, weights, squares):
        computing.set()
        assert held.wait(BOUND_S)
        return average(averager, payloads, weights, squares)

    def die_meanwhile(model, batch):
        if current_worker().rank == 1 and computing.is_set():
            raise Planted("planted")
        return count_up(model, batch)

    monkeypatch.setattr(Averager, "average", slow)
    b = builder(train=die_meanwhile, dataset=8000, batch_size=1, way=(CADENCE, OVER_CPU))
    handle = b.anchor(1).run()
    assert computing.wait(BOUND_S)
    tap.await_came(m.Failed, 1)
    averagers = [t for t in threading.enumerate() if t.name == "averager"]
    assert [t.is_alive() for t in averagers] == [True]
    with pytest.raises(TimeoutError):
        handle.join(0.05)  # it is waited for, since it reads the replicas' snapshots
    held.set()
    with within(FAST_S), pytest.raises(WorkerFailed):
        handle.join(BOUND_S)
    assert not averagers[0].is_alive()
    assert not [t for t in threading.enumerate() if t.name in ("averager", "coordinator")]


def test_a_failing_average_does_not_hang_the_run(monkeypatch):
    """D20: every round fails, and after some in a row the run ends with an error."""
    num_calls = [0]

    def broken(averager, payloads, weights, squares):
        num_calls[0] += 1
        raise MemoryError("planted")

    monkeypatch.setattr(Averager, "average", broken)
    b = builder(dataset=4000, batch_size=1, way=(CADENCE, OVER_CPU)).anchor(1)
    with within(FAST_S), pytest.raises(RuntimeError, match="3 averaging rounds failed in a row"):
        b.max_failed_rounds(3).run().join(BOUND_S)
    assert num_calls[0] == 3 + 1  # and that of the last states


@over([(SYNC, THREAD), (CADENCE, THREAD), (CADENCE, GLOO)])
def test_a_stop_during_rounds_returns_a_state_and_leaves_no_rank_waiting(way, faults, tap):
    """D23: over collectives, requested while one is in flight."""
    planted = faults().slow(rank=1, seconds=0.005)
    handle = planted.builder(dataset=4000, batch_size=1, way=way).anchor(1).run()
    planted.wait_for(lambda: planted.steps[1] >= 5)
    handle.stop()
    with within(FAST_S):
        assert handle.join(BOUND_S).stopped
    assert len(tap.came(m.Exiting)) == 2
