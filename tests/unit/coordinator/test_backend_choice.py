from __future__ import annotations

import pytest

from coordinator.backend_choice import (
    MAX_TRIAL_ROUNDS,
    MEASURED_ROUNDS,
    RETRIAL_ROUNDS,
    WARM_UP_ROUNDS,
    BackendChoice,
    RoundCost,
    candidate_backends,
)
from coordinator.config import ApplyPolicy, AverageBackend

CPU, THREAD, NCCL = AverageBackend.CPU, AverageBackend.THREAD, AverageBackend.NCCL
AUTO, GLOO = AverageBackend.AUTO, AverageBackend.GLOO
TRIAL = WARM_UP_ROUNDS + MEASURED_ROUNDS


def rounds(choice, costs, num=TRIAL, trained_s=10.0, anchor=10):
    """Rounds over whatever is next; gives what they went over, and whether all was decided."""
    over, decided = [], []
    for _ in range(num):
        over.append(choice.next)
        cost = costs[choice.next]
        cost = None if cost is None else RoundCost(ranks_s=cost)
        decided.append(choice.record_round(choice.next, cost, trained_s, anchor))
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
def test_what_can_serve(requested, policy, chosen, world, expected):
    assert candidate_backends(requested, policy, chosen, world) == expected


@pytest.mark.parametrize("cheaper", [CPU, THREAD])
def test_each_is_tried_and_the_cheaper_kept(cheaper):
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
            choice.record_round(over, RoundCost(ranks_s=float(cost)), 10.0, 10)
    mean = (MEASURED_ROUNDS + 1) / 2
    assert f"CPU {1000 * mean:.3g} ms" in choice.reason


def test_the_first_round_over_each_does_not_count():
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, {CPU: 0.2}, TRIAL)
    rounds(choice, {THREAD: 99.0}, WARM_UP_ROUNDS)
    rounds(choice, {THREAD: 0.1}, MEASURED_ROUNDS)
    assert choice.chosen is THREAD


def test_rounds_that_tell_nothing_end_a_trial_at_last():
    choice = BackendChoice((CPU, THREAD), measures=True)
    over, _ = rounds(choice, {CPU: 1.0, THREAD: None}, TRIAL + MAX_TRIAL_ROUNDS)
    assert over[-1] is THREAD
    assert choice.next is CPU


def decided(costs, **settings):
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, costs, 2 * TRIAL, **settings)
    return choice


def test_the_other_is_looked_at_now_and_then_and_ever_less():
    costs = {CPU: 0.1, THREAD: 0.2}
    choice = decided(costs)
    over, _ = rounds(choice, costs, 4 * RETRIAL_ROUNDS)
    assert over.index(THREAD) == RETRIAL_ROUNDS
    assert over[RETRIAL_ROUNDS : RETRIAL_ROUNDS + TRIAL] == [THREAD] * TRIAL
    again = over.index(THREAD, RETRIAL_ROUNDS + TRIAL)
    assert again == RETRIAL_ROUNDS + TRIAL + 2 * RETRIAL_ROUNDS


def test_a_look_waits_until_training_has_paid_for_it():
    costs = {CPU: 0.1, THREAD: 50.0}
    choice = decided(costs, trained_s=1.0)
    over, _ = rounds(choice, costs, 10 * RETRIAL_ROUNDS, trained_s=1.0)
    assert THREAD not in over


@pytest.mark.parametrize(("anchor", "looks"), [(15, False), (20, True), (5, True), (6, False)])
def test_an_anchor_that_has_changed_by_two_asks_for_a_look(anchor, looks):
    costs = {CPU: 0.1, THREAD: 0.2}
    choice = decided(costs, anchor=10)
    over, _ = rounds(choice, costs, 20, trained_s=100.0, anchor=anchor)
    assert (THREAD in over) is looks
    assert over.count(THREAD) <= TRIAL, "it holds from the new anchor on"


def test_what_has_become_cheaper_is_taken():
    choice = decided({CPU: 0.1, THREAD: 0.2})
    rounds(choice, {CPU: 0.5, THREAD: 0.2}, RETRIAL_ROUNDS + TRIAL)
    assert choice.chosen is THREAD


def test_noise_is_no_reason_to_change():
    choice = decided({CPU: 0.1, THREAD: 0.2})
    rounds(choice, {CPU: 0.1, THREAD: 0.095}, RETRIAL_ROUNDS + TRIAL)
    assert choice.chosen is CPU


def test_other_ranks_are_measured_anew_and_may_try_what_failed():
    choice = decided({CPU: 0.1, THREAD: 0.2})
    assert choice.exclude(THREAD, "broken")
    choice.reset()
    over, _ = rounds(choice, {CPU: 0.3, THREAD: 0.2}, 2 * TRIAL)
    assert over == [CPU] * TRIAL + [THREAD] * TRIAL
    assert choice.chosen is THREAD


def test_a_round_that_began_before_the_ranks_changed_is_no_trial():
    choice = decided({CPU: 0.2, THREAD: 0.1})
    choice.reset()
    assert choice.next is THREAD
    choice.record_round(CPU, RoundCost(ranks_s=9.0), 1.0, 10)
    over, _ = rounds(choice, {CPU: 0.1, THREAD: 0.2}, 2 * TRIAL)
    assert over == [THREAD] * TRIAL + [CPU] * TRIAL


def test_the_one_that_failed_is_left_and_the_last_is_not():
    choice = BackendChoice((NCCL, CPU), measures=True)
    assert choice.exclude(NCCL, "no link")
    assert (choice.chosen, choice.next, choice.before) == (CPU, CPU, NCCL)
    assert choice.reason == "NCCL failed: no link"
    assert choice.collective is None
    assert not choice.exclude(NCCL, "again")
    assert not choice.exclude(CPU, "the last one")
    over, _ = rounds(choice, {CPU: 1.0}, 3 * RETRIAL_ROUNDS, anchor=50)
    assert set(over) == {CPU}


def test_failures_in_a_row_are_counted_and_cost_something():
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, {CPU: 0.2}, TRIAL)
    for number in (1, 2):
        choice.record_fault(THREAD, RoundCost(ranks_s=5.0))
        assert choice.num_faults == number
    rounds(choice, {THREAD: 0.1, CPU: 0.2}, 1)
    choice.record_fault(CPU, RoundCost(ranks_s=1.0))
    assert choice.num_faults == 1
    assert choice.chosen is CPU


def test_without_measuring_only_a_failure_changes_it():
    choice = BackendChoice((NCCL, THREAD), measures=False)
    over, _ = rounds(choice, {NCCL: 9.0}, 3 * RETRIAL_ROUNDS, anchor=77)
    assert set(over) == {NCCL}
    assert choice.exclude(NCCL, "broken")
    choice.reset()
    assert choice.next is THREAD


def test_a_checkpoint_keeps_the_choice():
    choice = decided({CPU: 0.2, THREAD: 0.1})
    again = BackendChoice((CPU, THREAD), measures=True)
    again.load_state_dict(choice.state_dict())
    assert again.chosen is again.next is THREAD
    assert again.reason.startswith("measured before the checkpoint: CPU 200 ms")
    assert again.state_dict() == choice.state_dict()


@pytest.mark.parametrize("other", [(NCCL, CPU), (CPU,)])
def test_a_run_with_other_transports_begins_anew(other):
    state = decided({CPU: 0.2, THREAD: 0.1}).state_dict()
    again = BackendChoice(other, measures=True)
    again.load_state_dict(state)
    assert again.chosen is other[0]


def test_what_was_not_decided_is_not_kept():
    choice = BackendChoice((CPU, THREAD), measures=True)
    rounds(choice, {CPU: 0.2}, TRIAL)
    again = BackendChoice((CPU, THREAD), measures=True)
    again.load_state_dict(choice.state_dict())
    assert again.next is CPU
