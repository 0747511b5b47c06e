"""Plans under ``SYNC``, and the account of the steps that all ranks make together."""

from __future__ import annotations

import pytest

from coordinator.ledger import BatchLedger
from coordinator.steps import StepQueue
from tests.support.step_plans import step_plan

LAST = [
    # The last of two global batches of 3 ranks, the end of the epoch; the sizes of their pieces.
    ((3, 3, 3), False, [[3, 3], [3, 3], [3, 3]]),
    ((3, 3, 1), True, [[3, 3], [3, 3], [3, 1]]),
    ((3, 1, 0), True, [[3, 3], [3, 1], [3]]),
    ((1, 0, 0), True, [[3, 1], [3], [3]]),
    ((1, 0, 0), False, [[3, 1], [3, 0], [3, 0]]),
]


@pytest.mark.parametrize(("last", "omits_empty", "expected"), LAST)
def test_the_pieces_of_all_ranks_are_the_samples_in_order(last, omits_empty, expected):
    plan = step_plan(((3, 3, 3),), 2, last=(last,), start=9, omits_empty=omits_empty)
    pieces = [[piece for _, piece in plan.pieces(rank)] for rank in range(3)]
    assert [[stop - start for start, stop in own] for own in pieces] == expected
    assert [plan.num_pieces(rank) for rank in range(3)] == [len(own) for own in expected]
    in_order = sorted(piece for own in pieces for piece in own if piece[0] < piece[1])
    assert [i for piece in in_order for i in range(*piece)] == list(range(9, 18 + sum(last)))
    assert [*plan.pieces(3)] == []


def test_keys_of_equal_pieces_are_the_numbers_of_their_batches():
    plan = step_plan(((1, 1, 1),), 2, span=range(3, 9))
    keys = [[key for key, _ in plan.pieces(rank)] for rank in range(3)]
    assert keys == [[3, 6], [4, 7], [5, 8]]


def test_keys_of_smaller_pieces_are_unique():
    plan = step_plan(((1, 1, 1), (1, 1, 1)), 2, span=range(3, 9), key_stride=12)
    keys = [key for rank in range(3) for key, _ in plan.pieces(rank)]
    assert sorted(keys) == [3, 4, 5, 6, 7, 8, 15, 16, 17, 18, 19, 20]


def queue_of(*nums, accumulate=1, num_slices=1, before=0):
    """A queue of consecutive plans of these numbers of global batches of two ranks."""
    queue, stop = StepQueue(accumulate), 0
    queue.num_steps = before
    for num in nums:
        span = range(stop, stop + 2 * num)
        queue.add(step_plan(((3, 2),) * num_slices, span=span))
        stop = span.stop
    return queue


def test_batches_are_settled_by_the_first_ranks_last_piece_of_their_global_batch():
    queue = queue_of(2, 1, num_slices=2)
    assert [queue.report(1, 4), queue.report(0, 1)] == [(), ()]
    assert [queue.report(0, 1), queue.report(0, 4)] == [(range(2),), (range(2, 4), range(4, 6))]
    assert (queue.settled, queue.unsettled) == (6, ())


def test_a_plan_is_dropped_once_every_rank_has_reported_it():
    queue = queue_of(2)
    queue.report(0, 2)
    queue.add(step_plan(((3, 2),), span=range(4, 6)))
    assert (len(queue.plans), queue.settled, queue.num_steps) == (2, 4, 3)
    queue.report(1, 2)
    queue.add(step_plan(((3, 2),), span=range(6, 8)))
    assert (len(queue.plans), queue.settled, queue.num_steps) == (2, 0, 4)
    assert queue.report(0, 1) == (range(4, 6),)


def test_steps_that_were_made_and_not_reported_are_settled():
    queue = queue_of(3, before=10)
    queue.report(0, 1)
    agreed = queue.agree(12)
    assert (agreed.settled, agreed.reverted, agreed.reopened) == (
        (range(2, 4),),
        (),
        (range(4, 6),),
    )
    assert (agreed.num_undone, agreed.num_retrained) == (1, 0)
    assert agreed.unreported == {0: (1, 3), 1: (2, 4)}
    assert (queue.plans, queue.num_steps, queue.unsettled) == ([], 12, ())
    assert queue.agree(12) is None


def test_a_reported_step_that_the_survivors_did_not_make_is_reopened():
    queue = queue_of(1, 2)
    queue.report(0, 2), queue.report(1, 1)
    agreed = queue.agree(1)
    assert (agreed.settled, agreed.reverted) == ((), (range(2, 4),))
    assert agreed.reopened == (range(2, 6),)
    assert (agreed.num_undone, agreed.num_retrained, agreed.unreported) == (2, 3, {})


def test_steps_are_of_accumulate_global_batches_and_the_last_may_be_short():
    queue = queue_of(4, 1, accumulate=2)
    assert (queue.num_steps, queue.may_continue) == (3, False)
    queue.report(0, 3)
    assert queue.num_steps_of(0) == 2
    assert queue.agree(2).reopened == (range(8, 10),)


def test_a_step_with_a_short_global_batch_settles_its_batches():
    queue = StepQueue(1)
    queue.add(step_plan(((3, 2),), span=range(3), last=((1, 0),)))
    queue.add(step_plan(((3, 2),), span=range(3, 5)))
    assert (queue.report(0, 2), queue.settled) == ((range(3),), 3)
    assert (queue.report(0, 1), queue.settled) == ((range(3, 5),), 5)


def test_the_ledger_holds_the_batches_of_the_queue_until_they_are_settled():
    ledger = BatchLedger(num_samples=8, batch_size=1, num_epochs=1, world_size=2, max_batches=8)
    _, span = ledger.take_global((0, 1), (0.5, 0.5), 8)
    ledger.queue.add(step_plan(((1, 1),), span=span))
    assert not ledger.is_idle(in_order=True)
    assert not ledger.fully_trained(ledger.oldest)
    assert ledger.report_steps(0, 3) == 6
    assert (ledger.first_unsettled(), ledger.unsettled(ledger.oldest)) == ((0, 6), [range(6, 8)])
    ledger.return_to(2)
    assert (ledger.oldest.num_settled, ledger.oldest.num_samples) == (4, 4)
    assert (ledger.oldest.num_retrained, ledger.oldest.open.spans) == (1, (range(4, 8),))
    assert ledger.take_global((0,), (1.0, 0.0), 8) == (0, range(4, 8))
