"""Wrapping replicas: errors, and copies of parameters and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime import AverageBackend, Ddp, ReplicaMismatch
from tests.support.wrapping import Net, all_same, fill, grads, nets, same, tensors, wrap

NCCL = AverageBackend.NCCL


# -- errors of wrap --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "devices", "error", "match"),
    [
        ([], [], ValueError, "two or more models, got 0"),
        (nets(1), ["cpu"], ValueError, "two or more models, got 1"),
        (nets(2), ["cpu"], ValueError, "2 models for 1 devices"),
        (nets(2), ["cpu"] * 3, ValueError, "2 models for 3 devices"),
        (Net(), ["cpu"], TypeError, "pass a list of replicas"),
        ([Net(), "net"], ["cpu"] * 2, TypeError, "model 1 is a str"),
        (nets(2), 2.0, TypeError, "pass a list"),
        (nets(2), ["cpu", "tpu"], ValueError, "'tpu' is not a device"),
        (nets(2), ["cpu", "cuda:7"], ValueError, "there is no cuda:7"),
        ([Net(), nn.LazyLinear(2)], ["cpu"] * 2, ValueError, "model 1 is lazy"),
        (nets(2), ["meta"] * 2, ValueError, "no meta"),
    ],
)
def test_wrap_names_invalid_arguments(models, devices, error, match):
    with pytest.raises(error, match=match):
        Ddp.wrap(models, devices)


@pytest.mark.parametrize("backend", ["thread", None, 1])
def test_wrap_names_an_invalid_backend(backend):
    with pytest.raises(TypeError, match="pass an AverageBackend"):
        wrap(nets(), backend=backend)


def test_nccl_refuses_cpu_devices():
    with pytest.raises(ValueError, match=r"backend\(NCCL\) needs distinct CUDA devices"):
        wrap(nets(), backend=NCCL)


def test_a_model_on_another_device_than_given_is_named():
    with torch.device("meta"):
        away = Net()
    with pytest.raises(ValueError, match=r"'first.weight' of model 1 is on meta, not on cpu"):
        wrap([Net(), away])


def extra(model):
    model.more = nn.Linear(1, 1)


def double(model):
    model.first = model.first.double()


def integer_buffer(model):
    model.norm.running_mean = model.norm.running_mean.long()


def wider(model):
    model.first = nn.Linear(4, 9)


def frozen(model):
    model.first.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (extra, "it has a tensor 'more.weight' that rank 0 lacks"),
        (lambda m: delattr(m, "conv"), "rank 0 has trainable tensor 'conv.weight', which it lacks"),
        (double, r"the dtype of 'first.weight' is torch.float64, on rank 0 it is torch.float32"),
        (integer_buffer, r"the dtype of 'norm.running_mean' is torch.int64"),
        (frozen, r"the kind of 'first.bias' is frozen, on rank 0 it is trainable"),
        (wider, r"the shape of 'first.weight' is \(9, 4\)"),
    ],
)
def test_the_first_difference_between_replicas_is_named(change, match):
    models = nets(3)
    change(models[2])
    with pytest.raises(ReplicaMismatch, match=f"model 2 is no replica of model 0: {match}"):
        wrap(models)


def test_replicas_may_not_share_trainable_parameters():
    first, second = nets()
    second.first.weight = first.first.weight
    with pytest.raises(ValueError, match=r"models 0 and 1 share the parameter 'first.weight'"):
        wrap([first, second])
    with pytest.raises(ValueError, match="share the parameter"):
        wrap([first, first])


def test_replicas_may_share_frozen_parameters():
    first, second = nets()
    second.frozen = first.frozen
    with wrap([first, second]) as ddp:
        ddp.sync_params()
        fill([first, second])
        ddp.all_reduce_gradients()
    assert all_same([first, second], grads)


# -- parameters and buffers ---------------------------------------------------------------


def test_sync_params_copies_parameters_frozen_ones_and_buffers():
    models = nets(3)
    for rank, model in enumerate(models):
        model.norm.running_mean.fill_(rank)
        model.norm.num_batches_tracked.fill_(7 + rank)
        model.frozen.weight.data.fill_(rank + 1)
    before, addresses = tensors(models[0]), [p.data_ptr() for p in models[1].parameters()]
    with wrap(models) as ddp:
        assert (ddp.world_size, ddp.devices) == (3, (torch.device("cpu"),) * 3)
        ddp.sync_params()
    assert all(same(tensors(model), before) for model in models)
    assert [p.data_ptr() for p in models[1].parameters()] == addresses


def test_sync_buffers_copies_buffers_only():
    models = nets()
    models[0].norm.running_mean.fill_(5)
    models[0].norm.num_batches_tracked.fill_(9)
    weights = models[1].first.weight.detach().clone()
    with wrap(models) as ddp:
        ddp.sync_buffers()
    assert models[1].norm.running_mean.tolist() == [5.0] * 3
    assert models[1].norm.num_batches_tracked.item() == 9
    assert torch.equal(models[1].first.weight, weights)
    assert not torch.equal(models[0].first.weight, weights)


def test_a_buffer_replaced_by_a_module_is_copied_to_the_current_tensor():
    models = nets()
    with wrap(models) as ddp:
        for rank, model in enumerate(models):
            model.norm.running_var = torch.full((3,), float(rank))
        ddp.sync_buffers()
    assert models[1].norm.running_var.tolist() == [0.0] * 3


@pytest.mark.parametrize("method", ["sync_params", "sync_buffers"])
def test_buffers_of_different_shapes_are_named_before_anything_is_copied(method):
    models = nets()
    with wrap(models) as ddp:
        models[0].norm.running_mean.fill_(5)
        models[1].norm.running_var = torch.zeros(4)
        before = tensors(models[1])
        with pytest.raises(ReplicaMismatch, match=r"'norm.running_var' has shape \(4,\)"):
            getattr(ddp, method)()
    assert same(tensors(models[1]), before)
