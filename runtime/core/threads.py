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


class _Lent(threading.local):
    """What a thread was lent, how often, and what it had before."""

    times = 0
    now = 0
    before = 0


class IntraOpThreads:
    """Restores ``torch.set_num_threads`` when the last run of the process ends.

    What a worker sets leaks into every thread created later, so it is put back.
    """

    _lock = threading.Lock()
    _users = 0
    _before = 0
    _lent = _Lent()

    @classmethod
    def budget(cls) -> int:
        """Intra-op threads that all CPU workers of a run may have together."""
        with cls._lock:
            cls._recover()
            before = cls._before if cls._users else torch.get_num_threads()
        return min(num_cores(), before)

    @classmethod
    def acquire(cls) -> None:
        """A run starts."""
        with cls._lock:
            cls._recover()
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

    @classmethod
    def lend(cls, num_threads: int) -> int:
        """Let the calling thread have so many, until it takes its own back.

        For a thread that works in turn with CPU replicas: the intra-op threads of its own
        operations would go on spinning for a while, on the cores that the replicas need.

        Returns:
            The thread, for :meth:`take_back`.
        """
        lent = cls._lent
        if not lent.times:
            lent.before = torch.get_num_threads()
        lent.times += 1
        lent.now = num_threads
        torch.set_num_threads(num_threads)
        return threading.get_ident()

    @classmethod
    def take_back(cls, thread: int) -> None:
        """As many as before for the calling thread, if it is the one; takes no lock.

        Args:
            thread: From :meth:`lend`; called once for each call of that.
        """
        if thread == threading.get_ident() and cls._lent.times:
            cls._lent.times -= 1
            if not cls._lent.times:
                cls._restore()

    @classmethod
    def _recover(cls) -> None:
        """What this thread was lent and another one ended, it takes back late."""
        if cls._users == 0 and cls._lent.times:
            cls._lent.times = 0
            cls._restore()

    @classmethod
    def _restore(cls) -> None:
        if torch.get_num_threads() == cls._lent.now:  # else somebody has set it since
            torch.set_num_threads(cls._lent.before)
