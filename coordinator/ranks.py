"""What the coordinator knows about each rank, and what it tells others about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from coordinator.cadence import ElChe
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.messages import Allowance, FinalSnapshot
from coordinator.metrics import Tally
from coordinator.pool import ChunkPool


class RankState(Enum):
    """The life of a rank as the coordinator sees it."""

    BUILDING = "building"
    LIVE = "live"
    LEAVING = "leaving"
    GONE = "gone"
    DEAD = "dead"


_NEXT = {
    RankState.BUILDING: {RankState.LIVE, RankState.LEAVING, RankState.GONE, RankState.DEAD},
    RankState.LIVE: {RankState.LEAVING, RankState.GONE, RankState.DEAD},
    RankState.LEAVING: {RankState.GONE, RankState.DEAD},
    RankState.GONE: {RankState.DEAD},
    RankState.DEAD: set(),
}


@dataclass(slots=True)
class Rank:
    """One rank's record.

    ``since_round``, ``compute_since_round`` count what was trained and is in no round
    yet; ``round_batches``, ``round_compute_s`` what is in the round in progress.
    """

    rank: int
    state: RankState = RankState.BUILDING
    num_queued: int = 0
    since_round: int = 0
    compute_since_round: float = 0.0
    round_batches: int = 0
    round_compute_s: float = 0.0
    limit: int | None = None
    parked: bool = False
    num_batches: int = 0
    num_samples: int = 0
    compute_s: float = 0.0
    sync_s: float = 0.0
    num_throttles: int = 0
    final: FinalSnapshot | None = None

    def move(self, state: RankState) -> None:
        """Go to ``state``; an illegal move is a bug."""
        assert state in _NEXT[self.state], f"rank {self.rank}: {self.state} -> {state}"
        self.state = state

    @property
    def present(self) -> bool:
        """Whether a message to this rank can still be answered."""
        return self.state in (RankState.BUILDING, RankState.LIVE, RankState.LEAVING)

    def note(self, tally: Tally) -> None:
        """Add what a report says."""
        self.since_round += tally.num_batches
        self.compute_since_round += tally.compute_s
        self.num_batches += tally.num_batches
        self.num_samples += tally.num_samples
        self.compute_s += tally.compute_s
        parked = self.limit is not None and self.since_round >= self.limit
        if parked and not self.parked:
            self.num_throttles += 1
        self.parked = parked

    def set_limit(self, limit: int | None) -> None:
        """Remember the limit that the worker was told."""
        self.limit = limit
        self.parked = limit is not None and self.since_round >= limit

    def enter_round(self) -> None:
        """What was trained so far is in the round: counters subtract, they are not zeroed."""
        self.round_batches, self.since_round = self.since_round, 0
        self.round_compute_s, self.compute_since_round = self.compute_since_round, 0.0

    def freeze(self) -> None:
        """Remember how much the snapshot holds; training goes on meanwhile."""
        self.round_batches = self.since_round
        self.round_compute_s = self.compute_since_round

    def commit_freeze(self) -> None:
        """The average of the frozen part is out: what came after it counts from here."""
        self.since_round -= self.round_batches
        self.compute_since_round -= self.round_compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """Totals of one rank.

    Attributes:
        rank: The rank.
        device: Its device, by name.
        num_batches: Batches trained.
        num_samples: Samples in them.
        share: Its share of all samples trained.
        throughput: Samples per second of its own compute time.
        compute_s: Seconds spent in training steps.
        sync_s: Seconds that averaging cost it.
        num_throttles: Times it was parked for being too far ahead.
        alive: Whether it takes part.
    """

    rank: int
    device: str
    num_batches: int
    num_samples: int
    share: float
    throughput: float
    compute_s: float
    sync_s: float
    num_throttles: int
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of a run.

    Attributes:
        epoch: The oldest epoch that is open.
        global_step: Batches trained by all ranks together.
        num_averagings: Averaging rounds done; under ``SYNC`` the global steps.
        num_failed_rounds: Rounds given up, in all.
        anchor: Batches of the slowest rank between two rounds.
        batch_counts: The same for each rank.
        ranks: One record for each rank.
    """

    epoch: int
    global_step: int
    num_averagings: int
    num_failed_rounds: int
    anchor: int
    batch_counts: tuple[int, ...]
    ranks: tuple[RankStatistics, ...]


# -- When a round is due, and how far each rank may run before it --
#
# Every rule is a function of the present state, evaluated after each event, so that no
# wake-up can be lost: what was due stays due until it is done.

_OVERRUN = 4
"""Times its count after which a rank waits no more for one that does not get on."""


class Gate:
    """The rules of cadence, overshoot and lead.

    Args:
        config: Settings of the run.
        elche: How many batches each rank runs between two rounds.
        pool: Who has which batches.
    """

    def __init__(self, config: CoordinatorConfig, elche: ElChe, pool: ChunkPool) -> None:
        self._config = config
        self._elche = elche
        self._pool = pool
        self._pacer: int | None = None

    def allowance(self, rank: int) -> Allowance:
        """What a rank is told at the start and with each round."""
        limit = self._overshoot_limit(rank)
        lead = self._config.max_batch_diff
        if lead is not None:
            limit = lead + 1 if limit is None else min(limit, lead + 1)
        return Allowance(limit=limit, report_after=self._report_after(rank))

    def new_round(self) -> None:
        """Choose whose count makes the next round due, before its allowances are sent.

        Under ``CADENCE`` that is the slowest rank: the others need not wake the
        coordinator at their count.
        """
        cadence = self._config.policy is ApplyPolicy.CADENCE
        self._pacer = self._elche.slowest if cadence else None

    def _report_after(self, rank: int) -> int | None:
        if self._config.max_batch_diff is not None:
            return 1
        return self._elche.batch_counts[rank] if self._pacer in (None, rank) else None

    def _overshoot_limit(self, rank: int) -> int | None:
        if self._config.policy is not ApplyPolicy.ASYNC:
            return None
        count = self._elche.batch_counts[rank]
        overshoot = self._config.max_overshoot
        return count + (max(2, count // 4) if overshoot is None else overshoot)

    @property
    def limits(self) -> bool:
        """Whether the settings limit any rank."""
        return self._config.policy is ApplyPolicy.ASYNC or self._config.max_batch_diff is not None

    def limit(self, rank: Rank, live: Sequence[Rank]) -> int | None:
        """The limit that holds for a rank now, in batches since its last round.

        A rank without work cannot catch up, so it holds nobody back.
        """
        limit = self._overshoot_limit(rank.rank)
        lead = self._config.max_batch_diff
        if lead is None:
            return limit
        others = [r.since_round for r in live if r is not rank and self._has_work(r)]
        if not others:
            return limit
        behind = min(others) + lead + 1
        return behind if limit is None else min(limit, behind)

    def told_well_enough(self, rank: int, told: int | None, limit: int | None) -> bool:
        """Whether a rank need not hear that its limit has changed.

        Batch counts waver with each measurement. A limit that the settings do not name need
        not be raised as long as half of the overshoot is left to the rank.
        """
        c = self._config
        exact = c.max_batch_diff is not None or c.max_overshoot is not None
        if exact or told is None or limit is None:
            return told == limit
        return 0 <= 2 * (limit - told) <= limit - self._elche.batch_counts[rank]

    def relimit(self, rank: Rank, limit: int | None) -> Allowance:
        """The allowance that carries a changed limit."""
        return Allowance(limit=limit, report_after=self._report_after(rank.rank))

    def _has_work(self, rank: Rank) -> bool:
        return bool(self._pool.ledgers[rank.rank].assigned)

    def due(self, live: Sequence[Rank]) -> bool:
        """Whether the cadence asks for an averaging round."""
        trained, busy = False, []
        for r in live:
            trained = trained or r.since_round > 0
            if not r.parked and self._has_work(r):
                busy.append(r)
        if not (trained and busy):
            return trained
        counts = self._elche.batch_counts
        if self._config.policy is ApplyPolicy.CADENCE:
            for r in busy:
                if r.since_round >= _OVERRUN * counts[r.rank]:
                    return True
            seconds = self._elche.seconds_per_batch
            if seconds is not None:
                slow = self._slow(busy, seconds)
                if slow.since_round >= counts[slow.rank]:
                    return True
                reached = counts[slow.rank] * seconds[slow.rank]
                return slow.since_round > 0 and slow.compute_since_round >= reached
        return all(r.since_round >= counts[r.rank] for r in busy)

    def _slow(self, busy: Sequence[Rank], seconds: Sequence[float]) -> Rank:
        """The one of these ranks whose count makes a round due."""
        for r in busy:
            if r.rank == self._pacer:
                return r
        return max(busy, key=lambda r: seconds[r.rank])
