"""Rendezvous of ranks and host waits in a step of FSDP over NCCL, on fakes."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn

from runtime import FSDP, ShardingStrategy
from runtime.collective.barrier import AbortableBarrier
from runtime.device import cuda_api
from runtime.fsdp import layout as layout_module
from tests.support.fake_cuda import GPU, FakeCuda
from tests.support.fsdp_ranks import outcomes_of
from tests.support.posing import posing_group

TIMEOUT_S = 20.0
FULL, GRAD_OP, NONE, HYBRID = ShardingStrategy


class Counting(FakeCuda):
    """Counts the events that the host queries or waits for, each recording once."""

    def __init__(self):
        super().__init__(patience=1, allow_default=True, prompt=True)
        self.awaited = set()

    def is_complete(self, event):
        self.awaited.add((event.number, event.recorded))
        return super().is_complete(event)

    def wait_host(self, event):
        self.awaited.add((event.number, event.recorded))
        super().wait_host(event)


def layers(num_layers):
    return nn.Sequential(*[nn.Linear(12, 12) for _ in range(num_layers)])


def exchanges_of_a_step(strategy, num_layers, monkeypatch):
    """Meetings and host waits of one rank in a step, all ranks' counts being equal."""
    fake = Counting()
    meetings = Counter()
    wait = AbortableBarrier.wait

    def counted_wait(barrier, rank, *args):
        meetings[threading.get_ident()] += 1  # ranks are numbered anew in a subgroup
        wait(barrier, rank, *args)

    def steps(end):
        with fake.on_device(GPU), fake.stream(cuda_api.API.new_stream(GPU)):
            nodes = 1 if strategy is HYBRID else None
            fsdp = FSDP(layers(num_layers), end, strategy, nodes)
            optimizer = torch.optim.SGD(fsdp.parameters(), 0.1)
            fsdp(torch.ones(2, 12)).sum().backward()
            fsdp.sync_gradients()  # the first one compares replicated parameters
            optimizer.step()
            fsdp.broadcast_updated_params()
            end.barrier()
            if end.rank == 0:
                fake.awaited.clear()
            end.barrier()
            before = meetings[threading.get_ident()]
            optimizer.zero_grad()
            fsdp(torch.ones(2, 12)).sum().backward()
            fsdp.sync_gradients()
            optimizer.step()
            fsdp.broadcast_updated_params()
            num_meetings = meetings[threading.get_ident()] - before
            end.barrier()
            num_waits = len(fake.awaited) / end.world_size
            end.barrier()
            fsdp.close()
            return num_meetings, num_waits

    monkeypatch.setattr(AbortableBarrier, "wait", counted_wait)
    with posing_group(2, "nccl", TIMEOUT_S, fake=fake) as ends:
        first, second = outcomes_of(ends, steps)
    monkeypatch.setattr(AbortableBarrier, "wait", wait)
    assert first == second, (first, second)
    return first


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.name)
def test_a_step_over_nccl_meets_and_waits_as_often_for_many_buckets_as_for_one(
    strategy, monkeypatch
):
    monkeypatch.setattr(layout_module, "LARGE_ELEMENTS", 100)  # each weight is exchanged alone
    monkeypatch.setattr(layout_module, "BUCKET_BYTES", 100)  # two biases a bucket
    few = exchanges_of_a_step(strategy, 1, monkeypatch)
    many = exchanges_of_a_step(strategy, 9, monkeypatch)
    assert many == few
    num_exchanges = {FULL: 2, GRAD_OP: 2, NONE: 1, HYBRID: 3}[strategy]
    assert many[1] == num_exchanges
