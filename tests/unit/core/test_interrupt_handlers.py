"""Handlers of SIGINT and SIGTERM: when they are installed, and which handlers run afterwards."""

from __future__ import annotations

import signal
import threading
from signal import SIGINT, SIGTERM

import pytest

from runtime.core.signals import INTERRUPTS
from tests.support.running import WAIT_S, Gate, builder
from tests.support.signalling import (
    RecordedHandler,
    Waits,
    as_found,
    dispositions,
    held_run,
    raising,
)


@pytest.fixture(autouse=True)
def _handlers_are_as_found():
    with as_found():
        yield


@pytest.fixture
def waits(monkeypatch):
    return Waits(monkeypatch)


@pytest.fixture
def noted():
    """The test's own handler; restored afterwards."""
    before = dispositions()
    yield RecordedHandler()
    for signum, handler in zip((SIGINT, SIGTERM), before, strict=True):
        signal.signal(signum, handler)


# -- handlers ----------------------------------------------------------------------


def test_handlers_are_installed_while_the_main_thread_waits_and_restored_afterwards(waits):
    before = dispositions()
    gate = Gate()
    handle = builder(train=gate).run()
    for wait in (handle.join, handle.next_metrics):
        with pytest.raises(TimeoutError):
            wait(0.001)
        assert dispositions() == before
    gate.opened.set()
    handle.join(WAIT_S)
    assert dispositions() == before
    assert waits.seen
    for _, during in waits.seen:
        assert not set(during) & set(before)


def test_the_users_handlers_are_active_between_two_epochs():
    before = dispositions()
    for _ in builder(epochs=3).run().metrics():
        assert dispositions() == before


def test_nested_waits_restore_the_handlers_at_the_outermost_end():
    before = dispositions()
    with INTERRUPTS.waiting():
        during = dispositions()
        with INTERRUPTS.waiting():
            assert dispositions() == during
        assert dispositions() == during
    assert dispositions() == before != during


def test_signals_reach_the_run_of_a_nested_wait(noted, waits):
    (outer_gate, outer), (inner_gate, inner) = held_run(), held_run()
    signal.signal(SIGTERM, noted)
    seen = []

    def wait_for_the_other():
        with pytest.raises(KeyboardInterrupt):
            inner.join()
        seen.append(list(noted.calls))

    opens = [outer_gate.opened.set, inner_gate.opened.set]
    waits.actions = [[wait_for_the_other], [raising(SIGTERM), *opens]]
    with pytest.raises(KeyboardInterrupt):
        outer.join()
    assert inner.state.stopped
    assert outer.state.stopped
    assert seen == [[]]  # the previous handler runs when the outermost wait ends
    assert noted.calls == [(SIGTERM, None)]


def test_a_handler_installed_during_the_wait_is_kept(noted, waits):
    gate = Gate()
    handle = builder(train=gate).run()
    waits.actions = [[lambda: signal.signal(SIGINT, noted), gate.opened.set]]
    handle.join(WAIT_S)
    assert signal.getsignal(SIGINT) is noted


def test_a_handler_called_outside_a_wait_raises_keyboard_interrupt(noted):
    with INTERRUPTS.waiting():
        kept = signal.getsignal(SIGINT)
    with pytest.raises(KeyboardInterrupt):
        kept(SIGINT, None)


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_an_ignored_signal_stays_ignored(noted, waits, signum):
    signal.signal(signum, signal.SIG_IGN)
    gate = Gate()
    handle = builder(train=gate).run()
    waits.actions = [[raising(signum), gate.opened.set]]
    assert not handle.join(WAIT_S).stopped
    assert all(signal.SIG_IGN in during for _, during in waits.seen)


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_the_users_handler_is_called_after_the_end_of_the_run(noted, waits, signum):
    signal.signal(signum, noted)
    before = dispositions()
    gate, handle = held_run()
    waits.actions = [[raising(signum), gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    assert noted.calls == [(signum, None)]
    assert noted.during == [before]
    assert handle.state.stopped


def test_an_exception_of_the_users_handler_is_raised_by_the_wait(noted, waits):
    def leave(signum, frame):
        raise SystemExit(3)

    signal.signal(SIGTERM, leave)
    gate, handle = held_run()
    waits.actions = [[raising(SIGTERM), gate.opened.set]]
    with pytest.raises(SystemExit, match="3"):
        handle.join()
    assert handle.state.stopped


def test_a_wait_in_another_thread_installs_no_handler_and_is_not_interrupted(waits):
    before = dispositions()
    gate, handle = held_run()
    found = []
    thread = threading.Thread(target=lambda: found.append(handle.join()), name="waiter")
    thread.start()
    assert waits.entered.wait(WAIT_S)
    assert ("waiter", before) in waits.seen
    waits.actions = [[raising(SIGINT), gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    thread.join(WAIT_S)
    assert found == [handle.state]


# -- the registry ----------------------------------------------------------------------


def test_a_run_that_cannot_start_is_unregistered(monkeypatch):
    def refuse(self):
        raise OSError("no more threads")

    monkeypatch.setattr("coordinator.service.Service.start", refuse)
    with pytest.raises(OSError, match="no more threads"):
        builder().run()
    assert INTERRUPTS._runs == ()


def test_a_failed_run_is_unregistered():
    def broken(model, batch):
        raise ZeroDivisionError

    handle = builder(train=broken).run()
    with pytest.raises(RuntimeError):
        handle.join(WAIT_S)
    assert INTERRUPTS._runs == ()
