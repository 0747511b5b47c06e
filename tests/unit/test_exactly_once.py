"""Every sample once an epoch, for all policies, world sizes and remainders."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from coordinator.splitting import permutation
from runtime import ApplyPolicy, current_worker
from tests.support.pairs import SCALE
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    Trace,
    builder,
    count_up,
    local_ways,
)

SEED = 11


@dataclass(frozen=True)
class Case:
    """A small run."""

    n: int
    batch_size: int
    ranks: int
    policy: ApplyPolicy = CADENCE
    backend: object = OVER_CPU
    epochs: int = 2
    slow_rank: int | None = None
    slowdown: int = 0
    accumulate: int = 1
    drop_last: bool = False
    ratios: tuple[float, ...] | None = None
    max_batch_diff: int | None = None
    max_overshoot: int | None = None
    anchor: int = 3


def slowed(case):
    """Steps that take a rank longer, by computation instead of sleep."""
    ballast = torch.ones(96, 96)

    def train(model, batch):
        if current_worker().rank == case.slow_rank:
            for _ in range(case.slowdown):
                torch.mm(ballast, ballast)
        return count_up(model, batch)

    return train


def run(case):
    trace = Trace(slowed(case))
    b = builder(
        train=trace,
        dataset=case.n,
        batch_size=case.batch_size,
        epochs=case.epochs,
        ranks=case.ranks,
        way=(case.policy, case.backend),
    )
    b.seed(SEED).accumulate(case.accumulate).drop_last(case.drop_last)
    b.anchor(case.anchor)
    if case.ratios is not None:
        b.partition_ratios(case.ratios)
    if case.max_batch_diff is not None:
        b.max_batch_diff(case.max_batch_diff)
    if case.max_overshoot is not None:
        b.max_overshoot(case.max_overshoot)
    return trace, b.run().join(WAIT_S)


def expected_batches(case, epoch):
    order = permutation(case.n, epoch, SEED).tolist()
    cut = [tuple(order[i : i + case.batch_size]) for i in range(0, case.n, case.batch_size)]
    return [b for b in cut if len(b) == case.batch_size or not case.drop_last]


def assert_exactly_once(case, trace, state):
    assert [m.epoch for m in state.metrics] == list(range(case.epochs))
    for metrics in state.metrics:
        expected = expected_batches(case, metrics.epoch)
        trained = [indices for _, indices in trace.of_epoch(metrics.epoch)]
        assert Counter(trained) == Counter(expected)
        assert metrics.num_samples == sum(len(b) for b in expected)
        assert sum(r.num_batches for r in metrics.per_rank) == len(expected)
        assert sum(r.num_samples for r in metrics.per_rank) == metrics.num_samples
        assert metrics.num_retrained == metrics.num_skipped == 0
        for r in metrics.per_rank:
            mine = [indices for rank, indices in trace.of_epoch(metrics.epoch) if rank == r.rank]
            assert r.num_batches == len(mine)
    assert len(trace.batches) == sum(len(expected_batches(case, e)) for e in range(case.epochs))
    assert not state.stopped


@st.composite
def cases(draw):
    n = draw(st.sampled_from([1, 2, 3, 5, 8, 17, 103]) | st.integers(1, 60))
    batch_size = draw(st.sampled_from([1, 3, 8, 10]))
    ranks = draw(st.integers(1, 4))
    policy = draw(st.sampled_from(list(ApplyPolicy)))
    ratios = draw(st.none() | st.tuples(*[st.sampled_from([0.0, 0.2, 1.0])] * ranks))
    return Case(
        n=n,
        batch_size=batch_size,
        ranks=ranks,
        policy=policy,
        backend=draw(st.sampled_from([OVER_CPU, THREAD])),
        epochs=draw(st.integers(1, 3)),
        slow_rank=draw(st.none() | st.integers(0, ranks - 1)),
        slowdown=draw(st.sampled_from([1, 8])),
        accumulate=draw(st.sampled_from([1, 1, 2, 3])),
        drop_last=draw(st.booleans()) and n >= batch_size,
        ratios=ratios if policy is not SYNC and ratios and sum(ratios) > 0 else None,
        max_batch_diff=draw(st.sampled_from([None, None, 0, 1, 4])),
        max_overshoot=draw(st.sampled_from([None, 0, 1])),
        anchor=draw(st.sampled_from([1, 3, 10])),
    )


@settings(max_examples=60 if SCALE > 1 else 20)
@given(cases())
@example(Case(103, 10, 4, SYNC, THREAD))
@example(Case(103, 10, 3, drop_last=True))
@example(Case(103, 10, 3, CADENCE, OVER_CPU, slow_rank=1, slowdown=20))
@example(Case(103, 10, 2, ASYNC, THREAD, slow_rank=0, slowdown=20, max_overshoot=0))
@example(Case(5, 8, 4, CADENCE, THREAD))
@example(Case(1, 1, 4, ASYNC, OVER_CPU, epochs=3))
@example(Case(3, 1, 4, SYNC, OVER_CPU, accumulate=2))
@example(Case(60, 1, 2, CADENCE, OVER_CPU, max_batch_diff=0, slow_rank=1, slowdown=20))
@example(Case(60, 1, 2, CADENCE, THREAD, max_batch_diff=0))
@example(Case(60, 1, 3, ASYNC, THREAD, max_batch_diff=0, accumulate=2, anchor=10))
def test_every_epoch_trains_every_index_exactly_once(case):
    trace, state = run(case)
    assert_exactly_once(case, trace, state)


@pytest.mark.parametrize("policy", list(ApplyPolicy), ids=lambda p: p.name)
@pytest.mark.parametrize(("n", "batch_size", "ranks"), [(103, 10, 3), (5, 8, 2), (2, 1, 4)])
def test_gloo_trains_every_index_exactly_once(policy, n, batch_size, ranks):
    case = Case(n, batch_size, ranks, policy, GLOO, slow_rank=ranks - 1, slowdown=10)
    assert_exactly_once(case, *run(case))


@local_ways
def test_a_rank_delayed_by_others_loses_no_sample(way):
    """Rank 1 takes no step before rank 0 has taken all that it can."""
    policy, backend = way
    seen = Trace()

    def late(model, batch):
        worker = current_worker()
        # Under SYNC, and over a collective, rank 0 cannot go further without rank 1.
        lead = 1 if policy is SYNC or backend is THREAD else 4
        if worker.rank == 1 and not seen.steps[1]:
            seen.wait_for(lambda: seen.steps[0] >= lead)
        return seen(model, batch)

    case = Case(23, 2, 2, policy, backend, epochs=2)
    b = builder(train=late, dataset=23, batch_size=2, epochs=2, way=way).seed(SEED)
    state = b.run().join(WAIT_S)
    assert_exactly_once(case, seen, state)
    assert seen.steps[1] > 0


def test_another_seed_gives_another_permutation():
    trace = Trace()
    builder(train=trace, dataset=31, batch_size=31, ranks=1).seed(SEED + 1).run().join(WAIT_S)
    assert trace.batches[0][2] != expected_batches(Case(31, 31, 1), 0)[0]


@pytest.mark.parametrize("backend", [THREAD, GLOO], ids=lambda b: b.name)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sync_repeats_its_assignment_and_its_bits(backend, ranks):
    x, y = torch.randn(53, 6), torch.randn(53)

    def model(device):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def once():
        trace = Trace(lambda m, b: ((m(b[0]).squeeze(1) - b[1]) ** 2).mean())
        b = builder(
            model=model,
            optim=lambda p: torch.optim.AdamW(p, 0.01),
            train=trace,
            dataset=(x, y, torch.arange(53)),
            batch_size=5,
            epochs=2,
            ranks=ranks,
            way=(SYNC, backend),
        )
        state = b.seed(SEED).run().join(WAIT_S)
        return sorted(trace.batches), state

    (batches, state), (again, same) = once(), once()
    assert batches == again
    assert {i for e, _, ix in batches for i in ix if e == 0} == set(range(53))
    for key, tensor in state.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[key]), key
    assert [m.avg_loss for m in state.metrics] == [m.avg_loss for m in same.metrics]
