"""The handlers of SIGINT and SIGTERM: when they are there, and what acts after them."""

from __future__ import annotations

import signal
import threading
from signal import SIGINT, SIGTERM

import pytest

from runtime.core.signals import INTERRUPTS
from tests.support.running import WAIT_S, Gate, builder
from tests.support.signalling import Noted, Waits, as_found, dispositions, held_run, raising


@pytest.fixture(autouse=True)
def _handlers_are_as_found():
    with as_found():
        yield


@pytest.fixture
def waits(monkeypatch):
    return Waits(monkeypatch)


@pytest.fixture
def noted():
    """A handler of the test's own; whatever it sets is undone."""
    before = dispositions()
    yield Noted()
    for signum, handler in zip((SIGINT, SIGTERM), before, strict=True):
        signal.signal(signum, handler)


# -- the handlers ------------------------------------------------------------------


def test_handlers_are_there_while_the_main_thread_waits_and_restored_after_it(waits):
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


def test_a_body_between_two_epochs_has_the_users_handlers():
    before = dispositions()
    for _ in builder(epochs=3).run().metrics():
        assert dispositions() == before


def test_nested_waits_restore_the_handlers_when_the_last_is_left():
    before = dispositions()
    with INTERRUPTS.waiting():
        during = dispositions()
        with INTERRUPTS.waiting():
            assert dispositions() == during
        assert dispositions() == during
    assert dispositions() == before != during


def test_a_run_that_is_waited_for_inside_the_wait_for_another_counts_alike(noted, waits):
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
    assert seen == [[]]  # the handler found before acts when the last wait is left
    assert noted.calls == [(SIGTERM, None)]


def test_a_handler_that_somebody_else_put_in_meanwhile_stays(noted, waits):
    gate = Gate()
    handle = builder(train=gate).run()
    waits.actions = [[lambda: signal.signal(SIGINT, noted), gate.opened.set]]
    handle.join(WAIT_S)
    assert signal.getsignal(SIGINT) is noted


def test_a_handler_kept_by_somebody_else_raises_when_nobody_waits(noted):
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
def test_the_users_handler_is_called_once_the_run_is_over(noted, waits, signum):
    signal.signal(signum, noted)
    before = dispositions()
    gate, handle = held_run()
    waits.actions = [[raising(signum), gate.opened.set]]
    with pytest.raises(KeyboardInterrupt):
        handle.join()
    assert noted.calls == [(signum, None)]
    assert noted.during == [before]
    assert handle.state.stopped


def test_what_the_users_handler_raises_comes_out_of_the_wait(noted, waits):
    def leave(signum, frame):
        raise SystemExit(3)

    signal.signal(SIGTERM, leave)
    gate, handle = held_run()
    waits.actions = [[raising(SIGTERM), gate.opened.set]]
    with pytest.raises(SystemExit):
        handle.join()
    assert handle.state.stopped


def test_a_wait_in_another_thread_installs_nothing_and_is_not_interrupted(waits):
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


def test_a_run_that_cannot_start_is_not_kept(monkeypatch):
    def refuse(self):
        raise OSError("no more threads")

    monkeypatch.setattr("coordinator.service.Service.start", refuse)
    with pytest.raises(OSError, match="no more threads"):
        builder().run()
    assert INTERRUPTS._runs == ()


def test_a_run_that_failed_is_not_kept():
    def broken(model, batch):
        raise ZeroDivisionError

    handle = builder(train=broken).run()
    with pytest.raises(RuntimeError):
        handle.join(WAIT_S)
    assert INTERRUPTS._runs == ()
