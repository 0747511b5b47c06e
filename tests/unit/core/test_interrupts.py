"""Ctrl-C and SIGTERM during a wait: effects of the first, second and third signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from signal import SIGINT, SIGTERM
from types import SimpleNamespace

import pytest

from runtime import RunAborted
from runtime.core.signals import INTERRUPTS, POLL_S, InterruptibleWait
from runtime.loggers.metrics_thread import MetricsThread
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder
from tests.support.signalling import SOON_S, Probe, Waits, as_found, held_run, raising


@pytest.fixture(autouse=True)
def _handlers_are_as_found(monkeypatch):
    monkeypatch.setattr("runtime.core.signals.REPETITION_S", 0.0)
    with as_found():
        yield


@pytest.fixture
def waits(monkeypatch):
    return Waits(monkeypatch)


@pytest.fixture
def user_handler():
    """A handler of SIGTERM, so that no signal is kept for the end of the process."""
    before = signal.signal(SIGTERM, lambda *_: None)
    yield
    signal.signal(SIGTERM, before)


@pytest.fixture
def probe():
    probe = Probe()
    INTERRUPTS.add(probe)
    yield probe
    INTERRUPTS.remove(probe)


def leave_a_block(handle):
    with handle:
        pass


def join_in_a_block(handle):
    with handle:
        handle.join()


WAYS_TO_WAIT = {
    "join": lambda handle: handle.join(),
    "metrics": lambda handle: list(handle.metrics()),
    "next_metrics": lambda handle: handle.next_metrics(WAIT_S),
    "the end of a block": leave_a_block,
}
ways_to_wait = pytest.mark.parametrize("wait", WAYS_TO_WAIT.values(), ids=WAYS_TO_WAIT.keys())


# -- one, two and three signals --------------------------------------------------


@ways_to_wait
def test_the_first_signal_stops_the_run_and_keeps_its_state(wait, waits):
    gate, handle = held_run()
    waits.actions = [[raising(SIGINT), gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        wait(handle)
    assert handle.state.stopped
    assert handle.join() is handle.state


@ways_to_wait
@pytest.mark.parametrize("signals", [[SIGINT, SIGINT], [SIGTERM, SIGINT, SIGINT]])
def test_signals_that_repeat_the_first_one_do_not_abort(
    wait, signals, waits, probe, monkeypatch, user_handler
):
    monkeypatch.setattr("runtime.core.signals.REPETITION_S", WAIT_S)
    gate, handle = held_run()
    waits.actions = [[*map(raising, signals), gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        wait(handle)
    assert handle.state.reason == "signalled"
    assert not probe.aborted.is_set()


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)], ids=["SYNC", "CADENCE"])
def test_a_signal_from_another_process_interrupts_a_wait_without_timeout(way, waits, probe):
    gate, handle = held_run(way=way)

    def interrupt():
        assert waits.entered.wait(WAIT_S)
        os.kill(os.getpid(), SIGINT)
        assert probe.stopped.wait(WAIT_S)
        gate.opened.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    thread.join(WAIT_S)
    assert handle.state.stopped
    assert not probe.aborted.is_set()


@ways_to_wait
def test_the_second_signal_aborts_a_run_stuck_in_user_code(wait, waits):
    gate, handle = held_run(grace_s=0.1)
    waits.actions = [[raising(SIGINT), raising(SIGINT)]]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait(handle)
    assert time.monotonic() - start < SOON_S
    assert handle.state is None
    with pytest.raises(RunAborted, match="aborted") as caught:
        handle.join(WAIT_S)
    assert "stuck in user code: gpu-worker-" in caught.value.__notes__[0]
    gate.opened.set()


@pytest.mark.parametrize("wait", [lambda handle: handle.join(), join_in_a_block])
def test_the_third_signal_stops_waiting(wait, waits, probe):
    gate, handle = held_run()

    def interrupt():
        assert waits.entered.wait(WAIT_S)
        for answered in (probe.stopped, probe.aborted):
            os.kill(os.getpid(), SIGINT)
            assert answered.wait(WAIT_S)
        os.kill(os.getpid(), SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait(handle)
    assert time.monotonic() - start < SOON_S
    thread.join(WAIT_S)
    assert not handle._ended
    gate.opened.set()
    with pytest.raises(RunAborted):
        handle.join(WAIT_S)


def test_an_interrupted_wait_outlasts_its_timeout(waits):
    gate, handle = held_run()
    waits.actions = [[raising(SIGINT)], [gate.opened.set]]  # in the second wait, after 0.01 s
    with pytest.raises(KeyboardInterrupt):
        handle.join(0.01)
    assert waits.actions == []
    assert handle.state.stopped


def test_an_interrupted_wait_for_an_epoch_lasts_until_the_end_of_the_run(waits):
    gate, handle = held_run()
    waits.actions = [[raising(SIGINT), lambda: handle.publish("an epoch")], [gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        handle.next_metrics()
    assert handle.state.stopped
    assert handle.poll_metrics() == ["an epoch"]


def test_the_main_thread_polls_for_signals_that_did_not_end_its_wait():
    bounds = []
    condition = SimpleNamespace(wait=bounds.append)
    with INTERRUPTS.waiting() as period:
        for timeout_s in (None, WAIT_S, 0.01):
            period.wait(condition, timeout_s)
    InterruptibleWait().wait(condition, None)  # in another thread, which receives no signals
    assert bounds == [POLL_S, POLL_S, 0.01, None]


def test_a_signal_stops_every_run_of_the_process(waits):
    gate, one = held_run(way=(CADENCE, OVER_CPU))
    other_gate, other = held_run(way=(SYNC, THREAD))
    waits.actions = [[raising(SIGINT), gate.opened.set, other_gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        one.join()
    assert one.state.stopped
    assert other.join(WAIT_S).stopped


def test_a_signal_received_after_the_end_of_the_run_is_not_lost(waits):
    handle = builder().run()
    handle.join(WAIT_S)

    def late():
        handle._run.wait_threads = wait_threads
        signal.raise_signal(SIGINT)

    wait_threads, handle._run.wait_threads = handle._run.wait_threads, late
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    assert not handle.join().stopped


@pytest.mark.leaks_thread("metrics")
def test_the_second_signal_abandons_a_metrics_fn_that_does_not_return(waits, monkeypatch, caplog):
    release, closing = threading.Event(), threading.Event()
    real_close = MetricsThread.close

    def close(self, *args):
        closing.set()
        real_close(self, *args)

    monkeypatch.setattr(MetricsThread, "close", close)
    handle = builder().metrics_fn(lambda metrics: release.wait(WAIT_S)).run()
    assert closing.wait(WAIT_S)
    waits.actions = [[raising(SIGINT), raising(SIGINT)]]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    assert time.monotonic() - start < SOON_S
    assert handle.join() is handle.state
    assert "metrics_fn has not returned" in caplog.text
    release.set()


# -- other interrupts ----------------------------------------------------------------


def test_a_keyboard_interrupt_from_user_code_stops_the_run(waits):
    def interrupt():
        raise KeyboardInterrupt("mine")

    gate, handle = held_run()
    waits.actions = [[interrupt], [gate.opened.set]]
    with pytest.raises(KeyboardInterrupt, match="mine"):
        handle.join()
    assert handle.state.stopped


def test_an_interrupt_in_a_block_stops_the_run_and_propagates():
    gate, handle = held_run()

    def block():
        with handle:
            gate.opened.set()
            signal.raise_signal(SIGINT)  # Python's own handler

    with pytest.raises(KeyboardInterrupt):
        block()
    assert handle.state.stopped


def test_signals_count_while_a_failed_block_waits_for_its_run(waits):
    gate, handle = held_run()
    waits.actions = [[raising(SIGINT), gate.opened.set]]

    def block():
        with handle:
            raise LookupError

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert isinstance(caught.value.__context__, LookupError)
    assert handle.state.stopped


def test_after_ctrl_c_in_a_block_the_next_signal_is_the_second(waits):
    gate, handle = held_run(grace_s=0.1)
    waits.actions = [[raising(SIGINT)]]

    def block():
        with handle:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    with pytest.raises(RunAborted):
        handle.join(WAIT_S)
    gate.opened.set()
