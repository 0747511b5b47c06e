"""Memory budget of batches loaded ahead, and the prefetch depth that follows from it."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from runtime.device.memory import MemoryReading, capacity_bytes, margin_bytes

# A CUDA device gives the process ``total * vram_fraction`` bytes, the model included, or what
# others have left. From that the worst peak of active memory is kept back, as seen in the
# first steps and since, and a margin for what the allocator cannot use. The rest is for
# batches, split between the workers on the device. Nothing is granted before a peak is known.

MAX_DEPTH = 8
"""Batches that are loaded ahead at most where the user names no depth."""

HOST_FRACTION = 0.25
"""Part of the host's available memory that batches loaded ahead may take, all workers together."""

_BLOCK_BYTES = 512  # the CUDA allocator rounds up to it


class DeviceBudget:
    """The budget of one CUDA device, shared by the workers on it. Thread-safe.

    What is held for batches is never given back while the run lasts, so a holding only
    grows. Peaks are of the whole device, whoever of its workers caused them.

    Args:
        fraction: Of the total memory; see ``vram_fraction``.
        num_workers: Workers on the device.
        margin: Bytes kept free; ``None``: :func:`margin_bytes`.
        graphs: Whether steps are captured: a graph keeps the memory of a step for itself,
            beside what the steps take that are made eagerly.
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

    @property
    def reserve_bytes(self) -> int | None:
        """The worst peak of all but the batches; ``None`` before the first steps."""
        with self._lock:
            return self._reserve_bytes

    def reserve(self, num_bytes: int) -> None:
        """Keep back what a worker will need that no step has shown, such as for averaging."""
        with self._lock:
            self._extra_bytes += num_bytes

    def begin(self) -> bool:
        """Whether this is the first call: peaks are to count from here on."""
        with self._lock:
            first, self._is_begun = not self._is_begun, True
            return first

    def observe(self, owner: Hashable, reading: MemoryReading) -> None:
        """Take the peak of ``owner``'s steps so far into account; no reserve gets smaller.

        Args:
            owner: The worker, between two steps.
            reading: Memory of the device now.
        """
        with self._lock:
            self._seen.add(owner)
            self._step_bytes = max(self._step_bytes, reading.peak_bytes - reading.active_bytes)
            if self._reserve_bytes is None or reading.peak_bytes > self._last_peak:
                # The peak came after the last look, while at least so much was held.
                seen = max(0, reading.peak_bytes - self._last_held)
                self._reserve_bytes = max(self._reserve_bytes or 0, seen)
                self._last_peak = reading.peak_bytes

    def hold(self, owner: Hashable, num_bytes: int, reading: MemoryReading) -> None:
        """Note that ``owner`` now holds ``num_bytes`` in all for batches.

        Args:
            owner: The worker, or what the workers share.
            num_bytes: What it holds.
            reading: Memory of the device behind the allocation; :meth:`observe` came before.
        """
        with self._lock:
            self._held[owner] = num_bytes
            self._last_held = sum(self._held.values())
            # A peak that the allocation itself has caused is none of the steps'.
            self._last_peak = max(self._last_peak, reading.peak_bytes)
            if self._reserve_bytes is not None:
                seen = reading.peak_bytes - self._last_held
                self._reserve_bytes = max(self._reserve_bytes, seen)

    def room_bytes(self, reading: MemoryReading) -> int:
        """What batches may take on the device, what they hold included."""
        with self._lock:
            return self._room(reading)

    def share_bytes(self, owner: Hashable, reading: MemoryReading) -> int:
        """What ``owner``'s batches may take, what it holds included."""
        with self._lock:
            room = self._room(reading)
            others = sum(size for key, size in self._held.items() if key != owner)
            return max(0, min(room // self.num_workers, room - others))

    def _room(self, reading: MemoryReading) -> int:
        if self._reserve_bytes is None:
            return 0
        capacity = capacity_bytes(reading, self.fraction)
        margin = margin_bytes(capacity) if self._margin is None else self._margin
        # Those that have not shown what a step takes will take as much as the others.
        coming = max(0, self.num_workers - len(self._seen)) * self._step_bytes
        coming += self._num_graphs * self._step_bytes
        return max(0, capacity - self._reserve_bytes - self._extra_bytes - coming - margin)


def prefetch_slots(share_bytes: int, slot_bytes: int, depth: int | None, plan_batches: int) -> int:
    """Slots for the batch in use and those loaded ahead of it; 0 where two do not fit.

    Args:
        share_bytes: What a worker's batches may take together.
        slot_bytes: Size of one batch.
        depth: Batches that the user wants ahead; ``None``: up to ``MAX_DEPTH``.
        plan_batches: Batches in the plan, more than which are never ahead.
    """
    wanted = min(MAX_DEPTH if depth is None else depth, plan_batches)
    slots = min(share_bytes // max(1, slot_bytes), wanted + 1)
    return slots if slots > 1 else 0


def host_prefetch_depth(
    available_bytes: int, num_workers: int, batch_bytes: int, plan_batches: int | None = None
) -> int:
    """Batches that one of ``num_workers`` may hold ahead in the host's memory, at least 1.

    Args:
        available_bytes: What the system can give without swapping.
        num_workers: Workers that load into this memory.
        batch_bytes: Size of one batch.
        plan_batches: Batches in the plan; ``None``: not to be looked at.
    """
    share = int(available_bytes * HOST_FRACTION) // max(1, num_workers)
    depth = min(MAX_DEPTH, share // max(1, batch_bytes))
    if plan_batches is not None:
        depth = min(depth, plan_batches)
    return max(1, depth)


def padded_bytes(num_bytes: int) -> int:
    """What the CUDA allocator takes for a tensor of ``num_bytes``."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
