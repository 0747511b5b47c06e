"""Memory of a rank outside forward and backward, compared with a replicated run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.harness.reachable import reachable_bytes
from runtime import ShardingStrategy
from tests.support.fsdp_ranks import on_ranks, wrap

FULL, GRAD_OP, NONE, HYBRID = ShardingStrategy
MARGIN = 0.05


def make_model():
    return nn.Sequential(
        nn.Embedding(101, 48), nn.Linear(48, 300), nn.LayerNorm(300), nn.Linear(300, 257)
    )


def full_bytes():
    return reachable_bytes(make_model())


def held_by_a_rank(end, strategy):
    """Bytes after a step, with gradients and AdamW's state, and before a sync."""
    fsdp = wrap(end, strategy, make_model())
    optimizer = torch.optim.AdamW(fsdp.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        fsdp(torch.arange(101)).square().mean().backward()
        end.barrier()  # a peer's tensors in an exchange are reachable from here
        within = reachable_bytes(fsdp, optimizer)
        end.barrier()
        fsdp.sync_gradients()
        optimizer.step()
        fsdp.broadcast_updated_params()
    end.barrier()
    after = reachable_bytes(fsdp, optimizer)
    optimizer.zero_grad()
    without_gradients = reachable_bytes(fsdp, optimizer)
    end.barrier()
    return after, without_gradients, within


@pytest.mark.parametrize("kind", ["thread", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(world_size, kind):
    ranks = on_ranks(world_size, lambda end: held_by_a_rank(end, FULL), kind)
    replicated = on_ranks(1, lambda end: held_by_a_rank(end, NONE))[0][0]
    assert replicated >= 4 * full_bytes()
    for after, without_gradients, _ in ranks:
        assert after <= (1 / world_size + MARGIN) * replicated
        assert without_gradients <= 0.76 * after


def test_a_rank_of_a_hybrid_holds_its_share_within_a_node():
    ranks = on_ranks(4, lambda end: held_by_a_rank(end, HYBRID))
    replicated = on_ranks(1, lambda end: held_by_a_rank(end, NONE))[0][0]
    for after, _, _ in ranks:
        assert after <= (1 / 2 + MARGIN) * replicated


def test_shard_grad_op_shards_gradients_and_optimizer_state_only():
    ranks = on_ranks(4, lambda end: held_by_a_rank(end, GRAD_OP))
    for after, _, _ in ranks:
        # Full parameters, and a quarter each of the shard, its gradient and AdamW's two.
        assert after <= (1 + 4 / 4 + 4 * MARGIN) * full_bytes()


def test_within_a_step_full_parameters_and_gradients_exist_too():
    for _, _, within in on_ranks(4, lambda end: held_by_a_rank(end, FULL)):
        # Two of full size, and a quarter each of the shard and AdamW's two.
        assert 2 * full_bytes() <= within <= (2 + 3 / 4 + 4 * MARGIN) * full_bytes()


def test_shared_memory_counts_once():
    whole = torch.zeros(100)
    assert reachable_bytes([whole[:10], whole[50:], {"again": whole}]) == 400


def test_gradients_hidden_references_and_cycles_are_followed():
    parameter = nn.Parameter(torch.zeros(10))
    parameter.grad = torch.zeros(10)
    parameter.kept = torch.zeros(5)
    holder = [parameter]
    holder.append(holder)
    assert reachable_bytes(holder) == 100
    assert reachable_bytes(lambda: parameter) == 0
