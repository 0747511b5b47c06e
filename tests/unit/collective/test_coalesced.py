"""Coalesced collectives: equal to one call for each tensor, and refused on every rank alike."""

from __future__ import annotations

import torch

from runtime.collective import ReduceOp, ThreadCollective
from tests.support.pairs import pairwise
from tests.unit.collective.test_collectives import (
    KINDS,
    assert_same_bits,
    each_kind,
    errors_of,
    group_of,
    on_ranks,
    values_of,
)

WORLD_SIZE = 3
SIZES = (7, 0, 6_011, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32)


def inputs_of(rank, num_parts=1):
    return [
        values_of(WORLD_SIZE, size * num_parts, dtype)[rank]
        for size, dtype in zip(SIZES, DTYPES, strict=True)
    ]


def gathered(end, *, coalesced):
    inputs = inputs_of(end.rank)
    outputs = [tensor.new_empty(WORLD_SIZE * tensor.numel()) for tensor in inputs]
    if coalesced:
        end.all_gather_coalesced(outputs, inputs)
    else:
        for output, tensor in zip(outputs, inputs, strict=True):
            end.all_gather_into(output, tensor)
    return outputs


def scattered(end, *, coalesced):
    inputs = inputs_of(end.rank, WORLD_SIZE)
    outputs = [tensor.new_empty(tensor.numel() // WORLD_SIZE) for tensor in inputs]
    if coalesced:
        end.reduce_scatter_coalesced(outputs, inputs, ReduceOp.AVG)
    else:
        for output, tensor in zip(outputs, inputs, strict=True):
            end.reduce_scatter_into(output, tensor, ReduceOp.AVG)
    return outputs


def reduced(end, *, coalesced):
    tensors = inputs_of(end.rank)
    if coalesced:
        end.all_reduce_coalesced_(tensors, ReduceOp.AVG)
    else:
        for tensor in tensors:
            end.all_reduce_(tensor, ReduceOp.AVG)
    return tensors


@pairwise(limit=[1, 30_000, float("inf")], call=[gathered, scattered, reduced], kind=KINDS)
def test_a_coalesced_call_gives_the_values_of_single_calls(kind, call, limit, monkeypatch):
    monkeypatch.setattr(ThreadCollective, "coalesced_bytes", limit)
    with group_of(WORLD_SIZE, kind) as ends:
        single = on_ranks(ends, lambda end: call(end, coalesced=False))
        coalesced = on_ranks(ends, lambda end: call(end, coalesced=True))
    for one, other in zip(single, coalesced, strict=True):
        for expected, tensor in zip(one, other, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
    if call is not scattered:
        for tensors in zip(*coalesced, strict=True):
            assert_same_bits(list(tensors))


@each_kind
def test_a_rank_with_another_number_of_tensors_is_refused_on_every_rank(kind):
    def call(end):
        tensors = inputs_of(end.rank)
        end.all_reduce_coalesced_(tensors[: 3 if end.rank == 1 else 4])

    with group_of(WORLD_SIZE, kind) as ends:
        for error in errors_of(ends, call):
            assert isinstance(error, ValueError)
            assert "3 tensors" in str(error)
        on_ranks(ends, lambda end: end.barrier())


@each_kind
def test_an_output_without_an_input_is_refused_on_every_rank(kind):
    def call(end):
        inputs = [torch.ones(2), torch.ones(2)]
        outputs = [torch.ones(2 * WORLD_SIZE)] * (2 if end.rank else 3)
        end.all_gather_coalesced(outputs, inputs)

    with group_of(WORLD_SIZE, kind) as ends:
        for error in errors_of(ends, call):
            assert isinstance(error, ValueError)
            assert "rank 0" in str(error)
