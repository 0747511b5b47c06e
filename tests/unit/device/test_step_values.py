"""Values of a step: kept once it is made, and otherwise dropped."""

from __future__ import annotations

import pytest
import torch

from runtime.device.metering import StepValues, ValueLog


@pytest.fixture
def log():
    return ValueLog()


def step_of(log, *losses, scalars=()):
    """The values of a step with one batch for each loss; ``None``: it has none."""
    values = StepValues(log, log.number)
    for loss in losses:
        values.begin_batch()
        if loss is not None:
            values.push_loss(torch.tensor(loss), 2)
    for name, value in scalars:
        values.push_scalar(name, value, 2)
    return values


def test_values_count_once_their_step_is_kept(log):
    log.keep(step_of(log, 1.0, scalars=[("norm", 4.0)]))
    failed = step_of(log, 7.0, scalars=[("norm", 9.0)])
    assert failed.number == log.number == 1
    assert log.harvest() == (2.0, 2, {"norm": (8.0, 2)})
    log.keep(step_of(log, 3.0))
    assert log.harvest() == (6.0, 2, {})


def test_losses_of_one_batch_add_up(log):
    values = step_of(log, 1.0)
    values.push_loss(torch.tensor(5.0), 99)
    log.keep(values)
    assert log.harvest() == (12.0, 2, {})
    assert log.number == 1


def test_losses_of_a_further_step_on_a_batch_do_not_count(log):
    values = step_of(log)
    values.push_loss(torch.tensor(5.0), 2)
    values.push_scalar("norm", 3.0, 2)
    log.keep(values)
    assert log.harvest() == (0.0, 0, {"norm": (6.0, 2)})
    assert log.number == 0


def test_a_weight_holds_for_the_scalars_of_its_batch_alone(log):
    values = step_of(log, 1.0, scalars=[("norm", 1.0)])
    values.begin_batch()
    values.push_scalar("norm", 1.0, 2)
    values.weigh_scalars(5.0)
    assert [weight for *_, weight in values.scalars] == [2, 5.0]


def test_batches_of_a_dropped_step_stay_counted(log):
    bad, rates = [], iter((0.5, 0.25, 0.125))
    log.on_bad_loss, log.each, log.rate = bad.append, [], lambda: next(rates)
    dropped = step_of(log, float("nan"), None, scalars=[("norm", 4.0)])
    dropped.drop()
    log.keep(dropped)
    log.keep(step_of(log, 2.0))
    log.keep(step_of(log, float("inf")))
    log.harvest()
    assert bad == [3]
    assert log.take_each()[:3] == ((0.0, 0, 0.5), (0.0, 0, None), (2.0, 2, 0.25))
