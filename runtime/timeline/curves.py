"""Curves over a run of any length, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[float, ...]

NUM_BINS = 1024
NUM_POINTS = 4096
FIRST_WIDTH_S = 0.02


class Bins:
    """Running totals at equally spaced times.

    When all bins are used, each second total is dropped and the bins become twice as wide:
    between half of them and all of them are always in use. What happened in a span of
    time is the difference of two totals, so that nothing is lost. Written by one thread,
    read by any.

    Args:
        start: Time at which the first bin begins.
        num_bins: At most so many; even.
        width_s: Width of the first bins.

    Attributes:
        end: When the bin in progress is over.
    """

    __slots__ = ("_num_bins", "_rows", "_start", "_view", "_width_s", "end")

    def __init__(
        self, start: float, num_bins: int = NUM_BINS, width_s: float = FIRST_WIDTH_S
    ) -> None:
        self._start = start
        self._num_bins = num_bins
        self._width_s = width_s
        self._rows: list[Row] = []
        self._view = (width_s, self._rows)
        self.end = start + width_s

    def close(self, now: float, totals: Sequence[float], running: int | None = None) -> None:
        """Close all bins that ended up to now.

        Args:
            now: The time.
            totals: What the totals have come to.
            running: The one that has grown with the clock since before the bins ended; the
                others have not changed since then.
        """
        while self.end <= now:
            row = list(totals)
            if running is not None:
                row[running] -= now - self.end
            self._rows.append(tuple(row))
            if len(self._rows) == self._num_bins:
                # A new list: whoever reads the old one reads it with its own width.
                self._rows = self._rows[1::2]
                self._width_s *= 2
                self._view = (self._width_s, self._rows)
            # Multiplied, not added up: the ends stay exact however many there are.
            self.end = self._start + (len(self._rows) + 1) * self._width_s

    def read(self, end: float) -> tuple[float, list[Row]]:
        """Width of a bin in seconds, and the totals at the end of each, from any thread.

        Args:
            end: The bins come so wide that those allowed would reach at least up to here.
        """
        width_s, rows = self._view
        rows = list(rows)
        while end - self._start > self._num_bins * width_s:
            rows, width_s = rows[1::2], width_s * 2
        return width_s, rows


class Curve:
    """Points in order of time; once there are too many, only each second one stays.

    From then on each second one that comes is left out too, and so on; the last one is
    always there. Written by one thread, read by any.

    Args:
        num_points: At most so many; even.
    """

    __slots__ = ("_last", "_num_points", "_num_seen", "_rows", "_stride")

    def __init__(self, num_points: int = NUM_POINTS) -> None:
        self._num_points = num_points
        self._rows: list[Row] = []
        self._last: Row | None = None
        self._stride = 1
        self._num_seen = 0

    def add(self, *row: float) -> None:
        """Add a point; its first number is the time."""
        self._last = row
        if self._num_seen % self._stride == 0:
            self._rows.append(row)
            if len(self._rows) == self._num_points:
                self._rows = self._rows[::2]
                self._stride *= 2
        self._num_seen += 1

    def read(self) -> list[Row]:
        """The points that are kept and the last one, from any thread."""
        last, rows = self._last, list(self._rows)
        if last is not None and (not rows or rows[-1][0] < last[0]):
            rows.append(last)
        return rows
