"""Gradients over several replicas equal those of the whole batch on one device."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from runtime import DdpConfig, ReplicaFailed, Trainer
from runtime.loop import rank_replica
from tests.support.own_loop import (
    NUM_CLASSES,
    NUM_FEATURES,
    OneDevice,
    adamw,
    assert_close,
    assert_identical,
    exchanging_gradients,
    gradients,
    make_batch,
    make_net,
    on_cpus,
    sgd,
    train_step,
)

ratios = st.lists(st.floats(0.05, 20.0), min_size=2, max_size=4)


@pytest.fixture(autouse=True, scope="module", params=["directly", "meeting", "copies"])
def way(request):
    with exchanging_gradients(request.param):
        yield request.param


def set_ratios(model, weights):
    """Set the state after measurements of these speeds."""
    model._engine._balancer.adopt(weights)


@settings(max_examples=25)
@given(ratios, st.lists(st.integers(1, 23), min_size=1, max_size=3), st.sampled_from([sgd, adamw]))
def test_steps_equal_one_device_whatever_the_ratios(weights, sizes, optim):
    """Never scaled by 1/N, never weighted twice; replicas keep the same bits."""
    net = make_net()
    alone = OneDevice(net, optim)
    with on_cpus(net, len(weights), optim) as model:
        set_ratios(model, weights)
        for size in sizes:
            x, y = make_batch(size)
            assert_identical(model)
            F.cross_entropy(model(x), y).backward()
            F.cross_entropy(alone(x), y).backward()
            assert_close(gradients(model), gradients(alone.model))
            model.step()
            alone.step()
            assert_identical(model)
            assert_close(model, alone.model)


def test_several_forward_and_backward_passes_add_up_as_on_one_device():
    net = make_net()
    alone = OneDevice(net)
    x, y = make_batch(7)
    with on_cpus(net, 3) as model:
        for loop in (model, alone):
            one, two = loop(x), loop(x * 2)
            (F.cross_entropy(one, y) + F.cross_entropy(two, y)).backward()
            F.cross_entropy(loop(x * 3), y).backward()
        assert_close(gradients(model), gradients(alone.model))
        model.step()
        alone.step()
        assert_identical(model)
        assert_close(model, alone.model)


def test_between_backward_and_step_gradients_are_of_the_whole_batch_and_may_be_changed():
    """As clipping, noise or logging do in a loop on one device."""
    net = make_net()
    alone = OneDevice(net, adamw)
    with on_cpus(net, 2, adamw) as model:
        for _ in range(3):
            x, y = make_batch(9)
            norms = []
            for loop, params in ((model, model), (alone, alone.model)):
                F.cross_entropy(loop(x), y).backward()
                norms.append(nn.utils.clip_grad_norm_(params.parameters(), 0.05))
                for p in params.parameters():
                    p.grad.data.mul_(0.5)
                next(params.parameters()).grad = None
                loop.step()
            assert norms[0] == pytest.approx(norms[1].item(), rel=1e-9)
            assert_identical(model)
            assert_close(model, alone.model)


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("by", ["clip_grad_norm_", "step", "step of the optimizer"])
def test_the_gradient_of_the_whole_batch_is_clipped(num_devices, by):
    net = make_net()
    alone = OneDevice(net)
    x, y = make_batch(9)
    config = DdpConfig(max_grad_norm=None if by == "clip_grad_norm_" else 0.01, max_anchor=0)
    with on_cpus(net, num_devices, config=config) as model:
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(alone(x), y).backward()
        norm = nn.utils.clip_grad_norm_(alone.model.parameters(), 0.01)
        if by == "clip_grad_norm_":
            assert model.clip_grad_norm_(0.01).item() == pytest.approx(norm.item())
        (model.optimizer if by == "step of the optimizer" else model).step()
        alone.step()
        assert_close(model, alone.model)
        assert_identical(model)


def test_a_penalty_on_the_weights_counts_once():
    net = make_net()
    alone = OneDevice(net)
    x, y = make_batch(9)
    with on_cpus(net, 3) as model:
        for loop, params in ((model, model), (alone, alone.model)):
            penalty = sum(p.square().sum() for p in params.parameters())
            (F.cross_entropy(loop(x), y) + 0.1 * penalty).backward()
            loop.step()
        assert_close(model, alone.model)
        assert_identical(model)


class TwoWays(nn.Module):
    """Uses one layer for positive samples, another for negative ones, and a third never."""

    def __init__(self):
        super().__init__()
        self.plus, self.minus, self.never = (nn.Linear(1, 1).double() for _ in range(3))

    def forward(self, x):
        return self.plus(x) if x.sum() > 0 else self.minus(x)


def test_parameters_used_on_some_replicas_only_or_on_none():
    """Unused parameters keep the gradient None, so that weight decay does not change them."""
    net = TwoWays()
    before = net.never.weight.clone()
    x = torch.tensor([[1.0], [2.0], [-3.0], [-4.0]], dtype=torch.float64)
    expected = [x[:2].sum(), x[2:].sum()]
    with on_cpus(net, 2, adamw, DdpConfig(whole=[])) as model:
        model(x).sum().backward()
        assert net.never.weight.grad is None
        assert [net.plus.weight.grad, net.minus.weight.grad] == expected
        model.step()
        assert_identical(model)
        assert torch.equal(net.never.weight, before)


class Branches(nn.Module):
    """Each sample of its own class uses a branch; all use the trunk."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))
        self.trunk = nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(6)])

    def forward(self, x, branches):
        for number, branch in enumerate(self.branches):
            if (branches == number).any():
                x = torch.where((branches == number)[:, None], branch(x), x)
        return self.trunk(x)


def test_no_two_threads_add_to_one_gradient_where_ranks_use_different_parameters(monkeypatch):
    threads, add = {}, rank_replica._add

    def noting(additions):
        for targets, _ in additions:
            for target in targets:
                threads.setdefault(target.data_ptr(), set()).add(threading.get_ident())
        add(additions)

    monkeypatch.setattr(rank_replica, "_add", noting)
    net, x, used = Branches(), torch.randn(6, 4).double(), torch.tensor([0, 0, 1, 1, 1, 2])
    alone = copy.deepcopy(net)
    alone(x, used).square().sum().backward()
    with on_cpus(net, 3, config=DdpConfig(whole=[])) as model:
        model(x, used).square().sum().backward()
        for p, other in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, other.grad)
    assert all(len(idents) == 1 for idents in threads.values())


def test_parameters_may_be_frozen_and_unfrozen_during_training():
    net = make_net()
    net[0].bias.requires_grad_(False)
    alone = OneDevice(net, lambda params: sgd([p for p in params if p.requires_grad]))
    with on_cpus(net, 2) as model:
        for frozen in (False, True, False):
            x, y = make_batch(9)
            model.module[3].weight.requires_grad_(not frozen)
            alone.model[3].weight.requires_grad_(not frozen)
            train_step(model, x, y)
            train_step(alone, x, y)
            assert_identical(model)
            assert_close(model, alone.model)


def test_tied_parameters_stay_tied():
    net = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Linear(NUM_FEATURES, 6)).double()
    net[1].weight = net[0].weight
    alone = OneDevice(net)
    with on_cpus(net, 2) as model:
        for _ in range(3):
            x, y = make_batch(5)
            train_step(model, x, y)
            train_step(alone, x, y)
        assert all(r[0].weight is r[1].weight for r in model.replicas)
        assert_close(model, alone.model)


def test_gradients_reach_the_inputs_and_from_there_another_model():
    """A generator trained through a discriminator, each over its own replicas."""
    maker, judge = make_net(), nn.Linear(NUM_CLASSES, 1).double()
    alone_maker, alone_judge = OneDevice(maker), OneDevice(judge)
    z = torch.randn(5, NUM_FEATURES, dtype=torch.float64)
    real = torch.randn(5, NUM_CLASSES, dtype=torch.float64)
    with on_cpus(maker, 2) as g, on_cpus(judge, 3) as d:
        for _ in range(3):
            for gen, dis in ((g, d), (alone_maker, alone_judge)):
                (dis(gen(z).detach()).mean() - dis(real).mean()).backward()
                dis.step()
                (-dis(gen(z)).mean()).backward()
                gen.step()
                (dis if dis is d else dis.optimizer).zero_grad()
        for model, alone in ((g, alone_maker), (d, alone_judge)):
            assert_identical(model)
            assert_close(model, alone.model)


def test_gradients_of_inputs_only_leave_the_parameters_gradients_unchanged():
    net = make_net()
    x = torch.randn(5, NUM_FEATURES, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).square().sum(), x)
    with on_cpus(net, 2) as model:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x)
        assert all(p.grad is None for r in model.replicas for p in r.parameters())
    assert_close([grad], [expected])


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, shift, unused):
        return x * self.w * shift


def test_inputs_without_dimensions_or_effect_get_gradients_too():
    shift = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    unused = torch.ones(5, dtype=torch.float64, requires_grad=True)
    x = torch.arange(5.0, dtype=torch.float64, requires_grad=True)
    with on_cpus(Shifted(), 2) as model:
        model(x, shift, unused).sum().backward()
    assert shift.grad == x.sum()
    assert unused.grad is None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_retained_graph_can_run_backward_again():
    net = make_net()
    x, y = make_batch(5)
    with on_cpus(net, 2) as model:
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        assert_close(gradients(model), [2 * g for g in once])


def test_backward_through_a_freed_graph_raises():
    x, _ = make_batch(5)
    with on_cpus(make_net(), 2) as model:
        out = model(x)
        out.sum().backward()
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            out.sum().backward()


def test_gradients_of_gradients_are_refused():
    x = torch.randn(5, NUM_FEATURES, dtype=torch.float64, requires_grad=True)
    with on_cpus(make_net(), 2) as model, pytest.raises(RuntimeError, match=r"model\.module"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_sparse_gradients_equal_one_device_or_are_refused_between_devices(way):
    net = nn.Embedding(5, 2, sparse=True)
    alone = OneDevice(net)
    rows = torch.tensor([0, 1, 2, 1])
    with on_cpus(net, 2) as model:
        if way == "copies":
            with pytest.raises(ReplicaFailed, match="sparse=False"):
                model(rows).square().sum().backward()
            return
        for loop in (model, alone):
            loop(rows).square().sum().backward()
        assert torch.equal(net.weight.grad.to_dense(), alone.model.weight.grad.to_dense())


def test_a_step_without_gradients_changes_nothing():
    net = make_net()
    before = OneDevice(net).model
    with on_cpus(net, 2, adamw) as model:
        model.step()
        model(make_batch(4)[0])
        model.step()
        assert_close(net, before)


def test_gradients_of_the_first_model_only_reach_all_replicas():
    net = make_net()
    alone = OneDevice(net)
    x, y = make_batch(5)
    with on_cpus(net, 2) as model:
        F.cross_entropy(model.module(x), y).backward()
        model.step()
        train_step(alone, x, y)
        assert_identical(model)
        assert_close(model, alone.model)


def test_buffers_are_copied_from_the_first_device():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.BatchNorm1d(4)).double()
    x, _ = make_batch(12)
    with on_cpus(net, 3) as model:
        for _ in range(2):
            model(x).square().mean().backward()
            model.step()
            assert_identical(model)
        assert net[1].num_batches_tracked == 2
        model(x)  # changes each replica's buffers differently
        model.eval()
        expected = net(x)
        assert_close([model(x)], [expected])
        assert_identical(model)


def test_weights_changed_in_place_reach_all_replicas():
    """As weight clipping, or loading a submodule, does."""
    net = make_net()
    x, y = make_batch(6)
    with on_cpus(net, 2) as model:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        assert_close([model(x)], [net(x)])
        assert_identical(model)
        model.module[0].load_state_dict(make_net()[0].state_dict())
        train_step(model, x, y)
        assert_identical(model)
        net[0].weight.data.zero_()
        model.sync_params()
        assert_identical(model)


class MaskedLoss(nn.Module):
    """Mean loss over the samples that are not masked; NaN, as its gradients, without any."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x, mask):
        loss = (self.fc(x).squeeze(1).square() * mask).sum() / mask.sum()
        return {"loss": loss, "loss_weight": mask.sum()}


def test_gradients_of_a_loss_of_weight_0_that_the_host_does_not_read_are_zeros(monkeypatch):
    monkeypatch.setattr(
        rank_replica, "output_weight", lambda *args: args[3]["loss_weight"].detach()
    )
    x, mask = torch.randn(4, 3), torch.tensor([1.0, 1.0, 0.0, 0.0])
    alone = MaskedLoss()
    with Trainer.setup(copy.deepcopy(alone), sgd, ["cpu", "cpu"]) as model:
        model(x, mask)["loss"].backward()
        alone(x, mask)["loss"].backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
