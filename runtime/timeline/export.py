"""Everything that a timeline holds, as plain data."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from runtime.timeline.causes import Cause

if TYPE_CHECKING:
    from runtime.timeline.timeline import Timeline

FORMAT = "gpuworker-timeline"
VERSION = 1
DIGITS = 9
"""Decimals of seconds: a nanosecond."""


def document(timeline: Timeline) -> dict[str, Any]:
    """Lists, dictionaries, numbers and texts, each number finite or ``None``.

    ``lanes`` holds the seconds by cause in each bin, in the order of ``causes``.
    """
    width_s, rates = timeline.throughput()
    columns, readings = timeline.resources()
    summary = timeline.summary()
    found = {
        "format": FORMAT,
        "version": VERSION,
        "causes": [cause.label for cause in Cause],
        "summary": summary.as_dict(),
        "lanes": [_lane(timeline, rank.rank) for rank in summary.ranks],
        "epochs": timeline.epochs(),
        "curves": {
            "anchor": timeline.anchor_curve(),
            "throughput": {"bin_s": width_s, "rates": rates},
            "resources": {"columns": columns, "readings": readings},
        },
        "events": [event.as_dict() for event in timeline.events()],
        "gaps": [
            {
                "rank": gap.rank,
                "cause": gap.cause.label,
                "start_s": gap.start_s,
                "duration_s": gap.duration_s,
            }
            for gap in timeline.idle_gaps()
        ],
    }
    clean: dict[str, Any] = _plain(found)
    return clean


def _lane(timeline: Timeline, rank: int) -> dict[str, Any]:
    width_s, rows = timeline.profile(rank)
    return {"rank": rank, "bin_s": width_s, "bins": rows}


def _plain(value: Any) -> Any:
    """The value with numbers rounded, and ``None`` for those that JSON has no word for."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = round(value, DIGITS)
        return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def json_text(timeline: Timeline) -> str:
    """The document as JSON in ASCII."""
    return json.dumps(document(timeline), allow_nan=False) + "\n"
