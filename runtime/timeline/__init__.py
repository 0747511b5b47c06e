"""What a run did with its time: recorded as it goes, shown afterwards or meanwhile."""

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
