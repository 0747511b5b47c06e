"""The injector: faults fire where they were planted, are counted, and must fire."""

from __future__ import annotations

import threading

import pytest

from runtime import WorkerFailed
from tests.deadlock.faults import BOUND_S, Faults, Planted, Vanish
from tests.support.running import SYNC, THREAD, Trace, local_ways


def test_a_fault_that_never_fired_fails_the_block():
    planted = Faults().fail_at(rank=1, step=99)
    never = pytest.raises(AssertionError, match=r"never fired: fail_at\(rank=1, step=99\)")
    with never, planted as faults:
        faults.builder(way=(SYNC, THREAD)).run().join(BOUND_S)
    assert faults.num_shots == 0


def test_one_of_two_faults_that_never_fired_fails_the_block():
    until = threading.Event()
    until.set()
    planted = Faults().stall_at(rank=0, step=0, until=until).slow(rank=7, seconds=0.01)
    never = pytest.raises(AssertionError, match=r"never fired: slow\(rank=7\)$")
    with never, planted as faults:
        faults.builder(way=(SYNC, THREAD)).run().join(BOUND_S)


def test_the_fixture_fails_a_test_whose_fault_never_fired(request):
    definition = request.session._fixturemanager.getfixturedefs("faults", request.node)[-1]
    body = definition.func(tap=None)
    next(body)().fail_at(rank=0, step=0)
    with pytest.raises(AssertionError, match="never fired"):
        next(body, None)


def test_another_error_of_the_block_is_not_hidden():
    with pytest.raises(ZeroDivisionError), Faults().fail_at(rank=1, step=99):
        raise ZeroDivisionError


def test_the_end_of_the_block_releases_stalled_threads():
    until = threading.Event()
    with Faults().stall_at(rank=0, step=0, until=until) as faults:
        handle = faults.builder(ranks=1).run()
        faults.await_all()
    handle.join(BOUND_S)
    assert until.is_set()


def test_steps_are_counted_for_each_rank_from_0(faults):
    trace = Trace()
    planted = faults(trace).fail_at(rank=1, step=3)
    with pytest.raises(WorkerFailed) as failed:
        planted.builder(way=(SYNC, THREAD)).run().join(BOUND_S)
    assert (failed.value.rank, failed.value.step) == (1, 3)
    assert isinstance(failed.value.__cause__, Planted)
    assert (trace.steps[1], planted.steps[1], planted.num_shots) == (3, 4, 1)


def test_faults_of_one_step_act_in_their_order(faults):
    until = threading.Event()
    planted = faults().stall_at(rank=0, step=1, until=until).fail_at(rank=0, step=1)
    handle = planted.builder(ranks=1).run()
    planted.wait_for(lambda: planted.num_shots)
    assert planted.missed == ["fail_at(rank=0, step=1)"]
    until.set()
    with pytest.raises(WorkerFailed):
        handle.join(BOUND_S)


@local_ways
def test_a_vanished_worker_sends_no_message(faults, tap, way):
    planted = faults().vanish_at(rank=1, step=0)
    with pytest.raises(WorkerFailed, match="ended without a message") as failed:
        planted.builder(way=way).run().join(BOUND_S)
    assert failed.value.rank == 1
    assert not isinstance(failed.value.__cause__, Vanish)
    assert tap.machine.outcome.failure.rank == 1


def test_a_batch_is_identified_by_its_position_in_the_epoch(faults):
    planted = faults().fail_in_data(batch=4, epoch=1)
    handle = planted.builder(dataset=planted.dataset(20), epochs=2, ranks=1).run()
    with pytest.raises(WorkerFailed) as failed:
        handle.join(BOUND_S)
    assert (failed.value.epoch, failed.value.step) == (1, 14)
