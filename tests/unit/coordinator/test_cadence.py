"""Batch counts follow the speeds, the anchor follows the overhead."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coordinator
from coordinator.cadence import CadenceAction, ElChe
from runtime.settings import DEFAULT_ANCHOR, DEFAULT_MIN_ANCHOR
from tests.support.pairs import few_examples

times = st.floats(1e-6, 1e3)


def play(cadence, seconds, sync_s=0.0, rounds=1):
    """Report rounds of full counts on ranks that take ``seconds`` per batch."""
    for _ in range(rounds):
        counts = cadence.batch_counts
        compute_s = [s * n for s, n in zip(seconds, counts, strict=True)]
        cadence.report_timing(compute_s, counts, sync_s)


# -- speeds ----------------------------------------------------------------


def test_every_rank_trains_the_anchor_before_a_measurement():
    cadence = ElChe(3, 7)
    assert cadence.batch_counts == (7, 7, 7)
    assert cadence.shares == pytest.approx((1 / 3,) * 3)
    assert cadence.seconds_per_batch is None
    assert cadence.slowest is None


def test_the_speed_hint_replaces_missing_measurements():
    cadence = ElChe(3, 10, speed_hint=(1, 2.5))
    assert cadence.batch_counts == (25, 10, 25)
    assert cadence.shares == pytest.approx((2.5 / 6, 1 / 6, 2.5 / 6))
    assert cadence.slowest is None


def test_a_measurement_replaces_a_wrong_hint_at_once():
    cadence = ElChe(2, 10, speed_hint=(1, 3.0))
    cadence.report_timing([4.0, 1.0], [10, 10], 0.0)
    assert cadence.batch_counts == (10, 40)
    assert cadence.slowest == 0


def test_the_speed_hint_is_used_until_every_rank_is_measured():
    cadence = ElChe(2, 10, speed_hint=(1, 3.0))
    cadence.observe(0, 1.0, 10)
    assert cadence.batch_counts == (30, 10)
    cadence.observe(1, 2.0, 10)
    assert cadence.batch_counts == (20, 10)


@few_examples
@given(st.lists(times, min_size=1, max_size=8), st.integers(1, 200))
def test_counts_take_the_same_time_on_every_rank(seconds, anchor):
    cadence = ElChe(len(seconds), anchor)
    cadence.report_timing(seconds, [1] * len(seconds), 0.0)
    slow = max(range(len(seconds)), key=lambda r: seconds[r])
    counts = cadence.batch_counts
    assert seconds[cadence.slowest] == seconds[slow]
    assert counts[slow] == cadence.anchor == anchor
    for count, s in zip(counts, seconds, strict=True):
        assert count >= anchor
        assert abs(count - anchor * seconds[slow] / s) <= 0.5 + 1e-9 * count
    assert sum(cadence.shares) == pytest.approx(1)
    assert cadence.shares == pytest.approx([1 / s / sum(1 / t for t in seconds) for s in seconds])


def test_of_equally_slow_ranks_the_lowest_is_the_slowest():
    cadence = ElChe(3)
    play(cadence, (0.1, 0.2, 0.2))
    assert cadence.slowest == 1


def test_a_rank_without_a_batch_keeps_its_estimate():
    cadence = ElChe(2)
    cadence.report_timing([1.0, 2.0], [10, 10], 0.0)
    cadence.report_timing([1.0, 5.0], [10, 0], 0.0)
    assert cadence.seconds_per_batch == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_time_is_ignored(bad):
    cadence = ElChe(2)
    cadence.report_timing([1.0, 2.0], [10, 10], 0.0)
    cadence.report_timing([bad, bad], [10, 10], 0.0)
    cadence.observe(0, bad, 10)
    assert cadence.seconds_per_batch == pytest.approx((0.1, 0.2))
    assert cadence.anchor == 10


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_overhead_is_computed_from_ranks_with_valid_times(bad, rank):
    cadence = ElChe(2, 10, min_anchor=2, overhead_target=0.10)
    compute_s = [1.0, 1.0]
    compute_s[rank] = bad
    cadence.report_timing(compute_s, [10, 10], 0.15)
    assert cadence.anchor == 15


def test_one_outlier_hardly_moves_the_counts():
    cadence = ElChe(2)
    play(cadence, (0.1, 0.1), rounds=3)
    cadence.observe(1, 10.0, 1)
    assert cadence.seconds_per_batch[1] <= 0.13
    play(cadence, (0.1, 0.1), rounds=4)
    assert cadence.batch_counts == (10, 10)


@pytest.mark.parametrize("factor", [0.2, 0.6, 1.6, 2.5, 10.0])
def test_a_lasting_change_of_speed_is_followed_within_a_few_rounds(factor):
    cadence = ElChe(2)
    play(cadence, (0.1, 0.1), rounds=3)
    play(cadence, (0.1, 0.1 * factor), rounds=5)
    assert cadence.seconds_per_batch[1] == pytest.approx(0.1 * factor, rel=0.05)


def test_a_slow_first_batch_is_forgotten():
    cadence = ElChe(2)
    cadence.report_timing([5.0, 0.1], [1, 1], 0.0)
    play(cadence, (0.1, 0.1), rounds=3)
    assert cadence.seconds_per_batch == pytest.approx((0.1, 0.1))


def test_a_round_does_not_repeat_observed_measurements():
    cadence = ElChe(1)
    cadence.observe(0, 1.0, 10)
    cadence.observe(0, 3.0, 10)  # An outlier, reported again by the round.
    before = cadence.seconds_per_batch
    cadence.report_timing([3.0], [10], 0.0)
    assert cadence.seconds_per_batch == before
    cadence.report_timing([1.25], [10], 0.0)
    assert cadence.seconds_per_batch == pytest.approx((0.125,))


# -- overhead --------------------------------------------------------------


def test_costly_averaging_grows_the_anchor_to_the_target():
    cadence = ElChe(2, 10, overhead_target=0.10)
    play(cadence, (0.1, 0.05), sync_s=0.15)
    assert cadence.anchor == 15
    play(cadence, (0.1, 0.05), sync_s=0.15, rounds=5)
    assert cadence.anchor == 15


def test_cheap_averaging_lowers_the_anchor_to_min_anchor():
    cadence = ElChe(2, 10, min_anchor=2, overhead_target=0.10)
    anchors = []
    for _ in range(5):
        play(cadence, (0.1, 0.05), sync_s=0.001)
        anchors.append(cadence.anchor)
    assert anchors == [5, 2, 2, 2, 2]
    assert cadence.batch_counts == (2, 4)


@pytest.mark.parametrize(
    ("step_s", "sync_s", "wait_s", "anchor"),
    [
        (0.1, 0.001, 0.0, 2),  # a hundredth of a step: twice as many rounds cost nothing
        (0.1, 0.009, 0.0, 2),
        (0.1, 0.014, 0.0, 3),
        (0.001, 0.001, 0.0, 10),  # a round of a whole step
        (0.1, 0.001, 0.015, 2),
        (0.1, 0.001, 0.049, 5),  # ranks half a step out of phase
        (0.1, 0.001, 0.5, 10),  # a wait does not let the anchor grow
    ],
)
def test_the_default_cadence_is_as_dense_as_is_cheap(step_s, sync_s, wait_s, anchor):
    cadence = ElChe(2, DEFAULT_ANCHOR, min_anchor=DEFAULT_MIN_ANCHOR)
    for _ in range(20):
        counts = cadence.batch_counts
        cadence.report_timing([n * step_s for n in counts], counts, sync_s, wait_s=wait_s)
    assert cadence.anchor == anchor


def test_the_anchor_is_not_lowered_where_averaging_would_become_costly():
    cadence = ElChe(2, 10, min_anchor=1, overhead_target=0.10)
    play(cadence, (0.1, 0.1), sync_s=0.032, rounds=20)
    assert cadence.anchor == 7  # A smaller anchor would cost more than half of the target, 5 %.


def test_the_anchor_at_most_doubles_in_a_round_and_stops_at_its_limit():
    cadence = ElChe(1, 10, max_anchor=35)
    anchors = []
    for _ in range(3):
        play(cadence, (0.1,), sync_s=100.0)
        anchors.append(cadence.anchor)
    assert anchors == [20, 35, 35]


def test_a_shortened_round_does_not_look_expensive():
    cadence = ElChe(1, 100, overhead_target=0.10)
    cadence.report_timing([0.2], [2], 0.1)
    assert cadence.anchor == 100


def test_cheap_averaging_lowers_the_anchor_to_its_initial_value():
    cadence = ElChe(1, 10)
    play(cadence, (0.1,), sync_s=100.0)
    assert cadence.anchor == 20
    play(cadence, (0.1,), sync_s=0.001)
    assert 15 < cadence.anchor < 20
    play(cadence, (0.1,), sync_s=0.001, rounds=30)
    assert cadence.anchor == 10


@few_examples
@given(st.floats(1e-4, 10), st.integers(1, 50), st.sampled_from([0.01, 0.1, 0.5]))
def test_the_anchor_settles_for_a_constant_cost(sync_s, anchor, target):
    cadence = ElChe(1, anchor, overhead_target=target)
    play(cadence, (0.1,), sync_s=sync_s, rounds=40)
    settled = cadence.anchor
    play(cadence, (0.1,), sync_s=sync_s, rounds=3)
    assert cadence.anchor == settled
    assert anchor <= settled <= 200
    assert settled == 200 or sync_s / (settled * 0.1) <= target * 1.001


def test_a_held_anchor_does_not_grow():
    cadence = ElChe(1, 10)
    cadence.hold_growth(True)
    play(cadence, (0.1,), sync_s=1.0, rounds=3)
    assert cadence.anchor == 10
    cadence.hold_growth(False)
    play(cadence, (0.1,), sync_s=1.0)
    assert cadence.anchor == 20


@pytest.mark.parametrize("sync_s", [math.nan, math.inf, -1.0])
def test_an_invalid_cost_does_not_change_the_anchor(sync_s):
    cadence = ElChe(1, 10)
    play(cadence, (0.1,), sync_s=sync_s)
    assert cadence.anchor == 10


# -- guard and deaths ------------------------------------------------------


def test_a_nudge_halves_the_anchor_permanently():
    cadence = ElChe(2, 10)
    cadence.nudge_down()
    assert cadence.anchor == 5
    assert cadence.batch_counts == (5, 5)
    play(cadence, (0.1, 0.1), rounds=10)
    assert cadence.anchor == 5
    play(cadence, (0.1, 0.1), sync_s=0.08)
    assert cadence.anchor == 8
    play(cadence, (0.1, 0.1), rounds=10)
    assert cadence.anchor == 5


def test_nudges_stop_at_an_anchor_of_one():
    cadence = ElChe(1, 10)
    for _ in range(10):
        cadence.nudge_down()
    assert cadence.anchor == 1
    assert cadence.batch_counts == (1,)


def test_a_dead_rank_has_no_count_and_no_share():
    cadence = ElChe(3, 10)
    play(cadence, (0.1, 0.2, 0.4))
    cadence.drop(2)
    assert cadence.batch_counts == (20, 10, 0)
    assert cadence.shares == pytest.approx((2 / 3, 1 / 3, 0))
    assert cadence.slowest == 1
    assert cadence.seconds_per_batch == pytest.approx((0.1, 0.2, 0))


def test_an_unmeasured_dead_rank_is_not_waited_for():
    cadence = ElChe(2, 10, speed_hint=(1, 4.0))
    cadence.drop(1)
    assert cadence.batch_counts == (10, 0)
    cadence.observe(0, 1.0, 10)
    assert cadence.slowest == 0
    assert cadence.shares == (1.0, 0.0)


def test_counts_are_zero_without_a_live_rank():
    cadence = ElChe(1)
    cadence.drop(0)
    assert (cadence.batch_counts, cadence.shares, cadence.slowest) == ((0,), (0.0,), None)


def test_a_dead_rank_does_not_affect_the_overhead():
    cadence = ElChe(2, 10)
    play(cadence, (0.1, 0.4))
    cadence.drop(1)
    cadence.report_timing([1.0, 400.0], [10, 10], 0.15)
    assert cadence.anchor == 15


# -- state -----------------------------------------------------------------


def test_a_cadence_continues_from_its_saved_state():
    saved, loaded = ElChe(2, 10), ElChe(2, 10)
    play(saved, (0.1, 0.3), sync_s=0.5)
    saved.nudge_down(0.4)
    saved.hold_growth(True)
    saved.observe(0, 10.0, 1)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for cadence in (saved, loaded):
        cadence.observe(0, 5.0, 1)
        cadence.report_timing([1.0, 1.0], [10, 3], 5.0)
    assert loaded.state_dict() == saved.state_dict()
    assert loaded.batch_counts == saved.batch_counts


def test_another_world_size_restores_the_anchor_but_not_the_speeds():
    saved, loaded = ElChe(2, 10), ElChe(3, 10)
    play(saved, (0.1, 0.3), sync_s=0.4)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.anchor == saved.anchor == 14
    assert loaded.batch_counts == (14, 14, 14)
    assert loaded.seconds_per_batch is None


def test_a_loaded_anchor_keeps_within_the_limit():
    saved, loaded = ElChe(1, 100), ElChe(1, 10, max_anchor=20)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.anchor == 20


# -- bad values ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size"),
        ({"anchor": 0}, "anchor must lie"),
        ({"anchor": 201}, "max_anchor 200"),
        ({"anchor": 5, "max_anchor": 4}, "max_anchor 4"),
        ({"anchor": 5, "min_anchor": 6}, "min_anchor 6"),
        ({"min_anchor": 0}, "min_anchor must lie"),
        ({"overhead_target": 0.001}, "0.01 to 0.50"),
        ({"overhead_target": 0.51}, "0.01 to 0.50"),
        ({"overhead_target": math.nan}, "0.01 to 0.50"),
        ({"speed_hint": (2, 1.5)}, "ranks 0 to 1"),
        ({"speed_hint": (-1, 1.5)}, "ranks 0 to 1"),
        ({"speed_hint": (0, 0.9)}, "ratio of at least 1"),
        ({"speed_hint": (0, math.nan)}, "ratio of at least 1"),
    ],
)
def test_a_value_out_of_range_is_rejected_with_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        ElChe(**({"world_size": 2} | arguments))


def test_a_report_needs_an_entry_for_each_rank():
    with pytest.raises(ValueError, match="each of 2 ranks"):
        ElChe(2).report_timing([1.0], [1], 0.0)


@pytest.mark.parametrize("factor", [0.0, 1.0, -0.5, math.nan])
def test_a_nudge_factor_out_of_range_is_rejected(factor):
    with pytest.raises(ValueError, match="between 0 and 1"):
        ElChe(2).nudge_down(factor)


def test_the_former_name_of_the_action_is_deprecated():
    with pytest.warns(DeprecationWarning, match="CadenceAction"):
        assert coordinator.Verdict is CadenceAction
    with pytest.raises(AttributeError, match="no attribute 'Verdicts'"):
        _ = coordinator.Verdicts
