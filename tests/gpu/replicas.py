"""Averages two replicas on one device, whose expected values are known exactly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn

from coordinator.averaging import Averager
from runtime.collective import create_collectives
from runtime.replica.averager import ReplicaAverager
from tests.gpu.delays import DelayedState, Delays, context_of

SIZE = 1 << 16
WAIT_S = 60.0


class Numbers(nn.Module):
    """A parameter and a buffer to which each step adds, behind a delay."""

    def __init__(self, delays):
        super().__init__()
        self._delays = delays
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(7, dtype=torch.float64))

    @torch.no_grad()
    def step(self, amount):
        self._delays()
        self.w.add_(amount)
        self._delays()
        self.seen.add_(amount)


class Rank:
    """A replica with its own thread."""

    def __init__(self, rank, device):
        self.rank, self.expected, self.base = rank, 0.0, 0.0
        self._torch_device = device
        self._delays = Delays(device, rank)
        self.device = context_of(device, self._delays)
        self.pool = ThreadPoolExecutor(1)
        self._active = self.device.activate()
        self.run(self._build)

    def run(self, work, *args):
        return self.pool.submit(work, *args).result(WAIT_S)

    def _build(self):
        self._active.__enter__()
        self.model = Numbers(self._delays).to(self._torch_device)
        self.state = DelayedState(self.model, self._delays)
        self.averager = ReplicaAverager(self.state, self.device, None)

    def close(self):
        self.run(self._active.__exit__, None, None, None)
        self.pool.shutdown()

    def train(self, num_steps):
        for _ in range(num_steps):
            self.model.step(self.rank + 1)
            self.expected += self.rank + 1

    def snapshot(self):
        payload, copied, _ = self.averager.start_snapshot()
        self.base = self.expected
        self.train(1)  # overlaps the copy
        if copied is not None:
            copied.wait()
        return payload

    def take(self, average, value):
        self.train(1)
        copied = self.averager.apply(average)
        self.expected += value - self.base
        self.train(1)
        return copied

    def all_reduce(self, weight):
        self.train(1)
        self.averager.all_reduce(weight)

    def check(self):
        for tensor in (self.model.w, self.model.seen):
            assert bool((tensor == self.expected).all())


@contextmanager
def two_ranks(device):
    ranks = [Rank(rank, device) for rank in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def average_over_the_cpu(device, num_rounds):
    """Average through pinned memory; values are exact, so a missing stream wait changes them."""
    averager = Averager()
    with two_ranks(device) as ranks:
        for round_id in range(num_rounds):
            for rank in ranks:
                rank.run(rank.train, 1 + round_id % 2)
            payloads = [rank.run(rank.snapshot) for rank in ranks]
            for rank, payload in zip(ranks, payloads, strict=True):
                assert bool((payload.params[0] == rank.base).all())
                assert bool((payload.buffers[0] == rank.base).all())
            result = averager.average(payloads, (1, 1))
            value = (ranks[0].base + ranks[1].base) / 2
            copies = [rank.run(rank.take, result.average, value) for rank in ranks]
            if round_id % 50 == 49 or round_id == num_rounds - 1:
                for rank in ranks:
                    rank.run(rank.check)
            for rank, copied in zip(ranks, copies, strict=True):
                if copied is not None:
                    rank.run(copied.wait)


def average_in_shared_memory(device, num_rounds):
    """Average with the thread collective, which stages GPU tensors in host memory."""
    ends = create_collectives(2, "thread", [device] * 2, WAIT_S)
    with two_ranks(device) as ranks:
        for rank, end in zip(ranks, ends, strict=True):
            rank.averager.collective = end
        for round_id in range(num_rounds):
            futures = [rank.pool.submit(rank.all_reduce, 1) for rank in ranks]
            for future in futures:
                future.result(WAIT_S)
            mean = sum(rank.expected for rank in ranks) / 2
            for rank in ranks:
                rank.expected = mean
                rank.run(rank.train, 1)
            if round_id % 50 == 49 or round_id == num_rounds - 1:
                for rank in ranks:
                    rank.run(rank.check)
    for end in ends:
        end.close()
