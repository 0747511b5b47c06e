"""Each rank's share of a global batch, from measured speed and memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.splitting import (
    Cost,
    seconds,
    split_by_cost,
    split_by_ratio,
    split_like,
    split_within,
)
from coordinator.steps import Pieces, StepPlan

_TIME_WEIGHT = 0.3
"""Weight of a new measurement in the moving average of the seconds for a sample."""
_OUTLIER_SHARE = 0.25
"""Relative deviation of an outlier; a second one in the same direction is a new speed."""
_MIN_GAIN = 0.03
"""Share of the step time that new sizes must save: repeated sizes reuse memory and kernels."""
_PROBE = 2
"""Ratio of the faster and the slower ranks in the second sizes that are measured."""
_MIN_SIZE_DIFFERENCE = 0.1
"""Relative difference of two sizes from which the fixed part of the time is fitted."""
_MAX_FIXED_SHARE = 0.9
"""Upper bound of the fixed part, as a share of the time."""
_IDLE_GAIN = 0.1
"""A rank idles if the smallest piece on it delays the step by at least this share."""
PROBE_PLANS, MAX_PROBE_PLANS = 20, 1280
"""Plans until an idle rank is probed, at first and at most; doubled each time."""
IMBALANCE_RATIO = 1.15
"""Ranks are unequal if the slowest takes this multiple of the fastest one's time."""
MIN_PLACEMENT_BATCHES = 50
"""Batches of each rank until evaluations are placed by measured cost."""
_OUT_OF_MEMORY_FACTOR = 0.8
"""A device that ran out of memory on a piece receives at most this share of it."""


class Shares:
    """Tracks the speed of each rank and sizes its piece of the global batches.

    The time of ``n`` samples is modelled as ``a + b n``. The first measurement of a rank
    is discarded; the second is of the first pieces, the third of other ones, and both together
    give ``a``. From then on ``b`` is a moving average of the measurements, replaced at once by the
    second of two outliers in a row; these lower ``a`` if their sizes differ. Sizes change only if
    that saves a few percent of the step, and return to the first ones if these are as good. A rank
    that delays the others even with the smallest piece receives none, and is probed with that
    piece at growing intervals.

    Deterministic and not thread-safe: no clock, no thread.

    Args:
        first: Proportions of the first pieces; ``None``: equal ones.
        fixed: Keep the proportions of the first pieces, whatever is measured.
        min_piece: See the attribute.
        may_idle: True if a slow rank may have no samples.

    Attributes:
        min_piece: Minimum samples of a piece. Pieces are smaller only where the total or the limits
            of the ranks allow no others; a rank whose limit is below idles.
        num_plans: Number of calls of :meth:`sizes`.
    """

    def __init__(
        self,
        world_size: int,
        first: Sequence[float] | None = None,
        *,
        fixed: bool = False,
        min_piece: int = 1,
        may_idle: bool = True,
    ) -> None:
        self.min_piece = min_piece
        self._may_idle = may_idle
        self._first = first or [1] * world_size
        self._is_fixed = fixed
        self._fits = [_TimeFit() for _ in range(world_size)]
        self._ranks: tuple[int, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._has_probed = False
        self._failed: dict[int, int] = {}  # limits after out-of-memory errors
        self._limits: dict[int, int] = {}  # these and ``_bounds`` together
        self._bounds: dict[int, int] = {}  # limits by measured memory
        self._idle_ranks: dict[int, _IdleRank] = {}
        self.num_plans = 0

    def observe(self, rank: int, num_samples: float, compute_s: float) -> None:
        """Record the mean time of some micro-batches of a rank.

        Args:
            num_samples: Mean number of samples in one of them.
            compute_s: Mean seconds of one of them, with the rank's own lasting waits for data;
                waits for peers excluded.
        """
        if num_samples > 0 and math.isfinite(compute_s) and compute_s > 0:
            self._fits[rank].add(num_samples, compute_s, anew=rank in self._idle_ranks)

    def cost(self, rank: int) -> Cost | None:
        """The fitted cost of a rank; ``None``: not measured yet."""
        fit = self._fits[rank]
        return (fit.fixed_s, fit.sample_s) if fit.is_fitted else None

    @property
    def current(self) -> dict[int, int]:
        """The size of each rank's piece in the last plan."""
        return dict(zip(self._ranks, self._sizes, strict=True))

    def record_out_of_memory(self, rank: int, num_samples: int) -> bool:
        """Record that a rank ran out of memory on a piece: its later ones are smaller.

        Returns:
            False if the piece was above the rank's limit already, because the remaining ranks
            have no memory for the global batch.
        """
        limit = self._failed.get(rank, num_samples)
        most = max(1, min(num_samples - 1, int(_OUT_OF_MEMORY_FACTOR * num_samples)))
        self._failed[rank] = min(most, limit)
        self._set_limits()
        return num_samples <= limit

    def set_memory_limit(self, rank: int, most: int | None) -> None:
        """Limit the pieces of a rank by its measured memory.

        Args:
            most: Maximum samples, at least 1; ``None``: not measured. Replaces the last one.
        """
        if most is not None and most != self._bounds.get(rank):
            self._bounds[rank] = most
            self._set_limits()

    def _set_limits(self) -> None:
        self._limits = dict(self._bounds)
        for rank, most in self._failed.items():
            self._limits[rank] = min(most, self._limits.get(rank, most))

    def may_fit(self, total: int, ranks: Sequence[int]) -> bool:
        """True unless out-of-memory errors so far rule out ``total`` samples on these ranks."""
        return sum(self._failed.get(rank, total) for rank in ranks) >= total

    def fits(self, total: int, ranks: Sequence[int]) -> bool:
        """True if ``total`` samples are within the known limits of these ranks."""
        return sum(self._limits.get(rank, total) for rank in ranks) >= total

    def sizes(self, total: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Choose the pieces of the next global batches.

        Args:
            total: Samples in one global batch, at least one for each rank.

        Returns:
            The size of each rank's piece; their sum is ``total``. 0: the rank idles.
        """
        self.num_plans += 1
        self._sizes = self._next(total, tuple(ranks))
        self._ranks = tuple(ranks)
        return self._sizes

    def short_sizes(self, total: int, sizes: Mapping[int, int]) -> tuple[int, ...]:
        """Choose the pieces of a short global batch.

        Args:
            sizes: The pieces of its ranks in a whole one.

        Returns:
            The size of each rank's piece. Fixed pieces are as large as in a whole one, from the
            first rank on, until no sample is left. Others are in the proportions of a whole one,
            within the limits of the ranks if their sum allows; the first ranks have pieces, as few
            of them as keep these about as large as in a whole one.
        """
        ranks = list(sizes)
        if self._is_fixed and total <= sum(sizes.values()):
            return self._in_order(total, list(sizes.values()))
        num = -(-total * len(ranks) // max(1, sum(sizes.values())))
        busy, first = ([r for r in some if sizes[r]] for some in (ranks, ranks[:num]))
        splits = [
            self._split_like(total, {rank: sizes[rank] or 1 for rank in some})
            for some in (first, busy, ranks)
            if some
        ]
        found = min(splits, key=lambda found: (not self._is_within(found), self._num_small(found)))
        return tuple(found.get(rank, 0) for rank in ranks)

    def pieces(
        self, num_samples: int, num_slices: int, sizes: Mapping[int, int], *, is_short: bool = False
    ) -> Pieces:
        """Split a global batch into micro-batches, and these into pieces.

        Args:
            num_slices: Micro-batches of a whole one; a short one has as many, which may be empty.
            sizes: The pieces of the ranks in a whole micro-batch.
            is_short: It has fewer samples than a whole one.
        """
        whole = sum(sizes.values())
        num = min(num_slices, -(-num_samples // whole)) if is_short else num_slices
        num = min(num, max(1, num_samples // self.min_piece))
        return tuple(
            tuple(sizes.values() if total == whole else self.short_sizes(total, sizes))
            for total in split_by_ratio(num_samples, [1] * num)
        ) + ((0,) * len(sizes),) * (num_slices - num)

    def _in_order(self, total: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Pieces of these sizes from the first on, the last of which is short."""
        parts, least = [0] * len(sizes), self.min_piece
        for i, size in enumerate(sizes):
            parts[i] = min(size, total)
            total -= parts[i]
            if parts[i] and 0 < total < least:  # too few for a piece of their own
                moved = least - total if parts[i] >= 2 * least - total else -total
                parts[i] -= moved
                total += moved
        return tuple(parts)

    def _next(self, total: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        costs = {rank: cost for rank in ranks if (cost := self.cost(rank)) is not None}
        first = self._split_like(total, {rank: self._first[rank] for rank in ranks})
        if len(costs) < len(ranks) or self._is_fixed:
            sizes = first
        elif self._has_probed:
            sizes = self._by_cost(total, ranks, costs, first)
        else:
            self._has_probed = True
            sizes = self._second_sizes(total, costs, first)
        return tuple(sizes.values())

    def _second_sizes(
        self, total: int, costs: Mapping[int, Cost], first: Mapping[int, int]
    ) -> dict[int, int]:
        """Sizes after the first ones, different enough to fit the fixed part of the time."""
        by_speed = self._split(total, list(first), costs)
        if all(_differ(by_speed[rank], n) for rank, n in first.items() if n):
            return by_speed
        fastest_first = sorted(first, key=lambda rank: costs[rank][1])
        faster = fastest_first[: len(first) // 2]
        ratios = {r: self._first[r] * (_PROBE if r in faster else 1) for r in first}
        return self._split_like(total, ratios)

    def _by_cost(
        self,
        total: int,
        ranks: tuple[int, ...],
        costs: Mapping[int, Cost],
        first: dict[int, int],
    ) -> dict[int, int]:
        best = self._with_idle_ranks(
            total, ranks, costs, self._without_slow_ranks(total, ranks, costs)
        )
        probed = self._with_probe(best)
        if probed != best:
            return probed
        kept = [first]
        if ranks == self._ranks and sum(self._sizes) == total:
            kept.insert(0, self.current)
        for sizes in kept:
            is_allowed = self._num_small(sizes) <= self._num_small(best) and self._is_within(sizes)
            if is_allowed and _step_s(costs, sizes) * (1 - _MIN_GAIN) <= _step_s(costs, best):
                return sizes
        return best

    def _split(self, total: int, ranks: Sequence[int], costs: Mapping[int, Cost]) -> dict[int, int]:
        return self._split_within(
            total,
            ranks,
            lambda rank: seconds(costs[rank], self.min_piece),
            lambda n, free, least: split_by_cost(n, [costs[r] for r in free], least),
        )

    def _split_like(self, total: int, ratios: Mapping[int, float]) -> dict[int, int]:
        """Split by ratio, with none for ranks of ratio 0 beside others."""
        some = {rank: ratio for rank, ratio in ratios.items() if ratio} or dict.fromkeys(ratios, 1)
        found = self._split_within(
            total,
            list(some),
            lambda rank: -some[rank],
            lambda n, free, least: split_like(n, [some[r] for r in free], least),
        )
        return dict.fromkeys(ratios, 0) | found

    def _split_within(
        self,
        total: int,
        ranks: Sequence[int],
        cost: Callable[[int], float],
        split: Callable[[int, Sequence[int], int], Sequence[int]],
    ) -> dict[int, int]:
        """Split ``total`` samples in pieces of at least :attr:`min_piece`, or none for a rank.

        Args:
            total: Samples, at least one.
            cost: If they cannot all have a piece, those of the least cost are chosen.
            split: Splits samples between ranks, with at least some for each; without limits.

        Returns:
            The size of each rank's piece.
        """
        least = min(self.min_piece, total)
        limits = {rank: self._limits.get(rank, total) for rank in ranks}

        def choose(cost: Callable[[int], float], least: int) -> list[int]:
            able = sorted((rank for rank in ranks if limits[rank] >= least), key=cost)
            return sorted(able[: total // least], key=ranks.index)

        some = choose(cost, least)
        if not self.fits(total, some):
            some = choose(lambda rank: -limits[rank], least)
        if not self.fits(total, some):
            some = choose(lambda rank: -limits[rank], 1)
            if self.fits(total, some):
                least = 1
            else:  # no sizes are within the limits
                limits = {rank: max(n, least) for rank, n in limits.items()}
                some = choose(cost, least)
        parts = split_within(total, some, limits, lambda n, free: split(n, free, least))
        return dict.fromkeys(ranks, 0) | dict(zip(some, parts, strict=True))

    def _is_within(self, sizes: Mapping[int, int]) -> bool:
        return all(n <= self._limits.get(rank, n) for rank, n in sizes.items())

    def _num_small(self, sizes: Mapping[int, int]) -> int:
        """Number of pieces below the minimum."""
        return sum(0 < n < self.min_piece for n in sizes.values())

    def _without_slow_ranks(
        self, total: int, ranks: Sequence[int], costs: Mapping[int, Cost]
    ) -> dict[int, int]:
        """The best sizes, with 0 for ranks that delay the others with the smallest piece.

        Equally slow ranks are left out together: leaving out one of them gains nothing.
        """
        best = sizes = self._split(total, ranks, costs)
        while self._may_idle:
            some = [rank for rank in ranks if sizes[rank]]
            slow = max(some, key=lambda rank: seconds(costs[rank], sizes[rank]))
            others = [rank for rank in some if rank != slow]
            if sizes[slow] > self.min_piece or not others or not self.fits(total, others):
                return best
            if self._fits[slow].least > self.min_piece:
                return best  # the smallest piece on it is measured first
            sizes = dict.fromkeys(ranks, 0) | self._split(total, others, costs)
            if _step_s(costs, sizes) <= (1 - _IDLE_GAIN) * _step_s(costs, best):
                best = sizes
        return best

    def _with_idle_ranks(
        self,
        total: int,
        ranks: tuple[int, ...],
        costs: Mapping[int, Cost],
        best: dict[int, int],
    ) -> dict[int, int]:
        """Add idle ranks one by one to the sizes as long as the step gets shorter.

        The present sizes are tried as a start as well: where several ranks idle, ``best`` may
        include a slow one in place of a faster one.
        """
        if ranks == self._ranks and sum(self._sizes) == total:
            best = self._with_one_idle_rank(total, ranks, costs, best, self.current)
        while (better := self._with_one_idle_rank(total, ranks, costs, best, best)) is not best:
            best = better
        return best

    def _with_one_idle_rank(
        self,
        total: int,
        ranks: tuple[int, ...],
        costs: Mapping[int, Cost],
        best: dict[int, int],
        sizes: Mapping[int, int],
    ) -> dict[int, int]:
        """``best``, or better sizes for the busy ranks of ``sizes`` and one idle rank."""
        some = {rank for rank, n in sizes.items() if n}
        for rank in ranks:
            more = [r for r in ranks if r in some or r == rank]
            if rank not in some and self.fits(total, more):
                larger = dict.fromkeys(ranks, 0) | self._split(total, more, costs)
                best = min(best, larger, key=lambda s: (self._num_small(s), _step_s(costs, s)))
        return best

    def _with_probe(self, best: dict[int, int]) -> dict[int, int]:
        """The sizes with the smallest piece for an idle rank that is due to be probed."""
        least = self.min_piece
        self._idle_ranks = {
            r: self._idle_ranks.get(r, _IdleRank()) for r, n in best.items() if n == 0
        }
        for rank, idle in self._idle_ranks.items():
            idle.num_plans += 1
            most = max(best, key=lambda r: best[r])
            if self._limits.get(rank, least) < least or best[most] < 2 * least:
                continue
            if idle.num_plans > idle.interval:
                idle.num_plans = 0
                idle.interval = min(2 * idle.interval, MAX_PROBE_PLANS)
                return {**best, rank: least, most: best[most] - least}
        return best


class PieceTimes:
    """Times of the ranks' pieces in the plans in progress."""

    def __init__(self) -> None:
        self._untimed: dict[int, deque[int]] = {}  # pieces, by their samples
        self._timed: dict[int, tuple[int, int, float]] = {}

    def expect(self, plan: StepPlan, *, anew: bool) -> None:
        """Add the pieces of a plan.

        Args:
            anew: The times of earlier plans are complete, or lost by a death.
        """
        if anew:
            self._untimed, self._timed = {}, {}
        for rank in plan.ranks:
            sizes = (stop - start for _, (start, stop) in plan.pieces(rank))
            self._untimed.setdefault(rank, deque()).extend(filter(None, sizes))

    def record(self, rank: int, num_pieces: int, compute_s: float) -> None:
        """Record the compute time of a rank's next pieces with samples; it may lag behind."""
        untimed = self._untimed.get(rank, deque())
        num_pieces = min(num_pieces, len(untimed))
        num, samples, seconds = self._timed.get(rank, (0, 0, 0.0))
        samples += sum(untimed.popleft() for _ in range(num_pieces))
        self._timed[rank] = (num + num_pieces, samples, seconds + compute_s)

    def take(self, rank: int) -> tuple[float, float] | None:
        """Mean samples and seconds of a rank's pieces since the last call; ``None``: none timed."""
        num, samples, seconds = self._timed.pop(rank, (0, 0, 0.0))
        return (samples / num, seconds / num) if num else None


def _step_s(costs: Mapping[int, Cost], sizes: Mapping[int, int]) -> float:
    return max(seconds(costs[rank], n) for rank, n in sizes.items() if n)


@dataclass(slots=True)
class _TimeFit:
    """The time of a piece on one rank: ``fixed_s + sample_s * n``."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    num_seen: int = 0
    first: tuple[float, float] | None = None
    last: tuple[float, float] = (math.inf, 0.0)
    was_off: int = 0
    least: float = math.inf
    """The fewest samples measured: for fewer, the fixed part is extrapolated."""

    @property
    def is_fitted(self) -> bool:
        return self.sample_s > 0

    def add(self, n: float, time_s: float, *, anew: bool = False) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            return  # in the first steps libraries load and allocators grow
        self.least = min(self.least, n)
        if self.first is not None and _differ(n, self.first[0]):
            fixed_s = _intercept(self.first, (n, time_s))
            self.fixed_s = min(fixed_s, _MAX_FIXED_SHARE * min(time_s, self.first[1]))
            self.sample_s = (time_s - self.fixed_s) / n
            self.first = None
        elif not self.is_fitted:
            self.first = (n, time_s)
            self.sample_s = time_s / n
        else:
            self._update(n, time_s, anew=anew)

    def _update(self, n: float, time_s: float, *, anew: bool) -> None:
        self.fixed_s = min(self.fixed_s, _MAX_FIXED_SHARE * time_s)
        ratio = time_s / seconds((self.fixed_s, self.sample_s), n)
        off = 0 if abs(math.log(ratio)) <= math.log1p(_OUTLIER_SHARE) else (1 if ratio > 1 else -1)
        is_new_speed = off != 0 and off == self.was_off
        if is_new_speed and _differ(n, self.last[0]):
            # With too large a fixed part the sizes would oscillate.
            self.fixed_s = min(self.fixed_s, _intercept(self.last, (n, time_s)))
        weight = 1.0 if is_new_speed or anew else _TIME_WEIGHT
        self.was_off = off
        self.last = (n, time_s)
        new = (time_s - self.fixed_s) / n
        self.sample_s += weight * (new - self.sample_s)


def _differ(n: float, other: float) -> bool:
    """True if the fixed part of the time can be fitted to pieces of these sizes."""
    return abs(n / other - 1) > _MIN_SIZE_DIFFERENCE


def _intercept(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds of a piece of no samples, by the samples and seconds of two; not negative."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return max(0.0, one[1] - slope * one[0])


@dataclass(slots=True)
class _IdleRank:
    """A rank without samples: plans between two probes, and plans since the last one."""

    interval: int = PROBE_PLANS
    num_plans: int = 0
