"""One worker captures while all others are parked, or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from runtime.device.capture_gate import CaptureGate, _State

WAIT_S = 10.0


@pytest.fixture
def gate():
    return CaptureGate(wait_s=WAIT_S)


def in_a_step(gate):
    """A worker in the middle of a step."""
    member = gate.join()
    member.pause_point()
    return member


@contextmanager
def other(gate, work):
    """A second worker in a thread of its own; ends, and shows its error, on leaving."""
    member = in_a_step(gate)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, member)
        yield member
        future.result(WAIT_S)
    member.leave()


def await_state(gate, member, state):
    with gate._changed:
        assert gate._changed.wait_for(lambda: gate._states.get(member) is state, WAIT_S)


def test_a_worker_alone_captures_at_once(gate):
    with gate.join().alone() as alone:
        assert alone


def test_an_idle_worker_is_parked_and_wakes_behind_the_capture(gate):
    woken, leave = threading.Event(), threading.Event()

    def wait(member):
        with member.idle():
            assert leave.wait(WAIT_S)
        woken.set()

    me = in_a_step(gate)
    with other(gate, wait) as member:
        await_state(gate, member, _State.PARKED)
        with me.alone() as alone:
            assert alone
            leave.set()  # its message is here; it may not act on it yet
            assert not woken.wait(0.05)
        assert woken.wait(WAIT_S)


def test_a_capture_waits_until_the_other_reaches_its_next_step(gate):
    order, at_work = [], threading.Event()

    def step(member):
        assert at_work.wait(WAIT_S)
        order.append("step")
        member.pause_point()
        order.append("next step")

    me = in_a_step(gate)
    with other(gate, step), ThreadPoolExecutor(1) as pool:

        def capture():
            with me.alone() as alone:
                order.append("capture" if alone else "no capture")

        done = pool.submit(capture)
        with gate._changed:
            assert gate._changed.wait_for(lambda: gate._owner is me, WAIT_S)
        at_work.set()
        done.result(WAIT_S)
    assert order == ["step", "capture", "next step"]


def test_a_rank_in_a_collective_is_hardly_waited_for(gate):
    """It may be waiting for the one that wants to capture."""
    joined, leave = threading.Event(), threading.Event()

    def wait(member):
        with member.collective():
            joined.set()
            assert leave.wait(WAIT_S)

    me = in_a_step(gate)
    with other(gate, wait):
        assert joined.wait(WAIT_S)
        with me.alone() as alone:
            assert not alone
        leave.set()


def test_a_rank_that_is_about_to_leave_a_collective_is_waited_for():
    gate = CaptureGate(wait_s=WAIT_S, joined_s=WAIT_S)
    joined, leave = threading.Event(), threading.Event()

    def reduce(member):
        with member.collective():
            joined.set()
            assert leave.wait(WAIT_S)
        member.pause_point()

    me = in_a_step(gate)
    with other(gate, reduce), ThreadPoolExecutor(1) as pool:
        assert joined.wait(WAIT_S)

        def capture():
            with me.alone() as alone:
                return alone

        done = pool.submit(capture)
        with gate._changed:
            assert gate._changed.wait_for(lambda: gate._owner is me, WAIT_S)
        leave.set()
        assert done.result(WAIT_S)


def test_a_rank_parks_in_front_of_a_collective(gate):
    entered, go = threading.Event(), threading.Event()

    def join(member):
        assert go.wait(WAIT_S)
        with member.collective():
            entered.set()

    me = in_a_step(gate)
    with other(gate, join) as member:
        with member.idle():  # lets the capture begin
            pass
        with ThreadPoolExecutor(1) as pool:
            inside, leave = threading.Event(), threading.Event()

            def capture():
                with me.alone() as alone:
                    inside.set()
                    assert leave.wait(WAIT_S)
                    return alone

            done = pool.submit(capture)
            with gate._changed:
                assert gate._changed.wait_for(lambda: gate._owner is me, WAIT_S)
            go.set()
            assert inside.wait(WAIT_S)
            assert not entered.wait(0.05)
            leave.set()
            assert done.result(WAIT_S)
        assert entered.wait(WAIT_S)


def test_a_worker_that_never_pauses_costs_a_capture_and_no_more():
    gate = CaptureGate(wait_s=0.05)
    me, busy = in_a_step(gate), in_a_step(gate)
    with me.alone() as alone:
        assert not alone
    busy.pause_point()  # nobody wants to capture any more
    with busy.collective():
        pass


def test_nobody_captures_while_another_is_in_a_function_of_the_user(gate):
    """It may take minutes, for which nobody is held up."""
    me, building, evaluating = in_a_step(gate), gate.join(), in_a_step(gate)
    with me.alone() as alone:
        assert not alone
    building.leave()
    with evaluating.apart(), me.alone() as alone:
        assert not alone


def test_ranks_park_in_front_of_the_step_in_which_one_captures(gate):
    """And not in a reduction, where they would wait for that one."""
    me, order = in_a_step(gate), []

    def steps(member):
        member.pause_point()
        order.append("step")

    me.reserve()
    with ThreadPoolExecutor(1) as pool:
        member = gate.join()
        done = pool.submit(steps, member)
        await_state(gate, member, _State.PARKED)
        with me.alone() as alone:
            assert alone
            order.append("capture")
        done.result(WAIT_S)
    assert order == ["capture", "step"]


def test_a_rank_goes_on_to_the_reduction_in_which_the_other_waits_for_it(gate):
    me, member = in_a_step(gate), in_a_step(gate)
    me.reserve()
    with me.collective(), ThreadPoolExecutor(1) as pool:
        pool.submit(member.pause_point).result(WAIT_S)


@pytest.mark.parametrize("end", ["idle", "unreserve", "leave", "apart"])
def test_a_reservation_that_comes_to_nothing_holds_nobody(gate, end):
    me, member = in_a_step(gate), in_a_step(gate)
    me.reserve()
    if end in ("idle", "apart"):
        with getattr(me, end)():
            pass
    else:
        getattr(me, end)()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(member.pause_point).result(WAIT_S)


def test_a_worker_does_not_stay_parked_for_ever(caplog):
    gate = CaptureGate(park_s=0.05)
    me, late = in_a_step(gate), in_a_step(gate)
    with late.idle(), me.alone() as alone:
        assert alone
        late.pause_point()
    assert "going on beside it" in caplog.text


def test_a_worker_that_is_gone_is_not_waited_for(gate):
    me, gone = in_a_step(gate), in_a_step(gate)
    gone.leave()
    gone.leave()
    with me.alone() as alone:
        assert alone


def test_two_that_want_to_capture_do_so_one_after_the_other(gate):
    inside, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(4)

    def capture(member):
        nonlocal inside, most
        try:
            both.wait(WAIT_S)
            with member.alone() as alone:
                assert alone
                with lock:
                    inside += 1
                    most = max(most, inside)
                member.pause_point()  # the owner itself does not wait
                with lock:
                    inside -= 1
        finally:
            member.leave()

    members = [in_a_step(gate) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(capture, member) for member in members]:
            future.result(WAIT_S)
    assert most == 1
