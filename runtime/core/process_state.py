"""State of PyTorch that threads of a process share, made safe for workers that are threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

logger = logging.getLogger(__name__)

FORWARD_AD_TIMEOUT_S = 60.0
"""Longest wait for another thread to leave forward-mode AD."""


class _Entered(threading.local):
    """Levels of forward-mode AD that a thread is inside."""

    depth = 0


_ENTERED = _Entered()
_LOCK = threading.Lock()
_FORWARD_AD = threading.RLock()


class ProcessState:
    """Restores modes of the process when the last run of the process ends.

    Subclasses restore other settings of the process.
    """

    _lock = threading.Lock()
    _users = 0
    _before: Any

    @classmethod
    def acquire(cls) -> None:
        """Register a run that starts."""
        with cls._lock:
            if cls._users == 0:
                cls._before = cls._capture()
            cls._users += 1

    @classmethod
    def release(cls) -> None:
        """Register the end of a run, from any thread."""
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                cls._restore(cls._before)

    @classmethod
    def _capture(cls) -> Any:
        return _Modes.capture()

    @classmethod
    def _restore(cls, before: Any) -> None:
        before.restore()


class _Modes(NamedTuple):
    """Modes that overlapping ``with`` blocks of several threads can leave switched on.

    Attributes:
        anomaly: ``torch.is_anomaly_enabled()``.
        anomaly_nan: ``torch.is_anomaly_check_nan_enabled()``.
        dtype: ``torch.get_default_dtype()``.
    """

    anomaly: bool
    anomaly_nan: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls) -> _Modes:
        """The modes now."""
        return cls(
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
            torch.get_default_dtype(),
        )

    def restore(self) -> None:
        """Restore the modes, with a warning that lists the changes."""
        now = _Modes.capture()
        if now.dtype is not self.dtype:
            torch.set_default_dtype(self.dtype)
            logger.warning(
                "the default dtype was %s at the end of the run and is %s again, as before: call "
                "torch.set_default_dtype before the run; it holds for all threads",
                now.dtype,
                self.dtype,
            )
        if now[:2] != self[:2]:
            torch.autograd.set_detect_anomaly(self.anomaly, self.anomaly_nan)
            logger.warning(
                "anomaly detection was %s at the end of the run and is %s again, as before: "
                "detect_anomaly() in the workers' threads holds for the whole process; enable it "
                "before the run",
                "on" if now.anomaly else "off",
                "on" if self.anomaly else "off",
            )


def make_thread_safe() -> None:
    """Guard the helpers of PyTorch whose state belongs to the process; idempotent.

    Forward-mode AD (``torch.func.jvp``, ``jacfwd``, ``forward_ad.dual_level``) is used by one
    thread at a time, since its levels are counted for the whole process. The values that
    ``parametrize.cached()`` keeps are those of the thread that is inside it.
    """
    with _LOCK:
        if isinstance(parametrize._cache, _ThreadCache):
            return
        _guard_forward_ad()
        _guard_parametrize()


def _guard_forward_ad() -> None:
    from torch._functorch import eager_transforms  # imports slowly

    modules: list[tuple[Any, str, str]] = [
        (eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting"),
        (forward_ad, "enter_dual_level", "exit_dual_level"),
    ]
    for module, enter, leave in modules:
        setattr(module, enter, _entering(getattr(module, enter)))
        setattr(module, leave, _leaving(getattr(module, leave)))


def _entering(enter: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _FORWARD_AD.acquire(timeout=FORWARD_AD_TIMEOUT_S):
            raise RuntimeError(
                "forward-mode AD (torch.func.jvp, dual_level) is in use in another thread, and its "
                "levels belong to the process: a rank must not wait for another one inside of it"
            )
        try:
            result = enter(*args, **kwargs)
        except BaseException:
            _FORWARD_AD.release()
            raise
        _ENTERED.depth += 1
        return result

    return guarded


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _ENTERED.depth:  # PyTorch calls this after a failed enter, too
            return None
        try:
            return leave(*args, **kwargs)
        finally:
            _ENTERED.depth -= 1
            _FORWARD_AD.release()

    return guarded


class _CachedValues(threading.local):
    """The values of one thread inside ``parametrize.cached()``; ``None`` outside."""

    values: dict[Any, Any] | None = None


class _ThreadCache(dict[Any, Any]):
    """``parametrize._cache``, with separate values for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.local = _CachedValues()
        self.num_inside = 0

    def get(self, key: Any, default: Any = None) -> Any:
        values = self.local.values
        return default if values is None else values.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.local.values is not None:
            self.local.values[key] = value


def _guard_parametrize() -> None:
    cache = _ThreadCache()

    def cached() -> Iterator[None]:
        before = cache.local.values
        cache.local.values = {} if before is None else before
        with _LOCK:
            cache.num_inside += 1
            parametrize._cache_enabled = cache.num_inside
        try:
            yield
        finally:
            cache.local.values = before
            with _LOCK:
                cache.num_inside -= 1
                parametrize._cache_enabled = cache.num_inside

    parametrize._cache = cache
    # The object stays the one that others have imported; what it calls is in its closure.
    cell = next(
        cell
        for name, cell in zip(
            parametrize.cached.__code__.co_freevars,
            parametrize.cached.__closure__ or (),
            strict=True,
        )
        if name == "func"
    )
    cell.cell_contents = cached
