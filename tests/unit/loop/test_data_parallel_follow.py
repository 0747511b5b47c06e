"""Changes of the primary between two batches reach every replica."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.parallel import (
    NUM_CLASSES,
    adam,
    identical,
    loss_fn,
    mlp,
    replicas,
    samples_of,
    state,
)


def with_norm(device):
    return mlp(device, norm=True)


def train_on_one_device(changes, build=mlp):
    """One device on whole batches, with a change before each."""
    model = build("cpu")
    optimizer = adam(model.parameters())
    for seed, change in enumerate(changes):
        change(model)
        optimizer.zero_grad()
        loss_fn(model, samples_of(10, seed))[0].backward()
        optimizer.step()
    return state(model)


def assert_close(actual, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-11)


def nothing(model):
    pass


def freeze(model):
    model[0].requires_grad_(False)


def unfreeze(model):
    model[0].requires_grad_(True)


def scale(model):
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def scale_in_inference_mode(model):
    with torch.inference_mode():
        model[0].weight.mul_(1.5)


def load(model):
    other = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: tensor * 0.5 for name, tensor in other.items()})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        [nothing, freeze, nothing, unfreeze, nothing],
        [freeze, unfreeze, freeze],
        [scale, nothing, scale],
        [nothing, load, nothing],
        [freeze, scale, nothing, unfreeze],
        [nothing, scale_in_inference_mode, nothing],
    ],
    ids=lambda changes: "-".join(change.__name__ for change in changes),
)
def test_a_change_of_the_primary_equals_that_change_on_one_device(changes, world_size):
    with replicas(world_size) as coordinator:
        for seed, change in enumerate(changes):
            change(coordinator.primary)
            coordinator.train_batch(samples_of(10, seed))
            assert identical(coordinator)
    assert_close(state(coordinator.primary), train_on_one_device(changes))


def test_a_parameter_that_is_frozen_on_the_primary_gets_no_gradient_anywhere():
    with replicas(3) as coordinator:
        coordinator.train_batch(samples_of(9))
        freeze(coordinator.primary)
        before = coordinator.primary[0].weight.clone()
        coordinator.train_batch(samples_of(9))
        for model in coordinator.models:
            assert not model[0].weight.requires_grad
            assert model[0].weight.grad is None
            assert model[0].weight.equal(before)
        unfreeze(coordinator.primary)
        coordinator.train_batch(samples_of(9))
        assert not coordinator.primary[0].weight.equal(before)


def fill(model):
    model[1].running_mean.fill_(3.0)


def replace(model):
    model[1].running_mean = torch.full((8,), 3.0, dtype=torch.float64)


def replace_in_inference_mode(model):
    with torch.inference_mode():
        replace(model)


@pytest.mark.parametrize("change", [fill, replace, replace_in_inference_mode])
def test_buffers_of_the_primary_reach_all_replicas_in_the_next_batch(change):
    seen = []

    def look(model, samples):
        seen.append(model[1].running_mean.tolist())
        return loss_fn(model, samples)

    with replicas(3, model=with_norm, loss=look) as coordinator:
        coordinator.primary.eval()  # no forward changes them
        coordinator.train_batch(samples_of(9))
        change(coordinator.primary)
        seen.clear()
        coordinator.train_batch(samples_of(9))
        assert identical(coordinator)
    assert seen == [[3.0] * 8] * 3


def test_sync_params_copies_changes_that_version_counters_miss():
    with replicas(3, model=with_norm) as coordinator:
        freeze(coordinator.primary)  # sync_params copies this too
        coordinator.primary[0].weight.data.mul_(2.0)
        coordinator.primary[1].running_mean.data.fill_(3.0)
        coordinator.sync_params()
        assert identical(coordinator)
        assert coordinator.models[2][1].running_mean.tolist() == [3.0] * 8
        coordinator.train_batch(samples_of(8))
        assert identical(coordinator)


def test_modes_changed_by_loss_fn_are_reset_to_the_primarys():
    modes = []

    def look(model, samples):
        modes.append(model.training)
        model.eval()
        return loss_fn(model, samples)

    with replicas(3, loss=look) as coordinator:
        for _ in range(2):
            coordinator.primary.train()
            coordinator.train_batch(samples_of(9))
    assert modes == [True] * 6


def frozen_first(device):
    model = mlp(device, norm=True)
    model[0].requires_grad_(False)
    return model


def assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def add(model):
    model.register_parameter("extra", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    fill(model)


@pytest.mark.parametrize("change", [unfreeze, assign, add])
def test_changed_parameters_equal_one_device(change):
    """They get gradients, and the optimizer does not hold them."""
    alone = frozen_first("cpu")
    alone.eval()
    optimizer = adam([p for p in alone.parameters() if p.requires_grad])
    with replicas(2, model=frozen_first) as coordinator:
        coordinator.primary.eval()
        for step in range(3):
            if step == 1:
                change(alone)
                change(coordinator.primary)
            optimizer.zero_grad()
            loss_fn(alone, samples_of(8))[0].backward()
            optimizer.step()
            coordinator.train_batch(samples_of(8))
            assert identical(coordinator)
        assert_close(state(coordinator.primary), state(alone))


# -- optimizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["first", "all"])
def test_a_loaded_optimizer_continues_like_an_uninterrupted_one(which):
    with replicas(3) as straight:
        for seed in range(3):
            straight.train_batch(samples_of(10, seed))
        weights = copy.deepcopy(straight.primary.state_dict())
        saved = copy.deepcopy(straight.optimizers[0].state_dict())
        for seed in range(3, 6):
            straight.train_batch(samples_of(10, seed))
        with replicas(3) as again:
            again.primary.load_state_dict(weights)
            for optimizer in again.optimizers[: 1 if which == "first" else 3]:
                optimizer.load_state_dict(saved)
            for seed in range(3, 6):
                again.train_batch(samples_of(10, seed))
            assert identical(again)
            assert_close(state(again.primary), state(straight.primary))


def test_settings_of_the_first_optimizer_apply_to_all():
    with replicas(3) as coordinator:
        coordinator.train_batch(samples_of(10))
        coordinator.optimizers[0].param_groups[0]["lr"] = 0.3
        coordinator.train_batch(samples_of(10, 1))
        assert identical(coordinator)
        assert {o.param_groups[0]["lr"] for o in coordinator.optimizers} == {0.3}


def test_optimizers_may_be_stepped_directly():
    alone = mlp("cpu")
    optimizer = adam(alone.parameters())
    with replicas(2) as coordinator:
        for seed in range(2):
            coordinator.train_batch(samples_of(10, seed))
            optimizer.zero_grad()
            loss_fn(alone, samples_of(10, seed))[0].backward()
            for each in (*coordinator.optimizers, optimizer, optimizer):
                each.step()  # of the coordinator on the batch's gradients again
        assert identical(coordinator)
        assert_close(state(coordinator.primary), state(alone))


def test_groups_added_to_the_optimizer_are_trained():
    with replicas(2, optim=lambda params: adam(list(params)[1:])) as coordinator:
        weight = coordinator.primary[0].weight
        before = weight.detach().clone()
        coordinator.train_batch(samples_of(10))
        assert torch.equal(weight, before)
        coordinator.optimizers[0].add_param_group({"params": [weight]})
        coordinator.train_batch(samples_of(10))
        assert not torch.equal(weight, before)


class Laid(nn.Module):
    """Parameters in a memory format other than contiguous."""

    def __init__(self, channels, transposed):
        super().__init__()
        self.conv = nn.Conv2d(2, channels, 2).to(memory_format=torch.channels_last)
        weight = torch.randn(channels * 2, NUM_CLASSES)
        self.weight = nn.Parameter(weight.t().contiguous().t() if transposed else weight)

    def forward(self, x):
        return self.conv(x.view(-1, 2, 1, 3).expand(-1, 2, 2, 3)).flatten(1) @ self.weight


@settings(max_examples=15)
@given(st.integers(1, 4), st.booleans(), st.integers(2, 4), st.lists(st.integers(1, 9), min_size=1))
def test_gradients_have_the_layout_of_the_parameters(channels, transposed, world_size, sizes):
    layouts = []

    def build(device):
        torch.manual_seed(0)
        return Laid(channels, transposed).to(device)

    with replicas(world_size, model=build) as coordinator:
        params = list(coordinator.primary.parameters())

        def note(*_):
            layouts.append([(p.grad.shape, p.grad.stride(), p.grad.dtype) for p in params])

        coordinator.optimizers[0].register_step_pre_hook(note)
        for size in sizes[:3]:
            coordinator.train_batch(samples_of(size, dtype=torch.float32))
        assert identical(coordinator)
        expected = [(p.shape, p.stride(), p.dtype) for p in params]
    assert layouts == [expected] * len(sizes[:3])
