"""The rules for due rounds, and the limits of the ranks."""

import pytest

from coordinator.cadence import ElChe, RoundSchedule
from coordinator.config import ApplyPolicy, CoordinatorConfig
from coordinator.ledger import BatchLedger
from coordinator.run_state import Rank, RankState

CADENCE, ASYNC = ApplyPolicy.CADENCE, ApplyPolicy.ASYNC


class Bench:
    """Limits of ranks that all have work; anchor 10."""

    def __init__(self, policy=CADENCE, world=2, anchor=10, seconds=None, **settings):
        config = CoordinatorConfig(
            devices=("cpu",) * world,
            num_samples=1000,
            batch_size=1,
            num_epochs=1,
            policy=policy,
            anchor=anchor,
            **settings,
        )
        self.ledger = BatchLedger(num_samples=1000, batch_size=1, num_epochs=1, world_size=world)
        self.elche = ElChe(world, anchor)
        for rank, s in enumerate(seconds or ()):
            self.elche.observe(rank, s, 1)
        self.schedule = RoundSchedule(config, self.elche, self.has_work)
        self.ranks = [Rank(rank=r, state=RankState.LIVE) for r in range(world)]
        for rank in range(world):
            self.ledger.assign_chunk(
                rank, shares=(1 / world,) * world, seconds_per_batch=(1e-6,) * world
            )

    def done(self, *batches, seconds=()):
        for rank, n in zip(self.ranks, batches, strict=True):
            rank.since_round = n
        for rank, s in zip(self.ranks, seconds, strict=False):
            rank.compute_since_round = s
        return self

    def has_work(self, rank):
        return bool(self.ledger.by_rank[rank].assigned)

    def idle(self, rank):
        self.ledger.by_rank[rank].assigned.clear()
        return self

    @property
    def due(self):
        return self.schedule.is_round_due(self.ranks)

    def limit(self, rank):
        return self.schedule.limit(self.ranks[rank], self.ranks)


# -- when a round is due -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
def test_before_the_first_measurement_a_round_waits_for_every_count(policy):
    bench = Bench(policy)
    assert not bench.done(10, 9).due
    assert bench.done(10, 10).due


def test_the_pacing_rank_is_fixed_at_the_start_of_a_round():
    """Only this rank has a budget with a report at its count."""
    bench = Bench(CADENCE, seconds=(0.0101, 0.01))
    bench.schedule.new_round()
    bench.elche.observe(1, 0.0104, 1)
    assert bench.elche.slowest == 1
    assert bench.done(10, 9).due
    bench.schedule.new_round()
    assert not bench.done(10, 9).due


def test_under_cadence_time_counts_as_well_as_batches():
    bench = Bench(CADENCE, seconds=(0.01, 0.03))
    assert bench.done(30, 8, seconds=(0.3, 0.3)).due


def test_under_async_every_rank_runs_its_count():
    bench = Bench(ASYNC, seconds=(0.01, 0.03))
    assert bench.elche.batch_counts == (30, 10)
    assert not bench.done(29, 50).due
    assert bench.done(30, 10).due


@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
def test_a_rank_without_work_does_not_delay_a_round(policy):
    """D7."""
    bench = Bench(policy, seconds=(0.01, 0.01)).idle(1)
    assert bench.done(10, 0).due


# -- limits of the ranks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_overshoot", "limit"), [(None, 12), (0, 10), (3, 13)]
)  # fmt: skip
def test_the_overshoot_under_async_is_bounded(max_overshoot, limit):
    assert Bench(ASYNC, max_overshoot=max_overshoot).limit(0) == limit


def test_the_overshoot_is_a_quarter_of_a_large_count():
    assert Bench(ASYNC, anchor=100).limit(0) == 125


@pytest.mark.parametrize("policy", [CADENCE, ASYNC])
@pytest.mark.parametrize("lead", [0, 2])
def test_the_lead_counts_from_the_slowest_rank(policy, lead):
    bench = Bench(policy, world=3, max_batch_diff=lead).done(4, 1, 2)
    assert [bench.limit(r) for r in range(3)] == [1 + lead + 1, 2 + lead + 1, 1 + lead + 1]


def test_a_limit_is_raised_once_less_than_half_of_the_overshoot_is_left():
    schedule = Bench(ASYNC, anchor=100).schedule
    current = [schedule.limit_is_current(0, sent, 125) for sent in (126, 125, 113, 112)]
    assert current == [False, True, True, False]


@pytest.mark.parametrize("settings", [{"max_batch_diff": 3}, {"max_overshoot": 5}])
def test_limits_fixed_by_settings_are_sent_exactly(settings):
    schedule = Bench(ASYNC, anchor=100, **settings).schedule
    assert [schedule.limit_is_current(0, 12, limit) for limit in (12, 13, None)] == [
        True,
        False,
        False,
    ]
    assert not schedule.limit_is_current(0, None, 12)


def test_a_rank_without_work_does_not_limit_the_others():
    bench = Bench(CADENCE, max_batch_diff=0).done(5, 0).idle(1)
    assert bench.limit(0) is None


def test_a_budget_requests_reports_at_the_count_or_after_each_batch():
    assert Bench(CADENCE).schedule.report_after(0) == 10
    assert Bench(CADENCE, max_batch_diff=3).schedule.report_after(0) == 1
    assert Bench(CADENCE, max_batch_diff=3).schedule.initial_limit(0) == 4
