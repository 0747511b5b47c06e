"""Undoing a round over a collective: its effect is reverted, and later training is kept."""

import pytest
import torch
from torch import nn

from runtime import create_collectives
from runtime.device.base import Device
from runtime.replica.averager import ReplicaAverager
from runtime.replica.flat import FlatState
from tests.support.running import WAIT_S, at_once

WEIGHTS = (4, 1, 3)


class Mixed(nn.Module):
    """Parameters of two dtypes and buffers of every kind; all numbers are exact in binary."""

    def __init__(self, rank):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64) * (rank + 1))
        self.small = nn.Parameter(torch.full((2,), 8.0 * rank))
        self.register_buffer("mean", torch.full((3,), 16.0 * rank, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
        self.register_buffer("count", torch.tensor([5 - rank, 7 * rank]))
        self.register_buffer("byte", torch.tensor([3, 250, rank], dtype=torch.uint8))
        # One of each pair of bits in which two ranks can differ.
        self.register_buffer("flags", torch.tensor([rank == 0, rank == 1, rank == 2, True, False]))


def averagers(models, ranks, kind):
    ends = create_collectives(len(ranks), kind, None, WAIT_S)
    return [
        ReplicaAverager(FlatState(models[rank]), Device(1), end)
        for rank, end in zip(ranks, ends, strict=True)
    ]


def on_threads(group, weights):
    """Call ``all_reduce`` on all ranks at once; returns their results."""
    found = at_once(lambda i: group[i].all_reduce(weights[i]), range(len(group)))
    assert None not in found
    return found


def close(group):
    for averager in group:
        averager.collective.close()


def copy_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(params=["thread", "gloo"])
def undone(request):
    """Three averaged replicas, their earlier states and their averagers."""
    models = [Mixed(rank) for rank in range(3)]
    before = [copy_of(model) for model in models]
    group = averagers(models, range(3), request.param)
    on_threads(group, WEIGHTS)
    yield models, before, group
    close(group)


def test_the_round_changes_every_part_of_some_rank(undone):
    """Otherwise the tests below would show nothing."""
    models, before, _ = undone
    for name in before[0]:
        pairs = [(m.state_dict()[name], b[name]) for m, b in zip(models, before, strict=True)]
        assert any(not torch.equal(new, old) for new, old in pairs) == (name != "mask"), name
    flags = models[0].flags.tolist()
    assert any(b["flags"].tolist() != flags for b in before[1:])


def test_an_undone_round_restores_the_state_of_before(undone):
    models, before, group = undone
    assert [averager.version for averager in group] == [1, 1, 1]
    for averager in group:
        averager.undo_all_reduce()
    for model, wanted in zip(models, before, strict=True):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name
    assert [averager.version for averager in group] == [0, 0, 0]


def test_an_undone_round_keeps_the_training_after_it(undone):
    models, before, group = undone
    with torch.no_grad():
        for model in models:
            model.w.add_(0.5)
            model.small.sub_(2.0)
            model.mean.add_(0.25)
            model.count += 3
            model.byte += 10  # wraps around
    for averager in group:
        averager.undo_all_reduce()
    for model, old in zip(models, before, strict=True):
        assert torch.equal(model.w, old["w"] + 0.5)
        assert torch.equal(model.small, old["small"] - 2.0)
        assert torch.equal(model.mean, old["mean"] + 0.25)
        assert torch.equal(model.mask, old["mask"])
        assert torch.equal(model.count, old["count"] + 3)
        assert torch.equal(model.byte, old["byte"] + 10)


@pytest.mark.parametrize("value", [True, False])
def test_flags_set_after_the_round_are_kept_if_the_round_did_not_change_them(undone, value):
    models, before, group = undone
    taken = models[0].flags.clone()
    with torch.no_grad():
        for model in models:
            model.flags.fill_(value)
    for averager in group:
        averager.undo_all_reduce()
    for model, old in zip(models, before, strict=True):
        same = old["flags"] == taken
        assert (model.flags[same] == value).all()
        assert torch.equal(model.flags[~same], old["flags"][~same])


def test_a_round_undone_and_repeated_without_the_dead_rank_counts_once(undone):
    models, before, group = undone
    for averager in group:
        averager.undo_all_reduce()
    survivors = averagers(models, (0, 1), "thread")
    on_threads(survivors, WEIGHTS[:2])
    close(survivors)
    total = sum(WEIGHTS[:2])
    for model in models[:2]:
        for name in ("w", "small", "mean"):
            parts = (w * old[name] for w, old in zip(WEIGHTS[:2], before[:2], strict=True))
            torch.testing.assert_close(model.state_dict()[name], sum(parts) / total)
        for name in ("count", "byte", "flags"):
            assert torch.equal(model.state_dict()[name], before[0][name]), name


def test_a_second_undo_reverts_the_second_round(undone):
    """Only the change of the last round is kept."""
    models, _, group = undone
    with torch.no_grad():
        for rank, model in enumerate(models):
            model.w.add_(4.0 * rank)
            model.flags.logical_not_()
    before = [copy_of(model) for model in models]
    on_threads(group, WEIGHTS)
    for averager in group:
        averager.undo_all_reduce()
    for model, wanted in zip(models, before, strict=True):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name
