"""Detection of runs whose GPUs wait for Python: steps that are bound by launches under one GIL."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from runtime.core.capabilities import has_gil

logger = logging.getLogger(__name__)

SAMPLE_STEPS = 16
"""One step of so many is measured."""
SKIPPED_SAMPLES = 2
"""First samples of a worker, in which kernels are loaded and memory is allocated."""
WINDOW_SAMPLES = 16
"""Samples of each worker that are judged together; two windows in a row decide."""
MIN_LAUNCH_SHARE = 0.8
"""Launch time over device time from which on a step is bound by its launches."""
MIN_WAIT_SHARE = 0.25
"""Share of the launch time without CPU time from which on the interpreter lock is the cause."""


class LaunchLoad:
    """Launch times of the CUDA workers of one run. Thread-safe.

    Logs once, as a warning, if the workers are bound by launches and wait for the interpreter lock.
    A device that is the bound lets the host run ahead, so that launches take a small part of the
    step.

    Args:
        num_workers: CUDA workers of the process, at least 2.
        clocks: Wall time and CPU time of the calling thread, in seconds.
    """

    def __init__(
        self,
        num_workers: int,
        clocks: tuple[Callable[[], float], Callable[[], float]] = (
            time.perf_counter,
            time.thread_time,
        ),
    ) -> None:
        self.clocks = clocks
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._samples: list[LaunchSample] = []
        self._num_bound = 0
        self.is_decided = False

    @classmethod
    def of(cls, devices: Sequence[torch.device]) -> LaunchLoad | None:
        """The load of a run; ``None`` with fewer than two CUDA workers, or without a GIL."""
        num_workers = sum(device.type == "cuda" for device in devices)
        return cls(num_workers) if num_workers > 1 and has_gil() else None

    def add(self, sample: LaunchSample) -> None:
        """Count a step of any worker."""
        with self._lock:
            self._samples.append(sample)
            if self.is_decided or len(self._samples) < WINDOW_SAMPLES * self._num_workers:
                return
            launch_s, cpu_s, device_s = (sum(column) for column in zip(*self._samples, strict=True))
            num_samples = len(self._samples)
            self._samples.clear()
            wait_share = 1.0 - cpu_s / launch_s if launch_s > 0 else 0.0
            is_bound = launch_s >= MIN_LAUNCH_SHARE * device_s and wait_share >= MIN_WAIT_SHARE
            self._num_bound = self._num_bound + 1 if is_bound else 0
            if self._num_bound < 2:
                return
            self.is_decided = True
        logger.warning(
            "%d GPUs wait for one Python process: a step takes %.2g ms to launch, %.0f %% of that "
            "waiting for the interpreter lock, and the GPU %.2g ms. Use cuda_graphs(True), larger "
            "batches, a free-threaded build of Python, or a process for each device with cluster()",
            self._num_workers,
            1e3 * launch_s / num_samples,
            100 * wait_share,
            1e3 * device_s / num_samples,
        )


class LaunchSample(NamedTuple):
    """One step.

    Attributes:
        cpu_s: CPU time of the launching thread in it. The rest is spent without the interpreter
            lock: launches are asynchronous, and the driver spins where it waits.
        device_s: Time from its first event on the device to its last.
    """

    launch_s: float
    cpu_s: float
    device_s: float


class LaunchMeter:
    """Samples the steps of one worker for a :class:`LaunchLoad`. In the worker's thread.

    Args:
        load: Takes the samples.
    """

    def __init__(self, load: LaunchLoad) -> None:
        self._load = load
        self._wall, self._cpu = load.clocks
        self._num_steps = 0
        self._num_samples = 0
        self._begun: tuple[float, float] | None = None
        self._launch_s = self._cpu_s = 0.0

    def start(self) -> bool:
        """A step begins; true if it is sampled, and the other methods are to be called."""
        self._num_steps += 1
        if self._num_steps % SAMPLE_STEPS or self._load.is_decided:
            return False
        self._launch_s = self._cpu_s = 0.0
        self.resume()
        return True

    def pause(self) -> None:
        """The host does no work of the step from here on."""
        if self._begun is not None:
            wall, cpu = self._begun
            self._launch_s += self._wall() - wall
            self._cpu_s += self._cpu() - cpu
            self._begun = None

    def resume(self) -> None:
        """The host continues the step."""
        self._begun = self._wall(), self._cpu()

    def stop(self) -> tuple[float, float]:
        """The step has been launched; its launch time and CPU time, for :meth:`add`."""
        self.pause()
        return self._launch_s, self._cpu_s

    def add(self, launched: tuple[float, float], device_s: float) -> None:
        """Count a sampled step once its device time is known."""
        self._num_samples += 1
        if self._num_samples > SKIPPED_SAMPLES:
            self._load.add(LaunchSample(*launched, device_s))
