"""Parts that hang, die and fail, for the harness of first contact."""

from __future__ import annotations

import os
import signal
import threading

from tests.gpu.contact_record import NotHere


def wait_for_ever():
    threading.Event().wait()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


num_failed = 0


def fail():
    global num_failed
    num_failed += 1
    raise AssertionError("planted")


def begin_anew():
    assert num_failed == 0, "the process of a failed case is used again"


def refuse():
    raise NotHere("there is no such device")


def figures():
    return {"answer": 42}


PARTS = {
    "hangs": lambda setting: {"waits": wait_for_ever, "after it": figures},
    "troubled": lambda setting: {
        "fails": fail,
        "begins anew": begin_anew,
        "dies": die,
        "refuses": refuse,
        "passes": figures,
    },
    "last": lambda setting: {"passes": figures},
}


def setting_of(record, times, limit_s):
    return None
