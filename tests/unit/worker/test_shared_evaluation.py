"""Batches and results of evaluations that several ranks share: deaths, repeats and late ranks."""

from __future__ import annotations

import threading

import pytest
import torch

from coordinator.messages import TaskKind
from runtime.core.errors import CollectiveAborted
from runtime.core.group_gate import GroupGate
from runtime.evaluation.batch_source import SampleRange, open_source
from runtime.evaluation.pending_means import EvaluationView
from runtime.evaluation.predict import means_in_order
from runtime.evaluation.shared_evaluation import SharedEvaluations
from tests.support.running import WAIT_S, task

CALLER, HELPER = 0, 1


def opened(dataset=None, gate=None):
    """Shared evaluations with a call of rank 0, over ten samples in batches of four."""
    shared = SharedEvaluations(gate)
    data = (torch.arange(10.0),) if dataset is None else dataset
    call = shared.call(
        CALLER,
        data,
        lambda model, batch: None,
        lambda d: open_source(d, 4, 1, call="worker.evaluate"),
    )
    return shared, call


def join(shared, rank, number):
    """The part of a rank in the call, with the average of this round and task."""
    return shared.join(task(TaskKind.REQUESTED, rank=CALLER, id=number), rank, number)


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
    shared, call = opened()
    caller, helper = join(shared, CALLER, 1), join(shared, HELPER, 1)
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
    assert means_in_order(call.part.results()) == {"x": pytest.approx(4.5)}


def test_a_batch_in_parts_of_a_rank_that_dies_is_evaluated_whole():
    shared, call = opened()
    caller, helper = join(shared, CALLER, 1), join(shared, HELPER, 1)
    evaluate(helper, helper.take(), stop=2)
    evaluate_rest(caller)
    thread, found = ended(caller)
    shared.leave(HELPER)
    thread.join(WAIT_S)
    assert found == [False]
    evaluate_rest(caller)
    assert caller.end()
    assert means_in_order(call.part.results()) == {"x": pytest.approx(4.5)}


def test_an_average_that_the_caller_has_missed_is_forgotten():
    shared, call = opened()
    old = join(shared, HELPER, 1)
    evaluate(old, old.take())
    caller = join(shared, CALLER, 2)
    assert not old.may_continue()
    assert join(shared, 2, 1) is None
    evaluate_rest(old)
    evaluate_rest(caller)
    assert caller.end()
    assert means_in_order(call.part.results()) == {"x": pytest.approx(4.5)}


def test_an_iterator_is_read_for_one_average_only():
    batches = iter([torch.arange(4.0)])
    shared, call = opened(batches)
    assert join(shared, HELPER, 1).take() is not None
    caller = join(shared, CALLER, 2)
    with pytest.raises(ValueError, match="can be read only once") as error:
        caller.take()
    caller.fail(error.value)
    assert caller.end()
    with pytest.raises(ValueError, match="can be read only once"):
        call.part.results()


def test_a_late_rank_takes_no_part_in_the_next_call():
    shared, _ = opened()
    caller = join(shared, CALLER, 1)
    evaluate_rest(caller)
    caller.end()
    assert join(shared, HELPER, 1) is None
    shared.close(CALLER)
    assert join(shared, HELPER, 1) is None
    shared.call(CALLER, (torch.arange(3.0),), lambda model, batch: None, lambda d: None)
    assert join(shared, HELPER, 1) is None
    assert join(shared, HELPER, 2) is not None


def test_an_average_without_the_last_steps_of_the_caller_does_not_answer():
    shared, _ = opened()
    shared.call(CALLER, (torch.arange(3.0),), lambda model, batch: None, lambda d: None, after=4)
    assert join(shared, HELPER, 4) is None
    assert join(shared, CALLER, 4) is None
    assert join(shared, HELPER, 5) is not None


def test_the_end_of_the_run_wakes_the_caller():
    shared, call = opened(gate=(gate := GroupGate()))
    caller, helper = join(shared, CALLER, 1), join(shared, HELPER, 1)
    assert helper.take() is not None
    evaluate_rest(caller)
    thread, found = ended(caller)
    gate.abort(None)
    thread.join(WAIT_S)
    assert found == [True]
    assert not helper.may_continue()
    with pytest.raises(CollectiveAborted, match="the run has failed, or another"):
        call.part.results()


def test_an_error_ends_the_wait_of_the_caller_and_the_parts_of_all():
    shared, call = opened()
    caller, helper = join(shared, CALLER, 1), join(shared, HELPER, 1)
    evaluate_rest(caller)
    thread, found = ended(caller)
    helper.fail(KeyError("planted"))
    helper.fail(KeyError("later"))
    assert not helper.may_continue()
    assert helper.end()
    thread.join(WAIT_S)
    assert found == [True]
    with pytest.raises(KeyError, match="planted"):
        call.part.results()


def test_a_batch_without_samples_is_passed_over():
    shared, call = opened()
    call.read = lambda dataset: Source()
    caller = join(shared, CALLER, 1)
    evaluate_rest(caller)
    assert caller.end()
    assert means_in_order(call.part.results()) == {"x": 1.0}


class Source:
    """An empty batch, then one of two samples."""

    def __init__(self):
        self._left = [(1, 0, 2), (0, 0, 0)]

    def take(self):
        def load(start, stop):
            return (torch.ones(stop - start),)

        return SampleRange(*self._left.pop(), load) if self._left else None


VALIDATION = task(TaskKind.VALIDATE, rank=0)


def validating(shared, rank, of=VALIDATION, num_batches=3):
    source = open_source((torch.arange(4.0 * num_batches),), 4, 1, call="val_dataset")
    return shared.join(of, rank, 0, source)


def test_a_validation_is_begun_by_any_rank_and_ended_by_that_of_its_task():
    shared = SharedEvaluations()
    helper = validating(shared, HELPER)
    evaluate(helper, helper.take())
    lead = validating(shared, 0)
    evaluate_rest(lead)
    thread, found = ended(lead)
    assert helper.end()
    thread.join(WAIT_S)
    assert found == [True]
    assert means_in_order(lead.results()) == {"x": pytest.approx(5.5)}
    assert validating(shared, 2) is None


def test_no_rank_waits_for_one_that_has_not_joined():
    shared = SharedEvaluations()
    lead = validating(shared, 0)
    evaluate_rest(lead)
    assert lead.end()
    assert len(lead.results()) == 3
    assert validating(shared, HELPER) is None


@pytest.mark.parametrize("how", ["dies", "misses the average"])
def test_ranks_leave_a_validation_whose_rank(how):
    """Nobody else has its results: it is begun again, or its average was given up."""
    shared = SharedEvaluations()
    helper = validating(shared, HELPER)
    evaluate(helper, helper.take())
    if how == "dies":
        shared.leave(0)
    else:
        shared.drop([VALIDATION])
    assert not helper.may_continue()
    assert helper.end()
    assert validating(shared, 2) is None
    again = validating(shared, 2, task(TaskKind.VALIDATE, rank=2, id=2))
    evaluate_rest(again)
    assert again.end()
    assert len(again.results()) == 3


def test_a_validation_that_another_one_has_overtaken_is_ended_by_its_rank():
    shared = SharedEvaluations()
    later = validating(shared, HELPER, task(TaskKind.VALIDATE, rank=HELPER, id=2))
    evaluate_rest(later)
    assert later.end()
    assert validating(shared, HELPER) is None  # it could not tell that it is not over
    lead = validating(shared, 0)
    evaluate_rest(lead)
    assert lead.end()
    assert len(lead.results()) == 3


def meeting(shared, rank, key=(0, 3), *, reads=True):
    def read():
        return open_source((torch.arange(8.0),), 4, 1, call="worker.evaluate")

    return shared.meet(key, rank, 2, read if reads else None)


@pytest.mark.parametrize("reads", [True, False])
def test_in_lockstep_all_ranks_wait_for_each_other_and_have_the_results(reads):
    shared = SharedEvaluations()
    first = meeting(shared, 0)
    evaluate_rest(first)
    thread, found = ended(first)
    second = meeting(shared, 1, reads=reads)
    assert not found
    assert not second.may_end
    if reads:
        assert second.take() is None
    assert second.end()
    thread.join(WAIT_S)
    assert found == [True]
    for part in (first, second):
        assert means_in_order(part.results()) == {"x": pytest.approx(3.5)}
    assert meeting(shared, 0, key=(1, 3)).take() is not None


def test_in_lockstep_the_end_of_the_group_wakes_the_ranks():
    shared = SharedEvaluations(gate := GroupGate())
    part = meeting(shared, 0)
    evaluate_rest(part)
    thread, found = ended(part)
    gate.abort(0)
    thread.join(WAIT_S)
    assert found == [True]
    late = meeting(shared, 1)
    assert not late.may_continue()
    assert late.end()
    for each in (part, late):
        with pytest.raises(CollectiveAborted, match="another rank has left its group"):
            each.results()
    assert meeting(shared, 1, key=(1, 0)).may_continue()


@pytest.mark.parametrize("generation", [0, None], ids=["of the group", "of the run"])
def test_in_lockstep_an_end_while_batches_are_left_gives_no_rank_results(generation):
    """Both ranks end their parts, as each has left its loop."""
    shared = SharedEvaluations(gate := GroupGate())
    parts = [meeting(shared, rank) for rank in range(2)]
    evaluate(parts[0], parts[0].take())
    gate.abort(generation)
    assert not any(part.may_continue() for part in parts)
    for part in parts:
        assert part.end()
    for part in parts:
        with pytest.raises(CollectiveAborted, match="the run has failed, or another rank"):
            part.results()
