"""What a worker tells the coordinator of its training, and when."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

from coordinator import messages as m
from coordinator.metrics import ReportStats
from runtime.device.base import Device, PendingCopy
from runtime.device.metering import StepMeter, ValueLog
from runtime.replica.schedule import Schedule
from runtime.worker.protocol import WorkerProtocol


class Reporter:
    """Batches several steps into one report, so that no wake-up is wasted.

    Args:
        protocol: Says when a report is due.
        outbox: The coordinator's inbox.
        clock: Tells the time.
        interval_s: A report is due at the latest after this long.
        meter: Counts the batches; ``None``: a new one, which is told their time.

    Attributes:
        epoch: Epoch that the next batches belong to.
        meter: Counts them.
        schedule: The learning rate, which is told; ``None``: nobody has one.
        held: Messages that wait for copies, in order.
    """

    def __init__(
        self,
        protocol: WorkerProtocol,
        outbox: queue.SimpleQueue[Any],
        clock: Device,
        interval_s: float,
        meter: StepMeter | None = None,
    ) -> None:
        self.epoch = 0
        self.meter = meter or StepMeter(ValueLog())
        self.schedule: Schedule | None = None
        self._protocol = protocol
        self._outbox = outbox
        self._clock = clock
        self._interval_s = interval_s
        self._last = clock.now()
        self.held: deque[tuple[PendingCopy | None, m.FromWorker]] = deque()

    def put(self, message: m.FromWorker, arrival: PendingCopy | None = None) -> None:
        """Send a message, once the copies that it depends on have arrived.

        Messages never overtake each other: the coordinator takes what was told before a
        snapshot for what is in it.

        Args:
            message: What to send.
            arrival: When it may be sent; ``None``: at once.
        """
        if arrival is None and not self.held:
            self._outbox.put(message)
        else:
            self.held.append((arrival, message))
            self.flush()

    def flush(self, *, wait: bool = False) -> None:
        """Send what was held back and may be sent now.

        Args:
            wait: Block until everything may; the worker has nothing better to do.
        """
        while self.held:
            arrival, message = self.held[0]
            if arrival is not None:
                if wait:
                    arrival.wait()
                elif not arrival.done:
                    return
            self.held.popleft()
            self._outbox.put(message)

    def report_if_due(self) -> None:
        """Report if the protocol or the clock asks for it."""
        if self._protocol.report_due or self._clock.now() - self._last >= self._interval_s:
            self.report_timing()

    def take_report(self, *, wait: bool = False) -> m.BatchReport | None:
        """All that was trained and not told, to travel with a reply to a round.

        Both sides then count alike, and the coordinator wakes once, not twice.

        Args:
            wait: Also wait for losses and times that are still on the device.
        """
        untold = self._protocol.unreported or self.meter.num_skipped or wait
        return self._report(wait=wait) if untold else None

    def report_rest(self) -> None:
        """Tell what was trained and not told yet, if anything: nothing follows that could."""
        if self._protocol.unreported or self.meter.num_skipped:
            self.put(self._report(wait=True))

    def report_timing(self) -> None:
        """Tell what was trained since the last report."""
        self.put(self._report())

    def _report(self, *, wait: bool = False) -> m.BatchReport:
        stats = self._take(wait=wait)
        return m.BatchReport(rank=self._protocol.rank, epoch=self.epoch, stats=stats)

    def report_epoch(self, epoch: int, norm: float | None = None, *, wait: bool = True) -> None:
        """Tell that a plan is done, with what no report has told yet.

        Args:
            epoch: Its epoch.
            norm: Of the parameters, where it is told.
            wait: Wait for the losses and times of its last steps: nothing may follow that
                tells them.
        """
        stats = self._take(wait=wait)
        self.put(m.EpochReport(rank=self._protocol.rank, epoch=epoch, stats=stats, norm=norm))

    def _take(self, *, wait: bool) -> ReportStats:
        self._last = self._clock.now()
        self._protocol.reported()
        rate = None if self.schedule is None else self.schedule.host_lr
        return self.meter.take(wait=wait, learning_rate=rate)
