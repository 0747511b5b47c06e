"""Habits of loops for one device: right with FSDP, or answered with the remedy."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from runtime import FSDP, ReplicaMismatch, ShardingStrategy, create_collectives
from tests.support.fsdp_ranks import SHARDED, STRATEGIES, node_size, on_ranks, outcomes_of

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
each_sharded = pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s.name)
each_world = pytest.mark.parametrize("world_size", [1, 2])


class TwoLayers(nn.Module):
    """Two layers, of which the loss uses the first, or the second for negative inputs too."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

    def forward(self, x, with_idle=False):
        return self.used(x) + (self.idle(x) if with_idle else 0)


def data(num_samples=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :2].contiguous()


def seeded(make=TwoLayers):
    torch.manual_seed(0)
    return make()


def train(module, x, y, optimizer, between=lambda: None, num_steps=3, **kwargs):
    for _ in range(num_steps):
        optimizer.zero_grad()
        mse_loss(module(x, **kwargs), y).backward()
        between()
        optimizer.step()


def adamw(params):
    return torch.optim.AdamW(params, 0.01, weight_decay=0.5)


@each_strategy
@each_world
def test_parameters_that_no_rank_uses_have_no_gradient(strategy, world_size):
    x, y = data()
    one = seeded()
    train(one, x, y, adamw(one.parameters()))
    nets = [copy.deepcopy(seeded()) for _ in range(world_size)]

    def work(end):
        fsdp = FSDP(nets[end.rank], end, strategy, node_size(strategy, world_size))
        xs, ys = x.chunk(world_size)[end.rank], y.chunk(world_size)[end.rank]
        train(fsdp, xs, ys, adamw(fsdp.parameters()), fsdp.sync_gradients)
        missing = {name for name, p in fsdp.named_parameters() if p.grad is None}
        return fsdp.full_state_dict(), missing

    for state, missing in on_ranks(world_size, work):
        assert missing == {"module.idle.weight", "module.idle.bias"}
        for name, value in one.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@each_strategy
def test_a_parameter_that_one_rank_uses_has_the_mean_gradient_on_every_rank(strategy):
    x, y = data()

    def work(end):
        fsdp = FSDP(nets[end.rank], end, strategy, node_size(strategy, 2))
        mse_loss(fsdp(x, with_idle=end.rank == 0), y).backward()
        fsdp.sync_gradients()
        return [p.grad is not None for p in fsdp.parameters()]

    nets = [copy.deepcopy(seeded()) for _ in range(2)]
    assert on_ranks(2, work) == [[True] * 4] * 2


@each_sharded
def test_groups_made_by_the_shapes_of_shards_are_named_before_the_first_step(strategy, caplog):
    def work(end):
        fsdp = FSDP(nets[end.rank], end, strategy, node_size(strategy, 2))
        flat = {"params": [p for p in fsdp.parameters() if p.dim() < 2], "weight_decay": 0.0}
        deep = {"params": [p for p in fsdp.parameters() if p.dim() >= 2]}
        optimizer = torch.optim.SGD([flat, deep], 0.1, weight_decay=0.5)
        train(fsdp, *data(), optimizer, fsdp.sync_gradients)

    nets = [copy.deepcopy(seeded()) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        on_ranks(2, work)
    (message,) = {record.getMessage() for record in caplog.records}
    assert "p.dim()" in message
    assert "original_shape" in message


GROUPINGS = {
    "original_shape": lambda fsdp: by_shape(
        fsdp.parameters(), lambda p: len(p.original_shape) >= 2
    ),
    "param_groups": lambda fsdp: fsdp.param_groups(
        lambda module: by_shape(module.parameters(), lambda p: p.dim() >= 2)
    ),
    "names": lambda fsdp: by_shape(fsdp.parameters(), lambda p: p.original_name.endswith("weight")),
}


def by_shape(params, is_matrix):
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.5}]
    for p in params:
        groups[is_matrix(p)]["params"].append(p)
    return groups


@each_strategy
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_made_by_original_shapes_train_as_on_one_device(strategy, grouping, caplog):
    x, y = data()
    one = seeded()
    groups = by_shape(one.parameters(), lambda p: p.dim() >= 2)
    train(one, x, y, torch.optim.SGD(groups, 0.1))
    nets = [copy.deepcopy(seeded()) for _ in range(2)]

    def work(end):
        fsdp = FSDP(nets[end.rank], end, strategy, node_size(strategy, 2))
        optimizer = torch.optim.SGD(GROUPINGS[grouping](fsdp), 0.1)
        train(fsdp, x.chunk(2)[end.rank], y.chunk(2)[end.rank], optimizer, fsdp.sync_gradients)
        return fsdp.full_state_dict()

    for state in on_ranks(2, work):
        for name, value in one.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    assert not caplog.records


def test_shards_carry_the_attributes_of_their_originals():
    def work(end):
        net = seeded()
        net.used.bias.no_decay = True
        fsdp = FSDP(net, end)
        return [getattr(p, "no_decay", False) for p in fsdp.parameters()]

    assert on_ranks(1, work) == [[False, True, False, False]]


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch", "fsdp"])
@each_sharded
def test_clipping_shards_with_torch_is_named_once(strategy, by_torch, caplog):
    nets = [copy.deepcopy(seeded()) for _ in range(4)]

    def work(end):
        fsdp = FSDP(nets[end.rank], end, strategy, node_size(strategy, 4))

        def clip():
            fsdp.sync_gradients()
            if by_torch:
                torch.nn.utils.clip_grad_norm_(fsdp.parameters(), 0.01)
            else:
                fsdp.clip_grad_norm_(0.01)

        train(fsdp, *data(), torch.optim.SGD(fsdp.parameters(), 0.1), clip)

    with caplog.at_level(logging.WARNING):
        on_ranks(4, work)
    assert len(caplog.records) == 4 * by_torch
    assert all("fsdp.clip_grad_norm_" in record.getMessage() for record in caplog.records)


class Wrapping(nn.Module):
    """A bare module whose own keys begin with ``module``, as those of AveragedModel do."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.module(x)


@each_strategy
@pytest.mark.parametrize("make", [TwoLayers, Wrapping])
def test_load_state_dict_takes_a_full_state(strategy, make):
    best = {name: value * 3 for name, value in seeded(make).state_dict().items()}

    def work(end):
        fsdp = FSDP(make(), end, strategy, node_size(strategy, 2))
        result = fsdp.load_state_dict(best)
        partly = fsdp.load_state_dict(dict([*best.items()][:1]), strict=False)
        own = fsdp.state_dict()
        fsdp.load_state_dict(own)
        return fsdp.full_state_dict(), result, partly

    for state, result, partly in on_ranks(2, work):
        assert result.missing_keys == result.unexpected_keys == []
        assert partly.missing_keys == sorted([*best][1:])
        assert all(torch.equal(state[name], value) for name, value in best.items())


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_a_module_of_another_rank_is_refused_on_every_rank(part):
    net = seeded()
    ends = create_collectives(2, timeout_s=20)

    def work(end):
        mine = net if part == "whole" else nn.Sequential(net.used)
        return FSDP(mine, end)

    outcomes = outcomes_of(ends, work)
    for end in ends:
        end.close()
    assert all("another rank has wrapped this module" in str(outcome) for outcome in outcomes)
    assert any(isinstance(outcome, ValueError) for outcome in outcomes)


def test_a_module_can_be_wrapped_again_after_unwrap():
    def work(end):
        net = FSDP(seeded(), end).unwrap()
        return FSDP(net, end, ShardingStrategy.SHARD_GRAD_OP).full_state_dict()

    (state,) = on_ranks(1, work)
    assert all(torch.equal(state[name], v) for name, v in seeded().state_dict().items())


@each_sharded
def test_forward_inside_a_transform_of_functions_is_refused(strategy):
    x, _ = data()

    def rank(collective):
        fsdp = FSDP(seeded(), collective, strategy, node_size(strategy, 2))
        with pytest.raises(RuntimeError, match=r"transform of torch\.func.*create_graph=True"):
            torch.func.grad(lambda x: fsdp(x).sum())(x)
        fsdp(x).sum().backward()
        fsdp.sync_gradients()

    on_ranks(2, rank)


def on_shards(strategy, body, *, module=TwoLayers, world_size=2):
    """Run ``body(rank, fsdp, optimizer)`` on each rank."""
    nets = [seeded(module) for _ in range(world_size)]

    def rank(end):
        fsdp = FSDP(nets[end.rank], end, strategy, node_size(strategy, world_size))
        body(end.rank, fsdp, torch.optim.SGD(fsdp.parameters(), 0.1))

    on_ranks(world_size, rank)


@each_sharded
@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_shards_after_backward_is_refused_until_the_wrapper_clears_all(
    strategy, set_to_none
):
    x, y = data()

    def body(_, fsdp, optimizer):
        for _ in range(2):  # the shards have no gradients, then some
            for _ in range(2):
                mse_loss(fsdp(x), y).backward()
                optimizer.zero_grad(set_to_none=set_to_none)
            with pytest.raises(RuntimeError, match=r"call fsdp\.zero_grad\(\) to drop a batch"):
                fsdp.sync_gradients()
            fsdp.zero_grad()
            loss = mse_loss(fsdp(x), y)
            optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            fsdp.sync_gradients()
            optimizer.step()

    on_shards(strategy, body)


@each_sharded
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_shards_are_refused(strategy, register):
    x, _ = data()

    def body(_, fsdp, optimizer):
        getattr(next(fsdp.parameters()), register)(lambda _: None)
        with pytest.raises(RuntimeError, match=r"shard of 'used\.weight' has a hook"):
            fsdp(x)

    on_shards(strategy, body)


@each_sharded
@pytest.mark.parametrize("penalty_first", [True, False])
def test_a_loss_that_depends_on_shards_is_reported_once_on_each_rank(
    strategy, penalty_first, caplog
):
    x, y = data()
    alone = seeded()

    def penalty(module):
        return 0.1 * sum(p.square().sum() for p in module.parameters())

    def loss_of(module):
        terms = [lambda: penalty(module), lambda: mse_loss(module(x), y)]
        first, second = terms if penalty_first else terms[::-1]
        return first() + second()

    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(alone).backward()
        optimizer.step()

    def body(rank, fsdp, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(fsdp).backward()
            fsdp.sync_gradients()
            optimizer.step()
        for name, value in fsdp.full_state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name])

    on_shards(strategy, body)
    assert sum("depends on shards" in record.message for record in caplog.records) == 2


def test_a_penalty_on_full_parameters_is_not_reported(caplog):
    x, y = data()

    def body(_, fsdp, optimizer):
        loss = mse_loss(fsdp(x), y)
        (loss + sum(p.norm() for p in fsdp.module.parameters())).backward()
        fsdp.sync_gradients()

    on_shards(ShardingStrategy.FULL_SHARD, body)
    assert "depends on shards" not in caplog.text


@each_strategy
@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_need_whole_parameters_are_refused_where_ranks_have_parts(
    strategy, world_size
):
    x, y = data()

    def body(_, fsdp, optimizer):
        mse_loss(fsdp(x), y).backward()
        fsdp.sync_gradients()
        adafactor = torch.optim.Adafactor(fsdp.parameters())
        if world_size == 1 or strategy is ShardingStrategy.NO_SHARD:
            adafactor.step()
        else:
            with pytest.raises(ValueError, match=r"Adafactor.*use an element-wise optimizer"):
                adafactor.step()

    on_shards(strategy, body, world_size=world_size)


@pytest.mark.parametrize("name", ["Lamb", "FusedLAMB", "LARS", "SOAP", "DistributedShampoo"])
def test_optimizers_of_other_packages_that_need_whole_parameters_are_refused(name):
    """Their steps use norms or matrices of whole parameters."""
    x, y = data()
    kind = type(name, (torch.optim.SGD,), {})

    def body(_, fsdp, optimizer):
        mse_loss(fsdp(x), y).backward()
        fsdp.sync_gradients()
        with pytest.raises(ValueError, match=rf"{name} .*use an element-wise optimizer"):
            kind(fsdp.parameters(), 0.1).step()

    on_shards(ShardingStrategy.FULL_SHARD, body, world_size=2)


def test_ranks_that_initialize_replicated_parameters_differently_are_refused():
    x, y = data()

    def body(rank, fsdp, optimizer):
        fsdp.apply(
            lambda part: nn.init.constant_(part.weight, rank) if hasattr(part, "weight") else 0
        )
        mse_loss(fsdp(x), y).backward()
        with pytest.raises(ReplicaMismatch, match=r"'used\.weight' differs between ranks"):
            fsdp.sync_gradients()

    on_shards(ShardingStrategy.NO_SHARD, body)


class Tempered(TwoLayers):
    """Divides by a temperature; has names of FSDP, and a method of its own."""

    strategy = "of the module"

    def __init__(self):
        super().__init__()
        self.temperature = 1.0
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.encode(x) / self.temperature + self.shift

    def encode(self, x):
        return self.used(x)


@each_strategy
def test_attributes_set_on_the_wrapper_are_those_of_the_module(strategy):
    x, y = data()
    one = seeded(Tempered)
    one.temperature, one.shift = 4.0, torch.ones((), dtype=torch.float64)
    train(one, x, y, adamw(one.parameters()))

    models = [seeded(Tempered) for _ in range(2)]  # threads share the seed

    def work(end):
        fsdp = FSDP(models[end.rank], end, strategy, node_size(strategy, 2))
        fsdp.temperature = 4.0
        fsdp.shift = torch.ones((), dtype=torch.float64)
        assert fsdp.module.temperature == fsdp.temperature == 4.0
        assert fsdp.used is fsdp.module.used
        train(fsdp, x, y, adamw(fsdp.parameters()), between=fsdp.sync_gradients)
        fsdp.eval()
        assert not fsdp.module.training
        assert not fsdp.training
        with pytest.raises(AttributeError, match="'Tempered' object has no attribute 'missing'"):
            _ = fsdp.missing
        return fsdp.full_state_dict()

    for state in on_ranks(2, work):
        assert state.keys() == one.state_dict().keys()
        for name, value in one.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-8, atol=0), name


@each_sharded
def test_names_that_cannot_be_those_of_the_module_are_refused_on_the_wrapper(strategy, caplog):
    def work(end):
        fsdp = FSDP(seeded(Tempered), end, strategy, node_size(strategy, 2))
        with pytest.raises(
            AttributeError, match=r"fsdp\.strategy belongs to FSDP.*fsdp\.module\.st"
        ):
            fsdp.strategy = "of the module"
        with pytest.raises(RuntimeError, match=r"replace or delete modules .* before FSDP"):
            fsdp.used = nn.Linear(4, 2)
        with pytest.raises(RuntimeError, match=r"replace or delete modules .* before FSDP"):
            del fsdp.used
        with pytest.raises(AttributeError, match=r"Call encode in the module's forward"):
            fsdp.encode(data()[0])
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"copied or pickled: keep fsdp\.full_state_dict"):
                call(fsdp)

    with caplog.at_level(logging.WARNING):
        on_ranks(2, work)
    text = "attributes of Tempered are hidden by those of FSDP: use fsdp.module.strategy"
    assert [r.getMessage() for r in caplog.records] == [text]
