"""What one rank's thread notes of itself, without locks and without waiting."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from coordinator import messages as m
from coordinator.machine import Coordinator
from coordinator.messages import (
    LONGEST_REPORT_S,
    Command,
    PublishEpoch,
    ReportStall,
    SaveCheckpoint,
    SaveFailed,
    Send,
    TransportChosen,
)
from coordinator.metrics import EpochMetrics
from coordinator.state import Core
from coordinator.transports import Round, RoundState
from runtime.timeline.events import (
    ARGS,
    COMPUTE,
    GONE,
    NUM_CAUSES,
    STARTUP,
    STRETCHES,
    Cause,
    Event,
    IdleGap,
    Kind,
)
from runtime.timeline.export import error_text, one_line
from runtime.timeline.resources import NUM_POINTS, Bins, Row, Thinned

logger = logging.getLogger(__name__)


class Ring:
    """The last items that one thread added; any thread may read them.

    Each slot holds a tuple that starts with the item's number. A slot is replaced as a
    whole, with and without the interpreter's lock: a reader sees each item entire or not at
    all, and its number tells whether it is the one that was looked for.

    Args:
        capacity: How many items are kept; the oldest give way.
    """

    __slots__ = ("_capacity", "_slots", "num_added")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: list[tuple[Any, ...] | None] = [None] * capacity
        self.num_added = 0

    def add(self, item: tuple[Any, ...]) -> None:
        """Add an item. In the writing thread alone."""
        number = self.num_added
        self._slots[number % self._capacity] = (number, *item)
        self.num_added = number + 1

    def read(self, since: int = 0) -> tuple[list[tuple[Any, ...]], int]:
        """The items that are kept, oldest first, each behind its number.

        Args:
            since: Leave out those with lower numbers.

        Returns:
            The items, and the number of the next one.
        """
        end = self.num_added
        kept = []
        for number in range(max(since, end - self._capacity), end):
            item = self._slots[number % self._capacity]
            # One that was replaced meanwhile is told by a later call.
            if item is not None and item[0] == number:
                kept.append(item)
        return kept, end

    @property
    def num_dropped(self) -> int:
        """Items that have given way."""
        return max(0, self.num_added - self._capacity)


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
        elif isinstance(event, (m.SyncAck, m.ParamSnapshot, m.Captured, m.Halted)):
            if event.report is not None:
                self._count(event.report, now)
        else:
            self._hear(event, now)
        for command in commands:
            if not isinstance(command, Send):
                self._see(command, now)
        done = event.at if isinstance(event, m.SyncAck) else None
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
            case m.Granted() if event.round is not None:
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
            case TransportChosen():
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
        self.count(report.rank, report.tally.num_batches, report.tally.num_samples, now)

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
        reach = math.ceil(LONGEST_REPORT_S / (stride * width_s))
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


now = time.monotonic
"""The clock of every timeline: the coordinator's, so that both can be laid side by side."""


class Lane:
    """A rank's time by cause, and what happened on it.

    The rank's own thread alone calls the methods that write; any thread may read. The
    totals are never sampled and never dropped: each change of cause adds the time since
    the last one to the cause that it ends, so that they always sum to the time that has
    passed.

    Args:
        rank: The rank.
        start: When the run began, by :data:`now`.
        max_events: Events that are kept of each of two sorts: what is rare, and what is
            not (steps and gaps); the oldest give way.
        min_gap_s: Shorter gaps are counted, but no events.
        step_interval_s: At most one step in so long is an event.

    Attributes:
        cause: What the rank is doing.
        since: When it began to.
        totals: Seconds by cause, the stretch in progress left out.
        num_steps: Optimizer steps made.
        num_throttles: Times that the rank was parked.
    """

    __slots__ = (
        "_bin_end",
        "_bins",
        "_min_gap_s",
        "_next_step",
        "_often",
        "_rarely",
        "_start",
        "_step_interval_s",
        "cause",
        "num_steps",
        "num_throttles",
        "rank",
        "since",
        "totals",
    )

    def __init__(
        self,
        rank: int,
        start: float,
        *,
        max_events: int,
        min_gap_s: float,
        step_interval_s: float,
    ) -> None:
        self.rank = rank
        self._start = start
        self._min_gap_s = min_gap_s
        self._step_interval_s = step_interval_s
        self._next_step = start
        self._rarely = Ring(max_events)
        self._often = Ring(max_events)
        self._bins = Bins(start)
        self._bin_end = self._bins.end
        self.cause = STARTUP
        self.since = start
        self.totals = [0.0] * NUM_CAUSES
        self.num_steps = 0
        self.num_throttles = 0

    # On the rank's thread.

    def enter(self, cause: int, at: float | None = None) -> int:
        """The rank does something else.

        Args:
            cause: One of the numbers in :mod:`runtime.timeline.events`.
            at: Since when, by :data:`now`, not before :attr:`since`; ``None``: from now on.

        Returns:
            What it was doing, to be entered again afterwards.
        """
        before = self.cause
        if at is None:
            at = now()
        spent = at - self.since
        # Before the cause changes: a reader who sees the new cause sees this sum too.
        self.totals[before] += spent
        if spent >= self._min_gap_s and before != COMPUTE:
            self._often.add((before, self.since, at, None))
        if at >= self._bin_end:
            self._close_bins(before, at)
        self.cause = cause
        self.since = at
        return before

    def enter_past(self, past: int, start: float, cause: int) -> None:
        """Something that took little time is over already: two changes of cause at once.

        Args:
            past: What it was.
            start: When it began, by :data:`now`, not before :attr:`since`.
            cause: What the rank does from now on.
        """
        at = now()
        if at - self.since >= self._min_gap_s or at >= self._bin_end:
            self.enter(past, start)
            self.enter(cause, at)
            return
        totals = self.totals
        totals[self.cause] += start - self.since
        totals[past] += at - start
        self.cause = cause
        self.since = at

    def note(self, kind: Kind, start: float, *args: Any, end: float | None = None) -> None:
        """Something rare that began at ``start`` is over.

        Args:
            kind: What it was.
            start: When it began.
            args: What :data:`~runtime.timeline.events.ARGS` names for it; numbers, and
                texts that are known to be harmless.
            end: When it ended; ``None``: with the last :meth:`enter`.
        """
        self._rarely.add((kind, start, self.since if end is None else end, args))

    def end_step(self, cause: int, start: float, sizes: Sequence[int]) -> None:
        """An optimizer step is over; every one is counted, some are events.

        Args:
            cause: What the rank does from now on.
            start: When the step began.
            sizes: Samples in each of its batches.
        """
        # As enter() does, without the call: this is done in every step.
        at, before = now(), self.cause
        self.totals[before] += at - self.since
        if at >= self._bin_end:
            self._close_bins(before, at)
        self.cause = cause
        self.since = at
        self.num_steps += 1
        if at >= self._next_step:
            self._next_step = at + self._step_interval_s
            self._often.add((Kind.STEP, start, at, (self.num_steps, len(sizes), sum(sizes))))

    def close(self) -> None:
        """The rank's thread ends."""
        self.enter(GONE)

    def _close_bins(self, before: int, at: float) -> None:
        self._bins.close(at, self.totals, before)
        self._bin_end = self._bins.end

    # From any thread.

    def seconds(self, end: float | None = None) -> list[float]:
        """Seconds by cause up to now, or to the end of the run.

        Args:
            end: When the run ended; ``None``: it goes on.
        """
        # In this order: a stretch that ends meanwhile is in the totals, and what is left
        # over for the cause that was seen is next to nothing.
        cause, seconds = self.cause, list(self.totals)
        left = (now() if end is None else end) - self._start - sum(seconds)
        seconds[cause] += max(0.0, left)
        return seconds

    def bins(self, end: float) -> tuple[float, list[Row]]:
        """Width of a bin, and seconds by cause in each bin up to ``end``.

        Args:
            end: The last bin is cut here.
        """
        width_s, rows = self._bins.read(end)
        cause, totals = self.cause, list(self.totals)
        elapsed = end - self._start
        spans: list[Row] = []
        before: Row = (0.0,) * NUM_CAUSES
        for row in rows:
            spans.append(tuple(b - a for a, b in zip(before, row, strict=True)))
            before = row
        # What no bin holds yet: closed stretches since the last bin, then the one that is
        # in progress, which may cover many bins.
        rest = [max(0.0, b - a) for a, b in zip(before, totals, strict=True)]
        rest[cause] += max(0.0, elapsed - sum(totals))
        at = len(rows) * width_s
        while at < elapsed - 1e-9:
            room = min(width_s, elapsed - at)
            spans.append(_take(rest, room, last=cause))
            at += width_s
        return width_s, spans

    def events(self, start: float) -> list[Event]:
        """The events that are kept, in the order of their starts.

        Args:
            start: When the run began.
        """
        found, _ = self.read((0, 0), start)
        return sorted(found, key=lambda event: (event.start_s, -event.end_s))

    def read(self, cursor: tuple[int, int], start: float) -> tuple[list[Event], tuple[int, int]]:
        """Events that were added since, in the order of their ends, and the next cursor.

        Args:
            cursor: From the last call; ``(0, 0)`` at first.
            start: When the run began.
        """
        rarely, next_rarely = self._rarely.read(cursor[0])
        often, next_often = self._often.read(cursor[1])
        found = [
            self._event(item, start)
            for item in (*rarely, *often)
            if isinstance(item[1], Kind) or Cause(item[1]) in STRETCHES
        ]
        return sorted(found, key=lambda event: event.end_s), (next_rarely, next_often)

    def gaps(self, start: float, end: float | None = None) -> list[IdleGap]:
        """The gaps that are kept, in order.

        Args:
            start: When the run began.
            end: When it ended; ``None``: it goes on.
        """
        found = [
            IdleGap(
                rank=self.rank,
                cause=Cause(item[1]),
                start_s=item[2] - start,
                duration_s=item[3] - item[2],
            )
            for item in self._often.read()[0]
            if not isinstance(item[1], Kind)
        ]
        cause, since = self.cause, self.since
        until = now() if end is None else end
        if cause != COMPUTE and until - since >= self._min_gap_s:
            found.append(
                IdleGap(
                    rank=self.rank,
                    cause=Cause(cause),
                    start_s=since - start,
                    duration_s=until - since,
                )
            )
        return found

    @property
    def num_dropped(self) -> int:
        """Events that have given way to later ones."""
        return self._rarely.num_dropped + self._often.num_dropped

    def _event(self, item: tuple[Any, ...], start: float) -> Event:
        _, what, begun, ended, args = item
        kind = what if isinstance(what, Kind) else STRETCHES[Cause(what)]
        names = ARGS.get(kind, ())
        return Event(
            kind=kind,
            rank=self.rank,
            start_s=begun - start,
            end_s=ended - start,
            args=dict(zip(names, args or (), strict=False)),
        )


def _take(rest: list[float], room: float, *, last: int) -> Row:
    """Fill a bin from what is left, the cause that is in progress last."""
    taken = [0.0] * NUM_CAUSES
    for cause in (*(c for c in range(NUM_CAUSES) if c != last), last):
        part = min(rest[cause], room)
        taken[cause] = part
        rest[cause] -= part
        room -= part
    return tuple(taken)
