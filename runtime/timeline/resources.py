"""ResourcePoller: load and memory of the process, the machine and its GPUs, read by a thread."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import psutil
import torch

from runtime.timeline.buffers import NUM_POINTS, Decimated, Row
from runtime.timeline.nvml import NvmlGpus, open_gpus

THREAD_NAME = "timeline-poll"
STOP_S = 5.0
"""Longest time of a reading; only an unresponsive driver takes that long."""


class ResourcePoller:
    """Reads load and memory at intervals, in a daemon thread.

    Args:
        poll_s: Seconds between two readings.
        devices: The run's devices; their GPUs are read if NVML is available.
        read_gpus: Opens the GPUs; replaced in tests.

    Attributes:
        columns: Names of a reading's values after its time. CPU load of the process is in percent
            of one core, of the machine in percent of all cores.
    """

    def __init__(
        self,
        poll_s: float,
        devices: Sequence[torch.device],
        read_gpus: Callable[[Sequence[torch.device]], NvmlGpus | None] = open_gpus,
    ) -> None:
        self._poll_s = poll_s
        self._curve: Decimated[Row] = Decimated(NUM_POINTS)
        # A plain lock: waiting for an Event runs Python code at each reading.
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._gpus = read_gpus(devices)
        self.columns: tuple[str, ...] = RESOURCE_COLUMNS
        for index in range(0 if self._gpus is None else len(self._gpus)):
            self.columns += tuple(f"gpu{index}_{name}" for name in GPU_COLUMNS)

    def start(self) -> None:
        """Start the thread; on failure close the GPUs."""
        try:
            self._thread.start()
        except BaseException:
            self._close_gpus()
            raise

    def stop(self) -> None:
        """End the thread and wait for it, for one reading at most. Idempotent."""
        with contextlib.suppress(RuntimeError):  # already released, not acquired yet
            self._running.release()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.warning("%s did not end within %g s", THREAD_NAME, STOP_S)

    def rows(self) -> list[Row]:
        """The readings so far, each preceded by its time; from any thread."""
        return self._curve.read()

    def _run(self) -> None:
        try:
            load = HostLoad()
            while not self._running.acquire(timeout=self._poll_s):
                now = time.monotonic()
                self._curve.add((now, *load.read(now), *self._read_gpus()))
        except Exception:
            logger.warning("the machine's load is no longer recorded", exc_info=True)
        finally:
            self._close_gpus()

    def _read_gpus(self) -> list[float]:
        return [] if self._gpus is None else [n for pair in self._gpus.read() for n in pair]

    def _close_gpus(self) -> None:
        gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.close()


logger = logging.getLogger(__name__)

MEMORY_S, MACHINE_S = 0.5, 1.0
"""Shortest interval at which the process's memory and the machine's values are read: each takes a
third of a millisecond, for which all ranks in lockstep wait."""
RESOURCE_COLUMNS = (
    "process_cpu_percent",
    "process_rss_bytes",
    "machine_cpu_percent",
    "machine_used_bytes",
)
GPU_COLUMNS = ("percent", "used_bytes")


class HostLoad:
    """Load and memory of this process and of the machine. Created and used in one thread.

    Args:
        memory_s: Shortest interval of readings of the process's memory.
        machine_s: Shortest interval of readings of the machine's load and memory.
    """

    def __init__(self, memory_s: float = MEMORY_S, machine_s: float = MACHINE_S) -> None:
        self._memory_s, self._machine_s = memory_s, machine_s
        self._process = psutil.Process()
        self._rss = math.nan
        self._machine = (math.nan, math.nan)
        self._memory_due = self._machine_due = self._at = time.monotonic()
        self._cpu_s = time.process_time()
        psutil.cpu_percent()  # measured between calls

    def read(self, now: float) -> list[float]:
        """The values named by :data:`RESOURCE_COLUMNS` at this time, by ``time.monotonic``."""
        cpu_s = time.process_time()
        percent = 100.0 * (cpu_s - self._cpu_s) / (now - self._at) if now > self._at else math.nan
        self._cpu_s, self._at = cpu_s, now
        if now >= self._memory_due:
            self._memory_due = now + self._memory_s
            self._rss = float(self._process.memory_info().rss)
        if now >= self._machine_due:
            self._machine_due = now + self._machine_s
            self._machine = psutil.cpu_percent(), float(psutil.virtual_memory().used)
        return [percent, self._rss, *self._machine]
