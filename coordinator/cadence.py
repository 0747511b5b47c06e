"""Cadence of averaging: batches of each rank between two rounds, and when a round is due.

The rule is "El Che" of flodl: the slowest rank trains ``anchor`` batches between two averagings,
and every other rank as many as it can in the same time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Annotated, Any, Protocol

from coordinator.codec import Seconds, decode, encode
from coordinator.config import ApplyPolicy, CoordinatorConfig


class ElChe:
    """Batch counts in proportion to measured speeds, and the interval between averagings.

    The anchor grows while averaging costs more than ``overhead_target`` of the slowest rank's
    compute time, at most twofold in a round, and shrinks once averaging costs less than half of
    the target: slowly to its initial value, faster from there to ``min_anchor``.

    For use in custom loops::

        cadence = ElChe(world_size=2, anchor=10)
        while training:
            counts = cadence.batch_counts           # for instance (10, 10), later (10, 30)
            times = [train(rank, counts[rank]) for rank in (0, 1)]   # seconds
            sync_s = average(weights=counts)
            cadence.report_timing(times, counts, sync_s)

    Deterministic and not thread-safe: no clock, no thread.

    Args:
        world_size: Number of ranks.
        anchor: Batches of the slowest rank between two averagings, at the start.
        min_anchor: Minimum of the anchor; ``None``: its initial value.
        max_anchor: Maximum of the anchor.
        overhead_target: Share of the compute time that averaging may cost, 0.01 to 0.50.
        speed_hint: ``(slow rank, ratio)``: the others are ``ratio`` times faster. Used until every
            live rank is measured.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        world_size: int,
        anchor: int = 10,
        *,
        min_anchor: int | None = None,
        max_anchor: int = 200,
        overhead_target: float = 0.10,
        speed_hint: tuple[int, float] | None = None,
    ) -> None:
        floor = anchor if min_anchor is None else min_anchor
        _check(world_size, (floor, anchor, max_anchor), overhead_target, speed_hint)
        self._anchor = self._start = anchor
        self._floor = floor
        self._max_anchor = max_anchor
        self._overhead_target = overhead_target
        self._hint = speed_hint
        self._growth_held = False
        self._live = [True] * world_size
        self._speeds = [_Speed() for _ in range(world_size)]
        self._observed: set[int] = set()
        self._figures: _Derived | None = None

    @property
    def anchor(self) -> int:
        """Batches of the slowest rank between two averagings."""
        return self._anchor

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Batches of each rank between two averagings, at least 1; 0 for a dead rank."""
        return self._derived_values().batch_counts

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's share of the throughput; the sum is 1 while a rank lives."""
        return self._derived_values().shares

    @property
    def seconds_per_batch(self) -> tuple[float, ...] | None:
        """Estimated time of a batch, waits for peers excluded; 0.0 for a dead rank.

        ``None`` until every live rank is measured.
        """
        return self._derived_values().seconds_per_batch

    @property
    def slowest(self) -> int | None:
        """The lowest live rank with the slowest batches; ``None`` until all are measured."""
        seconds = self.seconds_per_batch
        if seconds is None:
            return None
        return max(
            (rank for rank, alive in enumerate(self._live) if alive),
            key=lambda rank: (seconds[rank], -rank),
        )

    def observe(self, rank: int, compute_s: float, num_batches: int) -> None:
        """Record the timing of one rank between two rounds.

        The estimate is a moving average with weight 0.5. A measurement that is off by more than a
        factor of 2 is clamped, unless the next one confirms it: it then replaces the estimate.

        Args:
            rank: The rank.
            compute_s: Compute time in seconds, with the rank's own lasting waits for data; ignored
                unless finite and positive.
            num_batches: Batches in that time; 0 keeps the estimate.
        """
        if num_batches > 0 and _is_time(compute_s):
            self._speeds[rank].add(compute_s / num_batches)
            self._figures = None
            self._observed.add(rank)

    def report_timing(
        self,
        compute_s: Sequence[float],
        num_batches: Sequence[int],
        sync_s: float,
        *,
        wait_s: float = 0.0,
    ) -> None:
        """Record a round: update the speeds, then fit the anchor to the overhead.

        Ranks already recorded by :meth:`observe` since the last round are not measured again.

        Args:
            compute_s: Compute time of each rank since the last round, in seconds.
            num_batches: Batches of each rank in that time.
            sync_s: Cost of the averaging, in seconds.
            wait_s: Wait of a rank for the others in it, on average: it does not let the anchor
                grow, but must not exceed the target at a lowered one.

        Raises:
            ValueError: The sequences do not have one entry for each rank.
        """
        if not len(compute_s) == len(num_batches) == len(self._live):
            raise ValueError(
                f"report_timing needs one time and one count for each of {len(self._live)} ranks, "
                f"got {len(compute_s)} and {len(num_batches)}"
            )
        for rank in range(len(self._live)):
            if rank not in self._observed:
                self.observe(rank, compute_s[rank], num_batches[rank])
        self._observed.clear()
        slowest = max(
            (
                compute_s[rank] / num_batches[rank]
                for rank, alive in enumerate(self._live)
                if alive and num_batches[rank] > 0 and _is_time(compute_s[rank])
            ),
            default=0.0,
        )
        if slowest and math.isfinite(sync_s) and sync_s >= 0:
            self._fit_anchor(sync_s / slowest, wait_s / slowest)

    def nudge_down(self, factor: float = 0.5) -> None:
        """Lower the anchor, and its minimum if that is larger.

        Args:
            factor: Ratio of the new anchor, which is at least 1, to the old one.

        Raises:
            ValueError: ``factor`` is not between 0 and 1.
        """
        if not 0 < factor < 1:
            raise ValueError(f"nudge_down needs a factor between 0 and 1, got {factor!r}")
        self._anchor = max(1, int(self._anchor * factor))
        self._floor = min(self._floor, self._anchor)
        self._figures = None

    def hold_growth(self, flag: bool) -> None:
        """Forbid (``True``) or allow (``False``) growth of the anchor, until called again."""
        self._growth_held = flag

    def drop(self, rank: int) -> None:
        """Remove a dead rank: its count and share become 0."""
        self._live[rank] = False
        self._figures = None

    @property
    def state(self) -> ElCheState:
        """Anchor and speeds."""
        return ElCheState(
            anchor=self._anchor,
            floor=self._floor,
            growth_held=self._growth_held,
            seconds=tuple(speed.seconds for speed in self._speeds),
            suspects=tuple(speed.suspect for speed in self._speeds),
        )

    def restore(self, state: ElCheState) -> None:
        """Restore anchor and speeds; of a state of another world size the anchor alone.

        Limits, hint and live ranks are kept.
        """
        self._anchor = min(state.anchor, self._max_anchor)
        self._floor = min(state.floor, self._anchor)
        self._growth_held = state.growth_held
        self._observed.clear()
        self._figures = None
        self._speeds = [_Speed() for _ in self._live]
        if len(state.seconds) == len(state.suspects) == len(self._live):
            measured = zip(self._speeds, state.seconds, state.suspects, strict=True)
            for speed, seconds, suspect in measured:
                speed.seconds, speed.suspect = seconds, suspect

    def state_dict(self) -> dict[str, Any]:
        """Anchor and speeds as plain numbers and lists; a speed of 0.0 is not measured."""
        found: dict[str, Any] = encode(self.state)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore anchor and speeds from :meth:`state_dict`.

        Limits, hint and live ranks are kept. From a state of another world size only the anchor is
        restored.

        Raises:
            ValueError: The state has another form.
        """
        self.restore(decode(ElCheState, state, "the state"))

    def _derived_values(self) -> _Derived:
        """Values derived from anchor and speeds, cached until one of them changes."""
        if self._figures is None:
            seconds = self._seconds()
            paces = self._relative_speeds(seconds)
            anchor, total = self._anchor, sum(paces) or 1.0
            self._figures = _Derived(
                seconds_per_batch=seconds,
                batch_counts=tuple([(round(anchor * p) or 1) if p else 0 for p in paces]),
                shares=tuple([p / total for p in paces]),
            )
        return self._figures

    def _seconds(self) -> tuple[float, ...] | None:
        live = self._live
        if True not in live:
            return None
        seconds = [
            speed.seconds if alive else 0.0 for speed, alive in zip(self._speeds, live, strict=True)
        ]
        # 0.0 for dead ranks, and for live ranks that are not measured.
        return tuple(seconds) if seconds.count(0.0) == live.count(False) else None

    def _relative_speeds(self, seconds: tuple[float, ...] | None) -> list[float]:
        if seconds is not None:
            slowest = max(seconds)
            return [slowest / s if s else 0.0 for s in seconds]
        paces = [1.0] * len(self._live)
        if self._hint is not None and self._live[self._hint[0]]:
            paces = [float(self._hint[1])] * len(self._live)
            paces[self._hint[0]] = 1.0
        return [pace if alive else 0.0 for pace, alive in zip(paces, self._live, strict=True)]

    def _fit_anchor(self, sync_in_batches: float, wait_in_batches: float) -> None:
        """Fit the anchor to the cost of a round, in batches of the slowest rank.

        The cost is related to a full round of ``anchor`` batches, so that a round shortened by the
        end of an epoch does not look expensive.
        """
        self._figures = None
        overhead = sync_in_batches / self._anchor
        if overhead > self._overhead_target:
            if not self._growth_held:
                # The margin absorbs rounding errors just above an integer.
                target = min(sync_in_batches / self._overhead_target, 2.0 * self._anchor)
                self._anchor = min(math.ceil(target * (1 - 1e-9)), self._max_anchor)
        elif overhead < self._overhead_target / 2:
            lowered = self._lowered_anchor(sync_in_batches, wait_in_batches)
            self._anchor = max(self._floor, lowered)

    def _lowered_anchor(self, sync_in_batches: float, wait_in_batches: float) -> int:
        """The lowered anchor: by a tenth above its initial value, by at most half below."""
        if self._anchor > self._start:
            return max(self._start, self._anchor - max(1, self._anchor // 10))
        target = self._overhead_target
        cheap = math.ceil(max(2 * sync_in_batches, sync_in_batches + wait_in_batches) / target)
        return min(self._anchor, max(cheap, self._anchor // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """Values derived from the anchor and the speeds."""

    seconds_per_batch: tuple[float, ...] | None
    batch_counts: tuple[int, ...]
    shares: tuple[float, ...]


_SPEED_WEIGHT = 0.5
"""Weight of a new measurement in the moving average."""

_OUTLIER_FACTOR = 2.0
"""A measurement off by more than this factor is an outlier, unless confirmed by the next."""

_CLAMPED_FACTOR = 1.5
"""An outlier is clamped to this factor."""

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ElCheState:
    """Saved state of :class:`ElChe`.

    Attributes:
        seconds: Seconds per batch of each rank; 0.0: not measured.
        suspects: Of each rank, 1 or -1 if its last measurement was far above or below, else 0.
    """

    anchor: Annotated[int, 1]
    floor: Annotated[int, 1]
    growth_held: bool
    seconds: tuple[Seconds, ...]
    suspects: tuple[int, ...]


class _Speed:
    """Moving average of a rank's seconds per batch; 0.0 before the first measurement."""

    __slots__ = ("seconds", "suspect")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.suspect = 0
        """1 or -1 if the last measurement was far above or below, else 0."""

    def add(self, seconds: float) -> None:
        seconds = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        if not self.seconds:
            self.seconds = seconds
            return
        off = seconds / self.seconds
        suspect = 1 if off > _OUTLIER_FACTOR else -1 if off < 1 / _OUTLIER_FACTOR else 0
        if suspect and suspect == self.suspect:
            self.seconds, self.suspect = seconds, 0
            return
        if suspect:
            seconds = self.seconds * _CLAMPED_FACTOR**suspect
        self.seconds += _SPEED_WEIGHT * (seconds - self.seconds)
        self.suspect = suspect


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _check(
    world_size: int,
    anchors: tuple[int, int, int],
    overhead_target: float,
    speed_hint: tuple[int, float] | None,
) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    min_anchor, anchor, max_anchor = anchors
    if not 1 <= anchor <= max_anchor:
        raise ValueError(
            f"anchor must lie in 1..max_anchor, got anchor {anchor} and max_anchor {max_anchor}; "
            "lower the one or raise the other"
        )
    if not 1 <= min_anchor <= anchor:
        raise ValueError(
            f"min_anchor must lie in 1..anchor, got min_anchor {min_anchor} and anchor {anchor}; "
            "lower the one or raise the other"
        )
    if not 0.01 <= overhead_target <= 0.50:
        raise ValueError(
            f"overhead_target must lie in 0.01 to 0.50, got {overhead_target}; 0.10 lets "
            "averaging cost a tenth of the computing time"
        )
    if speed_hint is None:
        return
    rank, ratio = speed_hint
    if not 0 <= rank < world_size:
        raise ValueError(
            f"speed_hint names rank {rank}: give the slow one of the ranks 0 to {world_size - 1}"
        )
    if not (math.isfinite(ratio) and ratio >= 1):
        raise ValueError(
            f"speed_hint needs a ratio of at least 1 (how much faster the others are), got {ratio}"
        )


_CONSECUTIVE_ROUNDS = 3
_TREND_ROUNDS = 10
_MIN_TREND = 33
"""Mann-Kendall statistic of these rounds, 45 at most; independent values reach it in 0.1 %."""
_MIN_RISE = 3.0
"""Factor by which their Theil-Sen line, fitted to logarithms, rises."""
_MIN_LEVEL = 0.1
"""Share of the threshold below which growth has no effect."""


class ConvergenceGuard:
    """Adjusts the cadence by the divergence of the replicas in each averaging round.

    Divergence above the threshold in one round: :attr:`CadenceAction.SUPPRESS_GROWTH`. In three
    consecutive rounds, with the last no smaller than the first:
    :attr:`CadenceAction.NUDGE_DOWN`, after which the count starts again. The same if divergence
    relative to the length of the round triples over ten rounds, in a steady trend, and
    exceeds a tenth of the threshold.

    Args:
        threshold: Largest acceptable divergence, ``||pre - post|| / ||post||``.
        enabled: ``False``: every round is stable.

    Attributes:
        state: The rounds so far; may be set to that of another guard.

    Raises:
        ValueError: ``threshold`` is not a positive finite number.
    """

    def __init__(self, threshold: float = 0.05, *, enabled: bool = True) -> None:
        if not (math.isfinite(threshold) and threshold > 0):
            raise ValueError(
                f"divergence threshold must be a positive number, got {threshold!r}; "
                "0.05 is the default; to disable the guard, pass enabled=False"
            )
        self._threshold = threshold
        self._enabled = enabled
        self.state = GuardState()

    def report(self, divergences: Sequence[float], length: float = 1.0) -> CadenceAction:
        """Record a round.

        Args:
            divergences: The divergence of each rank in the round. A value that is not finite
                is above the threshold. Empty, if not measured: stable, and not counted.
            length: Batches of the round times the learning rate: divergence that is proportional
                to it does not grow.

        Returns:
            The action for the cadence.
        """
        if not self._enabled or not divergences:
            return CadenceAction.STABLE
        worst = max(d if math.isfinite(d) else math.inf for d in divergences)
        above = (*self.state.above, worst)[-_CONSECUTIVE_ROUNDS:]
        above = above if worst > self._threshold else ()
        rate, rates = worst / length if length > 0 else math.inf, self.state.rates
        is_measured = 0 < rate < math.inf
        if is_measured:
            rates = (*rates, rate)[-_TREND_ROUNDS:]
        stays = len(above) == _CONSECUTIVE_ROUNDS and above[-1] >= above[0]
        if stays or (is_measured and self._has_grown(worst, rates)):
            self.state = GuardState()
            return CadenceAction.NUDGE_DOWN
        self.state = GuardState(above=above, rates=rates)
        return CadenceAction.SUPPRESS_GROWTH if above else CadenceAction.STABLE

    def _has_grown(self, worst: float, rates: Sequence[float]) -> bool:
        if len(rates) < _TREND_ROUNDS or worst < _MIN_LEVEL * self._threshold:
            return False
        pairs = list(combinations(enumerate(map(math.log, rates)), 2))
        trend = sum((b > a) - (b < a) for (_, a), (_, b) in pairs)
        slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs)
        return trend >= _MIN_TREND and slope * (_TREND_ROUNDS - 1) >= math.log(_MIN_RISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """Saved state of :class:`ConvergenceGuard`.

    Attributes:
        above: Divergences of the last consecutive rounds above the threshold.
        rates: Divergences of the last rounds relative to the length of each.
    """

    above: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()


class CadenceAction(Enum):
    """Action of the cadence on a round's divergence."""

    STABLE = "stable"
    """The anchor may grow."""
    SUPPRESS_GROWTH = "suppress_growth"
    """The anchor must not grow."""
    NUDGE_DOWN = "nudge_down"
    """The anchor should come down."""


_OVERRUN = 4
"""Multiple of its count after which a rank stops waiting for one that makes no progress."""


class RoundSchedule:
    """Decides when an averaging round is due, and how many batches each rank may run ahead.

    Every rule is a function of the present state and is evaluated after each event, so that no
    wake-up can be lost: a round that is due stays due until it starts.

    Args:
        elche: Batch counts of the ranks between two rounds.
        has_work: True if a rank has batches assigned.
    """

    def __init__(
        self, config: CoordinatorConfig, elche: ElChe, has_work: Callable[[int], bool]
    ) -> None:
        self._config = config
        self._elche = elche
        self._has_work = has_work
        self._pacer: int | None = None

    def is_round_due(self, live: Sequence[RankProgress]) -> bool:
        """True if the policy calls for an averaging round now."""
        trained, busy = False, []
        for r in live:
            trained = trained or r.since_round > 0
            if not r.parked and self._has_work(r.rank):
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
                slow = self._slowest(busy, seconds)
                if slow.since_round >= counts[slow.rank]:
                    return True
                reached = counts[slow.rank] * seconds[slow.rank]
                return slow.since_round > 0 and slow.compute_since_round >= reached
        return all(r.since_round >= counts[r.rank] for r in busy)

    def _slowest(self, busy: Sequence[RankProgress], seconds: Sequence[float]) -> RankProgress:
        for r in busy:
            if r.rank == self._pacer:
                return r
        return max(busy, key=lambda r: seconds[r.rank])

    def new_round(self) -> None:
        """Choose the rank whose count makes the next round due, before budgets are sent.

        Under ``CADENCE`` that is the slowest rank: the others need not wake the coordinator at
        their count.
        """
        cadence = self._config.policy is ApplyPolicy.CADENCE
        self._pacer = self._elche.slowest if cadence else None

    @property
    def any_limit(self) -> bool:
        """True if the settings limit any rank."""
        return self._config.policy is ApplyPolicy.ASYNC or self._config.max_batch_diff is not None

    def report_after(self, rank: int) -> int | None:
        """Batches after which a rank must report; ``None``: only at its regular intervals."""
        if self._config.max_batch_diff is not None:
            return 1
        return self._elche.batch_counts[rank] if self._pacer in (None, rank) else None

    def initial_limit(self, rank: int) -> int | None:
        """The limit at the start of a round, when no rank has trained in it."""
        limit = self._overshoot_limit(rank)
        lead = self._config.max_batch_diff
        if lead is not None:
            limit = lead + 1 if limit is None else min(limit, lead + 1)
        return limit

    def limit(self, rank: RankProgress, live: Sequence[RankProgress]) -> int | None:
        """The present limit of a rank, in batches since its last round; ``None``: no limit.

        A rank without work cannot catch up, so it does not hold back the others.
        """
        limit = self._overshoot_limit(rank.rank)
        lead = self._config.max_batch_diff
        if lead is None:
            return limit
        others = [r.since_round for r in live if r is not rank and self._has_work(r.rank)]
        if not others:
            return limit
        behind = min(others) + lead + 1
        return behind if limit is None else min(limit, behind)

    def _overshoot_limit(self, rank: int) -> int | None:
        if self._config.policy is not ApplyPolicy.ASYNC:
            return None
        count = self._elche.batch_counts[rank]
        overshoot = self._config.max_overshoot
        return count + (max(2, count // 4) if overshoot is None else overshoot)

    def limit_is_current(self, rank: int, last_sent: int | None, limit: int | None) -> bool:
        """True if the last limit sent is close enough that no message is needed.

        Batch counts change slightly with each measurement. A limit that no setting fixes need
        not be raised while half of the overshoot is left to the rank.
        """
        c = self._config
        exact = c.max_batch_diff is not None or c.max_overshoot is not None
        if exact or last_sent is None or limit is None:
            return last_sent == limit
        return 0 <= 2 * (limit - last_sent) <= limit - self._elche.batch_counts[rank]


class RankProgress(Protocol):
    """Counters of a rank since its last round; see :class:`~coordinator.run_state.Rank`."""

    rank: int
    since_round: int
    compute_since_round: float
    parked: bool
