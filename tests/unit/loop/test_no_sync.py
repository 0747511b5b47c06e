"""``model.no_sync()``: several backward passes and one reduction, as in DDP."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from runtime import DdpConfig, Timeline
from tests.support.own_loop import (
    OneDevice,
    assert_close,
    exchanging_gradients,
    gradients,
    make_batch,
    make_net,
    on_cpus,
)

NUM_PASSES = 4


@pytest.fixture(autouse=True, params=["directly", "meeting", "copies"])
def way(request):
    with exchanging_gradients(request.param):
        yield request.param


@pytest.fixture
def pair():
    """A model on two devices with its timeline, and the same model on one device."""
    net, timeline = make_net(), Timeline(poll_s=0.01)
    alone = OneDevice(net)
    with on_cpus(net, 2, config=DdpConfig(timeline=timeline, max_anchor=0)) as model:
        yield model, alone, timeline


def backward(model, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def count_reductions(model, timeline):
    model.close()
    return timeline.summary().num_averagings


def test_passes_within_no_sync_are_reduced_once_with_the_next_pass_outside(pair):
    model, alone, timeline = pair
    batches = [make_batch(size) for size in (8, 6, 4, 1)]
    for i, batch in enumerate(batches):
        with model.no_sync() if i < NUM_PASSES - 1 else nullcontext():
            backward(model, batch)
        backward(alone, batch)
    assert_close(gradients(model), gradients(alone.model))
    model.step()
    alone.step()
    assert_close(model, alone.model)
    assert count_reductions(model, timeline) == 1


def test_gradients_within_no_sync_are_those_of_the_first_device(pair):
    model, alone, _ = pair
    x, y = make_batch(8)
    with model.no_sync():
        backward(model, (x, y))
    half = F.cross_entropy(alone(x[:4]), y[:4], reduction="sum") / 8
    half.backward()
    assert_close(gradients(model), gradients(alone.model))


@pytest.mark.parametrize("step", ["step", "step with a weight", "clip"])
def test_a_step_or_clipping_reduces_first(pair, step):
    model, alone, timeline = pair
    for _ in range(2):
        batch = make_batch(8)
        with model.no_sync():
            backward(model, batch)
        backward(alone, batch)
    if step == "clip":
        norm = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 0.01)
        assert_close([model.clip_grad_norm_(0.01)], [norm])
    if step == "step with a weight":
        for p in alone.model.parameters():
            p.grad /= 3.0
    model.step(3.0 if step == "step with a weight" else None)
    alone.step()
    assert_close(model, alone.model)
    assert count_reductions(model, timeline) == 1


def test_a_direct_step_with_gradients_that_are_not_reduced_is_refused(pair):
    model, alone, _ = pair
    with model.no_sync():
        backward(model, make_batch(8))
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        model.optimizer.step()
    assert_close(model, alone.model)


@pytest.mark.parametrize("clear", ["model", "optimizer", "failure"])
def test_cleared_gradients_do_not_reach_a_later_step(pair, clear):
    model, alone, _ = pair
    with model.no_sync():
        backward(model, make_batch(8))
        if clear == "failure":
            with pytest.raises(RuntimeError):
                model(make_batch(8)[0]).backward()  # not a scalar
            model.zero_grad()
        else:
            (model if clear == "model" else model.optimizer).zero_grad()
    batch = make_batch(8)
    backward(model, batch)
    backward(alone, batch)
    assert_close(gradients(model), gradients(alone.model))


def test_gradients_requested_within_no_sync_are_of_the_whole_batch(pair):
    model, alone, _ = pair
    x, y = make_batch(8)
    with model.no_sync():
        backward(model, (x, y))
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    expected = torch.autograd.grad(F.cross_entropy(alone(x), y), list(alone.model.parameters()))
    assert_close(found, expected)


CHANGES = {
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "scaled": lambda model: model.module[0].weight.grad.mul_(0.5),
    "zeroed": lambda model: model.optimizer.zero_grad(set_to_none=False),
    "one removed": lambda model: setattr(model.module[0].weight, "grad", None),
    "one replaced": lambda model: setattr(model.module[0].bias, "grad", torch.ones(8).double()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("then", ["backward", "no_sync", "step", "clip"])
def test_gradients_changed_before_their_reduction_are_refused(pair, change, then):
    model, alone, _ = pair
    with model.no_sync():
        backward(model, make_batch(8))
    change(model)

    def go_on():
        if then == "step":
            model.step()
        elif then == "clip":
            model.clip_grad_norm_(1.0)
        else:
            with model.no_sync() if then == "no_sync" else nullcontext():
                backward(model, make_batch(8))

    with pytest.raises(RuntimeError, match=r"changed while other devices hold.*outside no_sync"):
        go_on()
    batch = make_batch(8)  # without the gradients from before
    backward(model, batch)
    backward(alone, batch)
    CHANGES["clipped"](model)
    CHANGES["clipped"](alone.model)
    model.step()
    alone.step()
    assert_close(model, alone.model)


@pytest.mark.parametrize("way_of_loop", ["accumulate", "max_anchor"])
def test_accumulated_gradients_changed_before_their_reduction_are_refused(way_of_loop):
    with on_cpus(make_net(), config=DdpConfig(max_anchor=2)) as model:
        if way_of_loop == "accumulate":
            model.accumulate(lambda m, b: F.cross_entropy(m(b[0]), b[1]), [make_batch(4)] * 2)
        else:
            backward(model, make_batch(8))
        CHANGES["scaled"](model)
        with pytest.raises(RuntimeError, match="changed while other devices hold theirs"):
            model.step()


def test_a_closed_model_has_no_hooks_of_gradients_that_were_not_reduced(pair):
    model, _, _ = pair
    with model.no_sync():
        backward(model, make_batch(8))
    model.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.module.parameters())


def test_hooks_and_penalties_do_not_count_as_changes_before_the_reduction(pair):
    model, alone, _ = pair

    def limit(p):
        p.grad.clamp_(-100.0, 100.0)

    for each in (model.module, alone.model):
        each[0].weight.register_post_accumulate_grad_hook(limit)
    batches = [make_batch(8) for _ in range(2)]
    with model.no_sync():
        backward(model, batches[0])
        model.module[3].bias.square().sum().backward()
    model.module[3].weight.square().sum().backward()
    backward(model, batches[1])
    for batch in batches:
        backward(alone, batch)
    (alone.model[3].bias.square().sum() + alone.model[3].weight.square().sum()).backward()
    assert_close(gradients(model), gradients(alone.model))
    model.step()
    alone.step()
    assert_close(model, alone.model)


def test_no_sync_nests_and_ends_on_an_exception(pair):
    model, alone, timeline = pair
    batch = make_batch(8)
    with pytest.raises(KeyError), model.no_sync(), model.no_sync():
        raise KeyError
    with model.no_sync():
        with model.no_sync():
            backward(model, batch)
        backward(model, batch)
    backward(model, batch)
    for _ in range(3):
        backward(alone, batch)
    assert_close(gradients(model), gradients(alone.model))
    assert count_reductions(model, timeline) == 1


def test_no_sync_has_no_effect_on_one_device():
    net = make_net()
    alone, batch = OneDevice(net), make_batch(8)
    with on_cpus(net, 1) as model:
        with model.no_sync():
            backward(model, batch)
        model.optimizer.step()
        backward(alone, batch)
        alone.step()
        assert_close(model, alone.model)
