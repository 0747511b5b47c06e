"""What the coordinator knows about each rank, and what it tells others about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coordinator.contents import Tally
from coordinator.reports import FinalSnapshot


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
