"""What the tests of clusters share: machines as threads of one process, and whose effect counts."""

from __future__ import annotations

import threading
from collections import Counter

import torch
from torch import nn

from coordinator.cluster.facts import MAX_OPEN_EPOCHS
from coordinator.splitting import permutation
from runtime import Mean, Trainer
from runtime.cluster.options import EngineOptions
from runtime.cluster.settings import ClusterSettings
from tests.support.running import CADENCE, OVER_CPU, WAIT_S

PERIOD_S = 0.05


SLOTS = MAX_OPEN_EPOCHS + 1
"""Numbers of a sample, so that epochs which may be open at a time change different ones."""


class Effects(nn.Module):
    """A number for each sample, or several, which a step on it changes, and no other."""

    def __init__(self, n, slots=1):
        super().__init__()
        self.n, self.slots = n, slots
        self.w = nn.Parameter(torch.zeros(slots * n, dtype=torch.float64))

    def numbers(self, samples, epoch):
        """Those of some samples that an epoch changes."""
        return self.w[samples + epoch % self.slots * self.n]


class RecordedRun(Mean):
    """Notes what each round changes."""

    def __init__(self, n):
        self.n = n
        self.changes = []

    def step(self, old, change):
        self.changes.append(change[0].clone())
        return super().step(old, change)

    def rounds_of_each_sample(self):
        """In how many rounds each sample had an effect."""
        none = torch.zeros(self.n, dtype=torch.int64)
        return sum(((c[: self.n].abs() > 1e-9).long() for c in self.changes), none)


class Counted(Mean):
    """Counts the rounds in which each number has changed, over the whole history: the counts
    heal machines and stand in checkpoints."""

    def __init__(self, n):
        self.counts = torch.zeros(SLOTS * n, dtype=torch.int64)

    def step(self, old, change):
        self.counts = self.counts + (change[0][: len(self.counts)].abs() > 1e-9)
        return super().step(old, change)

    def state(self):
        return [self.counts]

    def load_state(self, state):
        (self.counts,) = state


def expected_rounds(ledger, n, batch_size, seed=0):
    """What :class:`Counted` has to say of a history in which each batch counts once."""
    wanted = torch.zeros(SLOTS, n, dtype=torch.int64)
    for epoch in range(ledger.first_open):
        wanted[epoch % SLOTS] += 1
    for epoch in ledger.open_epochs:
        order = permutation(n, epoch, seed)
        for span in ledger.consumed_of(epoch):
            wanted[epoch % SLOTS, order[span.start * batch_size : span.stop * batch_size]] += 1
    return wanted.view(-1)


class Machine:
    """One machine of a cluster, whose engine is that of ``tests/support/memory_engine.py``.

    Args:
        cluster: The ``MemoryCluster``.
        name: Its name, which orders machines.
        n: Samples.
        epochs: Epochs.
        hold: An event for which each step waits; ``None``: none.
    """

    def __init__(
        self,
        cluster,
        name,
        *,
        n=203,
        epochs=1,
        ranks=2,
        way=(CADENCE, OVER_CPU),
        batch_size=4,
        outer=None,
        hold=None,
        before_step=None,
        configure=lambda builder: builder,
        period_s=PERIOD_S,
        timeout_s=5.0,
    ):
        self.trained = Counter()
        self.outer = RecordedRun(n) if outer is None else outer
        self.began = threading.Event()
        self._lock = threading.Lock()
        self._hold = hold
        self._before_step = before_step

        def train(model, batch):
            (samples,) = batch
            self.began.set()
            if self._hold is not None:
                assert self._hold.wait(WAIT_S)
            if self._before_step is not None:
                self._before_step()
            with self._lock:
                self.trained.update(samples.tolist())
            return -model.w[samples].mean()

        builder = (
            Trainer.builder(
                lambda device: Effects(n), lambda params: torch.optim.SGD(params, 1.0), train
            )
            .dataset((torch.arange(n),))
            .batch_size(batch_size)
            .num_epochs(epochs)
            .devices(["cpu"] * ranks)
            .policy(way[0])
            .backend(way[1])
            .progress(False)
        )
        settings = ClusterSettings(
            engine=EngineOptions(address="memory:1", machine=name, timeout_s=timeout_s),
            period_s=period_s,
            outer=self.outer,
            connect=lambda options, offer: cluster.engine(options.machine, offer),
        )
        self.handle = configure(builder)._set(cluster=settings).run()

    def join(self):
        return self.handle.join(WAIT_S)


def same(*states):
    """Whether all states hold the same bits."""
    return all(torch.equal(states[0].params["w"], state.params["w"]) for state in states)
