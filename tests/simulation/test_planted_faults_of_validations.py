"""Faults planted in the validation of averages, each of which the simulator must find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.batch_means import weighted_means
from coordinator.config import ApplyPolicy
from coordinator.epochs import EpochScheduler
from coordinator.transports import Round
from coordinator.validator import Validation, Validator
from tests.simulation.finding import STUCK, assert_is_found, drawn
from tests.simulation.harness import simulate
from tests.support.pairs import SCALE

VALIDATES = drawn(lambda s: s.config.val_batches)


def dies(schedule):
    return schedule.config.val_batches and schedule.deaths and schedule.config.continue_on_failure


@pytest.mark.parametrize("policy", ApplyPolicy)
def test_every_run_validates_whole_averages(policy):
    draw = drawn(lambda s: s.config.val_batches and s.config.policy is policy)
    for seed in range(30 * SCALE):
        simulate(seed, draw=draw)


def test_a_part_that_died_with_its_rank_is_found(monkeypatch):
    monkeypatch.setattr(Validation, "waits_for", lambda self, live: bool(self.tasks))
    assert_is_found(STUCK, drawn(dies), first=88)


def test_a_result_from_two_averages_is_found(monkeypatch):
    begin = Validator.begin

    def again(self, epoch, at, speeds):
        old = self.of_epoch.get(epoch)
        if at is not None or old is None:
            return begin(self, epoch, at, speeds)
        self.reassign(old, speeds)
        return old

    monkeypatch.setattr(Validator, "begin", again)
    assert_is_found("validates another average", drawn(dies), first=242)


def test_batches_evaluated_twice_after_a_death_are_found(monkeypatch):
    reassign = Validator.reassign

    def whole(self, validation, speeds):
        validation.results.clear()
        return reassign(self, validation, speeds)

    monkeypatch.setattr(Validator, "reassign", whole)
    in_lockstep = drawn(lambda s: dies(s) and s.config.policy is ApplyPolicy.SYNC)
    assert_is_found("validated twice", in_lockstep, first=66)


def test_a_rank_without_its_part_is_found(monkeypatch):
    work = Round.work

    def first_alone(self, rank, budget):
        found = work(self, rank, budget)
        return found if rank == self.lead else found | {"validate": None}

    monkeypatch.setattr(Round, "work", first_alone)
    assert_is_found(STUCK, VALIDATES)


def test_means_of_one_rank_are_found(monkeypatch):
    def first(self):
        return weighted_means(self.results[0])

    monkeypatch.setattr(Validation, "means", property(first))
    assert_is_found("batches are validated, published", VALIDATES)


def test_an_epoch_published_before_its_validation_is_found(monkeypatch):
    monkeypatch.setattr(
        EpochScheduler, "_is_done", lambda self, epoch: self.pending_work(epoch) == (None, None)
    )
    assert_is_found("batches are validated, published", VALIDATES)


def test_steps_that_end_with_an_epoch_are_validated_with_it(monkeypatch):
    """Otherwise the ranks would wait for a validation that never comes."""
    decide = EpochScheduler._is_validated

    def by_epochs(self, epoch):
        epoch.is_validated = self.validator.is_due(epoch.epoch)
        return decide(self, epoch)

    monkeypatch.setattr(EpochScheduler, "_is_validated", by_epochs)
    lockstep = drawn(
        lambda s: (
            s.config.val_every_steps
            and s.config.val_every > 1
            and s.config.policy is ApplyPolicy.SYNC
        )
    )
    assert_is_found(STUCK, lockstep)


@pytest.mark.parametrize(("policy", "first"), [(ApplyPolicy.CADENCE, 24), (ApplyPolicy.ASYNC, 65)])
def test_missing_validations_within_an_epoch_are_found(monkeypatch, policy, first):
    due = EpochScheduler.validation_due.fget
    alone = property(lambda self: due(self) and len(self._run.live) < 2)
    monkeypatch.setattr(EpochScheduler, "validation_due", alone)
    has_some = drawn(lambda s: s.config.val_every_steps and s.config.policy is policy)

    def draw(seed):
        schedule = has_some(seed)
        return replace(schedule, config=replace(schedule.config, val_every_steps=2))

    assert_is_found("never validated within", draw, first=first)
