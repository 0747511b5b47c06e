"""Changes of the primary between two batches reach every replica."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runtime import ReplicaMismatch
from tests.support.parallel import (
    NUM_CLASSES,
    adam,
    equal,
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


def test_weights_that_were_not_changed_are_not_copied(monkeypatch):
    with replicas(2, model=with_norm) as coordinator:
        coordinator.train_batch(samples_of(8))
        monkeypatch.setattr(coordinator, "_copy_all", lambda: pytest.fail("copied"))
        coordinator.primary.eval()
        with torch.no_grad():
            coordinator.primary(samples_of(4)[0])
        coordinator.primary.train()
        for seed in range(2):
            coordinator.train_batch(samples_of(8, seed))


def test_sync_params_copies_changes_that_version_counters_miss():
    with replicas(2) as coordinator:
        freeze(coordinator.primary)  # sync_params copies this too
        coordinator.primary[0].weight.data.mul_(2.0)
        coordinator.sync_params()
        assert identical(coordinator)
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


def shrink(model):
    model[1].running_mean = torch.zeros(1, dtype=torch.float64)


def add(model):
    model.register_parameter("extra", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    fill(model)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (unfreeze, RuntimeError, r"'0.weight' was frozen when .* trainable in .*model_factory"),
        (assign, RuntimeError, r"'0.weight' of the primary was replaced.* in place"),
        (shrink, ReplicaMismatch, r"cannot follow the primary: .*'1.running_mean'.* \(1,\)"),
        (add, ReplicaMismatch, r"cannot follow the primary: .*'extra'"),
    ],
)
@pytest.mark.parametrize("call", ["train_batch", "sync_params"])
def test_changes_that_replicas_cannot_copy_raise_and_change_nothing(change, error, says, call):
    with replicas(2, model=frozen_first) as coordinator:
        coordinator.train_batch(samples_of(8))
        others = state(coordinator.models[1])
        change(coordinator.primary)
        with pytest.raises(error, match=says):
            coordinator.train_batch(samples_of(8)) if call == "train_batch" else (
                coordinator.sync_params()
            )
        assert equal(state(coordinator.models[1]), others)


def test_a_repaired_primary_can_be_trained_again():
    with replicas(2, model=frozen_first) as coordinator:
        unfreeze(coordinator.primary)
        with pytest.raises(RuntimeError, match="was frozen when"):
            coordinator.train_batch(samples_of(8))
        freeze(coordinator.primary)
        coordinator.train_batch(samples_of(8))
        assert identical(coordinator)


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
            addresses = {
                value.data_ptr()
                for optimizer in again.optimizers
                for entry in optimizer.state.values()
                for value in entry.values()
                if isinstance(value, torch.Tensor)
            }
            num_tensors = sum(
                isinstance(value, torch.Tensor)
                for optimizer in again.optimizers
                for entry in optimizer.state.values()
                for value in entry.values()
            )
            assert len(addresses) == num_tensors, "replicas share the memory of their optimizers"


def test_settings_of_the_first_optimizer_apply_to_all():
    with replicas(3) as coordinator:
        coordinator.train_batch(samples_of(10))
        coordinator.optimizers[0].param_groups[0]["lr"] = 0.3
        coordinator.train_batch(samples_of(10, 1))
        assert identical(coordinator)
        assert {o.param_groups[0]["lr"] for o in coordinator.optimizers} == {0.3}


def test_optimizers_may_be_stepped_directly():
    with replicas(2) as coordinator:
        coordinator.train_batch(samples_of(10))
        for optimizer in coordinator.optimizers:  # on the batch's gradients again
            optimizer.step()
        coordinator.train_batch(samples_of(10, 1))
        assert identical(coordinator)


def test_groups_added_to_the_first_optimizer_only_are_refused():
    with replicas(2) as coordinator:
        coordinator.optimizers[0].add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        with pytest.raises(RuntimeError, match="build all groups in optim_factory"):
            coordinator.train_batch(samples_of(10))


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
def test_gradients_have_the_same_layout_on_all_replicas(channels, transposed, world_size, sizes):
    layouts = [[] for _ in range(world_size)]

    def build(device):
        torch.manual_seed(0)
        return Laid(channels, transposed).to(device)

    with replicas(world_size, model=build) as coordinator:
        for optimizer, seen in zip(coordinator.optimizers, layouts, strict=True):
            params = optimizer.param_groups[0]["params"]

            def note(*_, params=params, seen=seen):
                seen.append([(p.grad.shape, p.grad.stride(), p.grad.dtype) for p in params])

            optimizer.register_step_pre_hook(note)
        for size in sizes[:3]:
            coordinator.train_batch(samples_of(size, dtype=torch.float32))
        assert identical(coordinator)
    assert layouts[0]
    assert all(seen == layouts[0] for seen in layouts)
