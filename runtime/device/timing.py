"""How long steps take: what the device computes, without waits for data and for peers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class StepTime(ABC):
    """The time of one step, told by whoever measured it."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds of the step. The first reading may wait for the device."""


class StepTimer(ABC):
    """Measures the steps of one worker, in its thread: start, (pause, resume)*, stop.

    ``start`` after a ``start`` forgets the step that was not stopped.
    """

    @abstractmethod
    def start(self) -> None:
        """A step begins. Waits while the device is too far behind."""

    @abstractmethod
    def pause(self) -> None:
        """What follows is no work of the step."""

    @abstractmethod
    def resume(self) -> None:
        """The step goes on."""

    @abstractmethod
    def stop(self, num_batches: int) -> StepTime:
        """The step has been given to the device."""

    @abstractmethod
    def take(self, *, wait: bool) -> tuple[float, int]:
        """Seconds of the steps measured since the last call, and the batches in them.

        Args:
            wait: Wait for the steps that are still on the device; else they come later.
        """


class HostTime(StepTime):
    """A time that is known."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self._seconds


class HostTimer(StepTimer):
    """Wall time, for steps that are over when their calls return."""

    def __init__(self) -> None:
        self._begun = self._paused = self._idle_s = 0.0
        self._total_s = 0.0
        self._num_batches = 0

    def start(self) -> None:
        """A step begins."""
        self._idle_s = 0.0
        self._begun = time.perf_counter()

    def pause(self) -> None:
        """What follows is no work of the step."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """The step goes on."""
        self._idle_s += time.perf_counter() - self._paused

    def stop(self, num_batches: int) -> StepTime:
        """The step is done."""
        seconds = time.perf_counter() - self._begun - self._idle_s
        self._total_s += seconds
        self._num_batches += num_batches
        return HostTime(seconds)

    def take(self, *, wait: bool) -> tuple[float, int]:
        """Seconds and batches since the last call; nothing is ever outstanding."""
        taken = self._total_s, self._num_batches
        self._total_s, self._num_batches = 0.0, 0
        return taken
