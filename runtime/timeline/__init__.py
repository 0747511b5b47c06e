"""Timeline of a run: time by cause and events, recorded as it runs, and its exports."""

from __future__ import annotations

from runtime.timeline.events import Cause, Event, IdleGap, Kind
from runtime.timeline.summary import RankSummary, RunFacts, TimelineSummary
from runtime.timeline.timeline import Timeline

__all__ = [
    "Cause",
    "Event",
    "IdleGap",
    "Kind",
    "RankSummary",
    "RunFacts",
    "Timeline",
    "TimelineSummary",
]
