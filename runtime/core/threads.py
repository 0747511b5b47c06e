"""Workarounds for PyTorch in several threads, intra-op thread counts, and closing of objects."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from runtime.core.process_state import ProcessState, make_thread_safe

# PyTorch computes ``sqrt``, ``exp`` etc. of contiguous CPU tensors with MKL's VML, which selects a
# function's kernel in its first call. If two threads make that call concurrently, one of them may
# get a kernel of low accuracy for this call: relative errors of up to 3e-4 were observed in
# ``sqrt``, which each step of AdamW uses. Reported as
# https://github.com/pytorch/pytorch/issues/188792 for MKL 2024.2, which PyTorch's wheels contain;
# MKL 2025.0 and later are reported to be unaffected.

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
"""Functions that ``ATen/cpu/vml.h`` passes to MKL, in float32 and float64."""

_THREADS_LOCK = threading.Lock()
_IMPORTED_IN = os.getpid()


class _ThreadOverride(threading.local):
    """A thread's override of its intra-op threads: depth, current value, previous value."""

    times = 0
    now = 0
    before = 0


class IntraOpThreads(ProcessState):
    """Restores ``torch.set_num_threads`` when the last run of the process ends.

    A worker's setting would otherwise be inherited by every thread created later.
    """

    _users = 0
    _override = _ThreadOverride()

    @classmethod
    def budget(cls) -> int:
        """Total number of intra-op threads for all CPU workers of a run."""
        with cls._lock:
            cls._recover()
            before = cls._before if cls._users else torch.get_num_threads()
        return min(num_cores(), before)

    @classmethod
    def _capture(cls, before: int | None, of_call: bool) -> int:
        cls._recover()
        return torch.get_num_threads() if before is None else before

    @classmethod
    def _restore(cls, before: int, once: bool) -> None:
        torch.set_num_threads(before)

    @classmethod
    def override(cls, num_threads: int) -> int:
        """Set the calling thread's number of intra-op threads until :meth:`reset`.

        For a thread that alternates with CPU replicas: the intra-op threads of its own operations
        would keep spinning for a while on the cores that the replicas need.

        Returns:
            The thread's identifier, for :meth:`reset`.
        """
        state = cls._override
        if not state.times:
            state.before = torch.get_num_threads()
        state.times += 1
        state.now = num_threads
        torch.set_num_threads(num_threads)
        return threading.get_ident()

    @classmethod
    def reset(cls, thread: int) -> None:
        """Restore the calling thread's number of intra-op threads; acquires no lock.

        Args:
            thread: From :meth:`override`, one call for each of its calls. No effect in any other
                thread.
        """
        if thread == threading.get_ident() and cls._override.times:
            cls._override.times -= 1
            if not cls._override.times:
                cls._end_override()

    @classmethod
    def _recover(cls) -> None:
        """Restore this thread's number if another thread has ended the run."""
        if cls._users == 0 and cls._override.times:
            cls._override.times = 0
            cls._end_override()

    @classmethod
    def _end_override(cls) -> None:
        if torch.get_num_threads() == cls._override.now:  # else user code has changed it
            torch.set_num_threads(cls._override.before)


def prepare_threads() -> None:
    """Apply workarounds for PyTorch in several threads, once per process.

    Called before computing threads are started. Takes a few milliseconds. Thread-safe; blocks while
    another thread is in it.
    """
    with _THREADS_LOCK:
        _renew_thread_pool(os.getpid())
        _resolve_vector_math()
        _keep_device_guard()
        make_thread_safe()


@functools.cache
def _renew_thread_pool(process: int) -> None:
    # After a fork the first torch.set_num_threads() replaces PyTorch's thread pool without a lock
    # (caffe2/utils/threadpool/pthreadpool-cpp.cc): without the GIL, that of a second thread can
    # fail meanwhile with "Invalid thread pool!".
    if process != _IMPORTED_IN:
        torch.set_num_threads(torch.get_num_threads())


@functools.cache
def _resolve_vector_math() -> None:
    # Harmless without MKL. The caller may be under inference mode or a default device.
    with torch.inference_mode():
        for dtype in (torch.float32, torch.float64):
            x = torch.full((16,), 0.5, dtype=dtype, device="cpu")
            for name in FUNCTIONS:
                getattr(torch, name)(x)


@functools.cache
def _keep_device_guard() -> None:
    # In a CUDA build without a GPU, a fake tensor mode (used by torch.compile) replaces the
    # process's CUDA device guard by one owned by its thread: thread_local in
    # c10/core/impl/DeviceGuardImplInterface.cpp up to PyTorch 2.12, static in 2.13. Once that
    # thread has ended, the process crashes at the guard's next use. Only the main thread may
    # replace it, since it outlives the others; fake CUDA tensors do not work in other threads.
    replace = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if replace is None or torch.__version__ >= "2.13":
        return

    def replace_in_main_thread() -> None:
        if threading.current_thread() is threading.main_thread():
            replace()

    torch._C._ensureCUDADeviceGuardSet = replace_in_main_thread


def in_own_context(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` for the target of a thread, with the context variables of the caller."""
    return functools.partial(contextvars.copy_context().run, function)


def num_cores() -> int:
    """Number of CPU cores available to this process."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


class Closeable:
    """A context manager that calls :meth:`close` at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
