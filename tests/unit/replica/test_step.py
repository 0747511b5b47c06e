"""One optimizer step: accumulation, reduction, clipping, precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from runtime import current_worker
from tests.support.pairs import pairwise
from tests.support.running import (
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Trace,
    builder,
    local_ways,
)

N = 43
X = torch.randn(N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.pow(2).sum(1)
START = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def model(device):
    return copy.deepcopy(START)


def adam(params):
    return torch.optim.AdamW(params, 0.05)


def loss(net, batch):
    return ((net(batch[0]).squeeze(1) - batch[1]) ** 2).mean()


def by_hand(steps, *, clip=None):
    """One device trained on the union of each step's batches."""
    net = model(None)
    optimizer = adam(net.parameters())
    for indices in steps:
        optimizer.zero_grad()
        loss(net, (X[indices], Y[indices])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net.state_dict()


def run(way, ranks, *, accumulate=1, clip=None, batch_size=4, epochs=2):
    """A run, and the samples of each of its global steps."""
    trace = Trace(loss)
    b = builder(
        model=model,
        optim=adam,
        train=trace,
        dataset=(X, Y, torch.arange(N)),
        batch_size=batch_size,
        epochs=epochs,
        ranks=ranks,
        way=way,
    ).accumulate(accumulate)
    if clip is not None:
        b.max_grad_norm(clip)
    state = b.run().join(WAIT_S)
    steps = []
    for epoch in range(epochs):
        parts = {}
        for rank, indices in trace.of_epoch(epoch):
            parts.setdefault(rank, []).append(list(indices))
        longest = max(len(p) for p in parts.values())
        steps += [
            [x for part in parts.values() for batch in part[i : i + accumulate] for x in batch]
            for i in range(0, longest, accumulate)
        ]
    return state, steps


def assert_same(state, reference):
    for key, value in state.state_dict().items():
        torch.testing.assert_close(value, reference[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("accumulate", [2, 3, 50])
def test_accumulation_equals_the_big_batch_the_short_last_one_included(accumulate):
    state, steps = run((CADENCE, OVER_CPU), 1, accumulate=accumulate)
    assert {len(s) for s in steps} - {4 * accumulate}  # a short one is among them
    assert_same(state, by_hand(steps))


@pairwise(backend=[THREAD, GLOO], ranks=[2, 3], accumulate=[1, 2])
def test_lockstep_equals_one_device_on_the_union(backend, ranks, accumulate):
    state, steps = run((SYNC, backend), ranks, accumulate=accumulate)
    assert_same(state, by_hand(steps))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_lockstep_clips_the_reduced_gradients(ranks):
    state, steps = run((SYNC, THREAD), ranks, clip=0.5)
    assert_same(state, by_hand(steps, clip=0.5))


def test_more_ranks_than_samples_in_lockstep():
    state, steps = run((SYNC, THREAD), 4, batch_size=20)
    assert [len(s) for s in steps] == [43, 43]
    assert_same(state, by_hand(steps))


@local_ways
def test_gradients_are_clipped_to_the_norm(way):
    norms = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p.grad for g in self.param_groups for p in g["params"]]
            norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
            return super().step()

    b = builder(
        model=model,
        optim=lambda p: Watched(p, 1e-6),
        train=loss,
        dataset=(X, Y),
        batch_size=5,
        way=way,
    )
    b.max_grad_norm(0.01).run().join(WAIT_S)
    assert len(norms) >= 9
    assert max(norms) <= 0.01 + 1e-9


# -- parameters without a gradient ---------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.rank_one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(1, dtype=torch.float64))


def branches(net, batch):
    out = net.always.sum()
    return out + net.rank_one.sum() if current_worker().rank == 1 else out


class Noting(torch.optim.SGD):
    """SGD with weight decay, which changes parameters whose gradient is zero, not ``None``."""

    noted: list

    def step(self, closure=None):
        self.noted.append([p.grad is None for g in self.param_groups for p in g["params"]])
        return super().step()


@pytest.mark.parametrize("backend", [THREAD, GLOO], ids=lambda b: b.name)
def test_a_parameter_used_by_no_rank_has_no_gradient_and_by_one_rank_has_on_all(backend):
    noted = []

    def optim(params):
        found = Noting(params, 0.1, weight_decay=0.1)
        found.noted = noted
        return found

    state = (
        builder(
            model=lambda d: Branches(),
            optim=optim,
            train=branches,
            dataset=16,
            ranks=2,
            way=(SYNC, backend),
        )
        .run()
        .join(WAIT_S)
    )
    assert noted == [[False, False, True]] * 8
    assert float(state.params["never"]) == 1.0
    w = 1.0
    for _ in range(4):
        w -= 0.1 * (0.5 + 0.1 * w)
    assert float(state.params["rank_one"]) == pytest.approx(w)


def test_a_parameter_unused_in_one_batch_keeps_no_gradient_under_cadence():
    noted = []

    def optim(params):
        found = Noting(params, 0.1)
        found.noted = noted
        return found

    builder(model=lambda d: Branches(), optim=optim, train=branches, dataset=8, ranks=1).run().join(
        WAIT_S
    )
    assert noted == [[False, True, True]] * 4


# -- precision -----------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@local_ways
def test_low_precision_trains(precision, way):
    seen = []

    def train(net, batch):
        out = net(batch[0])
        seen.append(out.dtype)
        return ((out.squeeze(1).float() - batch[1]) ** 2).mean()

    def single(device):
        return copy.deepcopy(START).float()

    x = X.float()
    b = builder(
        model=single,
        optim=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        train=train,
        dataset=(x, Y.float()),
        batch_size=4,
        epochs=6,
        way=way,
    )
    state = b.precision(precision).max_grad_norm(5.0).run().join(WAIT_S)
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert state.params["0.weight"].dtype is torch.float32
    assert state.metrics[-1].avg_loss < state.metrics[0].avg_loss
