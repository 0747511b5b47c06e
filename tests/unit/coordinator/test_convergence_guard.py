"""Actions of the guard on the divergences of successive rounds."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cadence import CadenceAction, ConvergenceGuard

STABLE, SUPPRESS, NUDGE = (
    CadenceAction.STABLE,
    CadenceAction.SUPPRESS_GROWTH,
    CadenceAction.NUDGE_DOWN,
)


def verdicts(guard, *rounds):
    return [guard.report([value]) for value in rounds]


def test_small_divergences_are_stable():
    assert verdicts(ConvergenceGuard(0.05), 0.0, 0.01, 0.05, 0.05) == [STABLE] * 4


def test_one_round_above_the_threshold_suppresses_growth():
    assert verdicts(ConvergenceGuard(0.05), 0.01, 0.06, 0.01) == [STABLE, SUPPRESS, STABLE]


def test_nudge_down_is_reached_after_three_rounds_that_do_not_fall():
    assert verdicts(ConvergenceGuard(0.05), 0.06, 0.06, 0.06) == [SUPPRESS, SUPPRESS, NUDGE]
    assert verdicts(ConvergenceGuard(0.05), 0.06, 0.09, 0.07) == [SUPPRESS, SUPPRESS, NUDGE]


def test_falling_divergence_only_suppresses_growth():
    assert verdicts(ConvergenceGuard(0.05), 0.9, 0.7, 0.5, 0.3, 0.1) == [SUPPRESS] * 5


def test_a_rise_after_a_fall_nudges_down():
    assert verdicts(ConvergenceGuard(0.05), 0.9, 0.3, 0.3, 0.4)[-1] is NUDGE


def test_a_stable_round_resets_the_count():
    assert NUDGE not in verdicts(ConvergenceGuard(0.05), 0.1, 0.1, 0.0, 0.1, 0.1, 0.0, 0.1)


def test_each_nudge_needs_three_rounds_of_its_own():
    assert verdicts(ConvergenceGuard(0.05), *[0.1] * 9) == [SUPPRESS, SUPPRESS, NUDGE] * 3


def test_one_divergent_interval_cannot_nudge_twice():
    guard = ConvergenceGuard(0.05)
    verdicts(guard, 0.1, 0.1, 0.1)
    assert verdicts(guard, 0.06, 0.01, 0.06, 0.01) == [SUPPRESS, STABLE] * 2


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


@given(st.lists(st.floats(0, 0.2) | st.just(math.nan), max_size=40), st.integers(0, 40))
def test_a_guard_continues_from_its_saved_state(rounds, cut):
    whole, first, second = (ConvergenceGuard(0.05) for _ in range(3))
    expected = verdicts(whole, *rounds)
    head = verdicts(first, *rounds[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + verdicts(second, *rounds[cut:]) == expected


@pytest.mark.parametrize("threshold", [0.0, -0.1, math.nan, math.inf])
def test_an_invalid_threshold_is_rejected(threshold):
    with pytest.raises(ValueError, match="positive"):
        ConvergenceGuard(threshold)
