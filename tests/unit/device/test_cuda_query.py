"""Queries of events, which must not block other threads."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from runtime.device import cuda_api

WAIT_S = 30.0


class Event:
    """An event of PyTorch whose ``query`` must not be called."""

    def __init__(self, handle):
        self.cuda_event = handle

    def query(self):
        raise AssertionError("this query holds the interpreter lock")


@pytest.fixture
def driver(monkeypatch):
    """The driver's library; a test sets its ``cuEventQuery``."""
    library = SimpleNamespace()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    cuda_api.event_query.cache_clear()
    yield library
    cuda_api.event_query.cache_clear()


def test_a_query_that_blocks_in_the_driver_lets_other_threads_run(driver, monkeypatch):
    """``sem_wait`` simulates a query that waits for a lock; only another thread can end it."""
    libc = ctypes.PyDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    monkeypatch.undo()
    driver.cuEventQuery = ctypes.CDLL(None).sem_wait
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begun = threading.Event()

    def query():
        begun.set()
        return cuda_api.API.is_complete(Event(ctypes.addressof(semaphore)))

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(query)
        assert begun.wait(WAIT_S)
        assert not answer.done()
        libc.sem_post(semaphore)
        assert answer.result(WAIT_S)


class Query:
    """A fake ``cuEventQuery``."""

    def __init__(self, result):
        self.result = result

    def __call__(self, handle):
        return self.result


@pytest.mark.parametrize(("result", "complete"), [(0, True), (600, False)])
def test_the_answer_of_the_driver_is_that_of_the_event(driver, result, complete):
    driver.cuEventQuery = Query(result)
    assert cuda_api.API.is_complete(Event(7)) is complete


def test_an_event_that_was_never_recorded_is_complete(driver):
    driver.cuEventQuery = Query(400)
    assert cuda_api.API.is_complete(Event(0))


def test_an_error_of_the_driver_is_raised_by_pytorch(driver):
    driver.cuEventQuery = Query(700)
    with pytest.raises(AssertionError, match="interpreter lock"):
        cuda_api.API.is_complete(Event(7))


def test_without_the_driver_events_are_queried_by_pytorch(driver):
    with pytest.raises(AssertionError, match="interpreter lock"):
        cuda_api.API.is_complete(Event(7))
