"""Recognition of optimizers that ignore the scale of the gradient, and the rates of their steps."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import optim

from runtime.replica.capturable import CapturableOptimizer
from runtime.replica.optimizers import Optimizers
from runtime.replica.scaled_rates import ScaledRates, ignores_gradient_scale

CPU = torch.device("cpu")


class Lion(optim.Optimizer):
    """Steps by the sign of a mean gradient, as a user's optimizer with a required argument."""

    def __init__(self, params, lr, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})
        self.used = []

    @torch.no_grad()
    def step(self, closure=None):
        self.used.append([float(group["lr"]) for group in self.param_groups])
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (mean * group["beta"] + p.grad).sign())
                mean.lerp_(p.grad, 1 - group["beta"])


class Clipped(optim.SGD):
    """SGD that clips the gradient's norm to 1 itself."""

    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        super().step(closure)


class Drawing(optim.Adam):
    """Draws random numbers in each step."""

    def step(self, closure=None):
        torch.rand(())
        super().step(closure)


class Broken(optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        raise RuntimeError("planted")


class Counting(optim.RMSprop):
    """Counts the steps of all instances, and fails if another one is made."""

    num_steps = 0
    is_made = False

    def __init__(self, params, lr):
        assert not Counting.is_made
        Counting.is_made = True
        super().__init__(params, lr)

    def step(self, closure=None):
        Counting.num_steps += 1
        super().step(closure)


def parameters(*shapes):
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes or ((3, 4), (3,))]


INVARIANT = {
    "Adam": optim.Adam,
    "Adam with weight decay": lambda p: optim.Adam(p, weight_decay=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.1),
    "Adam, fused": lambda p: optim.Adam(p, fused=True),
    "Adam, foreach": lambda p: optim.Adam(p, foreach=True),
    "Adam, rate as a tensor": lambda p: optim.Adam(p, lr=torch.tensor(1e-3)),
    "Adam, eps of 1e-3": lambda p: optim.Adam(p, eps=1e-3),
    "NAdam": lambda p: optim.NAdam(p, weight_decay=1e-2),
    "RAdam": lambda p: optim.RAdam(p, weight_decay=1e-2),
    "Adamax": lambda p: optim.Adamax(p, weight_decay=1e-2),
    "Adagrad": lambda p: optim.Adagrad(p, weight_decay=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, weight_decay=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True, weight_decay=1e-2),
    "Rprop": optim.Rprop,
    "Lion of a user": lambda p: Lion(p, 1e-3, weight_decay=0.1),
}
FOLLOWING = {
    "SGD": lambda p: optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=5e-4),
    "Nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "ASGD": lambda p: optim.ASGD(p, weight_decay=1e-2),
    "Adam with an eps that dominates": lambda p: optim.Adam(p, eps=1.0),
    "SGD that clips": lambda p: Clipped(p, 0.1),
}
UNKNOWN = {"LBFGS": optim.LBFGS, "SparseAdam": optim.SparseAdam, "error": lambda p: Broken(p, 0.1)}
TABLE = [
    *((make, True) for make in INVARIANT.values()),
    *((make, False) for make in FOLLOWING.values()),
    *((make, None) for make in UNKNOWN.values()),
]


@pytest.mark.parametrize(("make", "expected"), TABLE, ids=[*INVARIANT, *FOLLOWING, *UNKNOWN])
@pytest.mark.parametrize("num_dims", [0, 1, 2])
def test_optimizers_are_recognised_by_their_steps(make, expected, num_dims):
    optimizer = make(parameters())
    (group,) = optimizer.param_groups
    assert ignores_gradient_scale(optimizer, group, num_dims) is expected


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="PyTorch has no Muon")
def test_an_optimizer_of_matrices_is_probed_with_a_matrix():
    optimizer = optim.Muon(parameters((3, 4)))
    assert ScaledRates(optimizer).names == ("Muon",)


@pytest.mark.parametrize("make", [optim.Adam, lambda p: Lion(p, 0.1), Drawing])
def test_a_probe_changes_neither_the_optimizer_nor_the_generator(make):
    optimizer = make(parameters())
    before, generator = optimizer.state_dict(), torch.get_rng_state()
    held = [p.clone() for p in optimizer.param_groups[0]["params"]]
    ScaledRates(optimizer)
    assert optimizer.state_dict() == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], held))
    assert getattr(optimizer, "used", []) == []


def test_code_of_a_subclass_of_an_optimizer_of_torch_is_not_run_by_a_probe():
    optimizer = Counting(parameters(), 0.1)
    assert ScaledRates(optimizer).names == ("Counting",)
    assert Counting.num_steps == 0


def test_an_optimizer_that_cannot_be_probed_is_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        optimizer = Broken([{"params": [p]} for p in parameters()], 0.1)
        rates = ScaledRates(optimizer, warns=True)
    assert rates.names == ()
    (record,) = caplog.records
    assert "the step of Broken could not be probed" in record.getMessage()


def test_each_of_several_optimizers_is_probed_by_itself():
    first, second = parameters((2,), (2,))
    members = {"body": Lion([first], 0.5), "head": optim.SGD([second], 0.5)}
    rates = ScaledRates(Optimizers(members))
    rates.factor = 2.0
    assert rates.names == ("Lion (body)",)
    with rates.during_step():
        used = [each.param_groups[0]["lr"] for each in members.values()]
    assert used == [1.0, 0.5]


def test_a_group_added_during_the_run_is_probed():
    optimizer = Lion(parameters((2,)), 0.5)
    rates = ScaledRates(optimizer)
    rates.factor = 2.0
    optimizer.add_param_group({"params": parameters((3,)), "lr": 0.1})
    with rates.during_step():
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def test_rates_are_those_of_the_user_after_a_step_that_fails():
    optimizer = optim.Adam(parameters(), lr=torch.tensor(0.5))
    (given,) = [group["lr"] for group in optimizer.param_groups]
    rates = ScaledRates(optimizer)
    rates.factor = 3.0

    def step():
        with rates.during_step():
            assert float(optimizer.param_groups[0]["lr"]) == 1.5
            raise KeyError("planted")

    with pytest.raises(KeyError):
        step()
    assert optimizer.param_groups[0]["lr"] is given
    assert float(given) == 0.5


def test_a_scaled_step_equals_one_with_the_scaled_rate():
    (scaled,), (plain,) = parameters((3,)), parameters((3,))
    optimizer, other = optim.AdamW([scaled], 0.01), optim.AdamW([plain], 0.02)
    rates = ScaledRates(optimizer)
    rates.factor = 2.0
    for step in range(5):
        scaled.grad = torch.arange(3.0) - step
        plain.grad = scaled.grad.clone()
        with rates.during_step():
            optimizer.step()
        other.step()
    assert torch.equal(scaled, plain)


@pytest.mark.parametrize("capturable", [True, False])
def test_steps_for_graphs_use_the_factor(capturable):
    p = parameters((2,))
    optimizer = optim.Adam(p, 0.5) if capturable else Lion(p, 0.5)
    rates = ScaledRates(optimizer)
    captured = CapturableOptimizer(optimizer, CPU, rates)
    before = captured.settings()
    rates.factor = 2.0
    captured.refresh()
    with captured.rates():
        assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.5
    # A number is part of a graph, which is then captured again; a tensor is not.
    assert (captured.settings() == before) is capturable
