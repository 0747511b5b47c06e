"""The full state: from any world size and strategy into any other."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from runtime import FSDP
from tests.support.fsdp_ranks import (
    SHARDED,
    STRATEGIES,
    Net,
    batch,
    loss_of,
    node_size,
    on_ranks,
    share,
    wrap,
)

FULL, GRAD_OP, NONE, HYBRID = STRATEGIES

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
each_sharded = pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s.name)


def state_of(seed):
    state = Net(seed=seed).state_dict()
    state["seen"] += seed
    return state


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype is tensor.dtype
        assert actual[name].equal(tensor), name


@each_strategy
@pytest.mark.parametrize("kind", ["thread", "gloo"])
def test_the_full_state_equals_the_bare_modules_on_every_rank(strategy, kind):
    def work(end):
        fsdp = wrap(end, strategy)
        fsdp.load_full_state_dict(state_of(5))
        state = fsdp.full_state_dict()
        Net().load_state_dict(state)  # strict
        with torch.no_grad():
            logits = fsdp(batch(4)[0])
        net = Net(seed=5)
        assert logits.equal(net(batch(4)[0]))
        return state

    for state in on_ranks(3, work, kind):
        assert_same(state, state_of(5))


@pytest.mark.parametrize(
    ("strategies", "world_sizes"),
    [
        ((FULL, FULL), (4, 3)),
        ((HYBRID, GRAD_OP), (4, 1)),
        ((NONE, FULL), (2, 4)),
        ((GRAD_OP, HYBRID), (3, 4)),
    ],
)
def test_training_continues_at_another_world_size(strategies, world_sizes):
    def train(end, strategy, state, seeds):
        fsdp = wrap(end, strategy)
        if state is not None:
            fsdp.load_full_state_dict(state)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.5)
        for seed in seeds:
            optimizer.zero_grad()
            loss_of(fsdp, share(batch(12, seed), end)).backward()
            fsdp.sync_gradients()
            optimizer.step()
            fsdp.broadcast_updated_params()
        return fsdp.full_state_dict()

    first, second = range(3), range(3, 6)
    half = on_ranks(world_sizes[0], lambda end: train(end, strategies[0], None, first))[0]
    states = on_ranks(world_sizes[1], lambda end: train(end, strategies[1], half, second))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for seed in (*first, *second):
        optimizer.zero_grad()
        loss_of(net, batch(12, seed)).backward()
        optimizer.step()
    for state in states:
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


@each_strategy
def test_the_full_state_may_go_to_one_rank_only(strategy):
    ranks = on_ranks(3, lambda end: wrap(end, strategy).full_state_dict(rank=1))
    assert [bool(state) for state in ranks] == [False, True, False]
    assert_same(ranks[1], Net().state_dict())


@each_strategy
def test_the_state_owns_its_memory(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        for tensor in fsdp.full_state_dict().values():
            tensor.zero_()
        return fsdp.full_state_dict()

    for state in on_ranks(2, work):
        assert_same(state, Net().state_dict())


@each_strategy
def test_the_full_state_is_available_between_forward_and_sync(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        loss = loss_of(fsdp, batch(4))
        state = fsdp.full_state_dict()
        own = fsdp.state_dict()
        loss.backward()
        fsdp.sync_gradients()
        assert own["module.hidden.weight"].dim() == (2 if strategy is NONE else 1)
        return state

    expected = Net().state_dict()
    expected["seen"] += 1
    for state in on_ranks(2, work):
        assert_same(state, expected)


@each_strategy
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.bias"), r"missing \['norm.bias'\]"),
        (lambda s: s.update(extra=torch.ones(1)), r"unexpected \['extra'\]"),
        (lambda s: s.update(scale=torch.ones(1)), r"'scale' has the shape \(1,\), .* \(\)"),
        (lambda s: s.update(seen=torch.ones(2)), "'seen' has the shape"),
        (lambda s: s.update(scale=1.0), "'scale' is a float"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(strategy, change, message):
    state = state_of(5)
    change(state)

    def work(end):
        fsdp = wrap(end, strategy)
        with pytest.raises(ValueError, match=message):
            fsdp.load_full_state_dict(state)
        return fsdp.full_state_dict()

    for found in on_ranks(2, work):
        assert_same(found, Net().state_dict())


@each_strategy
def test_a_partial_state_is_loaded_if_not_strict(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        fsdp.load_full_state_dict({"hidden.weight": torch.ones(6, 5)}, strict=False)
        with torch.no_grad():
            return fsdp(batch(4)[0]), fsdp.full_state_dict()

    net = Net()
    with torch.no_grad():
        net.hidden.weight.fill_(1.0)
    for logits, state in on_ranks(2, work):
        assert logits.equal(net(batch(4)[0]))
        state["seen"] += 1
        assert state["hidden.weight"].equal(net.hidden.weight)
        assert state["embed.weight"].equal(net.embed.weight)


@each_sharded
def test_a_partial_load_after_a_step_does_not_hide_the_step(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        with torch.no_grad():
            for p in fsdp.parameters():
                p.mul_(0.5)
        fsdp.load_full_state_dict({"scale": torch.tensor(3.0)}, strict=False)
        with torch.no_grad():
            return fsdp(batch(4)[0])

    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
        net.scale.fill_(3.0)
        for logits in on_ranks(2, work):
            assert logits.equal(net(batch(4)[0]))


def test_loading_between_forward_and_sync_is_an_error():
    def work(end):
        fsdp = wrap(end)
        loss_of(fsdp, batch(4))
        with pytest.raises(RuntimeError, match=r"reshard\(\)"):
            fsdp.load_full_state_dict(state_of(1))
        fsdp.reshard()
        fsdp.load_full_state_dict(state_of(1))
        assert_same(fsdp.full_state_dict(), state_of(1))

    on_ranks(2, work)


class WithExtra(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.value = "fresh"

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


@each_strategy
def test_extra_state_is_saved_and_loaded(strategy):
    def work(end):
        fsdp = wrap(end, strategy, nn.Sequential(WithExtra()))
        state = fsdp.full_state_dict()
        assert state["0._extra_state"] == {"value": "fresh"}
        state["0._extra_state"] = {"value": "loaded"}
        fsdp.load_full_state_dict(state)
        assert fsdp.module[0].value == "loaded"

    on_ranks(2, work)


@each_strategy
def test_a_rank_can_save_and_load_its_own_shards(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        own = {name: tensor.clone() for name, tensor in fsdp.state_dict().items()}
        with torch.no_grad():
            for p in fsdp.parameters():
                p.zero_()
        fsdp.load_state_dict(own)
        return fsdp.full_state_dict()

    for state in on_ranks(3, work):
        assert_same(state, Net().state_dict())


@each_strategy
def test_unwrapping_returns_the_bare_module(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.5)
        loss_of(fsdp, share(batch(8), end)).backward()
        fsdp.sync_gradients()
        optimizer.step()
        state = fsdp.full_state_dict()
        bare = fsdp.unwrap()
        assert type(bare) is Net
        loss_of(bare, batch(4)).backward()  # a usable module
        torch.optim.SGD(bare.parameters(), lr=0.5).step()
        return state, bare.seen.item()

    for state, seen in on_ranks(2, work):
        assert (state["seen"].item(), seen) == (1, 2)


@each_strategy
def test_updated_shards_are_used_by_the_next_forward(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        flat = torch.cat([p.detach().view(-1) for p in fsdp.parameters()])
        fsdp.update_shards(flat * 2)
        with torch.no_grad():
            return fsdp(batch(4)[0])

    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
        for logits in on_ranks(3, work):
            assert logits.equal(net(batch(4)[0]))


@each_strategy
def test_compiled_submodules_are_saved_and_loaded_under_plain_keys(strategy):
    def work(end):
        net = Net(seed=1)
        name, part = next((n, m) for n, m in net.named_children() if list(m.parameters()))
        setattr(net, name, torch.compile(part, backend="eager"))
        fsdp = FSDP(net, end, strategy, node_size(strategy, end.world_size))
        fsdp.load_full_state_dict(state_of(5))
        state = fsdp.full_state_dict()
        fsdp.load_full_state_dict(fsdp.module.state_dict() if strategy is NONE else state)
        return state

    for state in on_ranks(2, work):
        assert_same(state, state_of(5))


def conv(memory_format=torch.contiguous_format, size=3):
    return nn.Conv2d(2, 4, size).to(memory_format=memory_format)


@each_sharded
@pytest.mark.parametrize("nested", [False, True])
def test_shards_of_another_memory_format_are_not_loaded(strategy, nested):
    """Their sizes fit, and their elements are in another order."""

    def inside(fsdp):
        return nn.Sequential(fsdp) if nested else fsdp

    def work(end):
        state = inside(wrap(end, strategy, conv(torch.channels_last))).state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = wrap(end, strategy, conv())
        before = other.full_state_dict()
        with pytest.raises(
            ValueError, match=r"'weight' has another memory format.*full_state_dict"
        ):
            inside(other).load_state_dict(state)
        assert_same(other.full_state_dict(), before)
        same = wrap(end, strategy, conv(torch.channels_last))
        inside(same).load_state_dict(state)
        assert all(state[key].equal(value) for key, value in inside(same).state_dict().items())

    on_ranks(2, work)


@each_sharded
def test_formats_that_differ_in_dimensions_of_size_1_have_the_same_shards(strategy):
    def work(end):
        saved, loaded = (
            wrap(end, strategy, conv(torch.channels_last, 1)),
            wrap(end, strategy, conv(size=1)),
        )
        loaded.load_state_dict(saved.state_dict())
        assert_same(loaded.full_state_dict(), saved.full_state_dict())

    on_ranks(2, work)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda s: s.name)
def test_shards_of_another_rank_are_not_loaded(strategy):
    states = on_ranks(2, lambda end: wrap(end, strategy, conv()).state_dict())

    def work(end):
        with pytest.raises(ValueError, match=r"of another rank \(\d, here \d\)"):
            wrap(end, strategy, conv()).load_state_dict(states[1 - end.rank])

    on_ranks(2, work)


def test_shards_of_another_number_of_ranks_are_not_loaded():
    """Padding makes 2 elements over 3 ranks as long as over 2."""
    states = on_ranks(3, lambda end: wrap(end, FULL, nn.Linear(2, 1, bias=False)).state_dict())

    def work(end):
        with pytest.raises(ValueError, match=r"another number of ranks \(3, here 2\)"):
            wrap(end, FULL, nn.Linear(2, 1, bias=False)).load_state_dict(states[end.rank])

    on_ranks(2, work)
