"""Copies of modules for replicas: equal in all that training uses, or refused by name."""

from __future__ import annotations

import copy
import functools
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import gpuworker
from runtime.replica.copying import copy_module
from runtime.replica.flat import FlatParams
from tests.support.running import CPU, SYNC, THREAD, WAIT_S, builder

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def double(p):
    p.grad.mul_(2)


def with_hooks():
    net = nn.Linear(3, 2)
    net.weight.register_post_accumulate_grad_hook(double)
    net.bias.register_hook(lambda grad: grad * 3)
    return net


def with_frozen_hook():
    net = with_hooks()
    net.bias.requires_grad_(False)
    return net


def with_attribute():
    net = nn.Linear(3, 2)
    net.bias.no_decay = True
    return net


def with_parts_of_a_storage():
    net = nn.Module()
    fused = torch.randn(3, 4)
    net.left, net.right = nn.Parameter(fused[:, :2]), nn.Parameter(fused[:, 2:])
    return net


def with_expanded_buffer():
    net = nn.Linear(3, 2)
    net.register_buffer("mask", torch.ones(1, 2).expand(4, 2))
    return net


def with_a_method_as_hook():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.scale = nn.Parameter(torch.full((), 2.0))
            self.inner.register_forward_hook(self.scaled)

        def scaled(self, module, args, output):
            return output * self.scale

        def forward(self, x):
            return self.inner(x)

    return Scaled()


def with_ties_and_modes():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].weight = net[0].weight
    net[2].eval()
    net[1].bias.requires_grad_(False)
    return net


def pruned():
    net = nn.Linear(3, 2)
    prune.l1_unstructured(net, "weight", 0.5)
    return net


FAITHFUL = [
    with_hooks,
    with_frozen_hook,
    with_attribute,
    with_parts_of_a_storage,
    with_expanded_buffer,
    with_a_method_as_hook,
    with_ties_and_modes,
    pruned,
    lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
    lambda: nn.LSTM(3, 2),
    lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
]


def gradients_of(net):
    torch.manual_seed(0)
    if isinstance(net, nn.LSTM):
        net(X)[0].sum().backward()
    elif not isinstance(net, nn.Conv2d) and hasattr(net, "forward") and not hasattr(net, "left"):
        net(X).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("make", FAITHFUL)
def test_a_copy_has_the_gradients_of_its_original(make):
    torch.manual_seed(0)
    net = make()
    copied = copy_module(net, CPU)
    own = {id(t) for t in (*net.parameters(), *net.buffers())}
    assert not own & {id(t) for t in (*copied.parameters(), *copied.buffers())}
    expected, got = gradients_of(net), gradients_of(copied)
    torch.testing.assert_close(got, expected)


def test_a_copy_keeps_attributes_strides_ties_and_modes():
    assert copy_module(with_attribute()).bias.no_decay
    assert copy_module(with_expanded_buffer()).mask.stride() == (0, 1)
    parts = copy_module(with_parts_of_a_storage())
    left, right = parts.left.untyped_storage(), parts.right.untyped_storage()
    assert left.data_ptr() == right.data_ptr()
    tied = copy_module(with_ties_and_modes())
    assert tied[1].weight is tied[0].weight
    assert tied[0].training
    assert not tied[2].training
    assert not tied[1].bias.requires_grad


def scripted():
    return nn.Sequential(torch.jit.trace(nn.Linear(3, 2), X, check_trace=False))


def shared():
    return nn.Linear(3, 2).share_memory()


def with_closure():
    net = nn.Linear(3, 2)
    net.weight.register_hook(lambda grad: grad * net.bias.sum())
    return net


def with_optimizer_in_backward():
    net = nn.Linear(3, 2)
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    return net


def with_patched_forward():
    net = nn.Linear(3, 2)
    forward = net.forward
    net.forward = lambda x: 2 * forward(x)
    return net


def with_partial_of_a_closure():
    net = nn.Linear(3, 2)

    def hook(factor, grad):
        return grad * factor * net.bias.sum()

    net.weight.register_hook(functools.partial(hook, 2))
    return net


def with_a_lock():
    net = nn.Linear(3, 2)
    net.lock = threading.Lock()
    return net


class Forgetful(nn.Linear):
    def __deepcopy__(self, memo):
        return Forgetful(3, 2)


def forgetful():
    return nn.Sequential(Forgetful(3, 2))


class Careless(nn.Linear):
    def __deepcopy__(self, memo):
        copied = Careless(3, 2)
        copied.load_state_dict(self.state_dict())
        return copied


def careless():
    net = Careless(3, 2)
    net.weight.register_hook(lambda grad: grad)
    return net


REFUSED = [
    (scripted, "torch.jit"),
    (shared, "shared memory"),
    (with_closure, "a hook of the parameter 'weight'"),
    (with_partial_of_a_closure, "a hook of the parameter 'weight'"),
    (with_optimizer_in_backward, "a hook of the parameter 'weight'"),
    (with_patched_forward, "the function 'forward'"),
    (careless, "number of hooks of 'weight'"),
    (forgetful, "'0.weight' has other values"),
    (with_a_lock, "a Linear cannot be copied for each replica"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_a_module_that_cannot_be_copied_faithfully_is_refused_by_name(make, words):
    with pytest.raises(TypeError, match=words) as caught:
        copy_module(make())
    assert "factory" in str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(("make", "words"), REFUSED[:6])
def test_the_builder_refuses_the_module_before_a_thread_starts(make, words):
    with pytest.raises(TypeError, match=words):
        builder(model=make())


def with_a_view(kind):
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    if kind == "buffer":
        net.register_buffer("view", net.weight.detach())
    elif kind == "part":
        net.view = nn.Parameter(net.weight.detach()[2:])
    elif kind == "attribute":
        net.view = net.weight.detach()[:2]
    else:
        net.register_buffer("view", net.weight.detach().view(torch.int64))
    return net


@pytest.mark.parametrize("kind", ["buffer", "part", "attribute", "dtype"])
def test_a_parameter_that_shares_elements_is_refused_with_both_names(kind):
    with pytest.raises(ValueError, match=r"'\w+' and '\w+' share memory") as caught:
        FlatParams(with_a_view(kind))
    assert "'weight'" in str(caught.value)
    assert "'view'" in str(caught.value)


def test_parts_of_one_storage_without_a_common_element_are_moved():
    net = with_parts_of_a_storage()
    fused = torch.cat([net.left, net.right], 1).detach()
    (flat,) = FlatParams(net).flats
    memory = flat.untyped_storage().data_ptr()
    assert [p.untyped_storage().data_ptr() for p in net.parameters()] == [memory, memory]
    assert torch.equal(torch.cat([net.left, net.right], 1), fused)
    flat.zero_()
    assert not net.left.any()
    assert not net.right.any()


def test_a_factory_of_a_module_in_shared_memory_is_refused():
    run = builder(model=lambda device: shared(), dataset=(X,)).run()
    with pytest.raises(gpuworker.WorkerFailed, match="shared memory"):
        run.join(WAIT_S)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_given_module_trains_with_its_hooks_and_attributes(ranks):
    torch.manual_seed(0)
    net = with_hooks()
    net.bias.no_decay = True

    def optim(params):
        return torch.optim.SGD(
            [
                {"params": [p], "weight_decay": 0.0 if hasattr(p, "no_decay") else 1.0}
                for p in params
            ],
            0.05,
        )

    def loss(model, batch):
        return model(batch[0]).square().mean()

    expected = copy.deepcopy(net)
    expected.weight.register_post_accumulate_grad_hook(double)
    expected.bias.register_hook(lambda grad: grad * 3)
    expected.bias.no_decay = True
    optimizer = optim(expected.parameters())
    for _ in range(4):  # an epoch is one batch, so that the order does not matter
        optimizer.zero_grad()
        loss(expected, (X,)).backward()
        optimizer.step()
    way = (SYNC, THREAD)
    state = builder(
        model=net,
        optim=optim,
        train=loss,
        dataset=(X,),
        batch_size=8 // ranks,
        epochs=4,
        ranks=ranks,
        way=way,
    )
    trained = state.run().join(WAIT_S).params
    for name, p in expected.named_parameters():
        torch.testing.assert_close(trained[name], p.data)


def test_a_function_that_refers_to_a_part_through_another_one_is_refused():
    net = nn.Linear(3, 2)

    def inner(x):
        return x * net.weight.sum()

    def outer(module, args, output):
        return inner(output)

    net.register_forward_hook(outer)
    with pytest.raises(TypeError, match="factory"):
        copy_module(net)


@pytest.mark.parametrize("hold", [list, tuple, lambda parts: {"weight": parts[0]}])
def test_a_closure_over_a_container_of_parts_is_refused(hold):
    net = nn.Linear(3, 2)
    held = hold([net.weight])

    def hook(module, args, output):
        return output * len(held)

    net.register_forward_hook(hook)
    with pytest.raises(TypeError, match="'held'"):
        copy_module(net)


def test_a_closure_over_the_optimizer_of_the_original_is_refused():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(TypeError, match="'optimizer'"):
        copy_module(net)


def test_a_closure_over_a_variable_without_a_value_is_copied():
    net = nn.Linear(3, 2)

    def hook(module, args, output):
        return output if output is not None else later

    if net is None:
        later = None
    net.register_forward_hook(hook)
    assert torch.equal(copy_module(net)(X), net(X))


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_copy_that_a_module_makes_itself_is_taken_if_its_values_are_the_same(value):
    net = Careless(3, 2)
    nn.init.constant_(net.weight, value)
    copied = copy_module(net).weight
    assert copied is not net.weight
    assert torch.equal(copied.isnan(), net.weight.isnan())
    assert torch.equal(copied.nan_to_num(), net.weight.nan_to_num())
