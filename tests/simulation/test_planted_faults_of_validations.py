"""Faults planted in the validation of averages, each of which the simulator must find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.average_tasks import AverageTasks
from coordinator.config import ApplyPolicy
from coordinator.messages import TaskKind
from coordinator.rounds import Round
from runtime.evaluation.shared_evaluation import EvaluationPart, SharedEvaluations
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


def test_batches_that_died_with_their_rank_are_found(monkeypatch):
    leave = SharedEvaluations.leave

    def forgetting(self, rank):
        for found in self._open.values():
            found.claims.get(rank, {}).clear()
        leave(self, rank)

    monkeypatch.setattr(SharedEvaluations, "leave", forgetting)
    assert_is_found("batches are validated, published", drawn(dies))


def test_a_wait_for_a_dead_rank_is_found(monkeypatch):
    monkeypatch.setattr(SharedEvaluations, "leave", lambda self, rank: None)
    assert_is_found(STUCK, drawn(dies))


def test_a_coordinator_that_waits_for_a_dead_rank_is_found(monkeypatch):
    monkeypatch.setattr(AverageTasks, "lose", lambda self, rank: self.callers.discard(rank))
    assert_is_found(STUCK, drawn(dies))


def test_a_result_from_two_averages_is_found(monkeypatch):
    add, ids = AverageTasks._add, {}

    def again(self, kind, epoch, at, rank=None):
        if kind is not TaskKind.VALIDATE or at is not None:
            return add(self, kind, epoch, at, rank)
        self._num_begun = ids.setdefault((id(self), epoch), self._num_begun + 1) - 1
        task = add(self, kind, epoch, at, rank)
        self._num_begun += 1000
        return task

    monkeypatch.setattr(AverageTasks, "_add", again)
    assert_is_found("validates another average", drawn(dies))


def test_batches_evaluated_twice_after_a_death_are_found(monkeypatch):
    give = EvaluationPart.give

    def keeping(self, samples, means):
        claim = self._found.claims[self._rank][samples.batch]
        give(self, samples, means)
        self._found.claims[self._rank][samples.batch] = claim

    monkeypatch.setattr(EvaluationPart, "give", keeping)
    assert_is_found("validated twice", drawn(dies))


def test_a_rank_without_its_part_is_found(monkeypatch):
    work = Round.work

    def first_alone(self, rank, budget):
        found = work(self, rank, budget)
        return found | {"tasks": tuple(task for task in found["tasks"] if task.rank == rank)}

    monkeypatch.setattr(Round, "work", first_alone)
    assert_is_found(STUCK, drawn(lambda s: s.config.val_every_steps and not s.deaths))


def test_means_of_one_batch_are_found(monkeypatch):
    monkeypatch.setattr(EvaluationPart, "results", lambda self: self._found.found[:1])
    assert_is_found("batches are validated, published", VALIDATES)


def test_an_epoch_published_before_its_validation_is_found(monkeypatch):
    def is_done(self, epoch):
        return self.at_end(epoch) - {TaskKind.VALIDATE} <= self._results[epoch].keys()

    monkeypatch.setattr(AverageTasks, "is_done", is_done)
    assert_is_found("batches are validated, published", VALIDATES)


def test_steps_that_end_with_an_epoch_are_validated_with_it(monkeypatch):
    """Otherwise the ranks would wait for a validation that never comes."""
    at_end = AverageTasks.at_end

    def by_epochs(self, epoch):
        due = at_end(self, epoch)
        if (epoch + 1) % self._config.val_every:
            self._at_end[epoch] = due - {TaskKind.VALIDATE}
        return self._at_end[epoch]

    monkeypatch.setattr(AverageTasks, "at_end", by_epochs)
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
    due = AverageTasks.due

    def alone(self, epoch):
        kinds, several = due(self, epoch), len(self._live()) > 1
        return [k for k in kinds if k is not TaskKind.VALIDATE or epoch is not None or not several]

    monkeypatch.setattr(AverageTasks, "due", alone)
    has_some = drawn(lambda s: s.config.val_every_steps and s.config.policy is policy)

    def draw(seed):
        schedule = has_some(seed)
        return replace(schedule, config=replace(schedule.config, val_every_steps=2))

    assert_is_found("never validated within", draw, first=first)
