"""Memory budget of batches loaded ahead, and the prefetch depth that follows from it."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from runtime.device.memory import MemoryReading, capacity_bytes, margin_bytes

# The process may use ``total * vram_fraction`` bytes of a CUDA device, the model included, or as
# much as other processes leave free. Reserved are the peak of active memory measured so far and a
# margin for fragmentation. The rest is for batches, divided among the workers on the device.
# Before a peak is measured the budget is 0.

MAX_DEPTH = 8
"""Maximum number of batches loaded ahead, unless the user sets a depth."""

HOST_FRACTION = 0.25
"""Fraction of the host's available memory for batches loaded ahead by all workers."""

_BLOCK_BYTES = 512  # the CUDA allocator rounds sizes up to a multiple


class DeviceBudget:
    """Memory budget for batches on one CUDA device, shared by its workers. Thread-safe.

    Memory held for batches is not freed during the run. Peaks are those of the whole device.

    Args:
        fraction: Usable fraction of the total memory; see ``vram_fraction``.
        margin: Bytes kept free; ``None``: :func:`margin_bytes`.
        graphs: True if steps are captured: a graph's private pool holds the memory of a step, in
            addition to that of eager steps.
    """

    def __init__(
        self,
        fraction: float,
        num_workers: int = 1,
        margin: int | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        self.fraction = fraction
        self.num_workers = num_workers
        self._margin = margin
        self._num_graphs = num_workers if graphs else 0
        self._lock = threading.Lock()
        self._held: dict[Hashable, int] = {}
        self._extra_bytes = 0
        self._reserve_bytes: int | None = None
        self._step_bytes = 0
        self._seen: set[Hashable] = set()
        self._last_peak = 0
        self._last_held = 0
        self._is_begun = False

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory that the first steps do not use, such as for averaging."""
        with self._lock:
            self._extra_bytes += num_bytes

    def begin(self) -> bool:
        """True on the first call, after which the caller resets the peak statistics."""
        with self._lock:
            first, self._is_begun = not self._is_begun, True
            return first

    def observe(self, owner: Hashable, reading: MemoryReading) -> None:
        """Raise the reserve to the peak of ``owner``'s steps so far.

        Args:
            owner: The worker, between two steps.
            reading: Current memory statistics of the device.
        """
        with self._lock:
            self._seen.add(owner)
            self._step_bytes = max(self._step_bytes, reading.peak_bytes - reading.active_bytes)
            if self._reserve_bytes is None or reading.peak_bytes > self._last_peak:
                # The peak is new, so at least _last_held bytes of it were batches.
                seen = max(0, reading.peak_bytes - self._last_held)
                self._reserve_bytes = max(self._reserve_bytes or 0, seen)
                self._last_peak = reading.peak_bytes

    def hold(self, owner: Hashable, num_bytes: int, reading: MemoryReading) -> None:
        """Record that ``owner`` holds ``num_bytes`` in total for batches.

        Args:
            owner: A worker, or a key for memory that the workers share.
            num_bytes: Bytes held.
            reading: Memory statistics after the allocation; call :meth:`observe` before it.
        """
        with self._lock:
            self._held[owner] = num_bytes
            self._last_held = sum(self._held.values())
            # A peak caused by the allocation itself does not count as a step's.
            self._last_peak = max(self._last_peak, reading.peak_bytes)
            if self._reserve_bytes is not None:
                seen = reading.peak_bytes - self._last_held
                self._reserve_bytes = max(self._reserve_bytes, seen)

    def share_bytes(self, owner: Hashable, reading: MemoryReading) -> int:
        """Bytes available for ``owner``'s batches, including those held."""
        with self._lock:
            room = self._room(reading)
            others = sum(size for key, size in self._held.items() if key != owner)
            return max(0, min(room // self.num_workers, room - others))

    def _room(self, reading: MemoryReading) -> int:
        if self._reserve_bytes is None:
            return 0
        capacity = capacity_bytes(reading, self.fraction)
        margin = margin_bytes(capacity) if self._margin is None else self._margin
        # Workers that have not run a step yet will need as much as the others.
        unmeasured = max(0, self.num_workers - len(self._seen)) * self._step_bytes
        unmeasured += self._num_graphs * self._step_bytes
        return max(0, capacity - self._reserve_bytes - self._extra_bytes - unmeasured - margin)


def prefetch_slots(share_bytes: int, slot_bytes: int, depth: int | None, plan_batches: int) -> int:
    """Number of slots for the batch in use and those loaded ahead; 0 if two do not fit.

    Args:
        share_bytes: Memory for a worker's batches.
        depth: Batches ahead as set by the user; ``None``: up to ``MAX_DEPTH``.
        plan_batches: Batches in the plan, an upper limit.
    """
    ahead = min(MAX_DEPTH if depth is None else depth, plan_batches)
    slots = min(share_bytes // max(1, slot_bytes), ahead + 1)
    return slots if slots > 1 else 0


def host_prefetch_depth(
    available_bytes: int, num_workers: int, batch_bytes: int, plan_batches: int | None = None
) -> int:
    """Number of batches that one of ``num_workers`` may hold ahead in host memory, at least 1.

    Args:
        available_bytes: Host memory available without swapping.
        num_workers: Workers that load into this memory.
        plan_batches: Batches in the plan, an upper limit; ``None``: no such limit.
    """
    share = int(available_bytes * HOST_FRACTION) // max(1, num_workers)
    depth = min(MAX_DEPTH, share // max(1, batch_bytes))
    if plan_batches is not None:
        depth = min(depth, plan_batches)
    return max(1, depth)


def padded_bytes(num_bytes: int) -> int:
    """Memory that the CUDA allocator uses for a tensor of ``num_bytes``."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
