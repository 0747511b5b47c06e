"""Mutual exclusion of CUDA graph captures, launches and other driver calls.

CUDA graph captures run one at a time in the process, never during a read of data. Exchanges
between ranks are launched one at a time, never during a call that may wait for a device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

CAPTURE_WAIT_S = 5.0
"""Limit of a capture's wait for data sets that are being read."""
READ_WAIT_S = 60.0
"""Limit of the wait for a capture."""
LAUNCH_WAIT_S = 5.0
"""Longest wait of a launch for calls to the driver, and of such calls for a launch."""


class CaptureGate:
    """Mutual exclusion of captures, reads of data sets, launches and driver calls; thread-safe.

    A capture in the mode ``thread_local`` permits allocations, waits for events and NCCL's
    watchdog in other threads (``cudaThreadExchangeStreamCaptureMode`` in CUDA's reference;
    pytorch#104555), so workers are not parked. It permits neither a second capture in the process
    (``torch/cuda/graphs.py``), nor synchronization of its device by another thread ("Prohibited
    and Unhandled Operations" in the CUDA C++ Programming Guide), nor, up to PyTorch 2.12, draws
    from its device's default generator (pytorch#172390), which data sets and other workers on
    the GPU may make.

    Every wait is bounded: if a thread is stuck in user code, others lose a graph, but the run
    continues.

    The kernel of an exchange occupies its device until the kernels of all peers run. A driver
    call that waits for that device, or holds a lock while it waits, can block a peer's launch
    forever (nccl#613). The ranks' own threads are parked while an exchange is launched; other
    threads make such calls inside :meth:`driver_call`. Both sides are short: a launch of all
    ranks, and one allocation or one batch of asynchronous copies.

    Args:
        capture_wait_s: Longest wait of a capture for data sets that are being read.
        read_wait_s: Longest wait of a reader, or of another capture, for a capture.
        launch_wait_s: Longest wait of a launch for driver calls, and of a driver call for a launch.
    """

    def __init__(
        self,
        capture_wait_s: float = CAPTURE_WAIT_S,
        read_wait_s: float = READ_WAIT_S,
        launch_wait_s: float = LAUNCH_WAIT_S,
    ) -> None:
        self._capture_wait_s = capture_wait_s
        self._read_wait_s = read_wait_s
        self._changed = threading.Condition()
        self._workers: dict[object, torch.device] = {}
        self._num_reading = 0
        self._is_taken = False
        self._launch_wait_s = launch_wait_s
        self._launches = threading.Condition()
        self._is_launching = False
        self._num_calls = 0
        self._in_call = threading.local()
        self._num_captures = 0  # in progress, or waiting for their turn
        self._captured_s = self._captured_since = 0.0

    @property
    def captured_s(self) -> float:
        """Seconds so far in which any thread of the process captured, or waited for its turn.

        Peers of such a thread leave the growth of this number out of their time limits.
        """
        if not self._num_captures:  # read at every meeting of ranks: no lock
            return self._captured_s
        with self._changed:
            return self._captured_s + self._current_s()

    def join(self, worker: object, device: torch.device) -> None:
        """Register a worker on a device; blocks while a capture is in progress."""
        with self._changed:
            self._await_capture()
            self._workers[worker] = device

    def leave(self, worker: object) -> None:
        """Unregister a worker that issues no more work. Idempotent; from any thread."""
        with self._changed:
            self._workers.pop(worker, None)

    def num_workers(self, device: torch.device) -> int:
        """Number of the process's workers on a device."""
        with self._changed:
            return list(self._workers.values()).count(device)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context of a read of a data set: no capture is in progress in it.

        Threads read at the same time.
        """
        with self._changed:
            self._await_capture()
            self._num_reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        """Context of a capture; yields true if it may be made now.

        Blocks while another thread captures and while data sets are read, for a while at most.
        """
        with self._changed:
            if not self._num_captures:
                self._captured_since = time.monotonic()
            self._num_captures += 1
        granted = False
        try:
            with self._changed:
                granted = self._take()
            yield granted
        finally:
            with self._changed:
                if granted:
                    self._give_back()
                self._captured_s += self._current_s() if self._num_captures == 1 else 0.0
                self._num_captures -= 1

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context of a launch on several devices; no :meth:`driver_call` is in progress in it.

        One launch at a time in the process. Blocks until calls in progress are over; a call that
        exceeds the limit is reported, and the launch is made beside it.
        """
        with self._launches:
            if not self._launches.wait_for(lambda: not self._is_launching, self._launch_wait_s):
                self._report("the launch of another exchange")
            self._is_launching = True  # from here on no call begins
            if not self._launches.wait_for(lambda: not self._num_calls, self._launch_wait_s):
                self._report("a call to the driver in another thread")
        try:
            yield
        finally:
            with self._launches:
                self._is_launching = False
                self._launches.notify_all()

    @contextmanager
    def driver_call(self) -> Iterator[None]:
        """Context of a call that may wait for a device, outside the launch of an exchange.

        Several threads hold it at the same time, and one thread several times. Never held while
        waiting for a peer.
        """
        if getattr(self._in_call, "is_inside", False):
            yield
            return
        with self._launches:
            if not self._launches.wait_for(lambda: not self._is_launching, self._launch_wait_s):
                self._report("the launch of an exchange")
            self._num_calls += 1
        self._in_call.is_inside = True
        try:
            yield
        finally:
            self._in_call.is_inside = False
            with self._launches:
                self._num_calls -= 1
                if not self._num_calls:
                    self._launches.notify_all()

    def _report(self, what: str) -> None:
        logger.warning("%s takes more than %g s: not waiting for it", what, self._launch_wait_s)

    # With the lock held:

    def _current_s(self) -> float:
        return time.monotonic() - self._captured_since if self._num_captures else 0.0

    def _take(self) -> bool:
        changed = self._changed
        if not changed.wait_for(lambda: not self._is_taken, self._read_wait_s):
            return False
        self._is_taken = True  # from here on no read begins
        if changed.wait_for(lambda: not self._num_reading, self._capture_wait_s):
            return True
        self._give_back()
        return False

    def _give_back(self) -> None:
        self._is_taken = False
        self._changed.notify_all()

    def _await_capture(self) -> None:
        if not self._changed.wait_for(lambda: not self._is_taken, self._read_wait_s):
            logger.warning("a capture takes more than %g s: going on beside it", self._read_wait_s)


GATE = CaptureGate()
"""The gate of the process."""
