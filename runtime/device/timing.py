"""Times of steps on the device, without waits for data and for peers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque

from runtime.device.cuda_api import CudaApi, Event, Stream
from runtime.device.launch_load import LaunchLoad, LaunchMeter


class StepTimer(ABC):
    """Measures the steps of one worker, in its thread: start, (pause, resume)*, stop.

    ``start`` after a ``start`` discards the step that was not stopped.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin a step. Blocks while the device is too far behind."""

    @abstractmethod
    def pause(self) -> None:
        """Pause: later work does not belong to the step."""

    @abstractmethod
    def resume(self) -> None:
        """Continue the step."""

    @abstractmethod
    def stop(self, num_batches: int) -> StepTime:
        """End the step, all of whose work has been issued."""

    @abstractmethod
    def take(self, *, wait: bool) -> tuple[float, int]:
        """Seconds of the steps measured since the last call, and the batches in them.

        Args:
            wait: Block for steps that are still on the device; if not, a later call has them.
        """


class StepTime(ABC):
    """The time of one measured step."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds of the step. The first reading may wait for the device."""


class HostTime(StepTime):
    """A time that is available at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self._seconds


class HostTimer(StepTimer):
    """Wall time, for steps that are complete when their calls return."""

    def __init__(self) -> None:
        self._begun = self._paused = self._idle_s = 0.0
        self._total_s = 0.0
        self._num_batches = 0

    def start(self) -> None:
        self._idle_s = 0.0
        self._begun = time.perf_counter()

    def pause(self) -> None:
        """Pause: later work does not belong to the step."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        self._idle_s += time.perf_counter() - self._paused

    def stop(self, num_batches: int) -> StepTime:
        seconds = time.perf_counter() - self._begun - self._idle_s
        self._total_s += seconds
        self._num_batches += num_batches
        return HostTime(seconds)

    def take(self, *, wait: bool) -> tuple[float, int]:
        """Seconds and batches since the last call; nothing is ever outstanding."""
        taken = self._total_s, self._num_batches
        self._total_s, self._num_batches = 0.0, 0
        return taken


class EventPool:
    """Reusable events. For one thread.

    Args:
        api: Creates them.
        timing: True if they record times.
    """

    def __init__(self, api: CudaApi, *, timing: bool = False) -> None:
        self.api = api
        self._timing = timing
        self._free: list[Event] = []

    def record(self, stream: Stream | None = None) -> Event:
        """A free event, recorded in a stream (``None``: the current one)."""
        event = self._free.pop() if self._free else self.api.new_event(timing=self._timing)
        self.api.record(event, stream)
        return event

    def give_back(self, *events: Event) -> None:
        """Return events that are not in use any more."""
        self._free.extend(events)


class CudaTimer(StepTimer):
    """Measures steps by events of the compute stream, read once they are complete.

    A step may be started only when the one ``max_run_ahead`` before it is done, so that no
    more than that many are outstanding, in memory and in what a late error costs.

    Args:
        api: Creates the events.
        max_run_ahead: Steps that may be outstanding, at least 1.
        load: Receives samples of launch times; ``None``: none are taken.
    """

    def __init__(
        self,
        api: CudaApi,
        stream: Stream,
        max_run_ahead: int,
        load: LaunchLoad | None = None,
    ) -> None:
        self._api = api
        self._events = EventPool(api, timing=True)
        self._stream = stream
        self._max_run_ahead = max_run_ahead
        self._marks: list[Event] = []  # pairs (begin, end) in the open step
        self._running: deque[CudaStepTime] = deque()
        self._meter = None if load is None else LaunchMeter(load)
        self._is_sampled = False
        self._total_s = 0.0
        self._num_batches = 0

    def start(self) -> None:
        """Begin a step. Blocks for the step ``max_run_ahead`` back, for no other work."""
        while len(self._running) >= self._max_run_ahead:
            self._finish_oldest()
        self._events.give_back(*self._marks)  # left by a step that never ended
        self._marks = []
        self._mark()
        if self._meter is not None:
            self._is_sampled = self._meter.start()

    def pause(self) -> None:
        """Pause: later work does not belong to the step."""
        self._mark()
        if self._is_sampled and self._meter is not None:
            self._meter.pause()

    def resume(self) -> None:
        if self._is_sampled and self._meter is not None:
            self._meter.resume()
        self._mark()

    def stop(self, num_batches: int) -> StepTime:
        """End the step, all of whose work has been issued."""
        launched = None
        if self._is_sampled and self._meter is not None:
            launched = self._meter.stop()
            self._is_sampled = False
        self._mark()
        step = CudaStepTime(self, self._marks, num_batches, launched)
        self._marks = []
        self._running.append(step)
        return step

    def take(self, *, wait: bool) -> tuple[float, int]:
        """Seconds and batches of the complete steps since the last call."""
        if wait and self._running:
            self._api.wait_host(self._running[-1].end)
        while self._running and (wait or self._api.is_complete(self._running[0].end)):
            self._finish_oldest()
        taken = self._total_s, self._num_batches
        self._total_s, self._num_batches = 0.0, 0
        return taken

    def finish(self, step: CudaStepTime) -> None:
        """Measure all steps up to this one; blocks for it."""
        while step in self._running:
            self._finish_oldest()

    def _mark(self) -> None:
        self._marks.append(self._events.record(self._stream))

    def _finish_oldest(self) -> None:
        step = self._running.popleft()
        if not self._api.is_complete(step.end):
            self._api.wait_host(step.end)
        pairs = zip(step.marks[::2], step.marks[1::2], strict=True)
        step.measured = sum(self._api.elapsed_s(begin, end) for begin, end in pairs)
        self._events.give_back(*step.marks)
        step.marks = []
        if self._meter is not None and step.launched is not None:
            self._meter.add(step.launched, step.measured)
        self._total_s += step.measured
        self._num_batches += step.num_batches


class CudaStepTime(StepTime):
    """The time of a step that may still be on the device.

    Attributes:
        marks: Its events, until it is measured.
        measured: Its seconds, once it is measured.
        launched: Wall and CPU seconds of the host, of a step that was sampled.
    """

    def __init__(
        self,
        timer: CudaTimer,
        marks: list[Event],
        num_batches: int,
        launched: tuple[float, float] | None = None,
    ) -> None:
        self.launched = launched
        self._timer = timer
        self.marks = marks
        self.num_batches = num_batches
        self.measured: float | None = None

    @property
    def end(self) -> Event:
        return self.marks[-1]

    @property
    def seconds(self) -> float:
        """Seconds of the step; blocks until it is complete. In the worker's thread alone."""
        if self.measured is None:
            self._timer.finish(self)
        assert self.measured is not None, "a step that was stopped gets measured"
        return self.measured
