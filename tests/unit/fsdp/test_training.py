"""Steps of FSDP equal those of one device on the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runtime import FSDP, ShardingStrategy
from runtime.fsdp import layout as layout_module
from tests.support.fsdp_ranks import (
    FREEING,
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
from tests.support.pairs import diagonal

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)

NUM_STEPS = 4


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype is torch.float64:
            error = (actual[name] - tensor).norm() / max(tensor.norm(), 1e-30)
            assert error < 1e-8, f"{name}: {error:.1e}"


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def train_on_one_device(batches, max_norm=None):
    """The reference on one device."""
    net = Net()
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = adamw(params)
    for whole in batches:
        optimizer.zero_grad()
        loss_of(net, whole).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def train_step(fsdp, optimizer, part, max_norm=None):
    optimizer.zero_grad()
    loss_of(fsdp, part).backward()
    fsdp.sync_gradients()
    if max_norm is not None:
        fsdp.clip_grad_norm_(max_norm)
    optimizer.step()
    fsdp.broadcast_updated_params()


@diagonal(
    group=[(1, "thread"), (2, "gloo"), (3, "thread"), (4, "thread"), (4, "gloo")],
    strategy=STRATEGIES,
    times=2,
)
def test_training_equals_one_device_on_the_whole_batch(group, strategy):
    world_size, kind = group
    batches = [batch(12, seed) for seed in range(NUM_STEPS)]

    def work(end):
        fsdp = wrap(end, strategy)
        optimizer = adamw(fsdp.parameters())
        states = []
        for whole in batches:
            train_step(fsdp, optimizer, share(whole, end), 0.3)
            states.append(fsdp.full_state_dict())
        return states

    ranks = on_ranks(world_size, work, kind)
    for states in zip(*ranks, strict=True):
        for other in states[1:]:
            assert all(other[name].equal(tensor) for name, tensor in states[0].items())
    assert_close(ranks[0][-1], train_on_one_device(batches, 0.3))


def shard_gradients(end, strategy, module, inputs):
    fsdp = wrap(end, strategy, module)
    fsdp(inputs[end.rank]).square().mean().backward()
    fsdp.sync_gradients()
    return {name: p.grad for name, p in fsdp.named_parameters()}


class Shapes(nn.Module):
    """Parameters of given shapes, all of them used."""

    def __init__(self, shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.all = nn.ParameterList(
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
        )

    def forward(self, x):
        return torch.stack([(p.sin() * x).sum() * (i + 1) for i, p in enumerate(self.all)])


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4),
    world_size=st.integers(1, 4),
    strategy=st.sampled_from(SHARDED),
    large=st.sampled_from([1, 10, 1 << 16]),
)
def test_concatenated_gradient_shards_equal_one_devices_gradients(
    shapes, world_size, strategy, large
):
    inputs = torch.linspace(0.5, 2.0, world_size, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "LARGE_ELEMENTS", large)
        ranks = on_ranks(
            world_size, lambda end: shard_gradients(end, strategy, Shapes(shapes), inputs)
        )
    module = Shapes(shapes)
    torch.stack([module(x).square().mean() for x in inputs]).mean().backward()
    num_shards = node_size(strategy, world_size) or world_size
    for name, p in module.named_parameters():
        for first in range(0, world_size, num_shards):
            node = ranks[first : first + num_shards]
            whole = torch.cat([shards[f"module.{name}"] for shards in node])
            torch.testing.assert_close(whole, p.grad.view(-1), rtol=1e-9, atol=1e-12)


@each_strategy
def test_shards_are_one_dimensional_views_of_one_flat_tensor(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        shards = list(fsdp.parameters())
        storages = {p.untyped_storage().data_ptr() for p in shards if p.requires_grad}
        return [p.shape for p in shards], len(storages), [n for n, _ in fsdp.named_parameters()]

    ranks = on_ranks(4, work)
    whole = dict(Net().named_parameters())
    for shapes, num_storages, names in ranks:
        assert names == [f"module.{name}" for name in whole]
        if strategy is ShardingStrategy.NO_SHARD:
            assert shapes == [p.shape for p in whole.values()]
        else:
            assert all(len(shape) == 1 for shape in shapes)
            assert num_storages == 1
    if strategy is ShardingStrategy.FULL_SHARD:
        for sizes, p in zip(zip(*(r[0] for r in ranks), strict=True), whole.values(), strict=True):
            assert sum(size.numel() for size in sizes) == p.numel()


@each_strategy
def test_a_parameter_used_by_one_rank_only_gets_its_mean_gradient(strategy):
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(5))
            self.b = nn.Parameter(torch.ones(5))

        def forward(self, use_b):
            return (self.b if use_b else self.a).sum()

    def work(end):
        fsdp = wrap(end, strategy, Switch())
        fsdp(end.rank == 1).backward()
        fsdp.sync_gradients()
        return [p.grad.unique().tolist() for p in fsdp.parameters() if p.numel()]

    for found in on_ranks(2, work):
        assert found == [[0.5]] * len(found)


@each_strategy
def test_tied_parameters_stay_tied(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        optimizer = adamw(fsdp.parameters())
        train_step(fsdp, optimizer, share(batch(8), end))
        assert fsdp.module.head.weight is fsdp.module.embed.weight
        state = fsdp.full_state_dict()
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        bare = fsdp.unwrap()
        assert bare.head.weight is bare.embed.weight

    on_ranks(3, work)


@each_strategy
def test_dtypes_may_be_mixed(strategy):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.low = nn.Linear(6, 7, dtype=torch.bfloat16)
            self.high = nn.Linear(7, 3, dtype=torch.float64)
            self.table = nn.Parameter(torch.arange(5), requires_grad=False)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).double()) + self.table.sum()

    x = torch.randn(8, 6, dtype=torch.float64)
    bare, *models = (Mixed() for _ in range(3))
    bare(x).square().mean().backward()

    def work(end):
        fsdp = wrap(end, strategy, models[end.rank])
        fsdp(x).square().mean().backward()
        fsdp.sync_gradients()
        assert [p.dtype for p in fsdp.parameters()] == [p.dtype for p in bare.parameters()]
        norm = fsdp.clip_grad_norm_(1e9)
        state = fsdp.full_state_dict()
        assert all(state[name].equal(tensor) for name, tensor in bare.state_dict().items())
        return norm

    expected = torch.stack([p.grad.double().norm() for p in bare.parameters() if p.requires_grad])
    for norm in on_ranks(2, work):
        torch.testing.assert_close(norm.double(), expected.norm(), rtol=1e-2, atol=0)


@each_strategy
def test_gradients_add_up_over_passes_and_over_syncs(strategy):
    parts = [batch(8, seed) for seed in range(3)]
    net = Net()
    for part in parts:
        loss_of(net, part).backward()

    def work(end):
        fsdp = wrap(end, strategy)
        for part in parts[:2]:
            loss_of(fsdp, share(part, end)).backward()
        fsdp.sync_gradients()
        loss_of(fsdp, share(parts[2], end)).backward()
        fsdp.sync_gradients()
        return {name: p.grad for name, p in fsdp.named_parameters() if p.requires_grad}

    ranks = on_ranks(2, work)
    for name, p in net.named_parameters():
        if p.grad is None:
            continue
        found = [rank[f"module.{name}"].reshape(-1) for rank in ranks]
        whole = found[0] if strategy is ShardingStrategy.NO_SHARD else torch.cat(found)
        torch.testing.assert_close(whole, p.grad.reshape(-1), rtol=1e-9, atol=1e-12)


@each_strategy
def test_two_forwards_before_one_backward_use_the_same_parameters(strategy):
    first, second = batch(8, 0), batch(8, 1)
    net = Net()
    (loss_of(net, first) + loss_of(net, second)).backward()

    def work(end):
        fsdp = wrap(end, strategy)
        (loss_of(fsdp, share(first, end)) + loss_of(fsdp, share(second, end))).backward()
        fsdp.sync_gradients()
        return fsdp.clip_grad_norm_(1e9)

    expected = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
    for norm in on_ranks(2, work):
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)


@each_strategy
def test_a_recomputed_forward_uses_the_full_parameters(strategy):
    """Activation checkpointing reruns submodules inside backward."""

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.a, self.b = nn.Linear(4, 9), nn.Linear(9, 1)

        def forward(self, x):
            run = torch.utils.checkpoint.checkpoint
            return self.b(run(lambda y: self.a(y).tanh(), x, use_reentrant=False))

    bare = Recomputed()
    x = torch.linspace(-1, 1, 12).view(3, 4)
    bare(x).sum().backward()
    expected = torch.cat([p.grad.view(-1) for p in bare.parameters()])
    models = [Recomputed() for _ in range(2)]

    def work(end):
        fsdp = wrap(end, strategy, models[end.rank])
        fsdp(x).sum().backward()
        fsdp.sync_gradients()
        return fsdp.clip_grad_norm_(1e9)

    for norm in on_ranks(2, work):
        torch.testing.assert_close(norm, expected.norm())


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("dtype", "root"), [(torch.bfloat16, 257), (torch.float16, 2049)])
def test_a_norm_of_low_precision_is_rounded_nowhere(dtype, root, order):
    """The norm of each shard, ``root`` for order 2, has one bit too many for the dtype."""

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Parameter(torch.zeros(2 * root**2, dtype=dtype))
            self.high = nn.Parameter(torch.zeros(2, dtype=torch.float32))

        def forward(self):
            return self.low.sum().float() + self.high.sum()

    def work(end):
        fsdp = FSDP(Ones(), end)
        fsdp().backward()
        fsdp.sync_gradients()
        return fsdp.clip_grad_norm_(1e9, order)

    for norm in on_ranks(2, work):
        assert norm.dtype is torch.float32
        assert norm.item() == pytest.approx((2 * root**2 + 2) ** (1 / order), rel=1e-6)


@each_strategy
def test_clipping_uses_the_norm_of_the_whole_model(strategy):
    orders = [1.0, 2.0, 3.0, float("inf")]
    net = Net()
    loss_of(net, batch(9)).backward()
    expected = [nn.utils.clip_grad_norm_(net.parameters(), 1e9, order) for order in orders]

    def work(end):
        fsdp = wrap(end, strategy)
        loss_of(fsdp, share(batch(9), end)).backward()
        fsdp.sync_gradients()
        norms = [fsdp.clip_grad_norm_(1e9, order) for order in orders]
        fsdp.clip_grad_norm_(1e-2)
        return norms, fsdp.clip_grad_norm_(1e9)

    for norms, after in on_ranks(3, work):
        for norm, wanted in zip(norms, expected, strict=True):
            torch.testing.assert_close(norm, wanted, rtol=1e-9, atol=0)
        assert after == pytest.approx(1e-2, rel=1e-3)


@each_strategy
def test_a_non_finite_norm_is_returned_on_every_rank(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        (loss_of(fsdp, batch(4)) * (float("nan") if end.rank else 1.0)).backward()
        fsdp.sync_gradients()
        with pytest.raises(RuntimeError, match=r"non-finite|cannot be clipped"):
            fsdp.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return fsdp.clip_grad_norm_(1.0)

    assert all(norm.isnan() for norm in on_ranks(3, work))


@each_strategy
def test_all_ranks_start_from_rank_0s_parameters_and_buffers(strategy):
    models = [Net(seed=rank) for rank in range(3)]
    models[0].seen += 7

    def work(end):
        fsdp = wrap(end, strategy, models[end.rank])
        return fsdp.module.seen.item(), fsdp.full_state_dict()

    expected = Net(seed=0).state_dict()
    for seen, state in on_ranks(3, work):
        assert seen == state.pop("seen") == 7
        assert all(tensor.equal(expected[name]) for name, tensor in state.items())


def test_buffers_differ_between_ranks_until_they_are_synced():
    def work(end):
        fsdp = wrap(end)
        fsdp.module.seen += 10 * end.rank + 1
        own = fsdp.module.seen.item()
        fsdp.sync_buffers()
        return own, fsdp.module.seen.item()

    assert on_ranks(2, work) == [(1, 1), (11, 1)]


@each_strategy
def test_memory_formats_are_kept(strategy):
    def make():
        torch.manual_seed(0)
        return nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    models = [make() for _ in range(2)]
    x = torch.randn(2, 3, 6, 6)
    bare = make()
    bare(x).square().sum().backward()

    def work(end):
        seen = []
        models[end.rank].register_forward_pre_hook(
            lambda module, args: seen.append(module.weight.stride())
        )
        fsdp = wrap(end, strategy, models[end.rank])
        fsdp(x).square().sum().backward()
        fsdp.sync_gradients()
        norm = fsdp.clip_grad_norm_(1e9)
        return seen, fsdp.full_state_dict()["weight"], norm

    for seen, weight, norm in on_ranks(2, work):
        assert seen == [bare.weight.stride()]
        assert weight.equal(bare.weight)
        assert weight.stride() == bare.weight.stride()
        expected = torch.stack([p.grad.norm() for p in bare.parameters()]).norm()
        torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=str)
def test_all_optimizers_accept_empty_shards(options):
    def work(end):
        fsdp = wrap(end)
        optimizer = torch.optim.AdamW(fsdp.parameters(), **options)
        for seed in range(2):
            train_step(fsdp, optimizer, share(batch(8, seed), end))
        return any(p.numel() == 0 for p in fsdp.parameters()), fsdp.full_state_dict()

    ranks = on_ranks(4, work)
    assert any(empty for empty, _ in ranks)
    assert all(state["scale"].isfinite() for _, state in ranks)


@pytest.mark.parametrize("strategy", FREEING, ids=lambda s: s.name)
def test_full_parameters_are_freed_after_evaluation(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        with torch.no_grad():
            fsdp(batch(4)[0])
        return [a is b for a, b in zip(fsdp.parameters(), fsdp.module.parameters(), strict=True)]

    for are_shards in on_ranks(2, work):
        assert all(are_shards)


def test_an_fsdp_may_be_a_submodule():
    def work(end):
        whole = nn.Sequential(FSDP(nn.Linear(4, 5), end), nn.Tanh())
        optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
        whole(torch.ones(2, 4)).sum().backward()
        whole[0].sync_gradients()
        optimizer.step()
        return [tuple(p.shape) for p in whole.parameters()]

    assert on_ranks(2, work) == [[(10,), (3,)], [(10,), (2,)]]


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@each_strategy
def test_no_forward_uses_values_from_before_a_step(strategy, options, evaluates):
    """Neither without a broadcast, nor after an evaluation with gradients enabled.

    A fused optimizer leaves no trace in the versions of tensors.
    """
    x, _ = batch(4)

    def work(end):
        fsdp = wrap(end, strategy)
        optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.1, **options)
        loss_of(fsdp, share(batch(4), end)).backward()
        fsdp.sync_gradients()
        before = (fsdp if evaluates else Net())(x).detach()
        optimizer.step()
        optimizer.zero_grad()
        after = fsdp(x).detach()
        net = Net()
        net.load_state_dict(fsdp.full_state_dict())
        assert not after.equal(before)
        assert after.equal(net(x))
        # The same twice.
        assert fsdp(x).detach().equal(after)

    on_ranks(2, work)


@each_strategy
def test_gradients_with_strides_of_their_own_are_averaged(strategy):
    """A gradient of torch.autograd.grad has the strides that its operator has chosen."""
    x = torch.randn(2, 64, 4, 4, dtype=torch.float64)
    made = [nn.Conv2d(64, 128, 3, bias=False).double() for _ in range(3)]
    for module in made[1:]:
        module.load_state_dict(made[0].state_dict())
    bare, *models = made
    (wanted,) = torch.autograd.grad(bare(x).square().sum(), [bare.weight])

    def work(end):
        model = models[end.rank]
        weight = model.weight
        fsdp = wrap(end, strategy, model)
        inputs = x.to(memory_format=torch.channels_last) if end.rank else x
        (weight.grad,) = torch.autograd.grad(fsdp(inputs).square().sum(), [weight])
        strides = weight.grad.stride()
        fsdp.sync_gradients()
        (shard,) = fsdp.parameters()
        return strides, shard.grad.reshape(-1)

    (stride, first), (other, second) = on_ranks(2, work)
    assert stride != other
    found = first if strategy is ShardingStrategy.NO_SHARD else torch.cat([first, second])
    torch.testing.assert_close(found, wanted.reshape(-1))
