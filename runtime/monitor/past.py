"""What a timeline has of the time before anybody watched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from runtime.monitor.feed import Json
from runtime.monitor.machine_load import named
from runtime.timeline.curves import Row
from runtime.timeline.timeline import Timeline

NUM_POINTS = 120


def past_ticks(timeline: Timeline) -> list[Json]:
    """Readings as they would have been, at equal distances up to now; without the last.

    Args:
        timeline: The timeline, of a run that goes on or is over.
    """
    width_s, rates = timeline.throughput(NUM_POINTS)
    if len(rates) < 2:
        return []
    profiles = [timeline.profile(rank) for rank in range(len(rates[0]))]
    totals = [_running(rows) for _, rows in profiles]
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
                _at(rows, at / bin_s) for (bin_s, _), rows in zip(profiles, totals, strict=True)
            ],
        }
        if (anchor := _last(anchors, at)) is not None:
            tick["anchor"] = int(anchor[1])
        if (reading := _last(readings, at)) is not None:
            tick.update(named(columns, reading[1:]))
        ticks.append(tick)
    return ticks


def _running(rows: Sequence[Row]) -> list[Row]:
    """Sums of the rows up to each."""
    sums: list[Row] = []
    for row in rows:
        sums.append(tuple(a + b for a, b in zip(sums[-1], row, strict=True)) if sums else row)
    return sums


def _at(sums: Sequence[Row], bins: float) -> list[float]:
    """The sums after so many bins, of which the last may be a part."""
    index = min(len(sums), max(1, round(bins))) - 1
    return [round(value, 3) for value in sums[index]]


def _last(rows: Sequence[Row], at: float) -> Row | None:
    """The last row up to a time."""
    index = bisect_right(rows, at, key=lambda row: row[0])
    return rows[index - 1] if index else None
