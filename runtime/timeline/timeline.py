"""Timeline: records the time and events of a run."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from coordinator.machine import Coordinator
from runtime.core.checks import check_float, check_int
from runtime.timeline.buffers import Row
from runtime.timeline.coordinator_lane import CoordinatorLane, EpochRecord
from runtime.timeline.events import Cause, Event, IdleGap, Kind
from runtime.timeline.export import csv_text, html_text, json_text, trace_text
from runtime.timeline.rank_lane import RankLane
from runtime.timeline.resources import ResourcePoller
from runtime.timeline.summary import RankSummary, RunFacts, TimelineSummary, idle_seconds, share
from runtime.timeline.text import error_text, one_line, write_text

MIN_POLL_S = 0.001
MAX_POLL_S = 3600.0


class Timeline:
    """Records one run: attach it with ``.timeline(tl)`` before ``.run()``.

    For a custom loop, pass it as ``DdpConfig(timeline=tl)``. It then records forward, backward,
    reductions, steps and waits of each replica until the model is closed, and the coordinator's
    lane only counts.

    Each rank accounts its time by cause, without sampling. Events (epochs, chunks, steps,
    averagings, waits and so on) are kept in ring buffers, which drop the oldest and count them. A
    daemon thread reads the load of the process every ``poll_s`` seconds, its memory twice a
    second, and load and memory of the whole machine at most once a second. It ends with the run.

    Every method is callable from any thread, during the run and after its end. If the run fails or
    is stopped, everything recorded until then is kept.

    Args:
        poll_s: Seconds between readings of the machine's load, 0.001 to 3600.
        max_events: Events kept of each kind and rank (about 200 bytes each).
        min_gap_s: Gaps shorter than this, in seconds, are counted but are no events.
        step_interval_s: Shortest interval, in seconds, between steps of a rank that are events.

    Raises:
        TypeError, ValueError: A setting is not a number or out of range.
    """

    def __init__(
        self,
        poll_s: float = 0.1,
        *,
        max_events: int = 20_000,
        min_gap_s: float = 0.001,
        step_interval_s: float = 0.02,
    ) -> None:
        self.poll_s = check_float("Timeline: poll_s", poll_s, MIN_POLL_S, MAX_POLL_S)
        self.min_gap_s = check_float("Timeline: min_gap_s", min_gap_s, 0.0)
        self.step_interval_s = check_float("Timeline: step_interval_s", step_interval_s, 0.0)
        self.max_events = check_int("Timeline: max_events", max_events, 16)
        self._lock = threading.Lock()  # held by begin() and finish() only
        self._start = 0.0
        self._end: float | None = None
        self._state = "empty"
        self._error: str | None = None
        self._model = ""
        self._facts: RunFacts | None = None
        self._lanes: tuple[RankLane, ...] = ()
        self._open_lanes: tuple[RankLane, ...] = ()
        self._coordinator: CoordinatorLane | None = None
        self._poller: ResourcePoller | None = None

    # Called by the run.

    def require_unused(self) -> None:
        """Raise ``ValueError`` if this timeline has recorded a run."""
        if self._state != "empty":
            raise ValueError(
                "this Timeline has recorded a run already: pass a new Timeline() to each run"
            )

    def begin(
        self, facts: RunFacts, devices: Sequence[torch.device], machine: Coordinator | None
    ) -> CoordinatorLane:
        """Begin recording a run; called once, before its threads start.

        Args:
            facts: Facts known at the start.
            devices: The device of each rank.
            machine: The run's coordinator; ``None`` for a custom loop, which has none.

        Returns:
            The observer for the coordinator.

        Raises:
            ValueError: The timeline has recorded another run.
        """
        with self._lock:
            self.require_unused()
            self._start = time.monotonic()
            poller = ResourcePoller(self.poll_s, devices)
            poller.start()
            self._facts = facts
            self._coordinator = CoordinatorLane(
                machine, self._start, self.max_events, world_size=len(facts.devices)
            )
            self._lanes = tuple(
                RankLane(
                    rank,
                    self._start,
                    max_events=self.max_events,
                    min_gap_s=self.min_gap_s,
                    step_interval_s=self.step_interval_s,
                )
                for rank in range(len(facts.devices))
            )
            self._open_lanes = self._lanes
            self._poller = poller
            self._state = "running"
            return self._coordinator

    def lane(self, rank: int) -> RankLane:
        """The lane of a rank."""
        return self._open_lanes[rank]

    def count(self, rank: int, num_batches: int, num_samples: int) -> None:
        """Count batches of a rank in a loop without coordinator; by one thread at a time."""
        if self._coordinator is not None:
            self._coordinator.count(rank, num_batches, num_samples, time.monotonic())

    def count_averaging(self) -> None:
        """Count a gradient reduction in a loop without coordinator; by one thread at a time."""
        if self._coordinator is not None:
            self._coordinator.num_averagings += 1

    def built(self, model: object) -> None:
        """Record the model's class, which names the run."""
        self._model = one_line(type(model).__name__)

    def finish(self, *, stopped: bool, error: BaseException | None) -> None:
        """End recording; called when the run's threads have ended. Idempotent."""
        with self._lock:
            if self._state != "running":
                return
            self._end = time.monotonic()
            self._state = "failed" if error is not None else "stopped" if stopped else "finished"
            if error is not None:
                self._error = error_text(error)
            # A stuck thread that resumes from now on writes to a lane that is no longer read.
            self._lanes = tuple(
                lane if lane.cause == Cause.GONE else copy.deepcopy(lane) for lane in self._lanes
            )
            poller, coordinator = self._poller, self._coordinator
        if coordinator is not None:
            coordinator.release()
        if poller is not None:
            poller.stop()

    def summary(self) -> TimelineSummary:
        """Summary of the run, up to now or as a whole."""
        coordinator, facts = self._coordinator, self._facts
        if coordinator is None or facts is None:
            return TimelineSummary(state=self._state)
        if coordinator.transport is not None:
            backend, reason = coordinator.transport
            facts = replace(facts, backend=backend, backend_reason=reason)
        return TimelineSummary(
            state=self._state,
            error=self._error,
            wall_s=self._elapsed(),
            model=self._model,
            facts=facts,
            ranks=tuple(self._rank_summary(lane, facts, coordinator) for lane in self._lanes),
            num_epochs=coordinator.num_epochs,
            num_averagings=coordinator.num_averagings,
            num_failed_rounds=coordinator.num_failed_rounds,
            anchor=coordinator.anchor,
            coordinator_busy_s=coordinator.busy_s,
            num_dropped=coordinator.num_dropped + sum(lane.num_dropped for lane in self._lanes),
        )

    def _rank_summary(
        self, lane: RankLane, facts: RunFacts, coordinator: CoordinatorLane
    ) -> RankSummary:
        seconds = lane.seconds(self._end)
        wall_s = sum(seconds)
        num_samples = coordinator.num_samples[lane.rank]
        return RankSummary(
            rank=lane.rank,
            device=facts.devices[lane.rank],
            wall_s=wall_s,
            causes={cause.label: seconds[cause] for cause in Cause},
            idle_share=share(idle_seconds(seconds), wall_s),
            num_steps=lane.num_steps,
            num_batches=coordinator.num_batches[lane.rank],
            num_samples=num_samples,
            throughput=share(num_samples, wall_s),
            num_throttles=lane.num_throttles,
            num_dropped=lane.num_dropped,
        )

    def idle_gaps(self, min_s: float = 0.0) -> list[IdleGap]:
        """Intervals in which a rank did not train, longest first.

        Includes those of ``min_gap_s`` or longer that the ring still has; the totals of
        :meth:`summary` include all.

        Args:
            min_s: Shortest duration, in seconds.
        """
        found = [gap for lane in self._lanes for gap in lane.gaps(self._start, self._end)]
        found = [gap for gap in found if gap.duration_s >= min_s]
        return sorted(found, key=lambda gap: (-gap.duration_s, gap.rank, gap.start_s))

    def events(self) -> list[Event]:
        """All kept events of the ranks and the coordinator, in order."""
        found, _ = self.read()
        if self._facts is not None:
            args = {"state": self._state, "policy": self._facts.policy}
            found.append(
                Event(kind=Kind.RUN, rank=None, start_s=0.0, end_s=self._elapsed(), args=args)
            )
        return sorted(found, key=lambda event: (event.start_s, -event.end_s))

    def read(
        self, cursor: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[list[Event], dict[str, tuple[int, ...]]]:
        """The events added since the last call, in the order of their ends.

        For following a run: takes no lock and wakes no thread. An event is added at its end.
        Events dropped between two calls are not reported.

        Args:
            cursor: From the last call; ``None`` at first.

        Returns:
            The events, and the cursor for the next call.
        """
        before = cursor or {}
        after: dict[str, tuple[int, ...]] = {}
        found: list[Event] = []
        for lane in self._lanes:
            rare, frequent = before.get(str(lane.rank), (0, 0))
            events, after[str(lane.rank)] = lane.read((rare, frequent), self._start)
            found += events
        if self._coordinator is not None:
            (start,) = before.get("coordinator", (0,))
            events, end = self._coordinator.read(start)
            after["coordinator"] = (end,)
            found += events
        return sorted(found, key=lambda event: event.end_s), after

    def epochs(self, since: int = 0) -> list[EpochRecord]:
        """The closed epochs, without the first ``since``."""
        return [] if self._coordinator is None else self._coordinator.epochs(since)

    def profile(self, rank: int) -> tuple[float, list[Row]]:
        """A rank's time by cause over the run.

        Returns:
            Width of a bin in seconds, and for each bin the seconds by cause, in the order of
            :class:`Cause`; at most 1,024 bins, the last of which may be shorter.
        """
        return self._lanes[rank].bins(self._start + self._elapsed())

    def anchor_curve(self) -> list[Row]:
        """``(seconds, anchor)`` at the start and at each change."""
        if self._coordinator is None:
            return []
        return [(t - self._start, n) for t, n in self._coordinator.anchor_curve.read()]

    def throughput(self, num_points: int = 60) -> tuple[float, list[Row]]:
        """Samples/s of each rank over the run, as reported to the coordinator.

        Args:
            num_points: Maximum number of intervals.

        Returns:
            Width of an interval in seconds, and the samples/s of each rank in each interval.
        """
        if self._coordinator is None:
            return 0.0, []
        return self._coordinator.rates(self._start + self._elapsed(), num_points)

    def resources(self) -> tuple[tuple[str, ...], list[Row]]:
        """Names of the measured values, and ``(seconds, *values)`` for each reading."""
        if self._poller is None:
            return (), []
        rows = [(row[0] - self._start, *row[1:]) for row in self._poller.rows()]
        return self._poller.columns, rows

    def _elapsed(self) -> float:
        if self._facts is None:
            return 0.0
        return (time.monotonic() if self._end is None else self._end) - self._start

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write all events in the Chrome trace-event format, for Perfetto."""
        write_text(path, trace_text(self))

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write everything as one JSON object; non-finite numbers become ``null``."""
        write_text(path, json_text(self))

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one CSV table with a row for each total, epoch, event, gap and reading."""
        write_text(path, csv_text(self))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page."""
        write_text(path, html_text(self))
