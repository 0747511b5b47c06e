"""What the machine gives to the run, looked at by a thread of its own."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import psutil
import torch

logger = logging.getLogger(__name__)


Row = tuple[float, ...]
T = TypeVar("T")

NUM_BINS = 1024
NUM_POINTS = 4096
FIRST_WIDTH_S = 0.02


class Bins:
    """Running totals at equally spaced times.

    When all bins are used, each second total is dropped and the bins become twice as wide:
    between half of them and all of them are always in use. What happened in a span of
    time is the difference of two totals, so that nothing is lost. Written by one thread,
    read by any.

    Args:
        start: Time at which the first bin begins.
        num_bins: At most so many; even.
        width_s: Width of the first bins.

    Attributes:
        end: When the bin in progress is over.
    """

    __slots__ = ("_num_bins", "_rows", "_start", "_view", "_width_s", "end")

    def __init__(
        self, start: float, num_bins: int = NUM_BINS, width_s: float = FIRST_WIDTH_S
    ) -> None:
        self._start = start
        self._num_bins = num_bins
        self._width_s = width_s
        self._rows: list[Row] = []
        self._view = (width_s, self._rows)
        self.end = start + width_s

    def close(self, now: float, totals: Sequence[float], running: int | None = None) -> None:
        """Close all bins that ended up to now.

        Args:
            now: The time.
            totals: What the totals have come to.
            running: The one that has grown with the clock since before the bins ended; the
                others have not changed since then.
        """
        while self.end <= now:
            row = list(totals)
            if running is not None:
                row[running] -= now - self.end
            self._rows.append(tuple(row))
            if len(self._rows) == self._num_bins:
                # A new list: whoever reads the old one reads it with its own width.
                self._rows = self._rows[1::2]
                self._width_s *= 2
                self._view = (self._width_s, self._rows)
            # Multiplied, not added up: the ends stay exact however many there are.
            self.end = self._start + (len(self._rows) + 1) * self._width_s

    def read(self, end: float) -> tuple[float, list[Row]]:
        """Width of a bin in seconds, and the totals at the end of each, from any thread.

        Args:
            end: The bins come so wide that those allowed would reach at least up to here.
        """
        width_s, rows = self._view
        rows = list(rows)
        while end - self._start > self._num_bins * width_s:
            rows, width_s = rows[1::2], width_s * 2
        return width_s, rows


class Thinned(Generic[T]):
    """Items in order; once there are too many, only each second one stays.

    From then on each second one that comes is left out too, and so on; the last one is
    always there. Written by one thread, read by any.

    Args:
        max_items: At most so many, and the last; even.
    """

    __slots__ = ("_items", "_last", "_max_items", "_num_seen", "_stride")

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: list[T] = []
        self._last: T | None = None
        self._stride = 1
        self._num_seen = 0

    def add(self, item: T) -> None:
        """Add an item at the end."""
        self._last = item
        if self._num_seen % self._stride == 0:
            self._items.append(item)
            if len(self._items) >= self._max_items:
                self._items = self._items[::2]
                self._stride *= 2
        self._num_seen += 1

    def read(self) -> list[T]:
        """What is kept, oldest first, and the last item."""
        items = list(self._items)  # before the last one, which is never older
        last = self._last
        if last is not None and (not items or items[-1] is not last):
            items.append(last)
        return items


class Gpus:
    """Asks NVML for some of the GPUs of the machine. Used by one thread at a time.

    Args:
        handles: What NVML calls them.
        nvml: The module ``pynvml``, initialised.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> list[tuple[float, float]]:
        """Load in percent and used memory in bytes of each; NaN for what cannot be told."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: Any) -> tuple[float, float]:
        load = used = float("nan")
        try:
            used = float(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            # Not to be had for an instance of a GPU that is divided (MIG).
            load = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._nvml.NVMLError:
            pass
        return load, used

    def close(self) -> None:
        """Let go of NVML, which counts how often it was initialised."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            logger.debug("NVML could not be shut down", exc_info=True)


def open_gpus(devices: Sequence[torch.device]) -> Gpus | None:
    """The GPUs of a run, each once, in the order in which the run names them.

    Args:
        devices: Of the run; others than CUDA devices are passed over.

    Returns:
        ``None``: the run has none, or NVML is not to be had.
    """
    cuda = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if not cuda:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or no driver
        logger.debug("no GPU load in the timeline: %s", error)
        return None
    try:
        return Gpus(nvml, [_handle(nvml, device) for device in cuda])
    except Exception as error:
        logger.debug("no GPU load in the timeline: %s", error)
        nvml.nvmlShutdown()
        return None


def _handle(nvml: Any, device: torch.device) -> Any:
    # By UUID: NVML numbers all GPUs, the process those that CUDA_VISIBLE_DEVICES leaves it.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


THREAD_NAME = "timeline-poll"
MEMORY_S, MACHINE_S = 0.5, 1.0
"""The process's memory and the machine's numbers are read no more often: parsing each of them
takes a third of a millisecond, for which ranks that go in lockstep all wait."""
STOP_S = 5.0
"""How long a reading may take; only a driver that does not answer takes that long."""
COLUMNS = ("process_cpu_percent", "process_rss_bytes", "machine_cpu_percent", "machine_used_bytes")
GPU_COLUMNS = ("percent", "used_bytes")


class Load:
    """Load and memory of this process and of the machine. Made and used in one thread.

    Args:
        memory_s: Seconds between two readings of the process's memory.
        machine_s: Seconds between two readings of the machine's own numbers.
    """

    def __init__(self, memory_s: float = MEMORY_S, machine_s: float = MACHINE_S) -> None:
        self._memory_s, self._machine_s = memory_s, machine_s
        self._process = psutil.Process()
        self._rss = math.nan
        self._machine = (math.nan, math.nan)
        self._memory_due = self._machine_due = self._at = time.monotonic()
        self._cpu_s = time.process_time()
        psutil.cpu_percent()  # measured from one call to the next

    def read(self, now: float) -> list[float]:
        """What :data:`COLUMNS` names, at this time by ``time.monotonic``."""
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


class ResourcePoller:
    """Reads load and memory at intervals, in a daemon thread.

    Args:
        poll_s: Seconds between two readings.
        devices: Of the run: their GPUs are read where NVML can be had.
        read_gpus: Opens them; another one in tests.

    Attributes:
        columns: Names of the values of a reading, behind its time. CPU load of the process
            is in percent of one core, of the machine in percent of all.
    """

    def __init__(
        self,
        poll_s: float,
        devices: Sequence[torch.device],
        read_gpus: Callable[[Sequence[torch.device]], Gpus | None] = open_gpus,
    ) -> None:
        self._poll_s = poll_s
        self._curve: Thinned[Row] = Thinned(NUM_POINTS)
        # A plain lock: waiting for an Event is Python code, which each reading would pay for.
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._gpus = read_gpus(devices)
        self.columns: tuple[str, ...] = COLUMNS
        for index in range(0 if self._gpus is None else len(self._gpus)):
            self.columns += tuple(f"gpu{index}_{name}" for name in GPU_COLUMNS)

    def start(self) -> None:
        """Start the thread; on failure nothing is left."""
        try:
            self._thread.start()
        except BaseException:
            self._close_gpus()
            raise

    def stop(self) -> None:
        """End the thread and wait for it, which takes no longer than one reading. Idempotent."""
        with contextlib.suppress(RuntimeError):  # released before, and not taken yet
            self._running.release()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.warning("%s did not end within %g s", THREAD_NAME, STOP_S)

    def rows(self) -> list[Row]:
        """The readings so far, each behind its time; from any thread."""
        return self._curve.read()

    def _run(self) -> None:
        try:
            load = Load()
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
