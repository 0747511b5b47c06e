"""What a worker tells the coordinator of its training, and when."""

from __future__ import annotations

import queue
from typing import Any

from coordinator import messages as m
from runtime.device import DeviceContext, StepMeter, ValueLog
from runtime.protocol import WorkerProtocol


class Reporter:
    """Batches several steps into one report, so that no wake-up is wasted.

    Args:
        protocol: Says when a report is due.
        outbox: The coordinator's inbox.
        clock: Tells the time.
        interval_s: A report is due at the latest after this long.

    Attributes:
        epoch: Epoch that the next batches belong to.
        meter: Counts them.
    """

    def __init__(
        self,
        protocol: WorkerProtocol,
        outbox: queue.SimpleQueue[Any],
        clock: DeviceContext,
        interval_s: float,
    ) -> None:
        self.epoch = 0
        self.meter = StepMeter(ValueLog())
        self._protocol = protocol
        self._outbox = outbox
        self._clock = clock
        self._interval_s = interval_s
        self._last = clock.now()

    def put(self, message: m.FromWorker) -> None:
        """Send a message."""
        self._outbox.put(message)

    def report_if_due(self) -> None:
        """Report if the protocol or the clock asks for it."""
        if self._protocol.report_due or self._clock.now() - self._last >= self._interval_s:
            self.report_timing()

    def take_report(self) -> m.BatchReport | None:
        """All that was trained and not told, to travel with a reply to a round.

        Both sides then count alike, and the coordinator wakes once, not twice.
        """
        untold = self._protocol.unreported or self.meter.num_skipped
        return self._report() if untold else None

    def report_timing(self) -> None:
        """Tell what was trained since the last report."""
        self.put(self._report())

    def _report(self) -> m.BatchReport:
        return m.BatchReport(rank=self._protocol.rank, epoch=self.epoch, tally=self._take())

    def report_epoch(self, epoch: int) -> None:
        """Tell that a plan is done, with what no report has told yet."""
        self.put(m.EpochReport(rank=self._protocol.rank, epoch=epoch, tally=self._take()))

    def _take(self) -> m.Tally:
        self._last = self._clock.now()
        self._protocol.reported()
        return self.meter.take()
