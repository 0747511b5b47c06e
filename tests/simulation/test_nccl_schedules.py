"""The NCCL transport on the model of GPUs: no schedule hangs, and planted faults are found."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from runtime.collective import nccl
from runtime.device import capture_gate
from tests.simulation.nccl_harness import Plan, ScheduleFailed, simulate_nccl
from tests.support.pairs import SCALE

NUM_SCHEDULES = 100 if SCALE == 1 else 300 * SCALE
FOUND_WITHIN = 2000


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, 100))
def test_no_schedule_hangs_or_trusts_a_wrong_result(first):
    for seed in range(first, first + 100):
        simulate_nccl(seed)


def test_a_schedule_is_repeated_by_its_seed():
    one, other = simulate_nccl(7), simulate_nccl(7)
    assert one.scheduler.num_steps == other.scheduler.num_steps
    assert one.scheduler.now == other.scheduler.now


def calm(plan):
    """No rank of the plan may see an error."""
    plan.failing, plan.aborter, plan.stuck, plan.durations_s = None, False, False, Plan.durations_s


def found(pattern, change=None, *, first=0):
    """A seed whose schedule fails with these words.

    The search begins at seed ``first``, or at 0 for ``TEST_SCALE`` above 1.
    """
    first = first if SCALE == 1 else 0
    for seed in (*range(first, FOUND_WITHIN), *range(first)):
        try:
            simulate_nccl(seed, change)
        except ScheduleFailed as error:
            if pattern in str(error):
                return seed
    return None


def test_a_launch_before_the_meeting_is_found(monkeypatch):
    staged = nccl.NcclCollective._staged

    def launched_early(end, request):
        part = staged(end, request)
        if part is not None and not part.staged.scaled:
            with part.current():
                for issue in part.staged.issues:
                    issue()
            part.staged.issues.clear()
        return part

    monkeypatch.setattr(nccl.NcclCollective, "_staged", launched_early)
    assert found("hang: ", first=256) is not None


def test_pinned_memory_without_the_gate_is_found(monkeypatch):
    for seed in range(40):
        simulate_nccl(seed, calm)
    monkeypatch.setattr(capture_gate.CaptureGate, "driver_call", lambda self: nullcontext())
    assert found("pinned memory, for all devices", calm, first=650) is not None


def test_a_rank_with_another_order_of_buckets_is_found():
    def change(plan):
        calm(plan)
        plan.reversed_rank = 1

    assert found("bucketed_mean: rank 1 passed shape", change) is not None


def test_an_abort_between_two_launches_is_found(monkeypatch):
    monkeypatch.setattr(nccl, "_LAUNCH_GRACE_S", 0.0)
    # The wait for the device covers most of these launches.
    monkeypatch.setattr(nccl.Communicators, "_await_begun", lambda self, rank: None)
    assert found("on a communicator that is being aborted", first=135) is not None


def test_an_abort_in_front_of_a_queued_kernel_is_found(monkeypatch):
    """NCCL frees the memory of the kernel, which then fails with an illegal access."""

    def change(plan):
        plan.aborter, plan.stuck, plan.durations_s = True, False, (0.0, 0.4)

    for seed in range(20):
        simulate_nccl(seed, change)
    monkeypatch.setattr(nccl.Communicators, "_await_begun", lambda self, rank: None)
    assert found("is freed before it begins", change, first=37) is not None


def test_ranks_that_disagree_on_late_results_are_found(monkeypatch):
    def change(plan):
        calm(plan)
        plan.failing_readers = frozenset({1})

    for seed in range(20):
        simulate_nccl(seed, change)
    monkeypatch.setattr(
        nccl.NcclCollective, "agree", lambda self, subject, *, capable=True, **_: capable
    )
    assert found("called weighted_mean_, rank 0 called bucketed_mean", change) is not None
