"""Validator: division of the validation set, results batch by batch, exact means."""

import math

import pytest

from coordinator import messages as m
from coordinator.batch_means import BatchMeans, weighted_means
from coordinator.config import CoordinatorConfig
from coordinator.validator import Validator


def make(num_batches=10, **config):
    return Validator(
        CoordinatorConfig(
            devices=("cpu", "cpu"),
            num_samples=8,
            batch_size=2,
            num_epochs=1,
            val_batches=num_batches,
            **config,
        )
    )


def report(validation, rank, batches, seconds=1.0):
    results = tuple(BatchMeans(b, (("x", float(b), 1.0),)) for b in batches)
    return m.ValidationReport(rank=rank, id=validation.id, results=results, seconds=seconds)


def sizes(validation):
    return {rank: sum(map(len, task)) for rank, task in validation.tasks.items()}


def test_each_batch_belongs_to_one_rank_in_proportion_to_speed():
    tasks = make().begin(0, None, {0: 1.0, 1: 4.0}).tasks
    assert tasks == {0: (range(2),), 1: (range(2, 10),)}


def test_the_batches_of_a_long_validation_set_are_not_listed():
    validator = make(10**12)
    validation = validator.begin(0, None, {0: 1.0, 1: 3.0})
    assert sizes(validation) == {0: 10**12 // 4, 1: 10**12 // 4 * 3}
    validator.on_report(report(validation, 1, range(10**12 // 4, 10**12 // 4 + 2)))
    assert validation.tasks[1] == (range(10**12 // 4 + 2, 10**12),)
    new = validator.reassign(validation, {1: 3.0})
    assert new == {1: (range(10**12 // 4),)}


@pytest.mark.parametrize("speeds", [{0: 0.0, 1: 4.0}, {0: 0.0, 1: 0.0}, {0: 2.0, 1: 2.0}])
def test_ranks_that_are_not_measured_have_equal_parts(speeds):
    assert sizes(make().begin(0, None, speeds)) == {0: 5, 1: 5}


def test_the_next_parts_follow_the_measured_rates():
    validator = make()
    first = validator.begin(0, None, {0: 1.0, 1: 1.0})
    assert validator.on_report(report(first, 0, range(5), 1.0)) is None
    assert validator.on_report(report(first, 1, range(5, 10), 4.0)) is first
    second = validator.begin(1, None, {0: 1.0, 1: 1.0})
    assert sizes(second) == {0: 8, 1: 2}


def test_a_batch_has_the_means_of_its_parts():
    validator = make(2)
    validation = validator.begin(0, None, {0: 1.0})
    results = tuple(BatchMeans(b, (("x", x, w),)) for b, x, w in ((0, 1, 3), (0, 5, 1), (1, 7, 2)))
    whole = m.ValidationReport(rank=0, id=validation.id, results=results, seconds=1.0)
    assert validator.on_report(whole) is validation
    assert validation.means == {"x": (1 * 3 + 5 * 1 + 7 * 2) / 6}


def test_a_task_is_reported_in_parts():
    validator = make()
    validation = validator.begin(0, 7, {0: 1.0})
    assert validator.within is validation
    assert validator.on_report(report(validation, 0, range(3))) is None
    assert validation.waits_for([0])
    assert validator.on_report(report(validation, 0, range(3, 10))) is validation
    assert validator.within is None
    assert validation.means == {"x": 4.5}
    assert validation.duration_s == 2.0


def test_reports_of_a_cancelled_validation_are_ignored():
    validator = make()
    first = validator.begin(0, None, {0: 1.0})
    validator.cancel(first)
    assert validator.on_report(report(first, 0, range(10))) is None
    assert not first.results


def test_parts_of_dead_ranks_are_divided_among_the_others():
    validator = make()
    validation = validator.begin(0, None, {0: 1.0, 1: 1.0})
    validator.on_report(report(validation, 1, [5, 6]))
    assert validation.waits_for([0])
    validator.on_report(report(validation, 0, range(5)))
    assert not validation.waits_for([0])
    new = validator.reassign(validation, {0: 1.0})
    assert new == validation.tasks == {0: (range(7, 10),)}
    assert validation.message(new[0]).batches == new[0]
    assert validator.on_report(report(validation, 0, [7, 8, 9])) is validation
    assert validation.means == {"x": 4.5}


def test_validation_is_due_every_n_epochs():
    assert [make(val_every=3).is_due(epoch) for epoch in range(6)] == [False, False, True] * 2
    assert not make(0).is_due(0)


def test_means_are_exact_and_independent_of_the_order():
    batches = [BatchMeans(i, (("x", 0.1 * i, float(i % 4)),)) for i in range(1000)]
    found = weighted_means(batches)
    assert found == weighted_means(batches[::-1])
    exact = math.fsum(0.1 * i * (i % 4) for i in range(1000)) / sum(i % 4 for i in range(1000))
    assert found["x"] == exact


def test_batches_of_weight_0_do_not_count_and_others_that_are_not_finite_do():
    def means(*pairs):
        return weighted_means(BatchMeans(i, (("x", *pair),)) for i, pair in enumerate(pairs))["x"]

    assert means((math.nan, 0.0), (2.0, 1.0)) == 2.0
    assert math.isnan(means((math.nan, 1.0), (2.0, 1.0)))
    assert means((math.inf, 1.0), (2.0, 1.0)) == math.inf
    assert math.isnan(means((1.0, 0.0)))


def test_a_part_without_measurable_time_does_not_change_the_rates():
    validator = make()
    first = validator.begin(0, None, {0: 1.0, 1: 1.0})
    validator.on_report(report(first, 0, range(5), 0.0))
    assert validator.on_report(report(first, 1, range(5, 10), 4.0)) is first
    second = validator.begin(1, None, {0: 1.0, 1: 1.0})
    assert sizes(second) == {0: 5, 1: 5}
