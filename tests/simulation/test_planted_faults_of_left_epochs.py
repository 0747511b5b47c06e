"""Faults planted in epochs that bodies leave, each of which the simulator must find."""

from __future__ import annotations

from collections import deque

from coordinator.config import ApplyPolicy
from coordinator.epochs import EpochScheduler
from coordinator.failure_recovery import FailureRecovery
from coordinator.ledger import BatchLedger
from runtime.worker.protocol import WorkerProtocol
from tests.simulation.finding import STUCK, assert_is_found, drawn
from tests.simulation.harness import simulate
from tests.simulation.schedule import Schedule
from tests.support.pairs import SCALE


def leaves(schedule: Schedule) -> bool:
    return schedule.leave_chance > 0


def saves(schedule: Schedule) -> bool:
    return leaves(schedule) and schedule.config.save_every == 1


def dies(schedule: Schedule) -> bool:
    return leaves(schedule) and schedule.deaths and schedule.config.continue_on_failure


def test_samples_of_epochs_that_ranks_leave_are_trained_once():
    for seed in range(40 if SCALE == 1 else 200 * SCALE):
        simulate(seed, draw=drawn(leaves))


def test_batches_reserved_for_a_rank_that_left_the_epoch_are_found(monkeypatch):
    redistribute = BatchLedger._redistribute_quota

    def to_all(self, epoch, rank, shares):
        left, epoch.left = epoch.left, set()
        redistribute(self, epoch, rank, shares)
        epoch.left = left

    monkeypatch.setattr(BatchLedger, "_redistribute_quota", to_all)
    assert_is_found(STUCK, drawn(dies), first=98)


def test_an_epoch_that_does_not_end_once_all_ranks_left_it_is_found(monkeypatch):
    monkeypatch.setattr(EpochScheduler, "_end_left", lambda self: None)
    assert_is_found("have left epoch", drawn(leaves))


def test_omitted_batches_taken_for_the_last_ones_are_found(monkeypatch):
    end_short = BatchLedger.end_short

    def shorten(self, epoch):
        epoch.num_batches -= len(epoch.open)
        omitted = end_short(self, epoch)
        epoch.num_omitted = 0
        return omitted

    monkeypatch.setattr(BatchLedger, "end_short", shorten)
    assert_is_found("trained, not recorded", drawn(saves), first=94)


def test_a_rank_in_lockstep_that_receives_the_epoch_again_is_found(monkeypatch):
    resume = FailureRecovery._resume

    def forgetful(self):
        self._left.clear()
        resume(self)

    monkeypatch.setattr(FailureRecovery, "_resume", forgetful)
    assert_is_found(
        "events and no end", drawn(lambda s: leaves(s) and s.config.policy is ApplyPolicy.SYNC)
    )


def test_plans_of_earlier_epochs_kept_after_a_later_one_was_left_are_found(monkeypatch):
    def leave_this_one(self, epoch):
        self._left_epoch = epoch
        dropped = [plan for plan in self.plans if plan.epoch == epoch]
        self.plans = deque(plan for plan in self.plans if plan.epoch != epoch)
        self.end_plan()
        return dropped

    monkeypatch.setattr(WorkerProtocol, "leave_epoch", leave_this_one)
    assert_is_found("samples are trained in an epoch", drawn(leaves), first=452)
