"""Prefetch of full parameters: concurrent, joined by forward, never hanging."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from runtime import FSDP, create_collectives
from runtime.core.errors import CollectiveAborted, CollectiveTimeout
from runtime.fsdp.param_prefetch import ParamPrefetch
from tests.support.fake_cuda import GPU, FakeCuda, standing_in
from tests.support.fsdp_ranks import (
    FREEING,
    Net,
    batch,
    loss_of,
    on_ranks,
    outcomes_of,
    share,
    wrap,
)
from tests.support.posing import POSING, posing_group

WAIT_S = 60.0
WAKE_S = 10.0

each_freeing = pytest.mark.parametrize("strategy", FREEING, ids=lambda s: s.name)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fsdp-prefetch-")]


def train(end, strategy, *, prefetches=True, max_norm=None):
    """The full state after three steps."""
    fsdp = wrap(end, strategy)
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.1)
    for seed in range(3):
        assert fsdp.has_pending_prefetch == (prefetches and seed > 0)
        optimizer.zero_grad()
        loss_of(fsdp, share(batch(8, seed), end)).backward()
        assert not fsdp.has_pending_prefetch
        fsdp.sync_gradients()
        if max_norm is not None:
            fsdp.clip_grad_norm_(max_norm)
        optimizer.step()
        if prefetches:
            fsdp.prefetch_forward_params()
    state = fsdp.full_state_dict()
    fsdp.close()
    return state


@pytest.mark.parametrize("kind", ["thread", "gloo"])
@pytest.mark.parametrize("world_size", [1, 4])
@each_freeing
def test_training_with_prefetches_equals_training_without(strategy, world_size, kind):
    def work(end):
        return train(end, strategy), train(end, strategy, prefetches=False)

    for with_prefetch, without in on_ranks(world_size, work, kind):
        assert all(with_prefetch[name].equal(tensor) for name, tensor in without.items())


@each_freeing
def test_a_prefetch_returns_before_its_peers_join(strategy):
    returned = threading.Event()

    def work(end):
        fsdp = wrap(end, strategy)
        with torch.no_grad():
            fsdp.prefetch_forward_params()  # the first makes its group: all ranks must join
            fsdp(batch(2)[0])
            if end.rank == 1:
                assert returned.wait(WAIT_S)
            fsdp.prefetch_forward_params()
            if end.rank == 0:
                assert prefetch_threads()
                returned.set()
            logits = fsdp(batch(2)[0])
        assert logits.equal(Net()(batch(2)[0]))

    on_ranks(2, work)
    assert not prefetch_threads()


@each_freeing
def test_other_collective_calls_leave_a_prefetch_pending(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        loss_of(fsdp, share(batch(8), end)).backward()
        fsdp.sync_gradients()
        fsdp.prefetch_forward_params()
        norm = fsdp.clip_grad_norm_(1e9)
        fsdp.sync_buffers()
        state = fsdp.full_state_dict()
        assert fsdp.has_pending_prefetch
        with torch.no_grad():
            logits = fsdp(batch(2)[0])
        assert norm > 0
        assert state["norm.weight"].equal(Net().state_dict()["norm.weight"])
        return logits

    first, second = on_ranks(2, work)
    assert first.equal(second)


@each_freeing
def test_the_collective_stays_free_for_the_ranks_while_a_prefetch_is_pending(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        with torch.no_grad():
            fsdp.prefetch_forward_params()
            fsdp(batch(2)[0])
            if end.rank == 0:
                fsdp.prefetch_forward_params()
            total = torch.tensor([end.rank])
            end.all_reduce_(total)
            if end.rank == 1:  # only now: the sum did not wait for it
                fsdp.prefetch_forward_params()
            return total.item(), fsdp(batch(2)[0])

    for total, logits in on_ranks(2, work):
        assert total == 1
        assert logits.equal(Net()(batch(2)[0]))


@each_freeing
def test_resharding_drops_a_prefetch(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        fsdp.prefetch_forward_params()
        fsdp.reshard()
        assert not fsdp.has_pending_prefetch
        fsdp.prefetch_forward_params()
        loss_of(fsdp, batch(2)).backward()
        fsdp.sync_gradients()

    on_ranks(2, work)


class TwoRanks:
    """Both ranks have prefetched once, so that each may do so independently."""

    def __init__(self, strategy, kind, timeout_s):
        self.ends = create_collectives(2, kind, timeout_s=timeout_s)
        self.fsdp = outcomes_of(self.ends, lambda end: self.warm(end, strategy))

    @staticmethod
    def warm(end, strategy):
        fsdp = wrap(end, strategy)
        fsdp.prefetch_forward_params()
        with torch.no_grad():
            fsdp(batch(2)[0])
        return fsdp

    def close(self):
        for fsdp in self.fsdp:
            fsdp.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def make():
    made = []

    def make(strategy=FREEING[0], kind="thread", timeout_s=WAIT_S):
        made.append(TwoRanks(strategy, kind, timeout_s))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("kind", ["thread", "gloo"])
@each_freeing
@pytest.mark.parametrize(("end", "message"), [("abort", None), ("close", "left the group")])
def test_a_peer_that_aborts_or_leaves_ends_a_prefetch(make, strategy, kind, end, message):
    ranks = make(strategy, kind)
    ranks.fsdp[0].prefetch_forward_params()
    begin = time.monotonic()
    getattr(ranks.ends[1], end)()
    with pytest.raises(CollectiveAborted, match=message):
        ranks.fsdp[0](batch(2)[0])
    assert time.monotonic() - begin < WAKE_S


def test_a_peer_that_never_joins_is_a_timeout(make):
    ranks = make(timeout_s=3.0)
    ranks.fsdp[0].prefetch_forward_params()
    with pytest.raises(CollectiveTimeout, match=r"\b3(\.0)? s"):
        ranks.fsdp[0](batch(2)[0])
    with pytest.raises(CollectiveAborted):
        ranks.ends[1].check()  # all ranks raise


def test_closing_ends_a_prefetch_and_leaves_the_collective_usable(make):
    ranks = make()
    ranks.fsdp[0].prefetch_forward_params()
    assert prefetch_threads()
    begin = time.monotonic()
    ranks.fsdp[0].close()
    assert time.monotonic() - begin < WAKE_S
    assert not prefetch_threads()
    ranks.fsdp[1].close()
    assert outcomes_of(ranks.ends, lambda end: end.barrier()) == [None, None]


def test_a_prefetch_ends_when_its_module_is_collected(make):
    ranks = make()
    ranks.fsdp[0].prefetch_forward_params()
    (thread,) = prefetch_threads()
    gone = weakref.ref(ranks.fsdp[0])
    ranks.fsdp[0] = ranks.fsdp[1]
    gc.collect()
    assert gone() is None
    thread.join(WAKE_S)
    assert not thread.is_alive()
    ranks.ends[0].check()


def test_an_error_in_the_thread_is_raised_by_forward_and_aborts_the_peer(make):
    ranks = make()
    seen = threading.Event()

    def work(end):
        fsdp = ranks.fsdp[end.rank]
        with pytest.MonkeyPatch.context() as patch:
            if end.rank == 1:
                side = fsdp._store._prefetch_group
                patch.setattr(
                    side, "all_gather_coalesced", lambda *_: (_ for _ in ()).throw(MemoryError)
                )
            fsdp.prefetch_forward_params()
            if end.rank == 1:
                assert seen.wait(WAIT_S)  # the peer is aborted without a call on this rank
            try:
                fsdp(batch(2)[0])
            finally:
                seen.set()

    begin = time.monotonic()
    waiting, failing = outcomes_of(ranks.ends, work)
    assert isinstance(failing, MemoryError)
    assert isinstance(waiting, CollectiveAborted)
    assert "aborted through rank 1" in str(waiting)
    assert time.monotonic() - begin < WAKE_S


def test_a_raised_error_keeps_no_tensors_alive():
    def gather(fulls):
        raise MemoryError

    prefetch = ParamPrefetch(gather, [torch.zeros(1)], "fsdp-prefetch-0")
    gone = weakref.ref(prefetch)
    gc.disable()
    try:
        with pytest.raises(MemoryError):
            prefetch.join()
        del prefetch
        assert gone() is None
    finally:
        gc.enable()


# --- streams ------------------------------------------------------------------------


@pytest.fixture
def late():
    """Two ranks that pose as GPUs, whose streams run only when waited for."""
    fake = FakeCuda(patience=1, allow_default=True, prompt=True)
    with standing_in(fake), ThreadPoolExecutor(2) as pool:
        ends = create_collectives(2, "thread", [GPU, GPU], timeout_s=WAIT_S)

        def each(work):
            return [f.result(WAIT_S) for f in [pool.submit(work, end) for end in ends]]

        yield fake, each
        for end in ends:
            end.close()


def one_parameter(end, values):
    # One parameter, gathered in place without a copy, which the fake does not cover.
    module = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(values)
    fsdp = FSDP(module, end)
    fsdp.prefetch_forward_params()
    with torch.no_grad():
        fsdp(torch.ones(4))
    return fsdp


def test_a_prefetch_is_complete_on_the_device_when_forward_uses_it(late):
    fake, each = late
    values = torch.arange(8.0).view(2, 4)
    modules = each(lambda end: one_parameter(end, values))
    fake.prompt = False

    def work(end):
        with torch.no_grad(), fake.stream(fake.new_stream(GPU)):
            modules[end.rank].prefetch_forward_params()
            return modules[end.rank](torch.ones(4))

    for output in each(work):
        assert output.tolist() == [6.0, 22.0]


def test_a_prefetch_runs_after_the_step_on_its_own_stream(late):
    fake, each = late
    modules = each(lambda end: one_parameter(end, torch.zeros(2, 4)))
    fake.prompt = False
    assert len(fake.streams) == 2  # one per rank, reused

    def work(end):
        fsdp = modules[end.rank]
        (shard,) = fsdp.parameters()
        with torch.no_grad(), fake.stream(fake.new_stream(GPU)):
            # An optimizer with pending kernels and no change of the version counter.
            fake.copy(shard.data, torch.full((4,), 1.0 + end.rank))
            fsdp.prefetch_forward_params()
            return fsdp(torch.ones(4))

    for output in each(work):
        assert output.tolist() == [4.0, 8.0]
    assert len(fake.streams) == 2 + 2


@pytest.mark.parametrize("kind", POSING)
@each_freeing
def test_ranks_that_pose_as_gpus_train_as_on_the_cpu(strategy, kind):
    def work(end):
        return train(end, strategy, max_norm=0.5)

    with posing_group(2, kind, WAIT_S) as ends:
        posing = outcomes_of(ends, work)
    for state, expected in zip(posing, on_ranks(2, work), strict=True):
        assert not isinstance(state, BaseException), state
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
