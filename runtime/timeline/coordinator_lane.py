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
from coordinator.state import Core
from coordinator.transports import Round, RoundState
from runtime.timeline.buffers import NUM_POINTS, Bins, Ring, Row, Thinned
from runtime.timeline.events import (
    ARGS,
    Event,
    Kind,
)
from runtime.timeline.text import error_text, one_line

logger = logging.getLogger(__name__)


MAX_EPOCHS = 4096
MAX_SCALARS = 64
"""Scalars that are kept of an epoch."""


EpochRecord = dict[str, Any]
"""What is kept of a closed epoch: plain numbers under harmless names."""


NUM_NAMED = 16
"""Machines of a round that are told by name."""


def machine_shares(found: m.MachineRound) -> str:
    """Who took part in a round between machines, and the samples that each brought into it."""
    pairs = zip(found.machines, found.num_samples, strict=True)
    told = [f"{name} {samples}" for name, samples in pairs][:NUM_NAMED]
    left_out = len(found.machines) - len(told)
    return ", ".join([*told, *([f"{left_out} more"] if left_out else [])])


class CoordinatorLane:
    """Rounds, epochs, anchor, throughput and failures of a run.

    :meth:`observe` is called by the coordinator's thread alone, after each event; any
    thread may read. It keeps no tensor and no exception.

    Args:
        machine: The machine that is observed; only read, in its own thread. ``None``: there
            is none, and whoever trains counts by :meth:`count`.
        start: When the run began, by ``time.monotonic``.
        max_events: Events that are kept; the oldest give way.
        world_size: Ranks, where no machine tells.

    Attributes:
        busy_s: Seconds that the coordinator spent on events.
        num_events: Events that it handled.
        num_batches: Batches that each rank has reported.
        num_samples: Samples in them.
        anchor_curve: ``(time, anchor)`` at each change.
        transport: What the averagings have come to go over, and why; ``None``: what they began
            with.
        divergence: The largest of a rank in the last round; ``None``: not measured.
    """

    def __init__(
        self, machine: Coordinator | None, start: float, max_events: int, *, world_size: int = 1
    ) -> None:
        self._core: Core | None = None
        if machine is not None:
            self._core, self._rounds = machine.core, machine.rounds
            world_size = machine.core.config.world_size
        self._start = start
        self._ring = Ring(max_events)
        self._epochs = Ring(MAX_EPOCHS)
        self.num_batches = [0] * world_size
        self.num_samples = [0] * world_size
        self.busy_s = 0.0
        self.num_events = 0
        self.num_averagings = 0
        self.num_failed_rounds = 0
        self.transport: tuple[str, str] | None = None
        self.divergence: float | None = None
        self.anchor = 0 if machine is None else machine.core.elche.anchor
        self.anchor_curve: Thinned[Row] = Thinned(NUM_POINTS)
        self.anchor_curve.add((start, float(self.anchor)))
        self._samples = Bins(start)
        self._round = (0, RoundState.NONE)
        self._round_start = self._phase_start = start

    # On the coordinator's thread.

    def observe(self, event: m.Event, commands: Sequence[Command], now: float) -> None:
        """Look at an event that the machine has handled, and at what it decided.

        A fault in here is logged once and ends the observation, not the run.
        """
        core = self._core
        if core is None:
            return
        try:
            self._look(core, event, commands, now)
        except Exception:
            self._core = None
            logger.exception("the timeline could not follow the coordinator, and gives it up")
        self.num_events += 1
        self.busy_s += time.monotonic() - now

    def let_go(self) -> None:
        """Keep the machine alive no longer."""
        self._core = None
        self.__dict__.pop("_rounds", None)

    def _look(self, core: Core, event: m.Event, commands: Sequence[Command], now: float) -> None:
        # What comes with each step or round is told by its class alone: this thread takes
        # the interpreter from the workers.
        if isinstance(event, (m.BatchReport, m.EpochReport)):
            self._count(event, now)
        elif isinstance(event, (m.SyncAck, m.ParamSnapshot, m.CapturedState, m.Halted)):
            if event.report is not None:
                self._count(event.report, now)
        else:
            self._hear(event, now)
        for command in commands:
            if not isinstance(command, Send):
                self._see(command, now)
        done = event.done_at if isinstance(event, m.SyncAck) else None
        self.divergence = core.divergence
        self._follow_round(self._rounds.round, now if done is None else min(done, now))
        anchor = core.elche.anchor
        if anchor != self.anchor:
            self._note(Kind.ANCHOR, now, now, anchor, self.anchor)
            self.anchor_curve.add((now, float(anchor)))
            self.anchor = anchor
        self.num_averagings = core.num_averagings
        self.num_failed_rounds = core.num_failed_rounds

    def _hear(self, event: m.Event, now: float) -> None:
        match event:
            case m.Averaged():
                start = now - event.compute_s
                self._note(Kind.PHASE, start, now, event.round, "computed")
            case m.EvalReport():
                self._note(Kind.EVALUATION, now, now, event.epoch)
            case m.CheckpointDone():
                self._note(Kind.CHECKPOINT, now, now, event.version)
            case m.SaveRequested():
                self._note(Kind.CHECKPOINT, now, now, None, "asked for")
            case m.Failed():
                told = error_text(event.error)
                self._note(Kind.FAILURE, now, now, event.rank, event.epoch, event.step, told)
            case m.ClusterRoundDone() if event.round is not None:
                round_ = event.round
                shares = machine_shares(round_)
                self._note(Kind.MACHINES, now, now, round_.step, shares, round_.round_s)
            case m.StopRequested():
                self._note(Kind.STOP, now, now, "stop requested")
            case m.AbortRequested():
                self._note(Kind.STOP, now, now, "abort requested")
            case _:
                pass

    def _see(self, command: Command, now: float) -> None:
        match command:
            case PublishEpoch(metrics=metrics):
                self._close_epoch(metrics, now)
            case BackendChosen():
                self.transport = (command.backend.name, one_line(command.reason))
                self._note(
                    Kind.TRANSPORT,
                    now,
                    now,
                    command.backend.name,
                    command.before.name,
                    self.transport[1],
                )
            case ReportStall():
                self._note(Kind.STOP, now, now, "stalled")
            case SaveCheckpoint():
                part = "saved at the end" if command.final else "saved"
                self._note(Kind.CHECKPOINT, now, now, command.epoch, part)
            case SaveFailed():
                self._note(Kind.CHECKPOINT, now, now, None, f"failed: {error_text(command.error)}")
            case _:
                pass

    def _count(self, report: m.BatchReport | m.EpochReport, now: float) -> None:
        self.count(report.rank, report.stats.num_batches, report.stats.num_samples, now)

    def count(self, rank: int, num_batches: int, num_samples: int, now: float) -> None:
        """A rank has trained so much up to now."""
        if now >= self._samples.end:
            self._samples.close(now, self.num_samples)
        self.num_batches[rank] += num_batches
        self.num_samples[rank] += num_samples

    def _follow_round(self, rnd: Round, now: float) -> None:
        number, state = self._round
        if (rnd.id, rnd.state) == self._round:
            return
        if state is not RoundState.NONE:
            self._note(Kind.PHASE, self._phase_start, now, number, state.value)
            if rnd.id != number or rnd.state is RoundState.NONE:
                self._note(Kind.AVERAGING, self._round_start, now, number, "round", self.divergence)
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
        self._note(Kind.EPOCH, now, now, metrics.epoch)

    def _note(self, kind: Kind, start: float, end: float, *args: Any) -> None:
        self._ring.add((kind, start, end, args))

    # From any thread.

    def read(self, cursor: int = 0) -> tuple[list[Event], int]:
        """Events that were added since, in order, and the next cursor; ``0`` at first."""
        items, after = self._ring.read(cursor)
        return [self._event(item) for item in items], after

    def epochs(self, since: int = 0) -> list[EpochRecord]:
        """The closed epochs that are kept, oldest first.

        Args:
            since: Leave out so many of the first that closed.
        """
        return [item[1] for item in self._epochs.read(since)[0]]

    @property
    def num_epochs(self) -> int:
        """Epochs closed."""
        return self._epochs.num_added

    def rates(self, end: float, num_points: int) -> tuple[float, list[Row]]:
        """Samples/s of each rank in spans of equal width, up to ``end``.

        Args:
            end: The time.
            num_points: At most so many spans.

        Returns:
            Width of a span in seconds, and the rates in each.
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
            begun = index * stride * width_s
            lasted = max(width_s, min(stride * width_s, now_s - begun))
            rates.append(tuple((b - a) / lasted for a, b in zip(before, row, strict=True)))
            before = row
        return stride * width_s, rates

    @property
    def num_dropped(self) -> int:
        """Events that have given way to later ones."""
        return self._ring.num_dropped

    def _event(self, item: tuple[Any, ...]) -> Event:
        _, kind, begun, ended, args = item
        found = dict(zip(ARGS.get(kind, ()), args, strict=False))
        return Event(
            kind=kind,
            rank=found.get("rank"),
            start_s=max(0.0, begun - self._start),
            end_s=max(0.0, ended - self._start),
            args={name: value for name, value in found.items() if name != "rank"},
        )


def spread(totals: Sequence[float], reach: int) -> list[float]:
    """Running totals that come in jumps, as what grows all the time up to each of them.

    Args:
        totals: At the ends of spans of equal width.
        reach: A jump is spread over no more spans than that, nor beyond the one before.
    """
    smooth, before, risen = list(totals), 0.0, -1
    for index, total in enumerate(totals):
        if total > before:
            start = max(risen, index - reach)
            for at in range(start + 1, index):
                smooth[at] = before + (total - before) * (at - start) / (index - start)
            before, risen = total, index
    return smooth
