"""Batches and results of evaluations that several ranks share: deaths, repeats and late ranks."""

from __future__ import annotations

import threading

import pytest
import torch

from runtime.core.errors import CollectiveAborted
from runtime.evaluation.batch_source import SampleRange, open_source
from runtime.evaluation.pending_means import EvaluationView
from runtime.evaluation.predict import means_in_order
from runtime.worker.evaluation_calls import EvaluationCalls
from tests.support.running import WAIT_S

CALLER, HELPER = 0, 1


def opened(dataset=None):
    """Calls with one of rank 0, over ten samples in batches of four."""
    calls = EvaluationCalls()
    data = (torch.arange(10.0),) if dataset is None else dataset
    call = calls.open(
        CALLER,
        data,
        lambda model, batch: None,
        lambda d: open_source(d, 4, 1, call="worker.evaluate"),
    )
    return calls, call


def evaluate(part, samples, *, start=None, stop=None):
    """The result of a batch, or of a part of it: the mean of its numbers."""
    start, stop = start or samples.start, stop or samples.stop
    data = samples.load(start, stop)
    view = EvaluationView(torch.nn.Identity(), torch.device("cpu"), torch.Generator())
    part(SampleRange(samples.batch, start, stop, samples.load), data, {"x": data[0].mean()}, view)


def evaluate_rest(part):
    while (samples := part.take()) is not None:
        evaluate(part, samples)


def ended(part):
    """A thread in which a part ends, and its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(part.end()))
    thread.start()
    return thread, found


def test_the_caller_waits_for_the_batches_of_the_others():
    calls, call = opened()
    caller, helper = calls.join(CALLER, CALLER, 1), calls.join(CALLER, HELPER, 1)
    held = helper.take()
    evaluate_rest(caller)
    thread, found = ended(caller)
    assert not call.is_answered
    evaluate(helper, held)
    assert not call.is_answered
    assert helper.take() is None
    assert helper.end()
    thread.join(WAIT_S)
    assert found == [True]
    assert call.is_answered
    assert means_in_order(call.results()) == {"x": pytest.approx(4.5)}


def test_a_batch_in_parts_of_a_rank_that_dies_is_evaluated_whole():
    calls, call = opened()
    caller, helper = calls.join(CALLER, CALLER, 1), calls.join(CALLER, HELPER, 1)
    evaluate(helper, helper.take(), stop=2)
    evaluate_rest(caller)
    thread, found = ended(caller)
    calls.leave(HELPER)
    thread.join(WAIT_S)
    assert found == [False]
    evaluate_rest(caller)
    assert caller.end()
    assert means_in_order(call.results()) == {"x": pytest.approx(4.5)}


def test_an_average_that_the_caller_has_missed_is_forgotten():
    calls, call = opened()
    old = calls.join(CALLER, HELPER, 1)
    evaluate(old, old.take())
    caller = calls.join(CALLER, CALLER, 2)
    assert not old.may_continue()
    assert calls.join(CALLER, 2, 1) is None
    evaluate_rest(old)
    evaluate_rest(caller)
    assert caller.end()
    assert means_in_order(call.results()) == {"x": pytest.approx(4.5)}


def test_an_iterator_is_read_for_one_average_only():
    batches = iter([torch.arange(4.0)])
    calls, call = opened(batches)
    assert calls.join(CALLER, HELPER, 1).take() is not None
    caller = calls.join(CALLER, CALLER, 2)
    with pytest.raises(ValueError, match="can be read only once") as error:
        caller.take()
    caller.fail(error.value)
    assert caller.end()
    with pytest.raises(ValueError, match="can be read only once"):
        call.results()


def test_a_late_rank_takes_no_part_in_the_next_call():
    calls, _ = opened()
    caller = calls.join(CALLER, CALLER, 1)
    evaluate_rest(caller)
    caller.end()
    assert calls.join(CALLER, HELPER, 1) is None
    calls.close(CALLER)
    assert calls.join(CALLER, HELPER, 1) is None
    calls.open(CALLER, (torch.arange(3.0),), lambda model, batch: None, lambda d: None)
    assert calls.join(CALLER, HELPER, 1) is None
    assert calls.join(CALLER, HELPER, 2) is not None


def test_an_average_without_the_last_steps_of_the_caller_does_not_answer():
    calls, _ = opened()
    calls.open(CALLER, (torch.arange(3.0),), lambda model, batch: None, lambda d: None, after=4)
    assert calls.join(CALLER, HELPER, 4) is None
    assert calls.join(CALLER, CALLER, 4) is None
    assert calls.join(CALLER, HELPER, 5) is not None


def test_the_end_of_the_run_wakes_the_caller():
    calls, call = opened()
    caller, helper = calls.join(CALLER, CALLER, 1), calls.join(CALLER, HELPER, 1)
    assert helper.take() is not None
    evaluate_rest(caller)
    thread, found = ended(caller)
    calls.abort()
    thread.join(WAIT_S)
    assert found == [True]
    assert not helper.may_continue()
    with pytest.raises(CollectiveAborted, match="the run has failed"):
        call.results()


def test_an_error_ends_the_wait_of_the_caller_and_the_parts_of_all():
    calls, call = opened()
    caller, helper = calls.join(CALLER, CALLER, 1), calls.join(CALLER, HELPER, 1)
    evaluate_rest(caller)
    thread, found = ended(caller)
    helper.fail(KeyError("planted"))
    helper.fail(KeyError("later"))
    assert not helper.may_continue()
    assert helper.end()
    thread.join(WAIT_S)
    assert found == [True]
    with pytest.raises(KeyError, match="planted"):
        call.results()


def test_a_batch_without_samples_is_passed_over():
    calls, call = opened()
    call.read = lambda dataset: Source()
    caller = calls.join(CALLER, CALLER, 1)
    evaluate_rest(caller)
    assert caller.end()
    assert means_in_order(call.results()) == {"x": 1.0}


class Source:
    """An empty batch, then one of two samples."""

    def __init__(self):
        self._left = [(1, 0, 2), (0, 0, 0)]

    def take(self):
        def load(start, stop):
            return (torch.ones(stop - start),)

        return SampleRange(*self._left.pop(), load) if self._left else None
