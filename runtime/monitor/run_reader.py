"""RunReader: reads a run's counters, epochs and events at intervals."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from coordinator.metrics import OPTIONAL_METRICS, EpochMetrics
from coordinator.run_state import Statistics
from runtime.device.memory import MEMORY
from runtime.monitor.event_buffer import EventBuffer
from runtime.monitor.feed import Json
from runtime.monitor.run_view import RunEnd, RunView
from runtime.timeline.buffers import Row
from runtime.timeline.events import Cause
from runtime.timeline.recent_progress import RecentProgress
from runtime.timeline.resources import ResourcePoller
from runtime.timeline.summary import TimelineSummary
from runtime.timeline.text import error_text, one_line
from runtime.timeline.timeline import Timeline

NUM_POINTS = 120
MAX_SCALARS = 64
"""Scalars shown of an epoch."""


class RunReader:
    """Reads one run. Used by one thread; the run never waits for it.

    A reading takes the coordinator's counters, under its lock for some microseconds, and those of
    the timeline without a lock, if the run has one. The first reading includes the past.

    Args:
        poll_s: Seconds between readings.
    """

    def __init__(self, run: RunView, poll_s: float) -> None:
        self._run = run
        self._load = LoadReader(run, poll_s)
        self._events = EventBuffer(run)
        self._num_epochs = 0
        self._recent = RecentProgress(run.statistics, run.total_batches, run.facts.num_epochs)
        self._num_readings = 0
        self._losses = (0.0, 0.0)

    def facts(self) -> Json:
        """Constant facts of the run."""
        return {
            **asdict(self._run.facts),
            "total_batches": self._run.total_batches,
            "causes": [cause.label for cause in Cause],
            "recorded": self._run.timeline is not None,
            "begun": time.time() - (time.monotonic() - self._run.started),
        }

    def read(self) -> MonitorSnapshot:
        """Read the run once."""
        run = self._run
        end = run.end()  # before the counters, which are final once the run has ended
        statistics = run.statistics()
        summary = None if run.timeline is None else run.timeline.summary()
        elapsed_s = (time.monotonic() if end is None else end.at) - run.started
        if summary is not None and summary.facts is not None:
            elapsed_s = summary.wall_s
        ticks = [] if self._num_readings or run.timeline is None else tick_history(run.timeline)
        ticks.append(self._tick(statistics, summary, elapsed_s))
        self._num_readings += 1
        epochs = list(run.epochs(self._num_epochs))
        self._num_epochs += len(epochs)
        return MonitorSnapshot(
            now=self._now(statistics, summary, end, elapsed_s),
            ticks=ticks,
            epochs=[_epoch(metrics) for metrics in epochs],
            events=self._events.since_last(statistics, epochs, end, elapsed_s),
            over=end is not None,
        )

    def close(self) -> None:
        """End the poller; no more readings."""
        self._load.close()

    def _now(
        self,
        statistics: Statistics,
        summary: TimelineSummary | None,
        end: RunEnd | None,
        elapsed_s: float,
    ) -> Json:
        error = None if end is None else end.error
        throughput = self._run.summary()
        total, step = self._run.total_batches, statistics.global_step
        return {
            "state": "running" if end is None else end.state,
            "error": None if error is None else error_text(error),
            "model": "" if summary is None else summary.model,
            "headline": throughput.headline,
            "advice": throughput.advice,
            "elapsed_s": round(elapsed_s, 3),
            "left_s": None if end is not None else self._recent.read().left_s,
            "step": step,
            "progress": min(1.0, step / total) if total else 0.0,
            "epoch": statistics.epoch,
            "num_epochs": self._num_epochs,
            "anchor": statistics.anchor,
            "num_averagings": statistics.num_averagings,
            "num_failed_rounds": statistics.num_failed_rounds,
            "backend": statistics.backend.name,
            "backend_reason": statistics.backend_reason,
            "divergence": None if statistics.divergence is None else _finite(statistics.divergence),
            "param_norm": None if statistics.param_norm is None else _finite(statistics.param_norm),
            "ranks": [_rank(rank, summary) for rank in statistics.ranks],
            "machines": _machines(statistics),
        }

    def _tick(
        self, statistics: Statistics, summary: TimelineSummary | None, elapsed_s: float
    ) -> Json:
        tick: Json = {
            "t": round(elapsed_s, 3),
            "anchor": statistics.anchor,
            "samples": [rank.num_samples for rank in statistics.ranks],
            "memory": [_device_memory(device) for device in self._run.devices],
            **self._load.read(),
        }
        if any(rank.piece for rank in statistics.ranks):
            tick["pieces"] = [rank.piece for rank in statistics.ranks]
        tick.update(self._running_loss(statistics))
        seconds = self._run.seconds()
        if summary is not None and summary.ranks:
            tick["samples"] = [rank.num_samples for rank in summary.ranks]
            seconds = [[rank.causes[cause.label] for cause in Cause] for rank in summary.ranks]
        tick["causes"] = [[round(value, 3) for value in rank] for rank in seconds]
        return tick

    def _running_loss(self, statistics: Statistics) -> Json:
        """Mean of the losses reported since the last reading, and its position in epochs."""
        before, after = self._losses, (statistics.loss_sum, statistics.loss_weight)
        total = self._run.total_batches
        if after[1] <= before[1] or not total:
            return {}
        self._losses = after
        epochs = self._run.facts.num_epochs * min(1.0, statistics.num_trained / total)
        loss = _finite((after[0] - before[0]) / (after[1] - before[1]))
        return {"loss": loss, "epochs": round(epochs, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSnapshot:
    """One reading of a run.

    Attributes:
        now: The present state of the run.
        ticks: New readings of the counters, in order.
        epochs: Epochs closed since the last reading.
        events: Events since the last reading.
        over: True if the run has ended and this is the last reading.
    """

    now: Json
    ticks: list[Json]
    epochs: list[Json]
    events: list[Json]
    over: bool


class LoadReader:
    """The latest reading of load and memory: the timeline's, or that of a separate poller.

    Args:
        poll_s: Seconds between readings of the separate poller.
    """

    def __init__(self, run: RunView, poll_s: float) -> None:
        self._timeline = run.timeline
        self._poller: ResourcePoller | None = None
        if run.timeline is None and run.end() is None:
            self._poller = ResourcePoller(poll_s, run.devices)
            self._poller.start()

    def read(self) -> dict[str, float]:
        """Values by short name: ``cpu`` (percent of one core) and ``rss`` (bytes) of the process,
        ``all`` (percent of all cores), load and memory of each GPU; empty before the first
        reading.
        """
        if self._timeline is not None:
            columns, rows = self._timeline.resources()
        elif self._poller is not None:
            columns, rows = self._poller.columns, self._poller.rows()
        else:
            return {}
        return short_names(columns, rows[-1][1:]) if rows else {}

    def close(self) -> None:
        """End the poller. Idempotent."""
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.stop()


_NAMES = {"process_cpu_percent": "cpu", "process_rss_bytes": "rss", "machine_cpu_percent": "all"}


def short_names(columns: tuple[str, ...], values: tuple[float, ...]) -> dict[str, float]:
    """A reading by short names, without NaN."""
    found = {}
    for column, value in zip(columns, values, strict=True):
        name = _NAMES.get(column) or (column if column.startswith("gpu") else None)
        if name is not None and value == value:
            found[name] = round(value, 1)
    return found


def tick_history(timeline: Timeline) -> list[Json]:
    """Ticks of the past, reconstructed from a timeline at equal intervals; without the present."""
    width_s, rates = timeline.throughput(NUM_POINTS)
    if len(rates) < 2:
        return []
    profiles = [timeline.profile(rank) for rank in range(len(rates[0]))]
    totals = [_cumulative(rows) for _, rows in profiles]
    anchors = timeline.anchor_curve()
    columns, readings = timeline.resources()
    samples = [0.0] * len(rates[0])
    ticks: list[Json] = []
    for index, row in enumerate(rates[:-1]):
        at = (index + 1) * width_s
        samples = [total + rate * width_s for total, rate in zip(samples, row, strict=True)]
        tick: Json = {
            "t": round(at, 3),
            "samples": [round(total) for total in samples],
            "causes": [
                _sums_after(rows, at / bin_s)
                for (bin_s, _), rows in zip(profiles, totals, strict=True)
            ],
        }
        if (anchor := _last_before(anchors, at)) is not None:
            tick["anchor"] = int(anchor[1])
        if (reading := _last_before(readings, at)) is not None:
            tick.update(short_names(columns, reading[1:]))
        ticks.append(tick)
    return ticks


def _cumulative(rows: Sequence[Row]) -> list[Row]:
    sums: list[Row] = []
    for row in rows:
        sums.append(tuple(a + b for a, b in zip(sums[-1], row, strict=True)) if sums else row)
    return sums


def _sums_after(sums: Sequence[Row], bins: float) -> list[float]:
    """The sums after this number of bins, rounded to whole ones."""
    index = min(len(sums), max(1, round(bins))) - 1
    return [round(value, 3) for value in sums[index]]


def _last_before(rows: Sequence[Row], at: float) -> Row | None:
    """The last row at or before a time."""
    index = bisect_right(rows, at, key=lambda row: row[0])
    return rows[index - 1] if index else None


def _machines(statistics: Statistics) -> list[Json]:
    """The machines of the last round, with the samples contributed and the batches granted."""
    last = statistics.machine_round
    if last is None:
        return []
    parts = zip(last.machines, last.num_samples, last.num_granted, strict=True)
    return [
        {"machine": one_line(name), "num_samples": samples, "num_granted": granted}
        for name, samples, granted in parts
    ]


def _rank(rank: Any, summary: TimelineSummary | None) -> Json:
    found = {
        "rank": rank.rank,
        "device": rank.device,
        "alive": rank.alive,
        "share": rank.share,
        "piece": rank.piece,
        "throughput": _finite(rank.throughput),
        "num_batches": rank.num_batches,
        "num_samples": rank.num_samples,
        "num_throttles": rank.num_throttles,
        "sync_s": round(rank.sync_s, 3),
    }
    if summary is not None and summary.ranks:
        found["idle_share"] = summary.ranks[rank.rank].idle_share
    return found


def _epoch(metrics: EpochMetrics) -> Json:
    scalars = list(metrics.scalars.copy().items())[:MAX_SCALARS]
    norms = ((name, getattr(metrics, name)) for name in OPTIONAL_METRICS)
    scalars += [(name, value) for name, value in norms if math.isfinite(value)]
    return {
        "epoch": metrics.epoch,
        "loss": _finite(metrics.avg_loss),
        "epoch_s": round(metrics.epoch_s, 3),
        "num_samples": metrics.num_samples,
        # Pairs: a scalar's name could be a property of JavaScript objects.
        "scalars": [[one_line(name), _finite(value)] for name, value in scalars],
    }


def _finite(value: float) -> float | None:
    """The value as JSON, which has no non-finite numbers."""
    number = float(value)
    return number if math.isfinite(number) else None


def _device_memory(device: torch.device) -> int | None:
    """Bytes that PyTorch holds on a GPU, for all ranks on it together; ``None`` on the CPU."""
    if device.type != "cuda":
        return None
    return MEMORY.reserved_bytes(device)
