"""RankLane: a rank's time by cause and its events, recorded without locks by its own thread."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from runtime.timeline.buffers import Ring, Row, TimeBins
from runtime.timeline.events import (
    ARGS,
    COMPUTE,
    GAP_KINDS,
    GONE,
    NUM_CAUSES,
    STARTUP,
    Cause,
    Event,
    IdleGap,
    Kind,
)

now = time.monotonic
"""The clock of timelines, which is the coordinator's, so that their times are comparable."""


class RankLane:
    """A rank's time by cause, and what happened on it.

    Only the rank's own thread calls the methods that write; any thread may read. Totals are not
    sampled and never dropped: each change of cause adds the time since the previous change to the
    ended cause, so that totals always sum to the elapsed time.

    Args:
        start: Start of the run, by :data:`now`.
        max_events: Capacity of each of two rings: one for steps and gaps, one for rarer events.
        min_gap_s: Gaps shorter than this are counted but are no events.
        step_interval_s: Shortest interval between steps that are events.

    Attributes:
        cause: The present cause.
        since: Start of the present cause.
        totals: Seconds by cause, without the present interval.
    """

    __slots__ = (
        "_bin_end",
        "_bins",
        "_frequent",
        "_min_gap_s",
        "_next_step",
        "_rare",
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
        self._rare = Ring(max_events)
        self._frequent = Ring(max_events)
        self._bins = TimeBins(start)
        self._bin_end = self._bins.end
        self.cause = STARTUP
        self.since = start
        self.totals = [0.0] * NUM_CAUSES
        self.num_steps = 0
        self.num_throttles = 0

    @classmethod
    def without_events(cls, rank: int, start: float) -> RankLane:
        """A lane that only keeps the totals: no events, gaps or bins."""
        lane = cls(rank, start, max_events=1, min_gap_s=math.inf, step_interval_s=math.inf)
        lane._bin_end = lane._next_step = math.inf
        return lane

    # On the rank's thread.

    def enter(self, cause: int, at: float | None = None) -> int:
        """Change the cause.

        Args:
            cause: One of the integers in :mod:`runtime.timeline.events`.
            at: Time of the change, by :data:`now`, not before :attr:`since`; ``None``: now.

        Returns:
            The previous cause, to be restored afterwards.
        """
        before = self.cause
        if at is None:
            at = now()
        spent = at - self.since
        # Before the cause changes, so that a reader of the new cause reads this sum too.
        self.totals[before] += spent
        if spent >= self._min_gap_s and before != COMPUTE:
            self._frequent.add((before, self.since, at, None))
        if at >= self._bin_end:
            self._close_bins(before, at)
        self.cause = cause
        self.since = at
        return before

    def record_interval(self, past: int, start: float, cause: int) -> None:
        """Account a short interval that ends now: two changes of cause at once.

        Args:
            start: Start of the interval, by :data:`now`, not before :attr:`since`.
            cause: Cause from now on.
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

    def record(self, kind: Kind, start: float, *args: Any, end: float | None = None) -> None:
        """Record a rare event that has ended.

        Args:
            start: Its start.
            args: Its arguments as in :data:`~runtime.timeline.events.ARGS`; numbers, and
                printable texts.
            end: Its end; ``None``: the last :meth:`enter`.
        """
        self._rare.add((kind, start, self.since if end is None else end, args))

    def end_step(self, cause: int, start: float, sizes: Sequence[int]) -> None:
        """Count an optimizer step that ends now; some steps are events.

        Args:
            cause: Cause from now on.
            start: Start of the step.
            sizes: Samples in each of its batches.
        """
        # enter(), inlined: this runs in every step.
        at, before = now(), self.cause
        self.totals[before] += at - self.since
        if at >= self._bin_end:
            self._close_bins(before, at)
        self.cause = cause
        self.since = at
        self.num_steps += 1
        if at >= self._next_step:
            self._next_step = at + self._step_interval_s
            self._frequent.add((Kind.STEP, start, at, (self.num_steps, len(sizes), sum(sizes))))

    def close(self) -> None:
        """Record the end of the rank's thread."""
        self.enter(GONE)

    def _close_bins(self, before: int, at: float) -> None:
        self._bins.close(at, self.totals, before)
        self._bin_end = self._bins.end

    # From any thread.

    def seconds(self, end: float | None = None) -> list[float]:
        """Seconds by cause up to now, or to the end of the run.

        Args:
            end: End of the run; ``None`` while it is running.
        """
        # In this order: if the interval ends meanwhile it is in the totals, and almost nothing is
        # added to the cause read before.
        cause, seconds = self.cause, list(self.totals)
        left = (now() if end is None else end) - self._start - sum(seconds)
        seconds[cause] += max(0.0, left)
        return seconds

    def bins(self, end: float) -> tuple[float, list[Row]]:
        """Width of a bin, and seconds by cause in each bin up to ``end``.

        Args:
            end: End of the last bin.
        """
        width_s, rows = self._bins.read(end)
        cause, totals = self.cause, list(self.totals)
        elapsed = end - self._start
        spans: list[Row] = []
        before: Row = (0.0,) * NUM_CAUSES
        for row in rows:
            spans.append(tuple(b - a for a, b in zip(before, row, strict=True)))
            before = row
        # Not in bins yet: intervals that ended since the last bin, then the present one, which may
        # cover many bins.
        rest = [max(0.0, b - a) for a, b in zip(before, totals, strict=True)]
        rest[cause] += max(0.0, elapsed - sum(totals))
        at = len(rows) * width_s
        while at < elapsed - 1e-9:
            room = min(width_s, elapsed - at)
            spans.append(_fill_bin(rest, room, last=cause))
            at += width_s
        return width_s, spans

    def events(self, start: float) -> list[Event]:
        """The kept events, in the order of their starts.

        Args:
            start: Start of the run.
        """
        found, _ = self.read((0, 0), start)
        return sorted(found, key=lambda event: (event.start_s, -event.end_s))

    def read(self, cursor: tuple[int, int], start: float) -> tuple[list[Event], tuple[int, int]]:
        """The events added since the last call, in the order of their ends, and the next cursor.

        Args:
            cursor: From the last call; ``(0, 0)`` at first.
            start: Start of the run.
        """
        rare, next_rare = self._rare.read(cursor[0])
        frequent, next_frequent = self._frequent.read(cursor[1])
        found = [
            self._event(item, start)
            for item in (*rare, *frequent)
            if isinstance(item[1], Kind) or Cause(item[1]) in GAP_KINDS
        ]
        return sorted(found, key=lambda event: event.end_s), (next_rare, next_frequent)

    def gaps(self, start: float, end: float | None = None) -> list[IdleGap]:
        """The kept gaps, in order.

        Args:
            start: Start of the run.
            end: End of the run; ``None`` while it is running.
        """
        found = [
            IdleGap(
                rank=self.rank,
                cause=Cause(item[1]),
                start_s=item[2] - start,
                duration_s=item[3] - item[2],
            )
            for item in self._frequent.read()[0]
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
        return self._rare.num_dropped + self._frequent.num_dropped

    def _event(self, item: tuple[Any, ...], start: float) -> Event:
        _, what, started, ended, args = item
        kind = what if isinstance(what, Kind) else GAP_KINDS[Cause(what)]
        names = ARGS.get(kind, ())
        return Event(
            kind=kind,
            rank=self.rank,
            start_s=started - start,
            end_s=ended - start,
            args=dict(zip(names, args or (), strict=False)),
        )


def _fill_bin(rest: list[float], room: float, *, last: int) -> Row:
    """Move seconds from ``rest`` into a bin, those of the present cause last."""
    taken = [0.0] * NUM_CAUSES
    for cause in (*(c for c in range(NUM_CAUSES) if c != last), last):
        part = min(rest[cause], room)
        taken[cause] = part
        rest[cause] -= part
        room -= part
    return tuple(taken)
