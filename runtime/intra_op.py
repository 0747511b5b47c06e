"""Intra-op threads of PyTorch: how many CPU workers may have, and what was set before."""

from __future__ import annotations

import os
import threading

import torch


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


class IntraOpThreads:
    """Restores ``torch.set_num_threads`` when the last run of the process ends.

    What a worker sets leaks into every thread created later, so it is put back.
    """

    _lock = threading.Lock()
    _users = 0
    _before = 0

    @classmethod
    def budget(cls) -> int:
        """Intra-op threads that all CPU workers of a run may have together."""
        with cls._lock:
            before = cls._before if cls._users else torch.get_num_threads()
        return min(num_cores(), before)

    @classmethod
    def acquire(cls) -> None:
        """A run starts."""
        with cls._lock:
            if cls._users == 0:
                cls._before = torch.get_num_threads()
            cls._users += 1

    @classmethod
    def release(cls) -> None:
        """A run has ended, from any thread."""
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                torch.set_num_threads(cls._before)
