"""Memory of CUDA devices: readings, caps, and limits of step sizes.

As in :mod:`runtime.device.cuda_api`, a stand-in can replace the calls; importing the module
initialises no device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class CudaMemory:
    """Queries of CUDA memory; stateless and thread-safe. None waits for a device."""

    def read(self, device: torch.device) -> MemoryReading:
        """Memory of a device now, by this process's caching allocator."""
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
        """Memory that this process's caching allocator holds on a device now."""
        return int(torch.cuda.memory_reserved(device))

    def total_bytes(self, device: torch.device) -> int:
        """Memory of a device, from its properties alone."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def reset_peak(self, device: torch.device) -> None:
        """Restart peaks from the current use, for the whole process."""
        torch.cuda.reset_peak_memory_stats(device)

    def fraction(self, device: torch.device) -> float:
        """Fraction of the memory that the allocator may reserve."""
        with torch.cuda.device(device):  # PyTorch may leave it current
            return float(torch.cuda.get_per_process_memory_fraction(device))

    def set_fraction(self, device: torch.device, fraction: float) -> None:
        """Cap what the allocator may reserve from now on; it keeps what it has."""
        with torch.cuda.device(device):  # PyTorch leaves it current
            torch.cuda.set_per_process_memory_fraction(fraction, device)


MEMORY = CudaMemory()
"""The default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory of a device at one moment.

    Attributes:
        total_bytes: Memory of the device.
        free_bytes: Memory that no process has allocated.
        reserved_bytes: Memory that this process's allocator holds.
        active_bytes: The part of ``reserved_bytes`` in use.
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
    """Memory that this process may reserve on the device, including what it has reserved."""
    reachable = reading.free_bytes + reading.reserved_bytes
    return min(int(reading.total_bytes * fraction), reachable)


def margin_bytes(capacity: int) -> int:
    """Memory set aside for fragments and rounding of the allocator."""
    return max(MIN_MARGIN_BYTES, int(capacity * MARGIN_FRACTION))


class MemoryCaps:
    """Caps the allocator's memory on each device while runs use it. Thread-safe.

    The cap is of the process: of several runs on a device the smallest fraction applies, and
    the cap of before the first of them is restored after the last.
    """

    def __init__(self, memory: CudaMemory | None = None) -> None:
        self._memory = MEMORY if memory is None else memory
        self._lock = threading.Lock()
        self._before: dict[torch.device, float] = {}
        self._wanted: dict[torch.device, list[float]] = {}

    def acquire(self, device: torch.device, fraction: float) -> None:
        """Register a run that may reserve ``fraction`` of the device's memory."""
        with self._lock:
            wanted = self._wanted.setdefault(device, [])
            if not wanted:
                self._before[device] = self._memory.fraction(device)
            wanted.append(fraction)
            self._apply(device)

    def release(self, device: torch.device, fraction: float) -> None:
        with self._lock:
            self._wanted[device].remove(fraction)
            self._apply(device)

    def _apply(self, device: torch.device) -> None:
        wanted, before = self._wanted[device], self._before[device]
        self._memory.set_fraction(device, min([*wanted, before]))


CAPS = MemoryCaps()
"""The caps of the process."""


_NUM_READINGS = 3
"""Steps of a new largest size that are measured: the first ones allocate lasting memory."""
_READING_STEPS = 64
"""Steps between two later readings: others may allocate memory of the device."""
_MOST_GROWTH = 2
"""Limit of a size, as a multiple of the largest one measured."""


class StepMemory:
    """Limit of the samples in a worker's steps, by the peaks of its CUDA device.

    The peak of a step is ``a + b n`` for ``n`` samples in its largest micro-batch. Peaks of the
    two largest sizes give both numbers; before there are two, all memory that a step adds is
    assumed to grow with the samples, which is an upper bound. The budget is the memory that the
    allocator may reserve, less a margin and the memory of graphs. Not thread-safe.

    Args:
        memory: Queries of device memory.
        num_workers: Returns the number of the process's workers on the device now; each may add
            an equal part of the remaining memory.

    Attributes:
        most: Limit of samples in a micro-batch; ``None``: nothing is measured yet.
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
        """Count a step that was issued; reads the device's memory in some of them, never blocks.

        Args:
            num_samples: Samples in its largest micro-batch.
        """
        self._num_steps += 1
        if num_samples > self._largest:
            self._before = (self._largest, self._peak) if self._num_seen >= _NUM_READINGS else None
            self._largest, self._num_seen = num_samples, 0
        if num_samples == self._largest and self._num_seen < _NUM_READINGS:
            self._num_seen += 1
        elif self._num_steps < _READING_STEPS:
            return
        self._num_steps = 0
        reading = self._memory.read(self._device)
        self._peak = reading.peak_bytes
        self._step = reading.peak_bytes - reading.active_bytes
        room = self._budget(reading) - self._graph_bytes - self._peak
        extra = room / max(1, self._num_workers()) // max(1.0, self._sample_bytes())
        self.most = max(1, min(self._largest + int(extra), _MOST_GROWTH * self._largest))

    def has_room_for_graph(self, num_samples: int) -> bool:
        """True if another graph of such steps, with memory of its own, fits into the budget."""
        if self._largest == 0:
            return True
        reading = self._memory.read(self._device)
        wanted = self._step + (num_samples - self._largest) * self._sample_bytes()
        return wanted <= self._budget(reading) - reading.reserved_bytes

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context of a capture: memory reserved in it stays with the graph."""
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
    """True if a device, or the host, had no memory for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def explain_out_of_memory(
    error: BaseException, device: torch.device, fraction: float, total_bytes: int
) -> BaseException:
    """An out-of-memory error of a CUDA device with its budget; other errors as they are.

    Returns:
        An error to raise or report, with the original one as its ``__cause__``.
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
    for note in error.__dict__.pop("__notes__", ()):
        explained.add_note(note)
    return explained
