"""Random numbers on the CPU come from the calling thread's generator."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.core import rng
from runtime.core.rng import (
    RANDOM_KERNELS,
    install_thread_generators,
    seeded_globals,
    thread_generator,
)
from tests.support.running import at_once, builder

ONES = torch.ones(4, 6)
IMAGE = torch.linspace(0, 1, 400).view(1, 1, 20, 20)
QUERY = torch.linspace(0, 1, 48).view(2, 4, 6)

WAYS = {
    "rand": lambda: torch.rand(5),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 99, (5,)),
    "randperm": lambda: torch.randperm(9),
    "random_": lambda: torch.empty(5).random_(),
    "random_ from": lambda: torch.empty(5).random_(3, 99),
    "random_ to": lambda: torch.empty(5).random_(99),
    "normal": lambda: torch.normal(ONES, 2.0),
    "normal by spread": lambda: torch.normal(2.0, ONES),
    "normal of two": lambda: torch.normal(ONES, ONES),
    "normal into": lambda: torch.normal(ONES, ONES, out=torch.empty(4, 6)),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "bernoulli_": lambda: torch.empty(4, 6).bernoulli_(ONES / 2),
    "multinomial": lambda: torch.multinomial(ONES[0], 3),
    "multinomial with repeats": lambda: torch.multinomial(ONES[0], 9, True),
    "poisson": lambda: torch.poisson(ONES),
    "binomial": lambda: torch.binomial(ONES * 9, ONES / 2),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "geometric_": lambda: torch.empty(5).geometric_(0.3),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "gamma": lambda: torch.distributions.Gamma(ONES, 1.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(ONES).sample(),
    "gumbel_softmax": lambda: functional.gumbel_softmax(ONES),
    "dropout": lambda: functional.dropout(ONES),
    "dropout in place": lambda: functional.dropout(ONES.clone(), inplace=True),
    "dropout bf16": lambda: functional.dropout(ONES.bfloat16()),
    "alpha_dropout": lambda: functional.alpha_dropout(ONES, training=True),
    "dropout2d": lambda: functional.dropout2d(IMAGE.expand(2, 9, 20, 20)),
    "rrelu": lambda: functional.rrelu(-ONES, training=True),
    "rrelu_": lambda: functional.rrelu_(-ONES, training=True),
    "fractional_max_pool2d": lambda: functional.fractional_max_pool2d(IMAGE, 2, output_size=9),
    "attention": lambda: functional.scaled_dot_product_attention(
        QUERY, QUERY, QUERY, dropout_p=0.5
    ),
    "lstm": lambda: layer(nn.LSTM, 6, 6, 2, dropout=0.5)(QUERY)[0],
    "transformer": lambda: layer(nn.TransformerEncoderLayer, 6, 2, 8)(QUERY),
    "init": lambda: nn.init.kaiming_normal_(torch.empty(4, 6)),
}


def layer(kind, *args, **kwargs):
    """A module with deterministic weights."""
    made = kind(*args, **kwargs)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    return made


def own(seed=3):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("draw", WAYS.values(), ids=WAYS)
def test_random_operations_use_the_threads_generator(draw):
    draw()  # may create weights, which draws as well
    before = torch.default_generator.get_state()
    results = []
    for seed in (3, 3, 4):
        with thread_generator(own(seed)):
            results.append(draw())
    assert torch.equal(torch.default_generator.get_state(), before)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert torch.equal(draw(), results[0])  # the same numbers as PyTorch's


def test_every_random_kernel_is_replaced():
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if name.startswith("aten::") and any(a.name == "generator" for a in schema.arguments):
            try:
                has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
            except RuntimeError:  # not an operator of the dispatcher
                continue
            if has_kernel:
                found.add(name.removeprefix("aten::"))
    assert found == set(RANDOM_KERNELS)


def test_an_explicit_generator_is_used():
    wanted = torch.rand(4, generator=own(9))
    counts = torch.binomial(ONES * 9, ONES / 2, generator=own(9))
    mine = own()
    state = mine.get_state()
    with thread_generator(mine):
        assert torch.equal(torch.rand(4, generator=own(9)), wanted)
        assert torch.equal(torch.binomial(ONES * 9, ONES / 2, generator=own(9)), counts)
    assert torch.equal(mine.get_state(), state)


def test_threads_do_not_share_generators():
    in_turn = threading.Barrier(2)
    found = {}

    def run(rank):
        with thread_generator(own(rank)):
            values = []
            for _ in range(20):
                in_turn.wait(30)
                values.append(functional.dropout(ONES))
            found[rank] = torch.stack(values)

    at_once(run, range(2))
    for rank in range(2):
        with thread_generator(own(rank)):
            alone = torch.stack([functional.dropout(ONES) for _ in range(20)])
        assert torch.equal(found[rank], alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_the_random_numbers(reentrant):
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6), nn.Dropout())

    def gradients(forward):
        net.zero_grad()
        x = ONES.clone().requires_grad_()
        with thread_generator(own()):
            forward(x).sum().backward()
            after = torch.rand(1)  # recomputation does not consume later random numbers
        return [p.grad.clone() for p in net.parameters()] + [x.grad, after]

    wanted = gradients(net)
    before = torch.default_generator.get_state()
    found = gradients(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_rng_state_functions_act_on_the_threads_generator():
    before = torch.default_generator.get_state()
    with thread_generator(own()):
        state = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(8)
        assert torch.initial_seed() == 8
        assert torch.equal(torch.rand(3), torch.rand(3, generator=own(8)))
    assert torch.equal(torch.default_generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_use_the_threads_generator(backend):
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), backend=backend)
    model(ONES)
    before = torch.default_generator.get_state()
    outputs = []
    for _ in range(2):
        with thread_generator(own()):
            outputs.append(model(ONES))
    assert torch.equal(*outputs)
    assert torch.equal(torch.default_generator.get_state(), before)
    torch._dynamo.reset()


def test_generator_none_is_the_default_generator():
    with thread_generator(own()):
        with thread_generator(None):
            before = torch.default_generator.get_state()
            torch.rand(3)
            assert not torch.equal(torch.default_generator.get_state(), before)
        before = torch.default_generator.get_state()
        torch.rand(3)
        assert torch.equal(torch.default_generator.get_state(), before)


def test_other_global_generators_are_seeded_and_restored():
    states = random.getstate(), np.random.get_state()[1].tolist()
    found = []
    for _ in range(2):
        with thread_generator(own()), seeded_globals():
            found.append((random.random(), np.random.rand()))
    assert found[0] == found[1]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    with seeded_globals():
        assert random.getstate() == states[0]


def test_models_of_cpu_workers_are_built_without_the_type_none(monkeypatch):
    """PyTorch up to 2.12 cannot fork generators of the type ``None``."""
    fork, types = torch.random.fork_rng, []

    def recorded(*args, **kwargs):
        types.append(kwargs.get("device_type", "cuda"))
        return fork(*args, **kwargs)

    monkeypatch.setattr(torch.random, "fork_rng", recorded)
    builder().seed(3).run().join()
    assert types
    assert all(isinstance(kind, str) for kind in types)


def test_kernels_missing_in_a_pytorch_version_are_logged(monkeypatch, caplog):
    monkeypatch.setattr(rng, "RANDOM_KERNELS", ("uniform_.nothing", "no_such_kernel"))
    monkeypatch.setattr(rng, "_installed", [])
    monkeypatch.setattr(torch.random, "default_generator", torch.random.default_generator)
    install_thread_generators()
    assert "has no CPU kernels uniform_.nothing, no_such_kernel" in caplog.text
