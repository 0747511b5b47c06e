"""CoordinatorLane: rounds, epochs, anchor, throughput and failures of a run, for its timeline."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from coordinator import messages as m
from coordinator.machine import Coordinator
from coordinator.messages import (
    MAX_REPORT_INTERVAL_S,
    BackendChosen,
    Command,
    PublishEpoch,
    ReportStall,
    SaveCheckpoint,
    SaveFailed,
    Send,
)
from coordinator.metrics import EpochMetrics
from coordinator.rounds import Round, RoundState
from coordinator.run_state import RunState
from runtime.timeline.buffers import NUM_POINTS, Decimated, Ring, Row, TimeBins
from runtime.timeline.events import (
    ARGS,
    Event,
    Kind,
)
from runtime.timeline.text import error_text, one_line

logger = logging.getLogger(__name__)

MAX_EPOCHS = 4096
MAX_SCALARS = 64
"""Scalars kept of an epoch."""
EpochRecord = dict[str, Any]
"""A closed epoch: plain numbers by printable names."""
NUM_NAMED = 16
"""Machines of a round that are listed by name."""


class CoordinatorLane:
    """Rounds, epochs, anchor, throughput and failures of a run.

    :meth:`observe` is called by the coordinator's thread only, after each event; any thread may
    read. Keeps no tensor and no exception.

    Args:
        machine: The observed coordinator; only read, in its own thread. ``None`` for a custom
            loop, which calls :meth:`count`.
        start: Start of the run, by ``time.monotonic``.
        max_events: Events kept; the oldest are dropped.
        world_size: Number of ranks if there is no coordinator.

    Attributes:
        busy_s: Seconds that the coordinator spent on events.
        num_batches: Batches reported by each rank.
        num_samples: Samples reported by each rank.
        anchor_curve: ``(time, anchor)`` at each change.
        transport: Transport of averaging and its reason, if changed since the start; else
            ``None``.
        divergence: Largest divergence of a rank in the last round; ``None`` if not measured.
    """

    def __init__(
        self, machine: Coordinator | None, start: float, max_events: int, *, world_size: int = 1
    ) -> None:
        self._run: RunState | None = None
        if machine is not None:
            self._run, self._rounds = machine.run_state, machine.rounds
            world_size = machine.run_state.config.world_size
        self._start = start
        self._ring = Ring(max_events)
        self._epochs = Ring(MAX_EPOCHS)
        self.num_batches = [0] * world_size
        self.num_samples = [0] * world_size
        self.busy_s = 0.0
        self.num_averagings = 0
        self.num_failed_rounds = 0
        self.transport: tuple[str, str] | None = None
        self.divergence: float | None = None
        self.anchor = 0 if machine is None else machine.run_state.elche.anchor
        self.anchor_curve: Decimated[Row] = Decimated(NUM_POINTS)
        self.anchor_curve.add((start, float(self.anchor)))
        self._samples = TimeBins(start)
        self._round = (0, RoundState.NONE)
        self._round_start = self._phase_start = start

    # On the coordinator's thread.

    def observe(self, event: m.Event, commands: Sequence[Command], now: float) -> None:
        """Record an event that the coordinator has handled, and the resulting commands.

        An exception in here is logged once and ends the observation, not the run.
        """
        run = self._run
        if run is None:
            return
        try:
            self._observe(run, event, commands, now)
        except Exception:
            self._run = None
            logger.exception("the timeline failed to observe the coordinator, and stops")
        self.busy_s += time.monotonic() - now

    def release(self) -> None:
        self._run = None
        self.__dict__.pop("_rounds", None)

    def _observe(
        self, run: RunState, event: m.Event, commands: Sequence[Command], now: float
    ) -> None:
        # Frequent events are dispatched by class first: this thread competes with the workers for
        # the interpreter.
        if isinstance(event, (m.BatchReport, m.EpochReport)):
            self._count(event, now)
        elif isinstance(event, (m.SyncAck, m.ParamSnapshot, m.CapturedState, m.Halted)):
            if event.report is not None:
                self._count(event.report, now)
        else:
            self._record_event(event, now)
        for command in commands:
            if not isinstance(command, Send):
                self._record_command(command, now)
        done = event.done_at if isinstance(event, m.SyncAck) else None
        self.divergence = run.divergence
        self._follow_round(self._rounds.round, now if done is None else min(done, now))
        anchor = run.elche.anchor
        if anchor != self.anchor:
            self._record(Kind.ANCHOR, now, now, anchor, self.anchor)
            self.anchor_curve.add((now, float(anchor)))
            self.anchor = anchor
        self.num_averagings = run.num_averagings
        self.num_failed_rounds = run.num_failed_rounds

    def _record_event(self, event: m.Event, now: float) -> None:
        match event:
            case m.Averaged():
                start = now - event.compute_s
                self._record(Kind.PHASE, start, now, event.round, "computed")
            case m.TaskDone(task=m.Task(kind=m.TaskKind.EVALUATE, epoch=epoch)):
                self._record(Kind.EVALUATION, now, now, epoch)
            case m.TaskDone(task=m.Task(kind=m.TaskKind.HAND_OVER, epoch=epoch)):
                self._record(Kind.CHECKPOINT, now, now, epoch + 1)
            case m.SaveRequested() if not event.withdrawn:
                self._record(Kind.CHECKPOINT, now, now, None, "requested")
            case m.Failed():
                error = error_text(event.error)
                self._record(Kind.FAILURE, now, now, event.rank, event.epoch, event.step, error)
            case m.ClusterRoundDone() if event.round is not None:
                round_ = event.round
                shares = machine_shares(round_)
                self._record(Kind.MACHINES, now, now, round_.step, shares, round_.round_s)
            case m.StopRequested():
                self._record(Kind.STOP, now, now, "stop requested")
            case m.AbortRequested():
                self._record(Kind.STOP, now, now, "abort requested")
            case _:
                pass

    def _record_command(self, command: Command, now: float) -> None:
        match command:
            case PublishEpoch(metrics=metrics):
                self._close_epoch(metrics, now)
            case BackendChosen():
                self.transport = (command.backend.name, one_line(command.reason))
                self._record(
                    Kind.TRANSPORT,
                    now,
                    now,
                    command.backend.name,
                    command.before.name,
                    self.transport[1],
                )
            case ReportStall():
                self._record(Kind.STOP, now, now, "stalled")
            case SaveCheckpoint():
                part = "saved at the end" if command.final else "saved"
                self._record(Kind.CHECKPOINT, now, now, command.run.num_closed, part)
            case SaveFailed():
                self._record(
                    Kind.CHECKPOINT, now, now, None, f"failed: {error_text(command.error)}"
                )
            case _:
                pass

    def _count(self, report: m.BatchReport | m.EpochReport, now: float) -> None:
        self.count(report.rank, report.stats.num_batches, report.stats.num_samples, now)

    def count(self, rank: int, num_batches: int, num_samples: int, now: float) -> None:
        """Count batches and samples that a rank has trained."""
        if now >= self._samples.end:
            self._samples.close(now, self.num_samples)
        self.num_batches[rank] += num_batches
        self.num_samples[rank] += num_samples

    def _follow_round(self, rnd: Round, now: float) -> None:
        number, state = self._round
        if (rnd.id, rnd.state) == self._round:
            return
        if state is not RoundState.NONE:
            self._record(Kind.PHASE, self._phase_start, now, number, state.value)
            if rnd.id != number or rnd.state is RoundState.NONE:
                self._record(
                    Kind.AVERAGING, self._round_start, now, number, "round", self.divergence
                )
        if rnd.id != number:
            self._round_start = now
        self._phase_start = now
        self._round = (rnd.id, rnd.state)

    def _close_epoch(self, metrics: EpochMetrics, now: float) -> None:
        scalars = {
            one_line(name): float(value)
            for name, value in list(metrics.scalars.items())[:MAX_SCALARS]
        }
        self._epochs.add(
            (
                EpochRecord(
                    epoch=metrics.epoch,
                    end_s=now - self._start,
                    epoch_s=metrics.epoch_s,
                    avg_loss=metrics.avg_loss,
                    num_samples=metrics.num_samples,
                    num_averagings=metrics.num_averagings,
                    divergence=metrics.divergence,
                    param_norm=metrics.param_norm,
                    scalars=scalars,
                ),
            )
        )
        self._record(Kind.EPOCH, now, now, metrics.epoch)

    def _record(self, kind: Kind, start: float, end: float, *args: Any) -> None:
        self._ring.add((kind, start, end, args))

    # From any thread.

    def read(self, cursor: int = 0) -> tuple[list[Event], int]:
        """The events added since the last call, in order, and the next cursor; ``0`` at first."""
        items, after = self._ring.read(cursor)
        return [self._event(item) for item in items], after

    def epochs(self, since: int = 0) -> list[EpochRecord]:
        """The kept closed epochs, oldest first.

        Args:
            since: Number of closed epochs to skip.
        """
        return [item[1] for item in self._epochs.read(since)[0]]

    @property
    def num_epochs(self) -> int:
        return self._epochs.num_added

    def rates(self, end: float, num_points: int) -> tuple[float, list[Row]]:
        """Samples/s of each rank in intervals of equal width, up to ``end``.

        Args:
            end: End of the last interval.
            num_points: Maximum number of intervals.

        Returns:
            Width of an interval in seconds, and the rates in each.
        """
        width_s, rows = self._samples.read(end)
        now_s = end - self._start
        stride = max(1, math.ceil(now_s / width_s / max(1, num_points)))
        rows = [*rows[stride - 1 :: stride], tuple(float(n) for n in self.num_samples)]
        reach = math.ceil(MAX_REPORT_INTERVAL_S / (stride * width_s))
        rows = list(
            zip(*(spread(totals, reach) for totals in zip(*rows, strict=True)), strict=True)
        )
        before: Row = (0.0,) * len(self.num_samples)
        rates: list[Row] = []
        for index, row in enumerate(rows):
            start_s = index * stride * width_s
            lasted = max(width_s, min(stride * width_s, now_s - start_s))
            rates.append(tuple((b - a) / lasted for a, b in zip(before, row, strict=True)))
            before = row
        return stride * width_s, rates

    @property
    def num_dropped(self) -> int:
        return self._ring.num_dropped

    def _event(self, item: tuple[Any, ...]) -> Event:
        _, kind, started, ended, args = item
        found = dict(zip(ARGS.get(kind, ()), args, strict=False))
        return Event(
            kind=kind,
            rank=found.get("rank"),
            start_s=max(0.0, started - self._start),
            end_s=max(0.0, ended - self._start),
            args={name: value for name, value in found.items() if name != "rank"},
        )


def machine_shares(found: m.MachineRound) -> str:
    """The machines of a round and the samples that each contributed, as text."""
    pairs = zip(found.machines, found.num_samples, strict=True)
    listed = [f"{name} {samples}" for name, samples in pairs][:NUM_NAMED]
    left_out = len(found.machines) - len(listed)
    return ", ".join([*listed, *([f"{left_out} more"] if left_out else [])])


def spread(totals: Sequence[float], reach: int) -> list[float]:
    """Interpolate running totals that are reported in jumps.

    Args:
        totals: Totals at the ends of equal intervals.
        reach: Maximum number of intervals before a jump over which it is spread.
    """
    smooth, before, risen = list(totals), 0.0, -1
    for index, total in enumerate(totals):
        if total > before:
            start = max(risen, index - reach)
            for at in range(start + 1, index):
                smooth[at] = before + (total - before) * (at - start) / (index - start)
            before, risen = total, index
    return smooth
