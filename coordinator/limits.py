"""How far each rank may run, told to the ranks."""

from __future__ import annotations

from coordinator import messages as m
from coordinator.outcome import Phase
from coordinator.round_keeper import RoundKeeper
from coordinator.rounds import RoundState
from coordinator.state import Core


class Limits:
    """Sends each rank the limit that the :class:`~coordinator.gate.Gate` gives it."""

    def __init__(self, core: Core, rounds: RoundKeeper) -> None:
        self._core = core
        self._rounds = rounds

    def begin(self) -> None:
        """The run begins: tell every rank its first allowance."""
        if self._core.alone or self._core.lockstep:
            return
        for rank in self._core.live:
            allowance = self._core.gate.allowance(rank.rank)
            rank.set_limit(allowance.limit)
            self._core.send(rank.rank, m.Resume(allowance=allowance))

    def readjust(self) -> None:
        """Tell every rank anew how far it may go, and whose count makes a round due."""
        state = self._rounds.round.state
        if self._core.alone or self._core.lockstep or self._core.phase is Phase.STARTING:
            return
        if state is RoundState.SYNCING:
            return  # done when the round ends: a limit could be read against either round
        live = self._core.live
        self._core.gate.new_round()
        for rank in live:
            limit = self._core.gate.limit(rank, live)
            rank.set_limit(limit)
            self._core.send(rank.rank, m.Resume(allowance=self._core.gate.relimit(rank, limit)))

    def adjust(self) -> None:
        """Tell those ranks whose limit has changed."""
        # Between SyncNow and its acknowledgement a limit could be read against either round.
        if not self._core.gate.limits:
            return
        if self._core.alone or self._rounds.round.state is RoundState.SYNCING:
            return
        live = self._core.live
        for rank in live:
            limit = self._core.gate.limit(rank, live)
            if self._core.gate.told_well_enough(rank.rank, rank.limit, limit):
                continue
            raised = limit is None or (rank.limit is not None and limit > rank.limit)
            rank.set_limit(limit)
            if raised:
                self._core.send(rank.rank, m.Resume(allowance=self._core.gate.relimit(rank, limit)))
            elif limit is not None:
                self._core.send(rank.rank, m.Throttle(limit=limit))
