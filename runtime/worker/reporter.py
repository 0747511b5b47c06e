"""Reports of a worker to the coordinator."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable
from typing import Any

from coordinator import messages as m
from coordinator.metrics import ReportStats
from runtime.device.base import Device, PendingCopy
from runtime.device.metering import StepMeter, ValueLog
from runtime.replica.schedule import Schedule
from runtime.worker.protocol import WorkerProtocol


class Reporter:
    """Sends the worker's messages, and reports several steps at once to save wake-ups.

    Args:
        protocol: Has the counts, and determines when a report is due.
        interval_s: Longest time between two reports.
        meter: Counts the batches; ``None``: a new one.

    Attributes:
        epoch: The epoch of the next batches.
        meter: Counts the batches.
        schedule: The learning rate to report; ``None``: not reported.
        held: Messages that wait for pending copies, in order.
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

    def send(self, message: m.FromWorker, arrival: PendingCopy | None = None) -> None:
        """Send a message once the copy that it depends on has completed.

        Messages keep their order: the coordinator counts the reports before a snapshot as its
        content.

        Args:
            arrival: The pending copy; ``None``: send at once.
        """
        if arrival is None and not self.held:
            self._outbox.put(message)
        else:
            self.held.append((arrival, message))
            self.flush()

    def flush(self, *, wait: bool = False) -> None:
        """Send the held messages whose copies have completed.

        Args:
            wait: Block until all are sent.
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
        """Report if the protocol or the interval requires it."""
        if self._protocol.report_due or self._clock.now() - self._last >= self._interval_s:
            self.report_timing()

    def take_report(self, *, wait: bool = False) -> m.BatchReport | None:
        """Take a report of all training not reported yet, to send within a reply to a round.

        Both sides then have equal counts, and the coordinator wakes up once instead of twice.

        Args:
            wait: Wait for losses and times that are still on the device.
        """
        is_due = self._protocol.unreported or self.meter.num_skipped or wait
        return self._report(wait=wait) if is_due else None

    def report_rest(self) -> None:
        """Report all training not reported yet, if any, at the end of the worker."""
        if self._protocol.unreported or self.meter.num_skipped:
            self.send(self._report(wait=True))

    def report_timing(self) -> None:
        """Report the training since the last report."""
        self.send(self._report())

    def _report(self, *, wait: bool = False) -> m.BatchReport:
        stats = self._take(wait=wait)
        return m.BatchReport(rank=self._protocol.rank, epoch=self.epoch, stats=stats)

    def leave_epoch(self, epoch: int, dropped: Iterable[m.EpochPlan]) -> None:
        """Report that the worker has left an epoch.

        Args:
            dropped: Plans of it, or of earlier ones, that it has not begun.
        """
        stats, rank = self._take(wait=True), self._protocol.rank
        self.send(m.EpochReport(rank=rank, epoch=epoch, stats=stats, left=True))
        for plan in dropped:
            self.send(self._protocol.returned(plan))

    def report_epoch(
        self,
        epoch: int,
        norm: float | None = None,
        *,
        wait: bool = True,
        open_epoch: int | None = None,
    ) -> None:
        """Report a completed plan, with all training not reported yet.

        Args:
            norm: Norm of the parameters; ``None``: not reported.
            wait: Wait for the losses and times of its last steps, which may be the last report.
            open_epoch: See :class:`~coordinator.messages.EpochReport`.
        """
        stats, rank = self._take(wait=wait), self._protocol.rank
        self.send(
            m.EpochReport(rank=rank, epoch=epoch, stats=stats, norm=norm, open_epoch=open_epoch)
        )

    def _take(self, *, wait: bool) -> ReportStats:
        self._last = self._clock.now()
        self._protocol.on_reported()
        rate = None if self.schedule is None else self.schedule.host_lr
        return self.meter.take(wait=wait, learning_rate=rate)
