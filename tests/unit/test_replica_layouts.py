"""Replicas, checkpoints and machines with other memory formats, or parameters in another order."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from torch import nn

from runtime import CheckpointError, ReplicaMismatch, ShardingStrategy, Trainer
from runtime.checkpoint.format import digest
from tests.support.fsdp_ranks import on_ranks, wrap
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
)

X = torch.randn(48, 3, 4, 4, generator=torch.Generator().manual_seed(0))
LAST = torch.channels_last


def net(memory_format=torch.contiguous_format):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 2), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(36, 1)
        return nn.Sequential(*layers).to(memory_format=memory_format)


def alternating(*formats):
    """A model factory whose calls return models of these formats."""
    order = itertools.cycle(formats)
    return lambda device: net(next(order))


def loss_of(model, batch):
    return model(batch[0]).square().mean()


def make(model, *, ranks=2, way=(SYNC, THREAD), epochs=1, lr=0.0, optim=torch.optim.SGD):
    return builder(
        model=model,
        optim=lambda params: optim(params, lr),
        train=loss_of,
        dataset=(X,),
        batch_size=4,
        ranks=ranks,
        way=way,
        epochs=epochs,
    )


def unchanged(params):
    """True but for the rounding of averages."""
    return all(torch.allclose(params[name], p) for name, p in net().named_parameters())


@pytest.mark.parametrize("first", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize(
    "way",
    [(SYNC, THREAD), (SYNC, GLOO), (CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)],
    ids=str,
)
def test_ranks_with_another_memory_format_average_the_same_elements(way, first, caplog):
    """With a learning rate of 0 every average is the initial weight."""
    second = LAST if first is torch.contiguous_format else torch.contiguous_format
    state = make(alternating(first, second), way=way).run().join(WAIT_S)
    assert unchanged(state.params)
    assert caplog.text.count("rank 1: 0.weight has another memory format") == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_under_sync_the_steps_are_those_of_one_memory_format(ranks):
    same, mixed = (
        make(alternating(*formats), ranks=ranks, lr=0.1).run().join(WAIT_S).params
        for formats in ([torch.contiguous_format], [torch.contiguous_format, LAST])
    )
    assert all(torch.equal(same[name], mixed[name]) for name in same)


def test_an_own_loop_takes_the_memory_format_of_rank_0():
    def loop(worker):
        for batch in worker.batches():
            worker.step(loss_of(worker.model, batch))

    def params(*formats):
        models = alternating(*formats)
        made = Trainer.loop(models, lambda m: torch.optim.SGD(m.parameters(), 0.1), loop)
        made = made.dataset(torch.utils.data.TensorDataset(X)).batch_size(4).num_epochs(1)
        return made.devices(["cpu"] * 2).policy(SYNC).run().join(WAIT_S).params

    same, mixed = params(LAST), params(LAST, torch.contiguous_format)
    assert all(torch.equal(same[name], mixed[name]) for name in same)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)], ids=str)
def test_ranks_that_register_their_modules_in_another_order_are_refused(way):
    names = itertools.cycle([("one", "two"), ("two", "one")])

    def factory(device):
        model = nn.Module()
        for name in next(names):
            model.add_module(name, nn.Linear(3, 3))
        return model

    with pytest.raises(ReplicaMismatch, match=r"rank 1 in another order .* 'two.weight' is in the"):
        make(factory, way=way).run().join(WAIT_S)


def test_formats_that_differ_in_dimensions_of_size_1_are_equal(caplog):
    def factory(device):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 1))
        return model.to(memory_format=next(formats))

    formats = iter([torch.contiguous_format, LAST])
    make(factory).run().join(WAIT_S)
    assert "memory format" not in caplog.text


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)
def test_fsdp_refuses_ranks_with_another_memory_format(strategy):
    def work(end):
        with pytest.raises(ReplicaMismatch, match=r"'0\.weight' of shape .* strides"):
            wrap(end, strategy, net(LAST if end.rank else torch.contiguous_format))

    on_ranks(2, work)


@pytest.mark.parametrize("formats", [(torch.contiguous_format, LAST), (LAST, None)], ids=str)
def test_a_moving_average_is_resumed_in_another_memory_format(tmp_path, formats):
    before, after = (f or torch.contiguous_format for f in formats)
    make(lambda device: net(before)).ema(0.9).checkpoint_dir(tmp_path).run().join(WAIT_S)
    again = make(lambda device: net(after), epochs=2).ema(0.9).resume(tmp_path)
    assert unchanged(again.run().join(WAIT_S).ema_state_dict())


class Averaging(torch.optim.Optimizer):
    """Trains at ``y`` and evaluates in the middle of ``y`` and ``z``, a part of its state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.trains = False

    def _move(self, weight, trains):
        if self.trains is not trains:
            self.trains = trains
            for p in self.param_groups[0]["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)

    def eval(self):
        self._move(0.5, False)

    def train(self):
        self._move(-1.0, True)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("z", p.clone()).sub_(p.grad, alpha=0.1)
            p.sub_(p.grad, alpha=0.05)


def test_an_optimizer_with_modes_is_resumed_in_another_memory_format(tmp_path):
    last = make(lambda device: net(LAST), optim=Averaging, epochs=1)
    last.checkpoint_dir(tmp_path).run().join(WAIT_S)
    whole, resumed = (
        make(lambda device: net(), optim=Averaging, epochs=2) for _ in ("whole", "resumed")
    )
    whole = whole.run().join(WAIT_S).params
    resumed = resumed.resume(tmp_path).run().join(WAIT_S).params
    assert all(torch.allclose(resumed[name], whole[name], atol=1e-6) for name in whole)


def fused(params, lr):
    """Its kernel on a CPU reads parameters and states by their places in memory."""
    return torch.optim.AdamW(params, 0.01, fused=True)


@pytest.mark.parametrize("formats", [(torch.contiguous_format, LAST), (LAST, None)], ids=str)
@pytest.mark.parametrize("strategy", [None, *ShardingStrategy], ids=str)
def test_a_fused_optimizer_is_resumed_in_another_memory_format(tmp_path, formats, strategy):
    before, after = (f or torch.contiguous_format for f in formats)

    def made(memory_format, *, epochs):
        run = make(lambda device: net(memory_format), optim=fused, epochs=epochs)
        hybrid = strategy is ShardingStrategy.HYBRID_SHARD
        return run if strategy is None else run.sharded(strategy, 2 if hybrid else None)

    whole = made(before, epochs=2).run().join(WAIT_S).params
    made(before, epochs=1).checkpoint_dir(tmp_path).run().join(WAIT_S)
    found = made(after, epochs=2).resume(tmp_path).run().join(WAIT_S).params
    assert all(torch.allclose(found[name], whole[name], atol=1e-5) for name in whole)


def test_an_own_loop_loads_the_optimizer_state_of_another_memory_format():
    def trained(memory_format, state=None):
        model = Trainer.setup(net(memory_format), lambda p: fused(p, 0.0), devices=["cpu"] * 2)
        if state is not None:
            model.module.load_state_dict(state[0])
            model.load_optimizer_state_dict(copy.deepcopy(state[1]))
        model(X[:8]).square().mean().backward()
        model.step()
        return model.state_dict(), model.optimizer_state_dict()

    first = trained(LAST)
    same, other = trained(LAST, first), trained(torch.contiguous_format, first)
    assert all(torch.allclose(other[0][name], p, atol=1e-5) for name, p in same[0].items())


def pair():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))


def adam(order):
    """AdamW with the parameters in an order such as that of a set, which differs by process."""
    return lambda params, lr: torch.optim.AdamW([{"params": list(params)[::order]}], 0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_with_its_parameters_in_another_order_is_resumed(tmp_path, ranks):
    whole = make(lambda device: pair(), ranks=ranks, epochs=2, optim=adam(1))
    whole = whole.run().join(WAIT_S).params
    first = make(lambda device: pair(), ranks=ranks, optim=adam(1))
    first.checkpoint_dir(tmp_path).run().join(WAIT_S)
    again = make(lambda device: pair(), ranks=ranks, epochs=2, optim=adam(-1)).resume(tmp_path)
    found = again.run().join(WAIT_S).params
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_replica_is_copied_whose_optimizer_has_another_order():
    workers, meeting = {}, threading.Barrier(2, timeout=WAIT_S)

    @torch.no_grad()
    def copies(epoch, worker):
        workers[worker.rank] = worker
        if epoch == 1:
            meeting.wait()
            if worker.rank == 1:
                worker.model[1].weight.data.neg_()
                for state in worker.optimizer.state.values():
                    state["exp_avg"].neg_()
                worker.replica.copy_from(workers[0].replica)
            meeting.wait()

    def params(*orders):
        optims = itertools.cycle([adam(order) for order in orders])
        made = make(
            lambda device: pair(), epochs=4, optim=lambda params, lr: next(optims)(params, lr)
        )
        return made.epoch_fn(copies).run().join(WAIT_S).params

    same, mixed = params(1), params(1, -1)
    assert all(torch.equal(same[name], mixed[name]) for name in same)


def test_a_group_with_other_parameters_is_not_resumed(tmp_path):
    def groups(split):
        def optim(params, lr):
            params = list(params)
            return torch.optim.AdamW(
                [{"params": params[:split] + params[3:]}, {"params": params[split:3]}], 0.01
            )

        return optim

    def other(params, lr):
        one, two, three, four = params
        return torch.optim.AdamW([{"params": [three, two]}, {"params": [one, four]}], 0.01)

    first = make(lambda device: pair(), optim=groups(1))
    first.checkpoint_dir(tmp_path).run().join(WAIT_S)
    with pytest.raises(CheckpointError, match=r"group 0 has the state of \['1.weight', '3.bias'\]"):
        make(lambda device: pair(), optim=other).resume(tmp_path).run().join(WAIT_S)


def test_machines_with_another_memory_format_have_another_model_digest():
    assert digest(net()) == digest(net())
    assert digest(net(LAST)) == digest(net(LAST)) != digest(net())
    buffers = nn.BatchNorm1d(3)
    assert digest(buffers) == digest(nn.BatchNorm1d(3))
