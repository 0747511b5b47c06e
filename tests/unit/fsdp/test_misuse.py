"""Every misuse of FSDP is an error that names the remedy."""

from __future__ import annotations

import operator
import re
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runtime import (
    FSDP,
    CollectiveAborted,
    CollectiveTimeout,
    ReplicaMismatch,
    ShardingStrategy,
    create_collectives,
)
from runtime.fsdp import group_closer
from tests.support.fsdp_ranks import (
    FREEING,
    SHARDED,
    STRATEGIES,
    WAIT_S,
    Net,
    batch,
    forget_frames,
    loss_of,
    on_ranks,
    wrap,
)

FULL, GRAD_OP, NONE, HYBRID = STRATEGIES

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
each_sharded = pytest.mark.parametrize("strategy", SHARDED, ids=lambda s: s.name)
each_freeing = pytest.mark.parametrize("strategy", FREEING, ids=lambda s: s.name)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 2).to_sparse())


@pytest.fixture
def end():
    """A world of one rank, in the test's thread."""
    (end,) = create_collectives(1)
    yield end
    end.close()


@pytest.mark.parametrize(
    ("world_size", "arguments", "error", "message"),
    [
        (4, {"strategy": HYBRID}, ValueError, "needs intra_node_size"),
        (4, {"strategy": HYBRID, "intra_node_size": 3}, ValueError, "does not divide"),
        (4, {"strategy": HYBRID, "intra_node_size": 0}, ValueError, "does not divide"),
        (4, {"strategy": HYBRID, "intra_node_size": 8}, ValueError, "does not divide"),
        (4, {"strategy": HYBRID, "intra_node_size": 2.0}, TypeError, "pass an int"),
        (4, {"strategy": FULL, "intra_node_size": 2}, ValueError, "has no meaning"),
        (1, {"strategy": "full_shard"}, TypeError, "pass a ShardingStrategy"),
        (1, {"module": nn.ReLU()}, ValueError, "no parameters"),
        (1, {"module": Net}, TypeError, "wraps a torch.nn.Module"),
        (1, {"module": nn.LazyLinear(3)}, ValueError, "is lazy"),
        (1, {"module": nn.Linear(2, 2, device="meta")}, ValueError, "meta device"),
        (1, {"module": nn.Linear(2, 2, dtype=torch.complex64)}, ValueError, "complex64"),
        (1, {"module": Sparse()}, ValueError, "layout torch.sparse_coo; only dense"),
        (1, {"collective": "thread"}, TypeError, "create_collectives"),
    ],
)
def test_invalid_arguments_raise_before_any_exchange(world_size, arguments, error, message):
    # Rank 0 is alone: an exchange would time out.
    ends = create_collectives(world_size, timeout_s=1.0)
    try:
        with pytest.raises(error, match=message):
            FSDP(**{"module": nn.Linear(2, 2), "collective": ends[0], **arguments})
        ends[0].check()
    finally:
        for end in ends:
            end.close()


def test_a_module_that_holds_an_fsdp_cannot_be_wrapped(end):
    with pytest.raises(ValueError, match="contains an FSDP already"):
        FSDP(nn.Sequential(wrap(end)), end)


@pytest.mark.parametrize("held", ["all", "one"])
def test_an_optimizer_built_before_wrapping_is_detected(end, held):
    net = Net()
    params = net.parameters() if held == "all" else [{"params": [net.hidden.bias]}]
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.step()
    fsdp = wrap(end, module=net)
    with pytest.raises(ValueError, match=r"built from '.*' before .* from fsdp.parameters\(\)"):
        optimizer.step()
    torch.optim.SGD(fsdp.parameters(), lr=0.1).step()


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_a_step_without_the_gradients_of_the_other_ranks_is_refused(strategy):
    nodes = {"intra_node_size": 1} if strategy is ShardingStrategy.HYBRID_SHARD else {}

    def work(end):
        fsdp = FSDP(Net(), end, strategy, **nodes)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        data = batch(2, end.rank)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(fsdp, data).backward()
            with pytest.raises(RuntimeError, match=r"SGD would step .* call fsdp.sync_gradients"):
                optimizer.step()
            fsdp.sync_gradients()
            for gradient in (p.grad for p in fsdp.parameters() if p.grad is not None):
                gradient.mul_(0.5)  # as clipping and unscaling do
            optimizer.step()
        loss_of(fsdp, data)  # no backward: there is nothing to reduce
        optimizer.step()
        loss_of(fsdp, data).backward()
        fsdp.zero_grad()
        optimizer.step()
        fsdp.close()

    on_ranks(2, work)


def test_a_single_rank_with_full_parameters_may_step_without_a_sync(end):
    fsdp, alone = FSDP(Net(), end, ShardingStrategy.NO_SHARD), Net()
    for net in (fsdp, alone):
        loss_of(net, batch(1, 0)).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    torch.testing.assert_close(fsdp.full_state_dict(), alone.state_dict())


def test_lists_of_parameters_and_other_optimizers_are_not_affected(end):
    net, other = Net(), Net()
    params = tuple(net.parameters())
    kept, optimizer = list(params), torch.optim.SGD(other.parameters(), lr=0.1)
    wrap(end, module=net)
    assert all(map(operator.is_, kept, params))
    other.scale.grad = torch.ones_like(other.scale)
    optimizer.step()
    assert other.scale.item() == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: nn.Linear(3, 2 + rank), r"rank 1 .* shape \(3, 3\).* rank 0 .*\(2, 3\)"),
        (lambda rank: nn.Linear(3, 2, bias=rank == 0), r"rank 1 .* nothing, rank 0 .*'bias'"),
        (lambda rank: nn.Linear(3, 2).requires_grad_(rank == 0), r"has frozen .* trainable"),
        (lambda rank: nn.Linear(3, 2).to([torch.float64, torch.float32][rank]), "float32"),
        (lambda rank: [nn.LayerNorm(2), nn.BatchNorm1d(2)][rank], "running_mean"),
    ],
)
def test_modules_that_differ_are_an_error_on_every_rank(make, message):
    def work(end):
        with pytest.raises(ReplicaMismatch, match=message):
            FSDP(make(end.rank), end)

    on_ranks(2, work)


def test_strategies_that_differ_are_an_error_on_every_rank():
    def work(end):
        strategy = [FULL, GRAD_OP][end.rank]
        with pytest.raises(ReplicaMismatch, match=r"SHARD_GRAD_OP .* FULL_SHARD"):
            FSDP(nn.Linear(2, 2), end, strategy)

    on_ranks(2, work)


@each_strategy
def test_syncing_before_a_forward_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        with pytest.raises(RuntimeError, match=r"before forward\(\)"):
            fsdp.sync_gradients()
        with torch.no_grad():
            fsdp(batch(2)[0])
        with pytest.raises(RuntimeError, match=r"before forward\(\)"):
            fsdp.sync_gradients()
        loss_of(fsdp, batch(2)).backward()
        fsdp.sync_gradients()
        with pytest.raises(RuntimeError, match=r"before forward\(\)"):
            fsdp.sync_gradients()
        end.check()

    on_ranks(2, work)


@each_strategy
def test_clipping_before_a_sync_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        loss_of(fsdp, batch(2)).backward()
        with pytest.raises(RuntimeError, match="sync first"):
            fsdp.clip_grad_norm_(1.0)
        end.check()

    on_ranks(2, work)


@each_freeing
def test_prefetching_twice_is_an_error_and_the_first_stays_valid(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        fsdp.prefetch_forward_params()
        with pytest.raises(RuntimeError, match="twice without"):
            fsdp.prefetch_forward_params()
        assert fsdp.has_pending_prefetch
        loss_of(fsdp, batch(2)).backward()
        fsdp.sync_gradients()

    on_ranks(2, work)


@pytest.mark.parametrize("strategy", [GRAD_OP, NONE], ids=lambda s: s.name)
def test_prefetching_parameters_that_are_never_freed_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        with pytest.raises(RuntimeError, match=f"{strategy.name} keeps full parameters"):
            fsdp.prefetch_forward_params()
        assert not fsdp.has_pending_prefetch
        end.check()

    on_ranks(2, work)


@each_freeing
def test_prefetching_between_forward_and_sync_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        loss = loss_of(fsdp, batch(2))
        with pytest.raises(RuntimeError, match="holds the full parameters"):
            fsdp.prefetch_forward_params()
        loss.backward()
        fsdp.sync_gradients()
        fsdp.prefetch_forward_params()
        fsdp.close()

    on_ranks(2, work)


@each_freeing
def test_a_step_after_a_prefetch_is_an_error_and_the_prefetch_is_dropped(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        fsdp.prefetch_forward_params()
        with torch.no_grad():
            for p in fsdp.parameters():
                p.mul_(0.5)
        with pytest.raises(RuntimeError, match="step the optimizer first, then prefetch"):
            fsdp(batch(2)[0])
        with torch.no_grad():
            logits = fsdp(batch(2)[0])
        net = Net()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.5)
            assert logits.equal(net(batch(2)[0]))

    on_ranks(2, work)


@each_strategy
@pytest.mark.parametrize(
    "change", [lambda flat: flat[:-1], lambda flat: torch.cat([flat, flat[:1]]), lambda f: f[None]]
)
def test_updating_shards_with_a_wrong_size_is_an_error(strategy, change):
    def work(end):
        fsdp = wrap(end, strategy)
        flat = torch.cat([p.detach().view(-1) for p in fsdp.parameters()])
        numel = flat.numel()
        with pytest.raises(ValueError, match=f"this rank has {numel} elements"):
            fsdp.update_shards(change(flat))
        with pytest.raises(TypeError, match="takes a tensor"):
            fsdp.update_shards(flat.tolist())

    on_ranks(3, work)


@each_freeing
def test_writing_shards_while_a_prefetch_is_pending_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        flat = torch.cat([p.detach().view(-1) for p in fsdp.parameters()])
        state = fsdp.full_state_dict()
        own = fsdp.state_dict()
        fsdp.prefetch_forward_params()
        for call in (
            lambda: fsdp.update_shards(flat),
            lambda: fsdp.load_full_state_dict(state),
            lambda: fsdp.load_state_dict(own),
        ):
            with pytest.raises(RuntimeError, match="prefetch is pending"):
                call()
        fsdp.close()

    on_ranks(2, work)


@each_sharded
def test_a_backward_after_the_sync_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        loss = loss_of(fsdp, batch(4))
        loss.backward(retain_graph=True)
        fsdp.sync_gradients()
        with pytest.raises(RuntimeError, match=r"run every backward\(\) before sync_gradients"):
            loss.backward()

    on_ranks(2, work)


@each_sharded
def test_freezing_after_wrapping_is_an_error(strategy):
    def work(end):
        fsdp = wrap(end, strategy)
        next(fsdp.parameters()).requires_grad_(False)
        with pytest.raises(RuntimeError, match="before wrapping"):
            fsdp(batch(2)[0])

    on_ranks(2, work)


@each_strategy
@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.half(), lambda m: m.cpu()])
def test_moving_and_converting_a_wrapped_module_is_an_error(end, strategy, move):
    with pytest.raises(RuntimeError, match="before wrapping"):
        move(wrap(end, strategy))


@each_strategy
def test_calls_on_a_closed_or_unwrapped_module_raise(strategy):
    def work(end):
        closed, unwrapped = wrap(end, strategy), wrap(end, strategy)
        closed.close()
        closed.close()
        unwrapped.unwrap()
        for fsdp in (closed, unwrapped):
            for call in (
                lambda fsdp=fsdp: fsdp(batch(2)[0]),
                fsdp.prefetch_forward_params,
                fsdp.sync_gradients,
                fsdp.broadcast_updated_params,
                fsdp.full_state_dict,
                fsdp.unwrap,
                fsdp.reshard,
            ):
                with pytest.raises(RuntimeError, match="closed or unwrapped"):
                    call()
        end.check()

    on_ranks(2, work)


@dataclass
class Heads:
    """The output of a model with several heads."""

    more: tuple


@pytest.mark.parametrize(
    "pack",
    [
        lambda y: (y, [y * 2]),
        lambda y: {"out": y, "more": (y * 2,)},
        lambda y: Heads(more=(y * 2,)),
    ],
    ids=["tuple", "dict", "dataclass"],
)
def test_backward_after_reshard_is_refused_for_nested_outputs(pack):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return pack(self.net(x))

    def work(end):
        fsdp = wrap(end, ShardingStrategy.FULL_SHARD, Packed())
        out = fsdp(batch(4)[0])
        if isinstance(out, Heads):
            last = out.more[0]
        else:
            last = out[1][0] if isinstance(out, tuple) else out["more"][0]
        fsdp.reshard()
        with pytest.raises(RuntimeError, match="freed or replaced"):
            last.sum().backward()

    on_ranks(2, work)


def test_settings_of_a_single_group_that_differ_from_the_defaults_are_reported(end, caplog):
    fsdp = wrap(end)
    groups = [{"params": list(fsdp.parameters()), "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    loss_of(fsdp, batch(2, end.rank)).backward()
    fsdp.sync_gradients()
    optimizer.step()
    words = "all parameters are in one group, whose weight_decay is not the optimizer's"
    assert words in caplog.text


def test_a_closed_group_that_raises_is_logged_and_the_others_are_closed(caplog):
    def fails():
        raise RuntimeError("planted")

    closed = []
    groups = [
        SimpleNamespace(rank=1, close=fails),
        SimpleNamespace(rank=2, close=lambda: closed.append(2)),
    ]
    group_closer._close(groups)
    assert closed == [2]
    assert "rank 1: a subgroup did not close" in caplog.text


# -- calls of one rank alone -----------------------------------------------------------


def evaluate(fsdp):
    with torch.no_grad():
        fsdp(batch(2)[0])


ALONE = {
    "forward()": (SHARDED, evaluate),
    "sync_gradients()": (STRATEGIES, lambda fsdp: fsdp.sync_gradients()),
    "clip_grad_norm_()": (SHARDED, lambda fsdp: fsdp.clip_grad_norm_(1.0)),
    "full_state_dict()": (STRATEGIES, lambda fsdp: fsdp.full_state_dict()),
    "sync_buffers()": (STRATEGIES, lambda fsdp: fsdp.sync_buffers()),
    "unwrap()": (SHARDED, lambda fsdp: fsdp.unwrap()),
    "broadcast_updated_params()": ([GRAD_OP], lambda fsdp: fsdp.broadcast_updated_params()),
    "prefetch_forward_params()": (FREEING, lambda fsdp: fsdp.prefetch_forward_params()),
    "FSDP(...)": (STRATEGIES, lambda fsdp: FSDP(Net(), fsdp.collective)),
}
each_call_alone = pytest.mark.parametrize(
    ("call", "strategy"),
    [(call, strategy) for call, (strategies, _) in ALONE.items() for strategy in strategies],
    ids=lambda value: getattr(value, "name", value),
)


def stepped(end, strategy, call):
    """A wrapped module at a point at which the call may be made."""
    fsdp = wrap(end, strategy)
    loss_of(fsdp, batch(2, end.rank)).backward()
    if call != "sync_gradients()":
        fsdp.sync_gradients()
        torch.optim.SGD(fsdp.parameters(), lr=0.1).step()
    return fsdp


def refused(call, fsdp):
    with pytest.raises((CollectiveAborted, CollectiveTimeout)) as caught:
        ALONE[call][1](fsdp)
    forget_frames(caught.value)
    fsdp.close()
    return str(caught.value)


@each_call_alone
def test_a_call_of_one_rank_alone_is_named_once_the_others_have_closed(call, strategy):
    def work(end):
        fsdp = stepped(end, strategy, call)
        message = refused(call, fsdp) if end.rank == 0 else fsdp.close()
        end.close()
        return message

    message, _ = on_ranks(2, work)
    assert message.startswith(
        f"rank 0 called {call}, which all ranks have to call, and rank 1 did not: rank 1 has left"
    )


def test_all_ranks_that_did_not_make_a_call_are_named():
    def work(end):
        fsdp = stepped(end, FULL, "forward()")
        message = refused("forward()", fsdp) if end.rank == 1 else fsdp.close()
        end.close()
        return message

    _, message, _ = on_ranks(3, work)
    assert "rank 1 called forward(), which all ranks have to call, and ranks 0, 2 did" in message


@each_call_alone
def test_a_call_where_another_rank_makes_another_one_is_named_on_both(call, strategy):
    """Their exchanges may fit each other: no rank continues with the wrong tensors."""
    other = "full_state_dict()" if call == "sync_buffers()" else "sync_buffers()"

    def work(end):
        return refused(other if end.rank else call, stepped(end, strategy, call))

    one, two = on_ranks(2, work)
    assert one == two
    named, _, rule = one.partition(": ")
    assert named in (
        f"rank 0 called {call} where rank 1 called {other}",
        f"rank 1 called {other} where rank 0 called {call}",
    )
    assert rule.startswith("all ranks have to make the same calls of FSDP in the same order")


def test_a_batch_more_on_one_rank_is_named():
    """The exchange of its forward fits that of the other's full_state_dict()."""

    def work(end):
        fsdp = FSDP(nn.Linear(6, 1), end)
        for _ in range(2 - end.rank):
            fsdp(torch.ones(2, 6)).sum().backward()
            fsdp.sync_gradients()
        fsdp.full_state_dict()

    with pytest.raises(CollectiveAborted, match=r"called (forward|full_state_dict)\(\) where rank"):
        on_ranks(2, work)


def test_a_rank_that_never_comes_is_named_with_the_call():
    is_over = threading.Event()

    def work(end):
        fsdp = stepped(end, FULL, "full_state_dict()")
        if end.rank == 1:
            return is_over.wait(WAIT_S)
        message = refused("full_state_dict()", fsdp)
        is_over.set()
        return message

    message, _ = on_ranks(2, work, timeout_s=0.5)
    assert re.fullmatch(
        r"rank 0 called full_state_dict\(\), which all ranks have to call, and rank 1 did not: "
        r"rank 0 waited 0.5 s .*: pass a longer timeout_s to create_collectives .*",
        message,
    )


def test_calls_of_plain_collectives_that_differ_name_the_ranks_and_the_rule():
    def work(end):
        call = end.barrier if end.rank else lambda: end.all_reduce_(torch.ones(2))
        rule = "rank 1 called barrier, rank 0 called all_reduce_: all ranks have to make the same"
        with pytest.raises(ValueError, match=rule):
            call()

    on_ranks(2, work)
