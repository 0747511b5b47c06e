"""The memory of CUDA devices: what there is, what is used, and a cap on what may be.

Like :mod:`runtime.device.cuda_api` a place that a stand-in can take; importing it touches no
device.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory of a device at one moment.

    Attributes:
        total_bytes: All there is.
        free_bytes: What no process has taken.
        reserved_bytes: What this process's allocator has taken.
        active_bytes: The part of it that is in use.
        peak_bytes: The highest ``active_bytes`` so far.
    """

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    active_bytes: int
    peak_bytes: int


MARGIN_FRACTION = 0.05
MIN_MARGIN_BYTES = 64 * 2**20


def capacity_bytes(reading: MemoryReading, fraction: float) -> int:
    """What this process may reserve on the device, what it has reserved included."""
    reachable = reading.free_bytes + reading.reserved_bytes
    return min(int(reading.total_bytes * fraction), reachable)


def margin_bytes(capacity: int) -> int:
    """What is left over for fragments and rounding of the allocator."""
    return max(MIN_MARGIN_BYTES, int(capacity * MARGIN_FRACTION))


# glibc gives large blocks back to the system at every free, and every training step then
# pays the page faults again. Raising two thresholds keeps the blocks; on other C libraries
# nothing is done. The setting acts on the whole process and cannot be undone, but what was
# kept is given back when no run is left: each run has new threads, whose memory would else
# pile up.

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MMAP_BYTES = 32 * 2**20  # the largest value that glibc accepts
_TRIM_BYTES = 2**31 - 1
_lock = threading.Lock()
_done = False
_num_users = 0


def tune() -> bool:
    """Raise glibc's thresholds, once a process.

    Values that the user has set through the environment stay.

    Returns:
        Whether the process runs with the thresholds raised by this function.
    """
    global _done
    with _lock:
        if _done:
            return True
        if platform.libc_ver()[0] != "glibc":
            return False
        settings = (
            ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _MMAP_BYTES),
            ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _TRIM_BYTES),
        )
        try:
            libc = ctypes.CDLL(None)
            for variable, parameter, value in settings:
                if variable not in os.environ and libc.mallopt(parameter, value) != 1:
                    logger.debug("mallopt(%d, %d) was refused", parameter, value)
        except (OSError, AttributeError) as error:
            logger.debug("the allocator cannot be tuned: %s", error)
            return False
        _done = True
        return True


def acquire() -> None:
    """A run starts that wants freed memory kept."""
    global _num_users
    tune()
    with _lock:
        _num_users += 1


def release() -> None:
    """Such a run has ended; after the last of them, freed memory goes back to the system."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users or not _done:
            return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError) as error:
        logger.debug("freed memory could not be given back: %s", error)


class CudaMemory:
    """Every question about CUDA memory; stateless and thread-safe. None waits for a device."""

    def read(self, device: torch.device) -> MemoryReading:
        """The memory of a device now, as this process's caching allocator counts it."""
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        return MemoryReading(
            total_bytes=total,
            free_bytes=free,
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            active_bytes=stats.get("active_bytes.all.current", 0),
            peak_bytes=stats.get("active_bytes.all.peak", 0),
        )

    def reserved_bytes(self, device: torch.device) -> int:
        """What this process's caching allocator holds of a device now."""
        return int(torch.cuda.memory_reserved(device))

    def total_bytes(self, device: torch.device) -> int:
        """All memory of a device, without a look at what is used."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def reset_peak(self, device: torch.device) -> None:
        """Let peaks count from here on, for the whole process."""
        torch.cuda.reset_peak_memory_stats(device)

    def fraction(self, device: torch.device) -> float:
        """The part of the memory that the allocator may reserve."""
        with torch.cuda.device(device):  # PyTorch may leave it current
            return float(torch.cuda.get_per_process_memory_fraction(device))

    def set_fraction(self, device: torch.device, fraction: float) -> None:
        """Cap what the allocator may reserve from here on; what it has, it keeps."""
        with torch.cuda.device(device):  # PyTorch leaves it current
            torch.cuda.set_per_process_memory_fraction(fraction, device)


MEMORY = CudaMemory()
"""What is used where no other is passed."""


class MemoryCaps:
    """Caps the allocator's memory on each device while runs use it. Thread-safe.

    The cap is of the process: of several runs on a device the smallest fraction holds, and
    what was set before the first of them comes back after the last.
    """

    def __init__(self, memory: CudaMemory | None = None) -> None:
        self._memory = MEMORY if memory is None else memory
        self._lock = threading.Lock()
        self._before: dict[torch.device, float] = {}
        self._wanted: dict[torch.device, list[float]] = {}

    def acquire(self, device: torch.device, fraction: float) -> None:
        """A run starts that may reserve ``fraction`` of the device's memory."""
        with self._lock:
            wanted = self._wanted.setdefault(device, [])
            if not wanted:
                self._before[device] = self._memory.fraction(device)
            wanted.append(fraction)
            self._apply(device)

    def release(self, device: torch.device, fraction: float) -> None:
        """Such a run has ended."""
        with self._lock:
            self._wanted[device].remove(fraction)
            self._apply(device)

    def _apply(self, device: torch.device) -> None:
        wanted, before = self._wanted[device], self._before[device]
        self._memory.set_fraction(device, min([*wanted, before]))


CAPS = MemoryCaps()
"""Those of the process."""


_NUM_LOOKS = 3
"""Steps of a new largest size that are looked at: the first ones allocate what stays."""
_LOOK_STEPS = 64
"""Steps between two looks from there on: others may take memory of the device."""
_MOST_GROWTH = 2
"""A size is at most so many times the largest one that was measured."""


class StepMemory:
    """How many samples the steps of a worker may have, by the peaks of its CUDA device.

    The peak of a step is ``a + b n`` for ``n`` samples in its largest micro-batch. Peaks of the
    two largest sizes give both numbers; before there are two, all that the step adds to what is
    held between steps is taken to grow with the samples, which is too much. The budget is what
    the allocator may reserve, less a margin and what graphs keep. Not thread-safe.

    Args:
        memory: Tells of the device.
        device: The device.
        num_workers: Tells how many workers of the process are on it now: each may add an equal
            part of what is left.

    Attributes:
        most: Samples in a micro-batch at most; ``None``: nothing was measured yet.
    """

    def __init__(
        self, memory: CudaMemory, device: torch.device, num_workers: Callable[[], int]
    ) -> None:
        self._memory = memory
        self._device = device
        self._num_workers = num_workers
        self._graph_bytes = 0
        self._largest = self._num_seen = self._num_steps = 0
        self._peak = self._step = 0
        self._before: tuple[int, int] | None = None
        self.most: int | None = None

    def stepped(self, num_samples: int) -> None:
        """A step was given to the device; looks at its memory now and then, never waits.

        Args:
            num_samples: In its largest micro-batch.
        """
        self._num_steps += 1
        if num_samples > self._largest:
            self._before = (self._largest, self._peak) if self._num_seen >= _NUM_LOOKS else None
            self._largest, self._num_seen = num_samples, 0
        if num_samples == self._largest and self._num_seen < _NUM_LOOKS:
            self._num_seen += 1
        elif self._num_steps < _LOOK_STEPS:
            return
        self._num_steps = 0
        reading = self._memory.read(self._device)
        self._peak = reading.peak_bytes
        self._step = reading.peak_bytes - reading.active_bytes
        room = self._budget(reading) - self._graph_bytes - self._peak
        extra = room / max(1, self._num_workers()) // max(1.0, self._sample_bytes())
        self.most = max(1, min(self._largest + int(extra), _MOST_GROWTH * self._largest))

    def has_room_for_graph(self, num_samples: int) -> bool:
        """Whether another graph of such steps, with memory of its own, fits into the budget."""
        if self._largest == 0:
            return True
        reading = self._memory.read(self._device)
        wanted = self._step + (num_samples - self._largest) * self._sample_bytes()
        return wanted <= self._budget(reading) - reading.reserved_bytes

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around a capture: what is reserved in it stays with the graph."""
        before = self._memory.reserved_bytes(self._device)
        try:
            yield
        finally:
            self._graph_bytes += max(0, self._memory.reserved_bytes(self._device) - before)

    def _budget(self, reading: MemoryReading) -> int:
        capacity = capacity_bytes(reading, self._memory.fraction(self._device))
        return capacity - margin_bytes(capacity)

    def _sample_bytes(self) -> float:
        if self._before is not None and self._peak > self._before[1]:
            return (self._peak - self._before[1]) / (self._largest - self._before[0])
        return self._step / self._largest


_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no memory for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def explain_out_of_memory(
    error: BaseException, device: torch.device, fraction: float, total_bytes: int
) -> BaseException:
    """An out-of-memory of a CUDA device with the budget that it broke; any other as it is.

    Returns:
        An error to raise or report; the original one stands in ``__cause__``.
    """
    if not isinstance(error, torch.OutOfMemoryError) or device.type != "cuda":
        return error
    budget = total_bytes * fraction
    explained = torch.OutOfMemoryError(
        f"{device} has no memory left in the budget of {budget / 2**30:.2f} GiB, which is "
        f"vram_fraction({fraction:g}) of its {total_bytes / 2**30:.2f} GiB, the model included, "
        "for all workers on it: use a smaller batch_size, precision('bf16') or a larger "
        f"vram_fraction. {error}"
    )
    explained.__cause__ = error
    return explained
