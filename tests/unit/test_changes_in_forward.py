"""Models whose forward pass changes their parameters: as on one device, or refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runtime import DataParallelCoordinator, ReplicaMismatch, ShardingStrategy, WorkerFailed
from tests.support.fsdp_ranks import SHARDED, on_ranks, wrap
from tests.support.own_loop import OneDevice, exchanging_gradients, on_cpus
from tests.support.running import CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, builder


def batch(num_samples=12):
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(1)).double()
    return x, x.sum(1, keepdim=True)


def loss_of(model, samples):
    return F.mse_loss(model(samples[0]), samples[1])


def limit_norm(weight):
    weight.data = torch.renorm(weight.data, 2, 0, 0.5)


def shrink(weight):
    with torch.no_grad():
        weight.mul_(0.9)


def shrink_data(weight):
    weight.data.mul_(0.9)


class Changing(nn.Module):
    """Changes a parameter, or a frozen one, in each forward pass."""

    def __init__(self, change, *, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
        self.first.requires_grad_(not frozen)
        self.change = change

    def forward(self, x):
        self.change(self.first.weight)
        return self.last(self.first(x).tanh())


def sgd(params):
    return torch.optim.SGD([p for p in params if p.requires_grad], 0.1)


def trained_alone(model, num_steps=3):
    one = OneDevice(model, sgd)
    for _ in range(num_steps):
        loss_of(one, batch()).backward()
        one.step()
    return one.model.state_dict()


def assert_equal(model, expected):
    torch.testing.assert_close(dict(model.state_dict()), dict(expected))


def assert_as_one_device(model, ranks=2):
    """Three steps of an own loop, without a change of ``model``."""
    expected = trained_alone(model)
    with on_cpus(copy.deepcopy(model), ranks, sgd) as replicas:
        for _ in range(3):
            loss_of(replicas, batch()).backward()
            replicas.step()
        assert_equal(replicas, expected)


in_place = pytest.mark.parametrize("change", [shrink, shrink_data])
frozen_or_not = pytest.mark.parametrize("frozen", [False, True])


@frozen_or_not
def test_values_assigned_in_forward_are_those_of_one_device_in_an_own_loop(frozen):
    assert_as_one_device(Changing(limit_norm, frozen=frozen))


@frozen_or_not
def test_values_assigned_in_loss_fn_are_those_of_one_device(frozen):
    model = Changing(limit_norm, frozen=frozen)
    expected = trained_alone(model)
    with DataParallelCoordinator(copy.deepcopy(model), sgd, loss_of, ["cpu"] * 2) as replicas:
        for _ in range(3):
            replicas.train_batch(batch())
        assert_equal(replicas.primary, expected)


@in_place
@frozen_or_not
def test_a_change_in_place_of_shared_memory_is_refused(change, frozen):
    model = Changing(change, frozen=frozen)
    message = r"forward changes parameter 'first.weight' in place, .* 2 replicas"
    calls = [
        lambda loop: loop(batch()[0]),
        lambda loop: loop.accumulate(loss_of, [batch(), batch()]),
    ]
    for call in calls:
        with on_cpus(copy.deepcopy(model), 2, sgd) as loop, pytest.raises(RuntimeError) as caught:
            call(loop)
        assert re.match(message, str(caught.value))
    step = DataParallelCoordinator(copy.deepcopy(model), sgd, loss_of, ["cpu"] * 2)
    with step, pytest.raises(RuntimeError, match=message):
        step.train_batch(batch())


@in_place
@frozen_or_not
def test_ranks_with_memory_of_their_own_change_parameters_in_place_as_one_device(change, frozen):
    with exchanging_gradients("copies"):
        assert_as_one_device(Changing(change, frozen=frozen))


@in_place
def test_one_replica_changes_parameters_in_place_as_one_device(change):
    assert_as_one_device(Changing(change), ranks=1)


def test_a_change_in_a_later_forward_is_refused():
    model = Changing(lambda weight: None)
    with on_cpus(model, 2, sgd) as replicas:
        loss_of(replicas, batch()).backward()
        replicas.step()
        model.change = shrink
        with pytest.raises(RuntimeError, match="in place"):
            replicas(batch()[0])


def test_functional_call_on_the_replicas_is_refused():
    with on_cpus(Changing(lambda weight: None), 2, sgd) as replicas:
        scaled = {name: p * 1.1 for name, p in replicas.named_parameters()}
        with pytest.raises(RuntimeError, match=r"functional_call, .* apply .* model\.module"):
            torch.func.functional_call(replicas, scaled, (batch()[0],))
        torch.func.functional_call(replicas.module, scaled, (batch()[0],)).sum().backward()
        replicas.zero_grad()
        loss_of(replicas, batch()).backward()


@pytest.mark.parametrize("change", [limit_norm, shrink, shrink_data])
@pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s.name)
def test_shards_refuse_changes_of_gathered_parameters(strategy, change):
    def rank(end):
        fsdp = wrap(end, strategy, Changing(change))
        with pytest.raises(RuntimeError, match=r"forward changes the parameter 'first\.weight'"):
            fsdp(batch()[0])

    on_ranks(2, rank)


@pytest.mark.parametrize("change", ["in place", "through .data"])
def test_changes_of_parameters_that_depend_on_the_rank_are_refused_without_shards(change):
    def rank(end):
        def limit(weight):
            with torch.no_grad():
                (weight.data if change == "through .data" else weight).mul_(0.5 + 0.1 * end.rank)

        fsdp = wrap(end, ShardingStrategy.NO_SHARD, Changing(limit))
        loss_of(fsdp, batch()).backward()
        with pytest.raises(ReplicaMismatch, match=r"'first\.weight' differs between ranks"):
            fsdp.sync_gradients()

    on_ranks(2, rank)


def test_changes_of_parameters_alike_on_all_ranks_are_kept_without_shards():
    expected = trained_alone(Changing(shrink))
    models = [Changing(shrink) for _ in range(2)]  # threads share the generator of their values

    def rank(end):
        fsdp = wrap(end, ShardingStrategy.NO_SHARD, models[end.rank])
        optimizer = sgd(fsdp.parameters())
        for _ in range(3):
            loss_of(fsdp, batch()).backward()
            fsdp.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(fsdp.full_state_dict(), dict(expected))

    on_ranks(2, rank)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_train_fn_moves_ends_the_run_in_its_first_epoch(ranks, way):
    run = builder(
        model=lambda device: Changing(limit_norm),
        optim=sgd,
        train=loss_of,
        dataset=batch(16),
        epochs=50,
        ranks=ranks,
        way=way,
    ).run()
    with pytest.raises(WorkerFailed, match="was moved to other memory") as caught:
        run.join(WAIT_S)
    assert caught.value.epoch == 0


@in_place
def test_the_trial_of_a_first_batch_of_several_inputs_changes_no_parameter(change):
    class TwoInputs(Changing):
        def forward(self, x, shift):
            return super().forward(x) + shift

    net = TwoInputs(change)
    alone = copy.deepcopy(net)
    x, _ = batch()
    alone(x, x[:, :1])
    with exchanging_gradients("copies"), on_cpus(net) as model:
        model(x, x[:, :1])
        assert_equal(model, alone.state_dict())
