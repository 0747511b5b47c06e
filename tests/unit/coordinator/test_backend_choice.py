from __future__ import annotations

import pytest

from coordinator.backend_choice import (
    MAX_TRIAL_ROUNDS,
    MEASURED_ROUNDS,
    WARM_UP_ROUNDS,
    BackendChoice,
    RoundCost,
    candidate_backends,
)
from coordinator.config import ApplyPolicy, AverageBackend

CPU, THREAD, NCCL = AverageBackend.CPU, AverageBackend.THREAD, AverageBackend.NCCL
AUTO, GLOO = AverageBackend.AUTO, AverageBackend.GLOO
TRIAL = WARM_UP_ROUNDS + MEASURED_ROUNDS


def rounds(choice, costs, num=TRIAL, anchor=10):
    """Record rounds over the next backends; returns these backends and the decisions."""
    over, decided = [], []
    for _ in range(num):
        over.append(choice.next)
        cost = costs[choice.next]
        cost = None if cost is None else RoundCost(ranks_s=cost)
        decided.append(choice.record_round(choice.next, cost, anchor))
    return over, decided


@pytest.mark.parametrize(
    ("requested", "policy", "chosen", "world", "expected"),
    [
        (AUTO, ApplyPolicy.CADENCE, CPU, 2, (CPU, THREAD)),
        (AUTO, ApplyPolicy.ASYNC, NCCL, 2, (NCCL, CPU)),
        (AUTO, ApplyPolicy.SYNC, NCCL, 2, (NCCL, THREAD)),
        (AUTO, ApplyPolicy.SYNC, THREAD, 2, (THREAD,)),
        (AUTO, ApplyPolicy.CADENCE, CPU, 1, (CPU,)),
        (GLOO, ApplyPolicy.CADENCE, GLOO, 2, (GLOO,)),
    ],
)
def test_candidate_backends(requested, policy, chosen, world, expected):
    assert candidate_backends(requested, policy, chosen, world) == expected


@pytest.mark.parametrize("cheaper", [CPU, THREAD])
def test_each_backend_is_tried_and_the_cheaper_one_is_kept(cheaper):
    choice = BackendChoice((CPU, THREAD), measures=True)
    costs = {CPU: 1.0, THREAD: 1.0} | {cheaper: 0.1}
    over, decided = rounds(choice, costs, 2 * TRIAL)
    assert over == [CPU] * TRIAL + [THREAD] * TRIAL
    assert decided == [False] * (2 * TRIAL - 1) + [True]
    assert choice.chosen is choice.next is cheaper
    assert "CPU" in choice.reason
    assert "1e+03 ms" in choice.reason
    assert "100 ms" in choice.reason


def test_a_trial_costs_the_mean_of_its_rounds():
    choice = BackendChoice((CPU, THREAD), measures=True)
    for over, costs in (
        (CPU, (9.0, *range(1, MEASURED_ROUNDS + 1))),
        (THREAD, (9.0, *[4.0] * MEASURED_ROUNDS)),
    ):
        for cost in costs:
            choice.record_round(over, RoundCost(ranks_s=float(cost)), 10)
    mean = (MEASURED_ROUNDS + 1) / 2
    assert f"CPU {1000 * mean:.3g} ms" in choice.reason


def test_the_first_round_over_each_backend_is_not_measured():
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, {CPU: 0.2}, TRIAL)
    rounds(choice, {THREAD: 99.0}, WARM_UP_ROUNDS)
    rounds(choice, {THREAD: 0.1}, MEASURED_ROUNDS)
    assert choice.chosen is THREAD


def test_rounds_without_a_cost_end_a_trial_eventually():
    choice = BackendChoice((CPU, THREAD), measures=True)
    over, _ = rounds(choice, {CPU: 1.0, THREAD: None}, TRIAL + MAX_TRIAL_ROUNDS)
    assert over[-1] is THREAD
    assert choice.next is CPU


def decided(costs, **settings):
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, costs, 2 * TRIAL, **settings)
    return choice


@pytest.mark.parametrize(("anchor", "tries"), [(15, False), (20, True), (5, False)])
def test_an_anchor_that_doubled_causes_trials_of_each_backend(anchor, tries):
    costs = {CPU: 0.1, THREAD: 0.2}
    choice = decided(costs, anchor=10)
    over, _ = rounds(choice, costs, 1000, anchor=anchor)
    assert over.count(THREAD) == (TRIAL if tries else 0)
    assert over[1 : 1 + TRIAL] == [CPU] * TRIAL
    assert over[1 + TRIAL : 1 + 2 * TRIAL] == [THREAD if tries else CPU] * TRIAL


@pytest.mark.parametrize("cost", [0.2, 0.095])
def test_the_choice_changes_at_a_larger_anchor_only_if_the_other_is_clearly_cheaper(cost):
    choice = decided({CPU: 0.1, THREAD: 0.2})
    now = {CPU: 0.5, THREAD: 0.2} if cost == 0.2 else {CPU: 0.1, THREAD: cost}
    _, announced = rounds(choice, now, 1 + 2 * TRIAL, anchor=20)
    assert choice.chosen is (THREAD if cost == 0.2 else CPU)
    assert announced[-1] is (cost == 0.2)


def test_a_change_of_ranks_discards_measurements_and_exclusions():
    choice = decided({CPU: 0.1, THREAD: 0.2})
    assert choice.exclude(THREAD, "broken")
    choice.reset()
    over, _ = rounds(choice, {CPU: 0.3, THREAD: 0.2}, 2 * TRIAL)
    assert over == [CPU] * TRIAL + [THREAD] * TRIAL
    assert choice.chosen is THREAD


def test_a_round_from_before_a_change_of_ranks_is_no_trial():
    choice = decided({CPU: 0.2, THREAD: 0.1})
    choice.reset()
    assert choice.next is THREAD
    choice.record_round(CPU, RoundCost(ranks_s=9.0), 10)
    over, _ = rounds(choice, {CPU: 0.1, THREAD: 0.2}, 2 * TRIAL)
    assert over == [THREAD] * TRIAL + [CPU] * TRIAL


def test_a_failed_backend_is_excluded_unless_it_is_the_last():
    choice = BackendChoice((NCCL, CPU), measures=True)
    assert choice.exclude(NCCL, "no link")
    assert (choice.chosen, choice.next, choice.before) == (CPU, CPU, NCCL)
    assert choice.reason == "NCCL failed: no link"
    assert choice.collective is None
    assert not choice.exclude(NCCL, "again")
    assert not choice.exclude(CPU, "the last one")
    over, _ = rounds(choice, {CPU: 1.0}, 300, anchor=50)
    assert set(over) == {CPU}


def test_consecutive_faults_are_counted_with_their_cost():
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, {CPU: 0.2}, TRIAL)
    for number in (1, 2):
        choice.record_fault(THREAD, RoundCost(ranks_s=5.0))
        assert choice.num_faults == number
    rounds(choice, {THREAD: 0.1, CPU: 0.2}, 1)
    choice.record_fault(CPU, RoundCost(ranks_s=1.0))
    assert choice.num_faults == 1
    assert choice.chosen is CPU


def test_without_measurements_only_a_fault_changes_the_choice():
    choice = BackendChoice((NCCL, THREAD), measures=False)
    over, _ = rounds(choice, {NCCL: 9.0}, 300, anchor=77)
    assert set(over) == {NCCL}
    assert choice.exclude(NCCL, "broken")
    choice.reset()
    assert choice.next is THREAD


def test_a_checkpoint_restores_the_choice():
    choice = decided({CPU: 0.2, THREAD: 0.1})
    again = BackendChoice((CPU, THREAD), measures=True)
    again.restore(choice.state)
    assert again.chosen is again.next is THREAD
    assert again.reason.startswith("measured before the checkpoint: CPU 200 ms")
    assert again.state == choice.state


@pytest.mark.parametrize("other", [(NCCL, CPU), (CPU,)])
def test_a_checkpoint_with_other_candidates_is_ignored(other):
    state = decided({CPU: 0.2, THREAD: 0.1}).state
    again = BackendChoice(other, measures=True)
    again.restore(state)
    assert again.chosen is other[0]


def test_an_undecided_choice_is_not_restored():
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, {CPU: 0.2}, TRIAL)
    again = BackendChoice((CPU, THREAD), measures=True)
    again.restore(choice.state)
    assert again.next is CPU
