"""Actions of the guard on the divergences of successive rounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cadence import CadenceAction, ConvergenceGuard
from tests.support.pairs import few_examples

STABLE, SUPPRESS, NUDGE = (
    CadenceAction.STABLE,
    CadenceAction.SUPPRESS_GROWTH,
    CadenceAction.NUDGE_DOWN,
)


def verdicts(guard, *rounds):
    return [guard.report([value]) for value in rounds]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([0.0, 0.01, 0.05, 0.05], [STABLE] * 4),
        ([0.01, 0.06, 0.01], [STABLE, SUPPRESS, STABLE]),
        ([0.9, 0.7, 0.5, 0.3, 0.1], [SUPPRESS] * 5),
        ([0.1] * 9, [SUPPRESS, SUPPRESS, NUDGE] * 3),
        ([0.1, 0.1, 0.0] * 2 + [0.1], [SUPPRESS, SUPPRESS, STABLE] * 2 + [SUPPRESS]),
        (
            [0.1, 0.1, 0.1, 0.06, 0.01, 0.06],
            [SUPPRESS, SUPPRESS, NUDGE, SUPPRESS, STABLE, SUPPRESS],
        ),
    ],
)
def test_each_round_is_judged_by_the_rounds_before_it(rounds, expected):
    assert verdicts(ConvergenceGuard(0.05), *rounds) == expected


def test_nudge_down_is_reached_after_three_rounds_that_do_not_fall():
    assert verdicts(ConvergenceGuard(0.05), 0.06, 0.06, 0.06) == [SUPPRESS, SUPPRESS, NUDGE]
    assert verdicts(ConvergenceGuard(0.05), 0.06, 0.09, 0.07) == [SUPPRESS, SUPPRESS, NUDGE]


def test_a_rise_after_a_fall_nudges_down():
    assert verdicts(ConvergenceGuard(0.05), 0.9, 0.3, 0.3, 0.4)[-1] is NUDGE


def test_the_worst_rank_decides():
    assert ConvergenceGuard(0.05).report([0.0, 0.2, 0.01]) is SUPPRESS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_non_finite_divergence_is_above_the_threshold(value, where):
    guard = ConvergenceGuard(0.05)
    divergences = [0.0, 0.0]
    divergences[where] = value
    assert [guard.report(divergences) for _ in range(3)] == [SUPPRESS, SUPPRESS, NUDGE]


def test_a_round_without_a_measurement_is_stable_and_changes_nothing():
    guard = ConvergenceGuard(0.05)
    assert guard.report([]) is STABLE
    verdicts(guard, 0.1, 0.1)
    assert guard.report([]) is STABLE
    assert guard.report([0.1]) is NUDGE


def test_a_disabled_guard_is_always_stable():
    guard = ConvergenceGuard(enabled=False)
    assert verdicts(guard, 1.0, math.nan, 1.0, 1.0) == [STABLE] * 4


def test_growth_below_the_threshold_nudges_down_and_the_history_starts_again():
    growing = [0.06 * 1.2**i for i in range(15)]
    assert max(growing) < 1.0
    guard = ConvergenceGuard(1.0)
    assert verdicts(guard, *growing) == [STABLE] * 9 + [NUDGE] + [STABLE] * 5


def test_a_trend_continues_from_the_saved_state():
    growing = [0.006 * 1.2**i for i in range(10)]
    first, second = ConvergenceGuard(0.05), ConvergenceGuard(0.05)
    verdicts(first, *growing[:9])
    second.state = first.state
    assert verdicts(second, growing[9]) == [NUDGE]


def test_growth_with_noise_nudges_down():
    noise = [1.2, 0.8, 1.0, 1.2, 0.85, 1.15, 0.9, 1.1, 0.9, 1.0]
    growing = [0.006 * 1.2**i * n for i, n in enumerate(noise)]
    assert sorted(growing) != growing
    assert verdicts(ConvergenceGuard(0.05), *growing)[-1] is NUDGE


def test_a_noisy_level_and_a_slow_rise_are_stable():
    draw = random.Random(0)
    level = [0.02 * draw.uniform(0.5, 1.5) for _ in range(2000)]
    assert verdicts(ConvergenceGuard(0.05), *level) == [STABLE] * 2000
    slow = [0.006 * 1.1**i for i in range(20)]
    assert verdicts(ConvergenceGuard(0.05), *slow) == [STABLE] * 20


def test_growth_of_negligible_divergence_is_stable():
    growing = [1e-6 * 1.3**i for i in range(30)]
    assert verdicts(ConvergenceGuard(0.05), *growing) == [STABLE] * 30


def test_divergence_in_proportion_to_the_length_of_the_round_does_not_grow():
    lengths = [1.3**i for i in range(12)]  # a longer round, or a warm-up of the learning rate
    guard = ConvergenceGuard(0.05)
    assert [guard.report([0.002 * n], n) for n in lengths] == [STABLE] * 12
    shorter = [guard.report([0.04], 1 / n) for n in lengths]
    assert NUDGE in shorter


@pytest.mark.parametrize(
    ("value", "length"), [(math.nan, 1.0), (0.0, 1.0), (0.01, 0.0), (0.01, math.nan)]
)
def test_a_round_that_measures_no_growth_is_skipped_in_the_trend(value, length):
    growing = [0.006 * 1.2**i for i in range(10)]
    guard = ConvergenceGuard(0.05)
    verdicts(guard, *growing[:4])
    assert guard.report([value], length) is not NUDGE
    assert verdicts(guard, *growing[4:]) == [STABLE] * 5 + [NUDGE]


@few_examples
@given(st.lists(st.floats(0, 0.2) | st.just(math.nan), max_size=40), st.integers(0, 40))
def test_a_guard_continues_from_its_saved_state(rounds, cut):
    whole, first, second = (ConvergenceGuard(0.05) for _ in range(3))
    expected = verdicts(whole, *rounds)
    head = verdicts(first, *rounds[:cut])
    second.state = first.state
    assert head + verdicts(second, *rounds[cut:]) == expected


@pytest.mark.parametrize("threshold", [0.0, -0.1, math.nan, math.inf])
def test_an_invalid_threshold_is_rejected(threshold):
    with pytest.raises(ValueError, match="positive"):
        ConvergenceGuard(threshold)
