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


def fail():
    raise AssertionError("planted")


def refuse():
    raise NotHere("there is no such device")


def figures():
    return {"answer": 42}


PARTS = {
    "hangs": lambda setting: {"waits": wait_for_ever, "after it": figures},
    "troubled": lambda setting: {"fails": fail, "dies": die, "refuses": refuse, "passes": figures},
    "last": lambda setting: {"passes": figures},
}


def setting_of(record, times, limit_s):
    return None
