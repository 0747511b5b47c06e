"""RequestedEvaluations: evaluations that the bodies of own loops request, each on an average."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class RequestedEvaluations:
    """Requests of ranks that wait, and the ranks that evaluate for them.

    The next averaging round answers all requests; it is forced if none is due. Data sets, functions
    and results are shared by the workers and do not pass through the coordinator.

    Attributes:
        callers: Ranks whose requests wait for a round. A rank makes one request at a time.
    """

    def __init__(self) -> None:
        self.callers: set[int] = set()
        self._in_round: set[int] = set()  # callers that the last round answers
        self._evaluating: set[int] = set()

    def request(self, rank: int) -> None:
        """Record a request."""
        self.callers.add(rank)

    def begin(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Begin a round of these ranks; returns the callers that it answers, in order."""
        self._in_round, self.callers = self.callers, set()
        self._evaluating = set(ranks) if self._in_round else set()
        return tuple(sorted(self._in_round))

    def on_done(self, rank: int, *, answered: bool) -> None:
        """Record that a rank has done its part, and if its own request is answered."""
        self._evaluating.discard(rank)
        if answered:
            self.callers.discard(rank)
            self._in_round.discard(rank)

    def cancel(self, averaged: Collection[int]) -> None:
        """The round is given up: the requests without a result wait for the next one.

        Args:
            averaged: Ranks that have the average, and evaluate it nevertheless.
        """
        self.callers |= self._in_round
        self._in_round.clear()
        self._evaluating.intersection_update(averaged)

    def waits_for(self, live: Collection[int]) -> bool:
        """True if a live rank has not done its part."""
        return not self._evaluating.isdisjoint(live)

    def drop(self, rank: int) -> None:
        """Remove a dead rank."""
        for ranks in (self.callers, self._in_round, self._evaluating):
            ranks.discard(rank)
