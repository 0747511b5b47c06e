"""Threads that compute with PyTorch, and what is closed when a block or the process ends."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from abc import abstractmethod
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

# PyTorch computes ``sqrt``, ``exp`` and the like of contiguous CPU tensors with MKL's VML. MKL
# looks up the kernel of such a function in the first call of it. If two threads make that call
# together, one of them may get a kernel of low accuracy for this one call: relative errors of
# up to 3e-4 were seen here in ``sqrt``, which is in each step of AdamW. Reported as
# https://github.com/pytorch/pytorch/issues/188792 for MKL 2024.2, which PyTorch's wheels hold;
# MKL 2025.0 and later are said to be free of it.

FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
"""What ``ATen/cpu/vml.h`` hands to MKL, in float32 and in float64."""

_THREADS_LOCK = threading.Lock()


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


def prepare_threads() -> None:
    """Mend what PyTorch gets wrong when several threads compute; once in a process.

    To be called before threads are started that compute. Takes a few milliseconds.
    Thread-safe; blocks while another thread is in it.
    """
    with _THREADS_LOCK:
        _resolve_vector_math()
        _leave_device_guard_alone()


@functools.cache
def _resolve_vector_math() -> None:
    # Without MKL in PyTorch this does no harm.
    # The caller may be under inference mode or a default device.
    with torch.inference_mode():
        for dtype in (torch.float32, torch.float64):
            x = torch.full((16,), 0.5, dtype=dtype, device="cpu")
            for name in FUNCTIONS:
                getattr(torch, name)(x)


@functools.cache
def _leave_device_guard_alone() -> None:
    # Where a build with CUDA finds no GPU, a fake tensor mode (torch.compile enters one) replaces
    # the process's device guard of CUDA by one that belongs to its thread: thread_local in
    # c10/core/impl/DeviceGuardImplInterface.cpp up to PyTorch 2.12, static in 2.13. When that
    # thread ends, the process crashes at the guard's next use. The main thread outlives the rest;
    # fake CUDA tensors, which the new guard is for, are not to be had in other threads.
    replace = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if replace is None or torch.__version__ >= "2.13":
        return

    def replace_in_main_thread() -> None:
        if threading.current_thread() is threading.main_thread():
            replace()

    torch._C._ensureCUDADeviceGuardSet = replace_in_main_thread


T = TypeVar("T")


class LiveRegistry(Generic[T]):
    """Remembers objects and keeps none of them alive. Thread-safe, and safe in finalizers.

    A ``WeakSet`` is not: its iteration fails if another thread adds an object meanwhile, or
    if one dies there between the look whether somebody iterates and the removal. Here each
    step is one operation of a set, which is whole with and without the interpreter's lock.
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, item: T) -> None:
        """Remember an object, which must be hashable, until it dies."""
        self._refs.add(weakref.ref(item, self._refs.discard))

    def all(self) -> list[T]:
        """Those that are alive now, in any order."""
        found = [ref() for ref in self._refs.copy()]
        return [item for item in found if item is not None]


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


class Closeable:
    """A context manager that closes itself when the block is left."""

    @abstractmethod
    def close(self) -> None:
        """Free what is held. Idempotent."""

    def __enter__(self) -> Self:
        """Itself; closed when the block is left."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
