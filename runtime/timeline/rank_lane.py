"""RankLane: a rank's time by cause and its events, recorded by its own thread without locks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from runtime.timeline.buffers import Bins, Ring, Row
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

now = time.monotonic
"""The clock of every timeline: the coordinator's, so that both can be laid side by side."""


class RankLane:
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
