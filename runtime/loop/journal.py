"""What the replicas did and when, for a timeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from runtime.loop.config import Timeline
from runtime.loop.replica import LoopReplica
from runtime.loop.replicas import Outcome

logger = logging.getLogger(__name__)

_TOLD = {"forward", "backward", "accumulate", "step"}


class Journal:
    """Tells a timeline, as long as it listens without raising.

    Args:
        timeline: ``None``: nobody is told.

    Attributes:
        step: Optimizer steps made so far.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self.step = 0

    @property
    def on(self) -> bool:
        """Whether anybody listens."""
        return self._timeline is not None

    def outcomes(self, what: str, outcomes: Sequence[Outcome]) -> None:
        """Each rank has done its task."""
        if self._timeline is None or what not in _TOLD:
            return
        for rank, outcome in enumerate(outcomes):
            if outcome.end_s and outcome.error is None:
                self.record(what, rank, outcome.start_s, outcome.end_s)

    def reductions(self, replicas: Sequence[LoopReplica]) -> None:
        """Each rank has exchanged gradients."""
        if self._timeline is not None:
            for replica in replicas:
                self.record("reduce", replica.rank, *replica.reduced_s)

    def rebalanced(self, world_size: int) -> None:
        """Batches are shared out anew from here on."""
        now_s = time.perf_counter()
        for rank in range(world_size):
            self.record("rebalance", rank, now_s, now_s)

    def record(self, event: str, rank: int, start_s: float, end_s: float) -> None:
        """Tell one event."""
        if self._timeline is None:
            return
        try:
            self._timeline.record(event, rank=rank, step=self.step, start_s=start_s, end_s=end_s)
        except Exception:
            logger.warning("the timeline failed and gets nothing more", exc_info=True)
            self._timeline = None
