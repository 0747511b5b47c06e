"""Shares of a run in which the data of one rank are slow, with clocks that its functions set."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import Dataset

import runtime.data.loader
import runtime.device.timing
from runtime import current_worker
from tests.support.running import SYNC, THREAD, WAIT_S, builder

SIZE, NUM_STEPS = 10, 30
COMPUTE_S, READ_S = 0.01, 0.03
"""Seconds that a sample takes to train, and to read on a rank with slow data."""


class ThreadClock(threading.local):
    """A clock of each thread, which only :meth:`advance` moves; replaces the module ``time``."""

    now = 0.0

    def advance(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = ThreadClock()
    monkeypatch.setattr(runtime.data.loader, "time", clock)
    monkeypatch.setattr(runtime.device.timing, "time", clock)
    return clock


class SlowData(Dataset):
    """Samples that take ``READ_S`` to read on the slow ranks."""

    def __init__(self, clock, slow):
        self._clock, self._slow = clock, slow

    def __len__(self):
        return NUM_STEPS * 2 * SIZE

    def __getitem__(self, index):
        if current_worker().rank in self._slow:
            self._clock.advance(READ_S)
        return torch.ones(2)


def share_of_rank_1(clock, *, slow, prefetch, policy=SYNC):
    def train(model, batch):
        clock.advance(COMPUTE_S * len(batch))
        return model(batch).mean()

    run = builder(
        model=lambda device: torch.nn.Linear(2, 1),
        optim=lambda params: torch.optim.SGD(params, 0.01),
        train=train,
        dataset=SlowData(clock, slow),
        batch_size=SIZE,
        epochs=2,
        ranks=2,
        way=(policy, THREAD),
    )
    run.balance(True).prefetch(prefetch)
    state = run.run().join(WAIT_S)
    last = state.metrics[-1].per_rank
    return last[1].num_samples / sum(rank.num_samples for rank in last)


@pytest.mark.parametrize(("prefetch", "share"), [(0, 1 / 5), (1, 1 / 4)])
def test_a_rank_with_slow_data_gets_the_share_that_it_delivers(clock, prefetch, share):
    assert share_of_rank_1(clock, slow={1}, prefetch=prefetch) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("slow", [(), (0, 1)])
def test_shares_are_equal_where_the_data_of_all_ranks_are_alike(clock, slow):
    assert share_of_rank_1(clock, slow=slow, prefetch=0) == pytest.approx(0.5, abs=0.01)
