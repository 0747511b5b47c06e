"""Averaged gradients of wrapped replicas, and the checks before the average."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runtime import AverageBackend, ElChe, ReplicaMismatch
from runtime.core.errors import CollectiveAborted
from tests.support.wrapping import all_same, fill, grads, nets, same, wrap

THREAD, GLOO = AverageBackend.THREAD, AverageBackend.GLOO
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# -- gradients ----------------------------------------------------------------------------


def test_gradients_are_averaged_in_place():
    models = nets(4)
    fill(models)
    models[0].first.weight.grad = torch.ones(1).expand(3, 4)
    addresses = [p.grad.data_ptr() for p in models[3].parameters() if p.grad is not None]
    with wrap(models) as ddp:
        ddp.all_reduce_gradients()
    assert all(torch.all(g == 2.5) for g in grads(models[2]).values() if g is not None)
    assert all_same(models, grads)
    assert models[0].first_again.weight.grad is models[0].first.weight.grad
    assert addresses == [p.grad.data_ptr() for p in models[3].parameters() if p.grad is not None]


def test_a_reduction_without_gradients_has_no_effect():
    models = nets()
    with wrap(models) as ddp:
        ddp.all_reduce_gradients()
        ddp.weighted_all_reduce_gradients([0, 3])
    assert all(grad is None for model in models for grad in grads(model).values())


@pytest.mark.parametrize("backend", [THREAD, GLOO])
def test_a_parameter_that_some_replicas_used_counts_as_zero_on_the_others(backend):
    models = nets(3)
    fill(models[1:2], [6.0], names=["conv.weight"])
    with wrap(models, backend=backend) as ddp:
        ddp.all_reduce_gradients()
    assert all(torch.equal(m.conv.weight.grad, torch.full((3, 2, 2, 2), 2.0)) for m in models)
    assert all(m.conv.bias.grad is None for m in models)


@pytest.mark.parametrize("backend", [THREAD, GLOO])
def test_a_replica_with_weight_zero_adds_nothing_and_gets_the_mean(backend):
    models = nets()
    fill(models, [3.0, float("nan")])
    models[0].conv.bias.grad = None  # stale on the other replica, and must stay None
    with wrap(models, backend=backend) as ddp:
        ddp.weighted_all_reduce_gradients([5, 0])
    assert models[1].first.weight.grad.unique().tolist() == [3.0]
    assert models[1].conv.bias.grad is None
    assert all_same(models, grads)


@pytest.mark.parametrize("backend", [THREAD, GLOO])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_stay_visible(backend, bad):
    models = nets(3)
    fill(models)
    models[1].first.bias.grad[1] = bad
    with wrap(models, backend=backend) as ddp:
        ddp.weighted_all_reduce_gradients([1, 1, 2])
    for model in models:
        assert model.first.bias.grad.isfinite().tolist() == [True, False, True]
        assert model.first.weight.grad.isfinite().all()


def test_the_strides_of_gradients_are_kept():
    models = [nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last) for _ in range(3)]
    for model in models[1:]:
        model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    wanted = models[0].weight.stride()
    assert models[1].weight.grad.stride() == wanted == (27, 1, 9, 3)
    expected = sum(model.weight.grad.double() for model in models[1:]) / 3
    with wrap(models) as ddp:
        ddp.all_reduce_gradients()
    assert [model.weight.grad.stride() for model in models] == [wanted] * 3
    torch.testing.assert_close(models[0].weight.grad.double(), expected)
    assert all_same(models, grads)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_have_a_graph_are_averaged():
    """Gradients with a graph, as after a gradient penalty."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            model.weight.fill_(rank + 1.0)
    for model in models:
        model(torch.ones(1, 1)).square().backward(create_graph=True)
    with wrap(models) as ddp:
        ddp.all_reduce_gradients()
    assert [model.weight.grad.item() for model in models] == [3.0, 3.0]
    for model in models:
        model.weight.grad = None  # breaks a reference cycle


@pytest.mark.parametrize(("dtype", "small"), [(torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
def test_low_precision_is_summed_in_float32(dtype, small):
    """Added one by one to 1 in low precision, the small values would be lost."""
    models = [nn.Linear(1, 1, bias=False).to(dtype) for _ in range(4)]
    for model, value in zip(models, (1.0, small, small, small), strict=True):
        model.weight.grad = torch.tensor([[value]], dtype=dtype)
    expected = torch.stack([m.weight.grad.float() for m in models]).mean().to(dtype)
    assert expected > 0.25
    with wrap(models) as ddp:
        ddp.all_reduce_gradients()
    assert all(model.weight.grad.item() == expected.item() for model in models)


class Bag(nn.Module):
    """Parameters of given shapes and dtypes."""

    def __init__(self, kinds):
        super().__init__()
        for i, (shape, dtype) in enumerate(kinds):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)))


kinds = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(FLOATS)),
    min_size=1,
    max_size=6,
)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}


@settings(max_examples=60)
@given(data=st.data(), kinds=kinds, world_size=st.integers(2, 4), seed=st.integers(0, 1000))
def test_replicas_hold_the_same_weighted_mean_bit_for_bit(data, kinds, world_size, seed):
    weights = data.draw(
        st.lists(st.integers(0, 5), min_size=world_size, max_size=world_size).filter(any)
    )
    generator = torch.Generator().manual_seed(seed)
    models = [Bag(kinds) for _ in range(world_size)]
    given_to = {}
    for model_rank, model in enumerate(models):
        for name, p in model.named_parameters():
            if data.draw(st.booleans()):
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
                given_to[model_rank, name] = p.grad.double().clone()
    layouts = [
        {n: p.grad.stride() for n, p in m.named_parameters() if p.grad is not None} for m in models
    ]
    with wrap(models) as ddp:
        ddp.weighted_all_reduce_gradients(weights)
    assert all_same(models, grads)
    for name, p in models[0].named_parameters():
        counted = [given_to.get((rank, name)) for rank in range(world_size) if weights[rank]]
        if all(grad is None for grad in counted):
            assert p.grad is None
            continue
        expected = sum(
            weight * given_to[rank, name]
            for rank, weight in enumerate(weights)
            if weight and (rank, name) in given_to
        ) / sum(weights)
        tolerance = TOLERANCE[p.dtype]
        torch.testing.assert_close(p.grad.double(), expected, rtol=tolerance, atol=tolerance)
        for rank, model in enumerate(models):
            assert model.get_parameter(name).grad.stride() == layouts[rank].get(
                name, p.grad.stride()
            )


def test_many_and_large_gradients_are_cut_into_blocks_without_a_gap():
    models = [
        Bag(
            [
                ((300, 1000), torch.float32),
                ((7,), torch.float64),
                ((70, 1000), torch.float32),
                ((0,), torch.float32),
                ((200, 1000), torch.float32),
            ]
        )
        for _ in range(2)
    ]
    expected = {}
    for name, p in models[0].named_parameters():
        a, b = torch.randn_like(p), torch.randn_like(p)
        p.grad, models[1].get_parameter(name).grad = a.clone(), b.clone()
        expected[name] = 0.25 * a.double() + 0.75 * b.double()
    with wrap(models) as ddp:
        ddp.weighted_all_reduce_gradients([1, 3])
    assert all_same(models, grads)
    for name, wanted in expected.items():
        torch.testing.assert_close(
            models[1].get_parameter(name).grad.double(), wanted, rtol=1e-5, atol=1e-6
        )


# -- errors before anything is written ------------------------------------


@pytest.mark.parametrize(
    ("counts", "error", "match"),
    [
        ([1], ValueError, "1 entries for 2 replicas"),
        ([1, 1, 1], ValueError, "3 entries for 2 replicas"),
        ([], ValueError, "0 entries"),
        ([0, 0], ValueError, "at least one replica must have trained"),
        ([2, -1], ValueError, r"weights\[1\].*not negative"),
        ([1, float("nan")], ValueError, r"weights\[1\]"),
        ([1, float("inf")], ValueError, r"weights\[1\]"),
        ([1e308, 1e308], ValueError, "sum to inf"),
        ([1, "2"], TypeError, "pass a number"),
        (3, TypeError, "one number for each replica"),
        ("12", TypeError, "one number for each replica"),
    ],
)
def test_invalid_weights_are_named(counts, error, match):
    models = nets()
    fill(models)
    before = [grads(model) for model in models]
    with wrap(models) as ddp, pytest.raises(error, match=match):
        ddp.weighted_all_reduce_gradients(counts)
    assert all(same(grads(m), b) for m, b in zip(models, before, strict=True))


def sparse(models):
    models[1].first.weight.grad = torch.zeros(3, 4).to_sparse()


def freeze_one(models):
    models[1].norm.weight.requires_grad_(False)


def replace(models):
    models[1].norm.weight = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (sparse, ValueError, r"'first.weight' of model 1 has a sparse gradient.*sparse=False"),
        (freeze_one, ReplicaMismatch, r"'norm.weight' requires a gradient on some models only"),
        (replace, RuntimeError, r"'norm.weight' of model 1 was replaced since Ddp.wrap"),
    ],
)
def test_replicas_that_no_longer_match_are_named(change, error, match):
    models = nets()
    fill(models)
    with wrap(models) as ddp:
        change(models)
        models[0].first.bias.grad.fill_(9)
        with pytest.raises(error, match=match):
            ddp.all_reduce_gradients()
    assert models[0].first.bias.grad.unique().tolist() == [9.0]
    assert models[1].first.bias.grad.unique().tolist() == [2.0]


def test_a_parameter_frozen_on_every_replica_is_no_error():
    models = nets()
    with wrap(models) as ddp:
        for model in models:
            model.first.requires_grad_(False)
        fill(models)
        ddp.all_reduce_gradients()
    assert models[1].first.weight.grad is None
    assert models[1].conv.weight.grad.unique().tolist() == [1.5]


def test_calls_on_a_closed_ddp_raise_and_close_is_idempotent():
    models = nets()
    ddp = wrap(models)
    ddp.close()
    ddp.close()
    for call in (ddp.sync_params, ddp.sync_buffers, ddp.all_reduce_gradients):
        with pytest.raises(RuntimeError, match="closed; wrap the models again"):
            call()


# -- over a process group -------------------------------------------------------------------


def internal_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ddp-")]


def test_gloo_gives_the_same_mean_from_internal_threads_that_end():
    models = nets(3)
    copies = copy.deepcopy(models)
    fill(models), fill(copies)
    with wrap(models, backend=GLOO) as ddp, wrap(copies) as plain:
        assert (ddp.backend, plain.backend) == (GLOO, THREAD)
        assert "SYNC reduces in shared memory" in plain.backend_reason
        assert sorted(t.name for t in internal_threads()) == ["ddp-0", "ddp-1", "ddp-2"]
        assert all(thread.daemon for thread in internal_threads())
        for counts in (ElChe(3, 10).batch_counts, torch.tensor([4, 0, 1])):
            ddp.weighted_all_reduce_gradients(counts)
            plain.weighted_all_reduce_gradients(counts)
    assert internal_threads() == []
    assert all_same(models, grads)
    for mine, theirs in zip(grads(models[0]).values(), grads(copies[0]).values(), strict=True):
        assert mine is theirs is None or torch.allclose(mine, theirs)


def test_internal_threads_end_with_the_last_reference():
    models = nets()
    ddp = wrap(models, backend=GLOO)
    threads = internal_threads()
    assert len(threads) == 2
    gone = weakref.ref(ddp)
    del ddp
    assert gone() is None
    for thread in threads:
        thread.join(10)
    assert internal_threads() == []


def test_an_aborted_group_raises_and_leaves_the_gradients_unchanged():
    models = nets()
    fill(models)
    models[0].conv.bias.grad = None
    before = [grads(model) for model in models]
    with wrap(models, backend=GLOO) as ddp:
        ddp._reduction._collectives[1].abort()
        for _ in range(2):
            with pytest.raises(CollectiveAborted):
                ddp.all_reduce_gradients()
    assert all(same(grads(m), b) for m, b in zip(models, before, strict=True))
