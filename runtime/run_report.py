"""RunReport: what a run shows of itself, while it runs and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from coordinator.config import ApplyPolicy
from coordinator.machine import Coordinator
from coordinator.run_state import Statistics
from runtime.callbacks import EarlyStopping
from runtime.device.base import device_summary
from runtime.device.cuda import devices_differ
from runtime.monitor.run_view import RunEnd, RunView
from runtime.settings import RunConfig, RunSettings
from runtime.timeline.run_summary import Alternatives, RunSummary, summarize
from runtime.timeline.summary import RunFacts


class RunReport:
    """The facts, throughput and lost time of a run: summary, view for monitors, lines. Thread-safe.

    Args:
        statistics: Returns a snapshot of the coordinator's counters.
        seconds: Returns the seconds of each rank by cause; empty before the start.
    """

    def __init__(
        self,
        settings: RunSettings,
        config: RunConfig,
        devices: tuple[torch.device, ...],
        machine: Coordinator,
        statistics: Callable[[], Statistics],
        seconds: Callable[[], Sequence[Sequence[float]]],
    ) -> None:
        self._settings = settings
        self._config = config
        self._devices = devices
        self._machine = machine
        self.statistics = statistics
        self._seconds = seconds
        self._first_statistics = statistics()
        self._last: RunSummary | None = None

    @property
    def facts(self) -> RunFacts:
        """Static facts of the run, and the transport in use."""
        now = self.statistics()  # in which the two belong together
        return replace(
            self._config.facts, backend=now.backend.name, backend_reason=now.backend_reason
        )

    def summary(self) -> RunSummary:
        """The throughput of the run and its lost time by cause, so far or as a whole."""
        if self._last is not None:
            return self._last
        s = self._settings
        return summarize(
            self.facts,
            state="running",
            before=self._first_statistics,
            now=self.statistics(),
            seconds=self._seconds(),
            num_epochs=len(self._machine.outcome.metrics),
            alternatives=Alternatives(
                balance=s.advises_balance(self._devices),
                cadence=not (s.sync_batchnorm or s.all_gather or s.cluster),
                anchor=self._config.coordinator.anchor,
            ),
        )

    def end(self, state: str) -> None:
        """Keep the summary of the whole run, which has ended in this state."""
        self._last = replace(self.summary(), state=state)

    def view(self, started: float, end: Callable[[], RunEnd | None]) -> RunView:
        """The view of the run that a monitor reads.

        Args:
            started: Start of the run, by ``time.monotonic``.
            end: Returns the run's end; ``None`` while it runs.
        """
        machine = self._machine
        return RunView(
            facts=self.facts,
            devices=self._devices,
            total_batches=self._config.coordinator.planned_steps,
            started=started,
            timeline=self._settings.timeline,
            statistics=self.statistics,
            summary=self.summary,
            seconds=self._seconds,
            # The coordinator only appends to this list, except at a resume, which is complete
            # before any thread starts.
            epochs=lambda since: machine.outcome.metrics[since:],
            end=end,
        )

    def first_line(self) -> str:
        """Devices, policy, transport and the reason for it, batch, steps and learning rate."""
        c, facts = self._config.coordinator, self.facts
        devices, batch = device_summary(self._devices), facts.batch_line
        if len(self._devices) == 1:
            return f"{devices}; {batch}"
        alike = "unequal devices" if devices_differ(self._devices) else "equal devices"
        others = ", ".join(backend.name for backend in c.alternatives)
        tried = "" if c.policy is ApplyPolicy.SYNC or not others else f"; {others} is tried, too"
        return (
            f"{devices}; {alike}; policy {c.policy.name} over {facts.backend}; {batch}; "
            f"{facts.backend}: {facts.backend_reason}{tried}"
        )

    def last_lines(self) -> Iterator[str]:
        """An early end, the throughput and the lost time, and settings that would be faster."""
        outcome, summary = self._machine.outcome, self.summary()
        if outcome.stopped:
            by = "" if outcome.reason == "stopped" else f" ({outcome.reason})"
            for callback in self._settings.callbacks:
                if isinstance(callback, EarlyStopping) and callback.stopped_epoch is not None:
                    by = f" by EarlyStopping({callback.metric!r})"
            num, total = len(outcome.metrics), self._settings.num_epochs
            yield f"the run was stopped{by} after {num} of {total} epochs"
        yield from filter(None, (summary.headline, summary.advice))
