"""Each rank's share of a global batch, by measured speed and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.splitting import Cost, seconds, split_by_cost, split_like, split_within

_TIME_WEIGHT = 0.3
"""Weight of a new measurement in the moving average of the seconds for a sample."""
_OUTLIER_SHARE = 0.25
"""A time that is off by more than this part is an outlier, or the second time a new speed."""
_MIN_GAIN = 0.03
"""Part of the step that new sizes have to save: sizes that repeat are worth something."""
_PROBE = (2, 1)
"""Ratios of neighbouring ranks in the second size that is measured."""
_MIN_SIZE_DIFFERENCE = 0.1
"""Two sizes tell the fixed part of the time if they differ by more than this part."""
_MAX_FIXED_SHARE = 0.9
"""The fixed part of the time is at most this much of it."""
_IDLE_GAIN = 0.1
"""A rank gets nothing where the step without it is shorter by this part, and 1 sample delays it."""
PROBE_PLANS, MAX_PROBE_PLANS = 20, 1280
"""Plans until such a rank gets 1 sample again, at first and at most: twice as many each time."""
CHECK_BATCHES = 200
"""Batches of each rank behind a look at whether equal batches suit the ranks."""
IMBALANCE_RATIO = 1.15
"""Ranks are unequal if the slowest takes this many times the fastest one's time."""
_OUT_OF_MEMORY_FACTOR = 0.8
"""A device that had no memory for a piece gets no more than this part of it."""


class Shares:
    """Follows the speed of each rank and says how large its piece of a global batch is.

    The step time is not linear in the piece, so that ``a + b n`` is fitted. Each rank's first
    measurement is left out; the second is of equal pieces, the third of unequal ones, and
    both together give ``a``. From there ``b`` follows what is measured: smoothly, but at once
    where a time is far off for the second time in a row. New sizes are given only where they
    save a few percent of the step. A rank that was seen to delay the others with 1 sample gets
    nothing, and 1 sample in a plan now and then, to see whether it still does.

    Deterministic and not thread-safe: no clock and no thread of its own.

    Args:
        world_size: Number of ranks.
        first: Sizes of the first pieces; ``None``: equal ones.
        fixed: Whether pieces stay like the first ones, whatever is measured.

    Attributes:
        num_plans: How often sizes were given.
    """

    def __init__(
        self, world_size: int, first: Sequence[int] | None = None, *, fixed: bool = False
    ) -> None:
        self._first = first or [1] * world_size
        self._is_fixed = fixed
        self._fits = [_TimeFit() for _ in range(world_size)]
        self._ranks: tuple[int, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._has_probed = False
        self._failed: dict[int, int] = {}  # limits by pieces that were too large
        self._limits: dict[int, int] = {}  # these, and those by measured memory
        self._bounds: dict[int, int] = {}
        self._idle_ranks: dict[int, _IdleRank] = {}
        self.num_plans = 0

    def observe(self, rank: int, num_samples: float, compute_s: float) -> None:
        """Take the mean time of some micro-batches of a rank.

        Args:
            rank: Whose they are.
            num_samples: Samples in one of them, on the mean.
            compute_s: Seconds for one of them, waits for data and peers excluded.
        """
        if num_samples > 0 and math.isfinite(compute_s) and compute_s > 0:
            self._fits[rank].add(num_samples, compute_s, anew=rank in self._idle_ranks)

    def cost(self, rank: int) -> Cost | None:
        """Seconds for a piece and for each sample in it; ``None``: not measured yet."""
        fit = self._fits[rank]
        return (fit.fixed_s, fit.sample_s) if fit.known else None

    @property
    def current(self) -> dict[int, int]:
        """The piece of each rank that was dealt last."""
        return dict(zip(self._ranks, self._sizes, strict=True))

    def limit(self, rank: int, num_samples: int) -> bool:
        """A rank had no memory for a piece of so many samples: it gets smaller ones only.

        Returns:
            Whether that is news; not where its piece was above its limit already, because the
            ranks that were left had no memory for a smaller global batch.
        """
        known = self._failed.get(rank, num_samples)
        most = max(1, min(num_samples - 1, int(_OUT_OF_MEMORY_FACTOR * num_samples)))
        self._failed[rank] = min(most, known)
        self._set_limits()
        return num_samples <= known

    def bound(self, rank: int, most: int | None) -> None:
        """By its measured memory a rank bears pieces of at most so many samples.

        Args:
            rank: Whose memory it is.
            most: Samples, from 1 up; ``None``: not known. The last one counts.
        """
        if most is not None and most != self._bounds.get(rank):
            self._bounds[rank] = most
            self._set_limits()

    def _set_limits(self) -> None:
        self._limits = dict(self._bounds)
        for rank, most in self._failed.items():
            self._limits[rank] = min(most, self._limits.get(rank, most))

    def bearable(self, total: int, ranks: Sequence[int]) -> bool:
        """Whether no failure so far says that these ranks have no memory for so many samples."""
        return sum(self._failed.get(rank, total) for rank in ranks) >= total

    def fits(self, total: int, ranks: Sequence[int]) -> bool:
        """Whether the memory of these ranks bears so many samples, as far as is known."""
        return sum(self._limits.get(rank, total) for rank in ranks) >= total

    def sizes(self, total: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """The pieces of the next global batches.

        Args:
            total: Samples in one of them, at least one for each rank.
            ranks: Who takes part.

        Returns:
            The size of each rank's piece; their sum is ``total``. 0: 1 would delay the others.
        """
        self.num_plans += 1
        self._sizes = self._next(total, tuple(ranks))
        self._ranks = tuple(ranks)
        return self._sizes

    def short(self, total: int, sizes: Mapping[int, int]) -> tuple[int, ...]:
        """The pieces of a smaller global batch, cut like those of a whole one.

        Args:
            total: Samples in it, at least one for each rank.
            sizes: Of its ranks, in a whole one.

        Returns:
            The size of each rank's piece, within its limit if the ranks' memory bears them all.
        """
        chosen = [rank for rank, n in sizes.items() if n]
        if not chosen or not self.fits(total, chosen):
            chosen = list(sizes)
        parts = split_within(
            total,
            chosen,
            self._limits,
            lambda n, free: split_like(n, [sizes[r] or 1 for r in free]),
        )
        found = dict(zip(chosen, parts, strict=True))
        return tuple(found.get(rank, 0) for rank in sizes)

    def _next(self, total: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        costs = {rank: cost for rank in ranks if (cost := self.cost(rank)) is not None}
        ratios = {rank: self._first[rank] for rank in ranks}
        if len(costs) == len(ranks) and not self._is_fixed:
            if self._has_probed:
                return self._by_cost(total, ranks, costs)
            self._has_probed = True
            ratios = {rank: n * _PROBE[i % 2] for i, (rank, n) in enumerate(ratios.items())}
        elif sum(ratios.values()) == total and not self._limits:
            return tuple(ratios.values())
        return split_within(
            total, ranks, self._limits, lambda n, free: split_like(n, [ratios[r] for r in free])
        )

    def _by_cost(
        self, total: int, ranks: tuple[int, ...], costs: Mapping[int, Cost]
    ) -> tuple[int, ...]:
        best = self._with_one_more(total, ranks, costs, self._without_slow(total, ranks, costs))
        probed = self._probed(best)
        if probed != best:
            return tuple(probed.values())
        within = all(
            n <= self._limits.get(r, n) for r, n in zip(self._ranks, self._sizes, strict=True)
        )
        if ranks == self._ranks and sum(self._sizes) == total and within:
            now_s = _step_s(costs, dict(zip(ranks, self._sizes, strict=True)))
            if now_s * (1 - _MIN_GAIN) <= _step_s(costs, best):
                return self._sizes
        return tuple(best.values())

    def _cut(self, total: int, ranks: Sequence[int], costs: Mapping[int, Cost]) -> dict[int, int]:
        parts = split_within(
            total, ranks, self._limits, lambda n, free: split_by_cost(n, [costs[r] for r in free])
        )
        return dict(zip(ranks, parts, strict=True))

    def _without_slow(
        self, total: int, ranks: Sequence[int], costs: Mapping[int, Cost]
    ) -> dict[int, int]:
        """The best sizes, with nothing for ranks that would delay the others with 1 sample.

        Ranks that are slow alike go together: without one of them the step is as long as with it.
        """
        best = sizes = self._cut(total, ranks, costs)
        while True:
            some = [rank for rank in ranks if sizes[rank]]
            slow = max(some, key=lambda rank: seconds(costs[rank], sizes[rank]))
            others = [rank for rank in some if rank != slow]
            if sizes[slow] > 1 or not others or not self.fits(total, others):
                return best
            if self._fits[slow].least > 1:
                return best  # it gets 1 sample first, which shows whether it delays
            sizes = dict.fromkeys(ranks, 0) | self._cut(total, others, costs)
            if _step_s(costs, sizes) <= (1 - _IDLE_GAIN) * _step_s(costs, best):
                best = sizes

    def _with_one_more(
        self,
        total: int,
        ranks: tuple[int, ...],
        costs: Mapping[int, Cost],
        best: dict[int, int],
    ) -> dict[int, int]:
        """The best sizes, or better ones with one more rank, as long as there are any.

        Where several have none, the best sizes may be held up by another one of them: those
        that have some now may be better with one of the others, too.
        """
        if ranks == self._ranks and sum(self._sizes) == total:
            best = self._one_more(total, ranks, costs, best, self.current)
        while (better := self._one_more(total, ranks, costs, best, best)) is not best:
            best = better
        return best

    def _one_more(
        self,
        total: int,
        ranks: tuple[int, ...],
        costs: Mapping[int, Cost],
        best: dict[int, int],
        sizes: Mapping[int, int],
    ) -> dict[int, int]:
        """The best sizes, or better ones for the ranks of ``sizes`` and one that has none there."""
        some = {rank for rank, n in sizes.items() if n}
        for rank in ranks:
            more = [r for r in ranks if r in some or r == rank]
            if rank not in some and self.fits(total, more):
                cut = dict.fromkeys(ranks, 0) | self._cut(total, more, costs)
                best = min(best, cut, key=lambda sizes: _step_s(costs, sizes))
        return best

    def _probed(self, best: dict[int, int]) -> dict[int, int]:
        """The sizes with 1 sample for one rank that has rested long enough."""
        self._idle_ranks = {
            r: self._idle_ranks.get(r, _IdleRank()) for r, n in best.items() if n == 0
        }
        for rank, rest in self._idle_ranks.items():
            rest.num_plans += 1
            most = max(best, key=lambda r: best[r])
            if rest.num_plans > rest.interval and best[most] > 1:
                rest.num_plans = 0
                rest.interval = min(2 * rest.interval, MAX_PROBE_PLANS)
                return {**best, rank: 1, most: best[most] - 1}
        return best


def _step_s(costs: Mapping[int, Cost], sizes: Mapping[int, int]) -> float:
    return max(seconds(costs[rank], n) for rank, n in sizes.items() if n)


@dataclass(slots=True)
class _TimeFit:
    """What one rank takes for a piece: ``fixed_s + sample_s * n``."""

    fixed_s: float = 0.0
    sample_s: float = 0.0
    num_seen: int = 0
    first: tuple[float, float] | None = None
    was_off: int = 0
    least: float = math.inf
    """The fewest samples that were measured: below them the fixed part is a guess."""

    @property
    def known(self) -> bool:
        return self.sample_s > 0

    def add(self, n: float, time_s: float, *, anew: bool = False) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            return  # libraries load and allocators grow in the first steps
        self.least = min(self.least, n)
        if self.first is not None and abs(n / self.first[0] - 1) > _MIN_SIZE_DIFFERENCE:
            slope = (time_s - self.first[1]) / (n - self.first[0])
            fixed_s = self.first[1] - slope * self.first[0]
            self.fixed_s = min(max(fixed_s, 0.0), _MAX_FIXED_SHARE * min(time_s, self.first[1]))
            self.sample_s = (time_s - self.fixed_s) / n
            self.first = None
        elif not self.known:
            self.first = (n, time_s)
            self.sample_s = time_s / n
        else:
            self._follow(n, time_s, anew=anew)

    def _follow(self, n: float, time_s: float, *, anew: bool) -> None:
        self.fixed_s = min(self.fixed_s, _MAX_FIXED_SHARE * time_s)
        new = (time_s - self.fixed_s) / n
        ratio = time_s / seconds((self.fixed_s, self.sample_s), n)
        off = 0 if abs(math.log(ratio)) <= math.log1p(_OUTLIER_SHARE) else (1 if ratio > 1 else -1)
        is_new_speed = off != 0 and off == self.was_off
        weight = 1.0 if is_new_speed or anew else _TIME_WEIGHT
        self.was_off = off
        self.sample_s += weight * (new - self.sample_s)


@dataclass(slots=True)
class _IdleRank:
    """A rank that gets nothing: plans until it is probed, and those since it was."""

    interval: int = PROBE_PLANS
    num_plans: int = 0


class ImbalanceDetector:
    """Notices that ranks take unequal times for equal batches. Not thread-safe.

    Each look covers ``CHECK_BATCHES`` batches of each rank.
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}
        self.noticed = False

    def look(self, totals: Mapping[int, tuple[int, float]]) -> tuple[int, float, float] | None:
        """See whether the ranks are unequal; once they were, there is no further look.

        Args:
            totals: Batches of each live rank so far, and the seconds of computing in them.

        Returns:
            The slowest rank, how many times the fastest one's time it takes, and how many times
            as fast steps would be with shares; ``None``: there is nothing to say.
        """
        if self.noticed:
            return None
        if self._since.keys() != totals.keys() or len(totals) < 2:
            self._since = dict(totals)
            return None
        spans = {r: (n - self._since[r][0], s - self._since[r][1]) for r, (n, s) in totals.items()}
        if min(n for n, _ in spans.values()) < CHECK_BATCHES:
            return None
        self._since = dict(totals)
        times = {rank: compute_s / n for rank, (n, compute_s) in spans.items()}
        slowest = max(times, key=lambda rank: times[rank])
        fastest_s = min(times.values())
        if fastest_s <= 0 or times[slowest] < IMBALANCE_RATIO * fastest_s:
            return None
        self.noticed = True
        gain = times[slowest] * sum(1 / s for s in times.values()) / len(times)
        return slowest, times[slowest] / fastest_s, gain
