"""Errors on one rank abort the others at once; errors on all ranks leave the group usable."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from runtime import FSDP, create_collectives
from runtime.core.errors import CollectiveAborted
from tests.support.fsdp_ranks import (
    FREEING,
    SHARDED,
    STRATEGIES,
    Net,
    batch,
    forget_frames,
    loss_of,
    node_size,
    on_ranks,
    outcomes_of,
    wrap,
)

# A rank that is not aborted waits until the timeout.
WAKE_S = 25.0
TIMEOUT_S = 55.0
WORLD_SIZE, BAD = 4, 1

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
each_sharded = pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s.name)
each_freeing = pytest.mark.parametrize("strategy", FREEING, ids=lambda s: s.name)


def one_fails(work, error, match, kind="thread"):
    """One rank fails and then stays idle; the others are aborted with its rank in the error."""
    ends = create_collectives(WORLD_SIZE, kind, timeout_s=TIMEOUT_S)
    woken = threading.Barrier(WORLD_SIZE, timeout=WAKE_S)

    def run(end):
        try:
            work(end)
            # Not every call needs every rank: under HYBRID_SHARD the other node may be done.
            end.barrier()
            return None
        except Exception as failure:
            forget_frames(failure)
            return failure
        finally:
            woken.wait()

    begin = time.monotonic()
    try:
        outcomes = outcomes_of(ends, run)
    finally:
        for end in ends:
            end.close()
    assert time.monotonic() - begin < WAKE_S
    failure = outcomes.pop(BAD)
    assert isinstance(failure, error), failure
    assert match in str(failure)
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveAborted), outcome
        assert f"rank {BAD}" in str(outcome)


class Table(nn.Module):
    """A linear layer and an embedding whose gradient may be sparse on one rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.linear(self.table(tokens))


def step(fsdp, tokens=None):
    fsdp(torch.tensor([1, 2]) if tokens is None else tokens).sum().backward()
    fsdp.sync_gradients()


def tables(end, strategy, *, sparse):
    fsdp = wrap(end, strategy, Table())
    fsdp.module.table.sparse = sparse
    return fsdp


@each_strategy
def test_a_sparse_gradient_on_one_rank_aborts_the_others(strategy):
    def work(end):
        step(tables(end, strategy, sparse=end.rank == BAD))

    one_fails(work, ValueError, "sparse")


@each_strategy
def test_sparse_gradients_on_every_rank_leave_the_group_usable(strategy):
    def work(end):
        fsdp = tables(end, strategy, sparse=True)
        with pytest.raises(ValueError, match="sparse"):
            step(fsdp)
        fsdp.reshard()
        fsdp.zero_grad()
        fsdp.module.table.sparse = False
        step(fsdp)

    on_ranks(WORLD_SIZE, work)


@pytest.mark.parametrize("kind", ["thread", "gloo"])
@each_strategy
def test_a_module_that_raises_on_one_rank_aborts_the_others(strategy, kind):
    def work(end):
        fsdp = wrap(end, strategy, Table())
        step(fsdp)
        step(fsdp, torch.tensor([[99 if end.rank == BAD else 0]]))

    one_fails(work, IndexError, "out of range", kind)


@each_strategy
def test_a_module_that_raises_on_every_rank_leaves_the_group_usable(strategy):
    late = threading.Event()

    def work(end):
        fsdp = wrap(end, strategy, Table())
        for _ in range(3):
            if end.rank == BAD:
                late.wait(0.05)  # the others are in their next call by then
            with pytest.raises(IndexError):
                fsdp(torch.tensor([99]))
            if strategy in FREEING:
                assert all(p.dim() == 1 for p in fsdp.module.parameters())
        step(fsdp)

    on_ranks(WORLD_SIZE, work)


@each_strategy
def test_a_sync_without_a_forward_on_one_rank_aborts_the_others(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        if end.rank != BAD:
            loss_of(fsdp, batch(4)).backward()
        elif strategy in FREEING:
            with torch.no_grad():  # gathers with the others
                fsdp(batch(4)[0])
        fsdp.sync_gradients()

    one_fails(work, RuntimeError, "before forward()")


@each_sharded
@pytest.mark.parametrize(
    "call", [FSDP.full_state_dict, FSDP.unwrap, lambda fsdp: fsdp(batch(4)[0]).sum()]
)
def test_a_shard_moved_on_one_rank_aborts_the_others(strategy, call):
    def work(end):
        fsdp = wrap(end, strategy)
        if end.rank == BAD:
            shard = dict(fsdp.named_parameters())["module.hidden.weight"]
            shard.data = shard.data.clone()
        call(fsdp)
        if call is not FSDP.unwrap:  # the other node may have completed its own
            fsdp.sync_buffers()  # forward alone gathers nothing for SHARD_GRAD_OP

    one_fails(work, RuntimeError, "'hidden.weight' was moved to other memory")


@each_freeing
def test_a_prefetch_refused_on_one_rank_aborts_the_others(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        fsdp.prefetch_forward_params()
        step_behind = torch.enable_grad() if end.rank == BAD else torch.no_grad()
        with step_behind:
            fsdp(batch(4)[0])
        fsdp.prefetch_forward_params()
        fsdp(batch(4)[0])

    one_fails(work, RuntimeError, "holds the full parameters")


@each_strategy
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_exception_inside_a_collective_call_aborts_the_others(strategy, error):
    def refuse(module, prefix, keep_vars):
        raise error("planted")

    def work(end):
        module = Net()
        if end.rank == BAD:
            module.register_state_dict_pre_hook(refuse)
        wrap(end, strategy, module).full_state_dict()

    one_fails(work, error, "planted")


@each_strategy
def test_a_failed_reduction_on_one_rank_aborts_the_others(strategy):
    """As if memory ran out while gradients are concatenated."""

    def fails():
        raise MemoryError("planted")

    def work(end):
        fsdp = wrap(end, strategy)
        loss_of(fsdp, batch(4)).backward()
        if end.rank == BAD:
            fsdp._store.reduce = fails
        fsdp.sync_gradients()

    one_fails(work, MemoryError, "planted")


@each_strategy
def test_a_failed_wrap_on_one_rank_aborts_the_others(strategy, monkeypatch):
    class Stubborn(nn.Parameter):
        def detach(self):
            raise ValueError("planted")

    def work(end):
        module = nn.Linear(4, 2)
        if end.rank == BAD:
            module.weight = Stubborn(module.weight)
        FSDP(module, end, strategy, node_size(strategy, WORLD_SIZE))

    one_fails(work, ValueError, "planted")


@each_strategy
def test_an_invalid_argument_on_one_rank_raises_there_only_and_the_call_may_be_repeated(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        loss_of(fsdp, batch(4)).backward()
        fsdp.sync_gradients()
        if end.rank == BAD:
            for wrong, error in (
                ((None,), TypeError),
                ((-1.0,), ValueError),
                ((1.0, "two"), TypeError),
                ((1.0, 0), ValueError),
            ):
                with pytest.raises(error, match=r"max_norm|norm_type"):
                    fsdp.clip_grad_norm_(*wrong)
            for rank in (-1, 9):
                with pytest.raises(
                    ValueError, match=f"rank={rank}: pass a rank under {WORLD_SIZE}"
                ):
                    fsdp.full_state_dict(rank=rank)
            with pytest.raises(ValueError, match="elements in one dimension"):
                fsdp.update_shards(torch.zeros(0))
        norms = fsdp.clip_grad_norm_(1e9), fsdp.clip_grad_norm_(1e9, "inf")
        fsdp.full_state_dict(rank=0)
        end.check()
        return norms

    norms = on_ranks(WORLD_SIZE, work)
    assert all(norm == norms[0] for norm in norms)


def test_evaluation_on_one_rank_only_works_if_nothing_is_gathered():
    def work(end):
        fsdp = wrap(end, STRATEGIES[2])
        for _ in range(2):
            if end.rank == BAD:
                with torch.no_grad():
                    fsdp(batch(4)[0])
            loss_of(fsdp, batch(4)).backward()
            fsdp.sync_gradients()
        with pytest.raises(RuntimeError, match=r"before forward\(\)"):
            fsdp.sync_gradients()
        end.barrier()
        end.check()

    on_ranks(WORLD_SIZE, work)


def test_ranks_may_run_different_numbers_of_forwards_between_syncs():
    def work(end):
        fsdp = wrap(end)
        for _ in range(2):
            for _ in range(1 + end.rank):
                loss_of(fsdp, batch(4)).backward()
            fsdp.sync_gradients()
            fsdp.zero_grad()
        with pytest.raises(IndexError):
            fsdp(torch.tensor([99]))
        end.barrier()
        end.check()

    on_ranks(WORLD_SIZE, work)


def test_recorded_failures_keep_no_group_alive():
    (end,) = create_collectives(1)
    fsdp = wrap(end)
    with pytest.raises(IndexError):
        fsdp(torch.tensor([99]))
    gone = weakref.ref(end._group)
    end.close()
    del end, fsdp
    gc.collect()
    assert gone() is None
