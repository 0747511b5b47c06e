"""A machine's contribution to a round, and the state received from a peer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coordinator.cluster.cluster_ledger import ClusterLedger
from coordinator.messages import Payload, SaveCheckpoint
from coordinator.metrics import MachineStats, Sums
from coordinator.saved_run import RankTotals, SavedEpoch
from runtime.cluster.grants import captured, epoch_grants
from runtime.cluster.tensors import (
    contribution,
    from_wire,
    named_tensors,
    split,
    state_from_tensors,
    to_wire,
)
from tests.support.checkpointing import saved_run
from tests.support.clustering import report_of


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.complex64, torch.float32),
        (torch.complex128, torch.float64),
        (torch.int64, torch.float64),
        (torch.int32, torch.float64),
        (torch.bool, torch.float64),
    ],
)
def test_tensors_of_every_dtype_are_restored_from_the_wire(dtype, wire):
    tensor = torch.tensor([0, 1, 1, 0]) if dtype is torch.bool else torch.tensor([0, 1, -2, 3])
    tensor = tensor.to(dtype)
    if dtype.is_complex:
        tensor = tensor * (1 + 2j)
    sent = to_wire(tensor)
    assert sent.dtype is wire
    assert not sent.is_complex()
    assert torch.equal(from_wire(sent, tensor), tensor)


def test_sums_of_integers_are_rounded():
    like = torch.zeros(2, dtype=torch.int64)
    summed = torch.tensor([2.9999999, -3.0000001], dtype=torch.float64)
    assert from_wire(summed, like).tolist() == [3, -3]


def payload(value, *, num=4):
    return Payload(
        params=(torch.full((num,), value), torch.full((2,), value, dtype=torch.complex64)),
        buffers=(torch.full((1,), value, dtype=torch.bfloat16),),
        other_buffers=(torch.full((3,), int(value)),),
    )


def test_changes_of_machines_sum_to_the_weighted_mean():
    state, first, second = payload(8.0), payload(4.0), payload(0.0)
    parts = [
        contribution(state, first, 0.25, heaviest=False),
        contribution(state, second, 0.75, heaviest=True),
        contribution(state, None, 0.0, heaviest=False),  # it has trained nothing
    ]
    sums = [torch.stack(each).sum(0) for each in zip(*parts, strict=True)]
    params, buffers, taken = split(sums, state)
    found = [from_wire(t, like) for t, like in zip(params, state.params, strict=True)]
    assert [t.tolist() for t in found] == [[7.0] * 4, [7.0] * 2]
    assert from_wire(buffers[0], state.buffers[0]).tolist() == [7.0]
    assert (
        from_wire(taken[0], state.other_buffers[0]).tolist() == [0] * 3
    )  # those of the machine with the most samples


def test_a_state_is_restored_from_its_named_tensors():
    sent = named_tensors(payload(5.0), [torch.ones(4)])
    state, outer = state_from_tensors(sent, payload(0.0))
    assert all(map(torch.equal, state.tensors, payload(5.0).tensors))
    assert [t.tolist() for t in outer] == [[1.0] * 4]


@pytest.mark.parametrize("what", ["shape", "dtype", "lacks"])
def test_the_error_for_another_model_names_the_tensor(what):
    sent = named_tensors(payload(5.0, num=5 if what == "shape" else 4), [])
    if what == "dtype":
        sent["params.0"] = sent["params.0"].double()
    if what == "lacks":
        del sent["params.0"]
    with pytest.raises(ValueError, match=r"does not match this model in params\.0"):
        state_from_tensors(sent, payload(0.0))


def test_a_state_with_a_missing_outer_tensor_is_refused():
    sent = named_tensors(payload(5.0), [torch.ones(4), torch.ones(4)])
    del sent["outer.0"]
    with pytest.raises(ValueError, match=r"no tensor 'outer\.0'"):
        state_from_tensors(sent, payload(0.0))


NAME = "a/0"


def new_ledger(num_epochs=1):
    return ClusterLedger(
        settings={}, num_epochs=num_epochs, batches_per_epoch=10, period_s=1.0, max_batches=None
    )


def stats(num_samples, weight):
    return MachineStats(
        machine="a", ranks=(Sums(num_samples=num_samples, loss_samples=weight),), num_retrained=0
    )


def checkpoint(consumed, num_samples=0, kept=(), **run):
    """A run's checkpoint with these ranges of each epoch, and the sums of its samples."""
    epochs = tuple(
        SavedEpoch(epoch=e, consumed=spans, sums=stats(num_samples, 1.5).ranks)
        for e, spans in consumed.items()
    )
    return SaveCheckpoint(
        payload=payload(0.0),
        ranks=(),
        run=replace(saved_run(0, epoch=0), epochs=epochs, **run),
        scheduled=False,
        kept=kept,
    )


def test_a_machine_reports_the_batches_of_its_grant_that_its_run_has_trained():
    """Once each, though a run that has ended does not learn of the last round."""
    ledger = new_ledger()
    ledger.commit([report_of(ledger, "a"), report_of(ledger, "b")])
    assert ledger.grants["a"].batches == ((0, (range(5),)),)
    found = captured(checkpoint({0: (range(3),)}, kept=((0, (range(3, 5),)),)), ledger, "a", NAME)
    assert found.seconds_per_batch is None
    assert found.done == ((0, (range(3),)),)
    assert found.kept == ((0, (range(3, 5),)),)
    ledger.commit([report_of(ledger, "a", found.done, kept=found.kept), report_of(ledger, "b")])
    last = captured(checkpoint({0: (range(5),)}), ledger, "a", NAME)
    assert last.done == ((0, (range(3, 5),)),)


def test_a_capture_weighs_as_much_as_was_trained_since_the_last_committed_round():
    ledger = new_ledger()
    ledger.commit([report_of(ledger, "a"), report_of(ledger, "b")])
    first = captured(checkpoint({0: (range(2),)}, num_samples=4), ledger, "a", NAME)
    assert (first.num_samples, first.weight) == (4, 1.5)
    assert captured(checkpoint({0: (range(2),)}, num_samples=4), ledger, "a", NAME) == first
    reports = [report_of(ledger, "a", first.done, tallies=((0, stats(4, 1.0)),))]
    ledger.commit([*reports, report_of(ledger, "b")])
    then = captured(checkpoint({0: (range(5),)}, num_samples=10), ledger, "a", NAME)
    assert (then.num_samples, then.weight) == (6, 0.5)
    restarted = captured(checkpoint({0: (range(5),)}, num_samples=10), ledger, "a", "a/1")
    assert restarted.num_samples == 10


def test_batches_of_an_epoch_that_is_closed_on_all_machines_are_not_reported():
    ledger = new_ledger(num_epochs=2)
    ledger.commit([report_of(ledger, "a")])
    ledger.commit([report_of(ledger, "a", ledger.grants["a"].batches)])
    ledger.commit([report_of(ledger, "a", ledger.grants["a"].batches)])
    assert ledger.open_epochs == (1,)
    kept = ((0, (range(3),)), (1, (range(6, 10),)))
    found = captured(checkpoint({0: (range(10),), 1: (range(6),)}, kept=kept), ledger, "a", NAME)
    assert {epoch for epoch, _ in (*found.done, *found.kept, *found.tallies)} == {1}


def test_a_run_is_granted_the_batches_of_its_machine_with_those_consumed_by_all():
    ledger = new_ledger(num_epochs=2)
    ledger.commit([report_of(ledger, "a"), report_of(ledger, "b")])
    first = epoch_grants(ledger.grants["a"], ledger)[0]
    assert (first.epoch, first.batches, first.consumed) == (0, (range(5),), ())
    ledger.commit([report_of(ledger, name, ledger.grants[name].batches) for name in "ab"])
    (second,) = epoch_grants(ledger.grants["b"], ledger)
    assert (second.epoch, second.batches, second.consumed) == (1, (range(8, 10),), (range(6),))


@pytest.mark.parametrize(
    ("waits", "batch_s"),
    [
        (((0.0, 0.0), (0.0, 0.0)), (2.0, 3.0)),
        (((0.2, 0.3, 0.2), (0.1, 0.1, 0.4)), (2.5, 3.5)),
        (((0.2, 0.2), (0.1,)), (2.0, 3.0)),
    ],
    ids=["none", "of all ranks", "not measured"],
)
def test_a_machine_is_slower_by_the_wait_for_data_that_all_its_ranks_have(waits, batch_s):
    ledger = new_ledger()
    ledger.commit([report_of(ledger, "a")])
    totals = (RankTotals(num_samples=30, num_batches=6), RankTotals(num_samples=20, num_batches=4))
    speeds = replace(saved_run().elche, seconds=(2.0, 3.0))
    saved = checkpoint({}, elche=speeds, data_waits=waits, ranks=totals)
    found = captured(saved, ledger, "a", NAME).seconds_per_batch
    assert found == pytest.approx(1 / sum(1 / s for s in batch_s))
