"""A block recomputed in the backward pass repeats the random numbers of its own rank."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime import (
    FSDP,
    DataParallelCoordinator,
    DdpConfig,
    ShardingStrategy,
    create_collectives,
)
from tests.support.fsdp_ranks import on_ranks
from tests.support.looping import loop_builder
from tests.support.own_loop import WAIT_S, on_cpus
from tests.support.running import SYNC, THREAD, at_once, builder

SIZE = 400
BATCH = torch.ones(2, SIZE)
"""A sample for each rank."""
UNCHECKED = DdpConfig(whole=[])
"""Models, which would wait for other ranks, are not tried on the first batch."""
meeting = threading.Barrier(1)


@contextmanager
def ranks_that_draw_together(num_ranks=2):
    """No rank draws in a block before the other has begun it, in both passes."""
    global meeting
    meeting = threading.Barrier(num_ranks)
    try:
        yield
    finally:
        meeting = threading.Barrier(1)


def block(x):
    meeting.wait(WAIT_S)
    return functional.dropout(x * 1.0, 0.5)


class Reversible(torch.autograd.Function):
    """Recomputes a block by the state of its random numbers, set and restored by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.state = torch.get_rng_state()
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = block(leaf)
        torch.set_rng_state(now)
        return torch.autograd.grad(out, leaf, grad)[0]


WAYS = {
    "saved": block,
    "recomputed": lambda x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(block, x, use_reentrant=True),
    "nested": lambda x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False
    ),
    "nested reentrant": lambda x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=True), x, use_reentrant=True
    ),
    "reversible": Reversible.apply,
}


class Net(nn.Module):
    """All weights are one: the gradient of the sum is the output, if both have the same mask."""

    def __init__(self, way="recomputed"):
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return WAYS[self.way](x * self.weight)


def full_sgd(params):
    return torch.optim.SGD(params, 1.0)


def gradient_of_setup(net):
    with on_cpus(net, config=UNCHECKED) as model:
        out = model(BATCH)
        out.sum().backward()
        return out.detach().sum(0), model.module.weight.grad


def gradient_of_accumulated_batches(net):
    outputs = [torch.zeros(SIZE)] * 2

    def loss_fn(model, batch):
        out = model(batch)
        outputs[int(batch[0, 0]) - 1] = out.detach().sum(0)
        return out.sum()

    with on_cpus(net, optim=full_sgd) as model:
        model.accumulate(loss_fn, [BATCH[:1], 2 * BATCH[:1]])
        model.step()
        return sum(outputs), 2 * (1 - model.module.weight.detach())


def gradient_of_train_batch(net):
    outputs = []

    def loss_fn(model, samples):
        out = model(samples)
        outputs.append(out.detach().sum(0))
        return out.sum(1).mean()

    with DataParallelCoordinator(net, full_sgd, loss_fn, ["cpu"] * 2) as coordinator:
        coordinator.train_batch(BATCH)
        return sum(outputs), 2 * (1 - coordinator.primary.weight.detach())


def gradient_of(run, outputs):
    """Those of both ranks' outputs, added up, after one step of rate 1 on their mean."""
    weights = run.join().params["weight"]
    return sum(outputs), 2 * (1 - weights)


def gradient_of_the_builder(net):
    outputs = []

    def train_fn(model, batch):
        out = model(BATCH[:1])
        outputs.append(out.detach().sum(0))
        return out.sum()

    made = builder(
        model=net, optim=full_sgd, train=train_fn, dataset=2, batch_size=1, way=(SYNC, THREAD)
    )
    return gradient_of(made.run(), outputs)


def gradient_of_a_loop(net):
    outputs = []

    def loop(worker):
        for _ in worker.batches():
            out = worker.model(BATCH[:1])
            outputs.append(out.detach().sum(0))
            worker.step(out.sum())

    made = loop_builder(
        loop,
        model=net,
        optim=lambda model: full_sgd(model.parameters()),
        dataset=(torch.arange(2),),
        epochs=1,
    )
    return gradient_of(made.batch_size(1).run(), outputs)


DOORS = {
    "setup": gradient_of_setup,
    "accumulate": gradient_of_accumulated_batches,
    "train_batch": gradient_of_train_batch,
    "builder": gradient_of_the_builder,
    "loop": gradient_of_a_loop,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("door", DOORS)
def test_gradients_have_the_mask_of_the_forward_pass(door, way):
    with ranks_that_draw_together():
        out, grad = DOORS[door](Net(way))
    assert torch.allclose(grad, out)
    assert 0 < out.count_nonzero() < SIZE


def in_another_thread(call):
    at_once(lambda _: call(), [0])


@pytest.mark.parametrize("way", WAYS)
def test_backward_of_an_own_loop_may_run_in_another_thread(way):
    with ranks_that_draw_together(), on_cpus(Net(way), config=UNCHECKED) as model:
        out = model(BATCH)
        in_another_thread(out.sum().backward)
        assert torch.equal(model.module.weight.grad, out.detach().sum(0))


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_fsdp_have_the_mask_of_the_forward_pass(strategy, way):
    def train(collective):
        fsdp = FSDP(Net(way), collective, strategy, 2 if "HYBRID" in strategy.name else None)
        out = fsdp(BATCH)
        out.sum().backward()
        return out.detach().sum(0), fsdp.module.weight.grad

    with ranks_that_draw_together():
        for out, grad in on_ranks(2, train):
            assert torch.equal(grad, out)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reversible"])
def test_backward_of_fsdp_may_run_in_another_thread(way):
    def train(collective):
        fsdp = FSDP(Net(way), collective)
        out = fsdp(BATCH)
        in_another_thread(out.sum().backward)
        return out.detach().sum(0), fsdp.module.weight.grad

    with ranks_that_draw_together():
        for out, grad in on_ranks(2, train):
            assert torch.equal(grad, out)


class Masked(nn.Module):
    """Returns dropout's mask for each sample, and can do without draws."""

    def __init__(self, *, draws=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.draws = draws

    def forward(self, x):
        return functional.dropout(x * self.weight, 0.5 if self.draws else 0.0)


class Recomputed(Masked):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_seed_of_the_caller_decides_the_draws_of_all_ranks():
    with on_cpus(Masked()) as model:
        torch.manual_seed(3)
        first, second = model(BATCH), model(BATCH)
        assert not torch.equal(first[0], first[1])  # of two ranks
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        state = torch.get_rng_state()
        assert torch.equal(model(BATCH), first)
        assert torch.equal(model(BATCH), second)
        torch.set_rng_state(state)
        assert torch.equal(model(BATCH), first)


def test_what_runs_on_one_device_draws_as_a_plain_loop():
    def make(device):
        return nn.Sequential(nn.Linear(6, 1), nn.Dropout())

    torch.manual_seed(3)
    with on_cpus(make) as model:
        found = model(torch.ones(1, 6))
        after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(make("cpu")(torch.ones(1, 6)), found)
    assert torch.equal(torch.rand(1), after)


def test_a_seed_decides_the_draws_of_train_batch():
    found = []

    def loss_fn(model, samples):
        out = model(samples)
        found.append(out.detach())
        return out.sum()

    with DataParallelCoordinator(Masked(), full_sgd, loss_fn, ["cpu"] * 2) as coordinator:
        for _ in range(2):
            torch.manual_seed(3)
            coordinator.train_batch(BATCH)
            coordinator.primary.weight.data.fill_(1.0)
    first, second = ({tuple(map(bool, m[0])) for m in masks} for masks in (found[:2], found[2:]))
    assert len(first) == 2
    assert first == second


def test_a_model_that_draws_nothing_leaves_the_callers_generator():
    for draws in (False, True):
        with on_cpus(Recomputed(draws=draws)) as model:
            before = torch.get_rng_state()
            model(BATCH).sum().backward()
            assert torch.equal(torch.get_rng_state(), before) is not draws


def test_a_seed_within_forward_is_that_of_its_rank():
    class Seeding(Masked):
        def forward(self, x):
            torch.manual_seed(int(x[0, 0]))
            meeting.wait(WAIT_S)
            return x * self.weight + torch.rand(SIZE)

    rows = torch.tensor([[3.0], [4.0]]).expand(2, SIZE)
    with ranks_that_draw_together(), on_cpus(Seeding(), config=UNCHECKED) as model:
        found = model(rows).detach() - rows
    for row, seed in zip(found, (3, 4), strict=True):
        wanted = torch.rand(SIZE, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(row, wanted)


def test_random_numbers_of_fsdp_are_those_of_its_rank():
    def masks(collective):
        fsdp = FSDP(Masked(), collective)
        mask = fsdp(BATCH).detach()
        torch.manual_seed(collective.rank)  # as in a process of its own
        meeting.wait(WAIT_S)
        return mask, torch.rand(3)

    with ranks_that_draw_together():
        torch.manual_seed(3)
        first, second = on_ranks(2, masks)
        torch.manual_seed(3)
        again = on_ranks(2, masks)
    assert not torch.equal(first[0], second[0])
    for rank, (mask, drawn) in enumerate((first, second)):
        assert torch.equal(again[rank][0], mask)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(rank)))


def test_a_rank_of_fsdp_in_the_main_thread_draws_from_the_default_generator():
    def mask(collective):
        return FSDP(Masked(), collective)(BATCH).detach()

    ends = create_collectives(2, "thread")
    torch.manual_seed(3)
    other = threading.Thread(target=mask, args=(ends[1],))
    other.start()
    found = mask(ends[0])
    other.join(WAIT_S)
    torch.manual_seed(3)
    assert torch.equal(found, functional.dropout(BATCH, 0.5))
    for end in ends:
        end.close()
