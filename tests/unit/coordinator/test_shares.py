"""Shares by measured speed: the split, and its adaptation under a simulated clock."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.shares import PieceTimes, Shares
from coordinator.splitting import seconds, split_by_cost, split_like, split_within
from tests.support.pairs import SCALE, few_examples, pairwise
from tests.support.step_plans import step_plan

STEPS = 6
"""Global steps per measurement."""

a_cost = st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-2))


def longest(costs, sizes):
    return max(seconds(cost, n) for cost, n in zip(costs, sizes, strict=True))


@few_examples
@given(st.lists(a_cost, min_size=1, max_size=6), st.integers(0, 4000))
def test_no_single_move_shortens_the_step(costs, extra):
    total = len(costs) + extra
    sizes = split_by_cost(total, costs)
    assert sum(sizes) == total
    assert min(sizes) >= 1
    whole = longest(costs, sizes)
    last = [i for i in range(len(sizes)) if seconds(costs[i], sizes[i]) == whole]
    if len(last) == 1 and sizes[last[0]] > 1:
        for to in set(range(len(sizes))) - set(last):
            moved = list(sizes)
            moved[last[0]] -= 1
            moved[to] += 1
            assert longest(costs, moved) >= whole * (1 - 1e-9)


@few_examples
@given(st.lists(a_cost, min_size=3, max_size=3), st.integers(3, 14))
def test_the_split_is_optimal(costs, total):
    every = [s for s in product(range(1, total), repeat=3) if sum(s) == total]
    best = min(longest(costs, s) for s in every)
    assert longest(costs, split_by_cost(total, costs)) <= best * (1 + 1e-9)


@few_examples
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(0, 500))
def test_a_short_batch_is_split_in_the_same_proportions(sizes, extra):
    parts = split_like(len(sizes) + extra, sizes)
    assert sum(parts) == len(sizes) + extra
    assert min(parts) >= 1


class Ranks:
    """Ranks with modelled compute times."""

    def __init__(self, costs, total, noise=0.0, seed=0):
        self.costs, self.total = list(costs), total
        self.shares = Shares(len(costs))
        self.ranks = tuple(range(len(costs)))
        self.sizes = self.shares.sizes(total, self.ranks)
        self._noise, self._random = noise, random.Random(seed)

    def train(self, change=None):
        """Train global steps; ``change`` sets costs before the step with its number."""
        at, costs = change or (0, self.costs)
        times = [0.0] * len(costs)
        for step in range(STEPS):
            if step == at:
                self.costs = list(costs)
            for rank, n in enumerate(self.sizes):
                if not n:
                    continue
                noise = 1 + self._noise * self._random.gauss(0, 1)
                times[rank] += max(0.1, noise) * seconds(self.costs[rank], n)
        for rank, n in enumerate(self.sizes):
            self.shares.observe(rank, n, times[rank] / STEPS)
        self.sizes = self.shares.sizes(self.total, self.ranks)

    @property
    def loss(self):
        """Excess of the step time over that of the best sizes."""
        best = longest(self.costs, split_by_cost(self.total, self.costs))
        return longest(self.costs, self.sizes) / best - 1


steady = st.lists(st.tuples(st.floats(0, 0.02), st.floats(2e-4, 2e-3)), min_size=2, max_size=4)


@settings(max_examples=50 if SCALE == 1 else 200)
@given(steady, st.integers(200, 1000))
def test_steady_ranks_come_within_5_percent_of_the_best_in_a_few_measurements(costs, total):
    ranks = Ranks(costs, total)
    for _ in range(8):
        ranks.train()
    for _ in range(20):
        ranks.train()
        assert ranks.loss < 0.05
        assert sum(ranks.sizes) == total


@pairwise(at=range(STEPS), factor=[3, 1 / 3], fixed_s=[0.0, 0.005])
def test_a_change_of_speed_is_followed_within_20_steps(at, factor, fixed_s):
    before = [(fixed_s, 1e-3), (fixed_s, 1e-3)]
    after = [(fixed_s, 1e-3), (fixed_s, factor * 1e-3)]
    ranks = Ranks(before, 128)
    for _ in range(10):
        ranks.train()
    num_steps = STEPS - at
    ranks.train((at, after))
    while num_steps + STEPS <= 20:
        ranks.train()
        num_steps += STEPS
    assert ranks.loss < 0.05


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_noise_of_5_percent_does_not_change_sizes(ratio, seed):
    ranks = Ranks([(0.002, 1e-3), (0.002, ratio * 1e-3)], 128, noise=0.05, seed=seed)
    for _ in range(12):
        ranks.train()
    num_changes = 0
    for _ in range(200):
        before = ranks.sizes
        ranks.train()
        num_changes += ranks.sizes != before
        assert ranks.loss < 0.10
    assert num_changes <= 4


def test_ranks_that_are_nearly_equal_return_to_the_first_sizes():
    ranks = Ranks([(0, 1e-3), (0, 1.04e-3), (0, 1e-3)], 99)
    sizes = set()
    for _ in range(9):
        ranks.train()
        sizes.add(ranks.sizes)
    assert len(sizes) > 1
    assert ranks.sizes == (33, 33, 33)


@pytest.mark.parametrize("costs", [[(0, 1e-3), (0, 3e-3)], [(0, 1.1e-3), (0, 1e-3)]])
def test_the_second_sizes_give_the_faster_rank_more_samples(costs):
    ranks = Ranks(costs, 60)
    for _ in range(2):
        assert ranks.sizes == (30, 30)
        ranks.train()
    assert max(ranks.sizes) >= 40
    assert (ranks.sizes[0] > ranks.sizes[1]) is (costs[0] < costs[1])


def test_sizes_settle_although_the_fixed_part_was_fitted_too_large():
    """The third measurement has waits for data that the second one did not have."""
    ranks = Ranks([(0, 1e-3), (0, 3e-3)], 64)
    for _ in range(2):
        ranks.train()
    ranks.costs[1] = (0, 5e-3)
    sizes = []
    for _ in range(40):
        ranks.train()
        sizes.append(ranks.sizes)
    assert set(sizes[12:]) == {sizes[-1]}
    assert ranks.loss < 0.05


def test_one_outlier_is_forgotten():
    ranks = Ranks([(0, 1e-3), (0, 1e-3)], 128)
    for _ in range(10):
        ranks.train()
    ranks.shares.observe(1, 64, 0.64)
    for _ in range(3):
        ranks.train()
    assert ranks.loss < 0.05


def test_the_first_measurement_of_a_rank_is_discarded():
    shares = Shares(2)
    for rank, first_s in ((0, 5.0), (1, 0.1)):
        shares.observe(rank, 8, first_s)
    assert shares.sizes(16, (0, 1)) == (8, 8)
    for rank in (0, 1):
        shares.observe(rank, 8, 0.1)
    assert shares.cost(0) == shares.cost(1) == (0, 0.1 / 8)


def test_pieces_are_equal_until_each_rank_is_measured():
    shares = Shares(2)
    for _ in range(9):
        shares.observe(0, 8, 0.1)
    assert shares.sizes(16, (0, 1)) == (8, 8)
    assert shares.cost(1) is None


@few_examples
@given(st.lists(st.tuples(a_cost, st.integers(1, 90)), min_size=1, max_size=5), st.data())
def test_no_part_is_above_its_limit(drawn, data):
    costs, limits = [cost for cost, _ in drawn], dict(enumerate(n for _, n in drawn))
    total = data.draw(st.integers(len(costs), sum(limits.values())))
    parts = split_within(
        total, range(len(costs)), limits, lambda n, free: split_by_cost(n, [costs[i] for i in free])
    )
    assert sum(parts) == total
    assert all(1 <= n <= limits[i] for i, n in enumerate(parts))


@pytest.mark.parametrize("num_measured", [0, 1, 2, 3, 9])
def test_pieces_shrink_at_once_after_running_out_of_memory(num_measured):
    ranks = Ranks([(0, 1e-3), (0, 3e-3)], 80)
    for _ in range(num_measured):
        ranks.train()
    ranks.shares.record_out_of_memory(0, 40)
    assert ranks.shares.fits(80, (0, 1))
    for _ in range(5):
        ranks.sizes = ranks.shares.sizes(80, (0, 1))
        assert ranks.sizes[0] <= 32
        ranks.train()
    assert ranks.sizes[0] <= 32
    ranks.shares.record_out_of_memory(1, 59)
    assert not ranks.shares.fits(80, (0, 1))


def test_a_rank_that_delays_the_others_with_one_sample_idles_and_is_probed():
    ranks = Ranks([(0, 1e-3), (0.2, 1e-3), (0, 1e-3)], 60)
    sizes = []
    for _ in range(200):
        ranks.train()
        sizes.append(ranks.sizes)
    assert all(sum(found) == 60 for found in sizes)
    assert sizes[-1] == (30, 0, 30)
    probes = [n for n, found in enumerate(sizes[10:]) if found[1] == 1]
    assert 2 <= len(probes) <= 5
    assert probes[-1] - probes[-2] >= 1.9 * (probes[1] - probes[0])
    ranks.costs[1] = (0, 1e-3)
    for _ in range(400):
        ranks.train()
    assert min(ranks.sizes) >= 19


def allows(total, limits, least):
    """True if some ranks can take ``total`` samples, with ``least`` or more each."""
    able = [n for n in limits if n >= least]
    return any(
        least * num <= total <= sum(some)
        for num in range(1, len(able) + 1)
        for some in combinations(able, num)
    )


@settings(max_examples=75 if SCALE == 1 else 300)
@given(
    st.lists(st.tuples(a_cost, st.integers(1, 30) | st.none()), min_size=1, max_size=5),
    st.integers(1, 40),
    st.data(),
)
def test_batch_statistics_need_two_samples_on_a_rank_or_none(drawn, total, data):
    costs, most = [cost for cost, _ in drawn], [limit for _, limit in drawn]
    ranks = tuple(range(len(costs)))
    shares = Shares(len(costs), min_piece=2)

    def check(total, sizes):
        limits = [total if limit is None else limit for limit in most]
        assert sum(sizes) == total
        if allows(total, limits, 2):
            assert 1 not in sizes
        if allows(total, limits, 1):
            assert all(n <= limit for n, limit in zip(sizes, limits, strict=True))

    at = data.draw(st.integers(0, 6))
    for plan in range(60):
        if plan == at:  # from here on there are limits
            for rank, limit in enumerate(most):
                shares.set_memory_limit(rank, limit)
        sizes = shares.sizes(total, ranks)
        if plan >= at:
            check(total, sizes)
            short = data.draw(st.integers(1, total)) if plan in (at, 59) else total
            check(short, shares.short_sizes(short, dict(enumerate(sizes))))
        elif total > 1:
            assert 1 not in sizes
        for rank, n in enumerate(sizes):
            shares.observe(rank, n, seconds(costs[rank], n))


def test_a_rank_whose_memory_does_not_fit_the_smallest_piece_has_none():
    shares = Shares(2, min_piece=2)
    assert shares.sizes(4, (0, 1)) == (2, 2)
    shares.set_memory_limit(0, 1)
    for _ in range(5):
        for rank, n in enumerate(shares.current.values()):
            shares.observe(rank, n or 1, (n or 1) / 128)
        assert shares.sizes(4, (0, 1)) == (0, 4)


@few_examples
@given(st.lists(a_cost, min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 60))
def test_a_split_by_cost_or_sizes_has_parts_of_at_least_the_minimum(costs, least, extra):
    total = least * len(costs) + extra
    by_cost = split_by_cost(total, costs, least)
    for parts in (by_cost, split_like(total, [1 + i for i in range(len(costs))], least)):
        assert sum(parts) == total
        assert min(parts) >= least


def test_a_slow_rank_has_two_samples_idles_and_is_probed_where_statistics_need_them():
    ranks = Ranks([(0, 1e-3), (0.01, 6e-3)], 16)
    ranks.shares.min_piece = 2
    sizes = []
    for _ in range(60):
        ranks.train()
        sizes.append(ranks.sizes)
    assert sizes[-1] == (16, 0)
    assert {n for _, n in sizes[4:]} == {0, 2}
    ranks.shares.record_out_of_memory(1, 2)  # one sample fits, which is none
    for _ in range(400):
        ranks.train()
        assert ranks.sizes == (16, 0)


def test_a_rank_with_memory_for_one_sample_idles_where_statistics_need_two():
    shares = Shares(3, min_piece=2)
    shares.record_out_of_memory(1, 2)
    assert shares.sizes(9, (0, 1, 2)) == (5, 0, 4)
    assert shares.short_sizes(5, {0: 5, 1: 0, 2: 4}) == (5, 0, 0)
    shares.record_out_of_memory(0, 3)
    shares.record_out_of_memory(2, 6)
    assert shares.sizes(7, (0, 1, 2)) == (2, 1, 4)  # no other sizes fit


def test_equally_slow_ranks_idle_together():
    """Leaving out one of them would not shorten the step."""
    slow, fast = (1.0, 1e-3), (0.0, 1e-2)
    ranks = Ranks([slow, slow, fast, fast], 64)
    for _ in range(12):
        ranks.train()
    assert ranks.sizes == (0, 0, 32, 32)


def test_a_rank_is_measured_with_one_sample_before_it_idles():
    ranks = Ranks([(2e-3, 1.7e-3), (2e-3, 9.3e-3)], 16)
    for n, compute_s in ((8, 0.07), (8, 0.067), (6, 0.061)):  # mostly fixed cost
        ranks.shares.observe(1, n, compute_s)
        ranks.shares.observe(0, 16 - n, seconds(ranks.costs[0], 16 - n))
        ranks.sizes = ranks.shares.sizes(16, (0, 1))
    sizes = [ranks.sizes]
    for _ in range(10):
        ranks.train()
        sizes.append(ranks.sizes)
    assert min(n for _, n in sizes) == 1
    assert ranks.sizes == (14, 2)


@pytest.mark.parametrize(
    ("total", "sizes", "parts"),
    [
        (8, {0: 0, 1: 3, 2: 2, 3: 0}, [0, 5, 3, 0]),  # idle ranks stay idle
        (16, {0: 0, 1: 3, 2: 3}, [0, 6, 10]),  # within the limit
        (27, {0: 0, 1: 9, 2: 9, 3: 0}, [0, 6, 21, 0]),
        (9, {0: 0, 1: 3}, [3, 6]),  # above the memory limits of the others
        (4, {0: 0, 3: 0}, [2, 2]),
    ],
)
def test_a_short_global_batch_is_split_in_proportion_within_limits(total, sizes, parts):
    shares = Shares(4)
    assert shares.record_out_of_memory(1, 8)
    assert list(shares.short_sizes(total, sizes)) == parts


@pytest.mark.parametrize(
    ("sizes", "last"),
    [({0: 0, 1: 16}, (0, 4)), ({0: 2, 1: 14}, (1, 3))],
)
def test_the_first_rank_has_a_short_global_batch_only_if_it_is_busy_and_has_memory(sizes, last):
    shares = Shares(2)
    shares.record_out_of_memory(0, 3)
    assert shares.pieces(4, 1, sizes, is_short=True) == (last,)


@pytest.mark.parametrize(
    ("num_samples", "pieces"),
    [
        (18, ((3, 3, 3), (3, 3, 3))),
        (17, ((3, 3, 3), (3, 3, 2))),
        (10, ((3, 2, 0), (3, 2, 0))),
        (9, ((3, 3, 3), (0, 0, 0))),
        (4, ((3, 1, 0), (0, 0, 0))),
    ],
)
def test_fixed_pieces_fill_the_micro_batches_of_a_short_global_batch_in_order(num_samples, pieces):
    shares = Shares(3, fixed=True)
    sizes = dict(enumerate(shares.sizes(9, (0, 1, 2))))
    assert shares.pieces(num_samples, 2, sizes, is_short=num_samples < 18) == pieces


def test_micro_batches_of_a_whole_global_batch_differ_by_a_sample():
    shares = Shares(2, fixed=True)
    sizes = dict(enumerate(shares.sizes(3, (0, 1))))
    assert shares.pieces(9, 4, sizes) == ((2, 1), (2, 0), (2, 0), (2, 0))


def test_micro_batches_have_the_least_samples_of_a_piece():
    shares = Shares(2, fixed=True, min_piece=2)
    sizes = dict(enumerate(shares.sizes(4, (0, 1))))
    assert shares.pieces(3, 3, sizes, is_short=True) == ((3, 0), (0, 0), (0, 0))


def test_the_time_of_pieces_is_their_mean_even_if_it_lags_behind():
    times = PieceTimes()
    times.expect(step_plan(((4, 2),), 3, last=((2, 0),)), anew=True)
    times.record(0, 1, 0.1)
    assert (times.take(0), times.take(0), times.take(1)) == ((4.0, 0.1), None, None)
    times.record(0, 5, 0.5)  # no more than were sent
    assert times.take(0) == (3.0, 0.25)
    times.record(1, 1, 0.2)
    times.expect(step_plan(((8, 8),)), anew=True)
    assert times.take(1) is None


def test_an_out_of_memory_piece_above_the_limit_is_not_new():
    shares = Shares(2)
    assert [shares.record_out_of_memory(0, n) for n in (10, 8, 9, 6)] == [True, True, False, True]


@pytest.mark.parametrize(("failed", "most"), [(1, 1), (2, 1), (3, 2), (4, 3), (10, 8)])
def test_the_limit_after_an_out_of_memory_error(failed, most):
    shares = Shares(1)
    shares.record_out_of_memory(0, failed)
    assert shares.may_fit(most, (0,))
    assert not shares.may_fit(most + 1, (0,))


def test_a_larger_piece_that_runs_out_of_memory_later_does_not_raise_the_limit():
    """It was assigned before the first error."""
    shares = Shares(2)
    shares.record_out_of_memory(0, 10)
    shares.record_out_of_memory(0, 20)
    assert shares.may_fit(8, (0,))
    assert not shares.may_fit(9, (0,))


def test_measured_memory_limits_a_piece_until_the_next_measurement():
    ranks = Ranks([(0, 1e-3), (0, 3e-3)], 80)
    for _ in range(9):
        ranks.train()
    assert ranks.sizes == (60, 20)
    for most, size in ((50, 50), (55, 55), (None, 55), (90, 60)):
        ranks.shares.set_memory_limit(0, most)
        ranks.train()
        assert ranks.sizes[0] == size
    ranks.shares.record_out_of_memory(0, 60)  # the out-of-memory limit persists
    ranks.train()
    assert ranks.sizes[0] == 48
    ranks.shares.set_memory_limit(0, 40)
    ranks.train()
    assert ranks.sizes[0] == 40


def test_measured_limits_alone_do_not_fail_the_run():
    """A piece above the measured limit may still fit."""
    shares = Shares(2)
    shares.set_memory_limit(0, 20)
    shares.record_out_of_memory(1, 30)
    assert not shares.fits(60, (0, 1))
    assert shares.may_fit(60, (0, 1))
    shares.record_out_of_memory(0, 40)
    assert not shares.may_fit(60, (0, 1))


def test_a_rank_that_does_not_delay_the_others_keeps_its_sample():
    ranks = Ranks([(0, 1e-3), (0.03, 1e-2)], 40)
    for _ in range(100):
        ranks.train()
        assert min(ranks.sizes) >= 1


def test_an_idle_rank_that_shortens_the_step_joins(monkeypatch):
    """Another idle rank would be as slow as the slowest one."""
    monkeypatch.setattr(Shares, "cost", lambda self, rank: costs[rank])
    costs = {
        0: (0.00028, 0.00037),
        1: (0.00109, 0.00042),
        2: (0.00028, 0.000012),
        3: (0.00031, 0.00019),
        4: (0.00071, 0.00024),
    }
    shares, ranks = Shares(5), list(costs)
    shares._has_probed = True
    for fit in shares._fits:
        fit.least = 1
    first = shares.sizes(25, ranks)
    assert first[0] == first[1] == first[4] == 0
    costs[2], costs[3] = (0.00028, 0.0000282), (0.00031, 0.00029)  # they have become slower
    then = shares.sizes(25, ranks)
    assert then[0] >= 1
    before = longest(list(costs.values()), first)
    assert max(seconds(costs[r], n) for r, n in enumerate(then) if n) < 0.96 * before


def test_every_idle_rank_that_shortens_the_step_joins(monkeypatch):
    seconds_each = (0.0356, 0.0525, 0.0707, 0.0555, 0.0054, 0.0426, 0.1785)
    costs = [(0.015 if s < 0.01 else 0.0, s) for s in seconds_each]
    monkeypatch.setattr(Shares, "cost", lambda self, rank: costs[rank])
    shares, ranks = Shares(7), tuple(range(7))
    shares._has_probed = True
    shares._ranks, shares._sizes = ranks, (0, 0, 0, 0, 7, 0, 0)
    sizes = shares.sizes(7, ranks)
    assert [rank for rank in ranks if sizes[rank]] == [0, 4, 5]


def test_the_only_rank_with_enough_memory_is_not_used_alone():
    ranks = Ranks([(0, 1e-3), (0.2, 1e-3)], 60)
    ranks.shares.record_out_of_memory(0, 60)
    for _ in range(20):
        ranks.train()
    assert ranks.sizes == (48, 12)


def test_the_share_of_a_dead_rank_is_split_between_the_others():
    ranks = Ranks([(0, 1e-3), (0, 2e-3), (0, 1e-3)], 90)
    for _ in range(9):
        ranks.train()
    assert ranks.shares.sizes(60, (0, 1)) == (40, 20)
