"""Machines as threads of one process, and models that record each sample's effects, for tests."""

from __future__ import annotations

import threading
from collections import Counter

import torch
from torch import nn

from coordinator.cluster.machine_report import MAX_OPEN_EPOCHS, MachineReport
from coordinator.splitting import permutation
from runtime import Mean, Trainer
from runtime.cluster.cluster_settings import ClusterSettings
from runtime.cluster.options import EngineOptions
from tests.support.running import CADENCE, OVER_CPU, WAIT_S

PERIOD_S = 0.05


SLOTS = MAX_OPEN_EPOCHS + 1
"""Elements per sample, so that epochs open at the same time change different ones."""


class Effects(nn.Module):
    """A model with one element or more per sample, which only steps on that sample change."""

    def __init__(self, n, slots=1):
        super().__init__()
        self.n, self.slots = n, slots
        self.w = nn.Parameter(torch.zeros(slots * n, dtype=torch.float64))

    def elements(self, samples, epoch):
        """The elements of these samples that an epoch changes."""
        return self.w[samples + epoch % self.slots * self.n]


class RecordedChanges(Mean):
    """Records the change of each round."""

    def __init__(self, n):
        self.n = n
        self.changes = []

    def step(self, old, change):
        self.changes.append(change[0].clone())
        return super().step(old, change)

    def rounds_of_each_sample(self):
        """Number of rounds in which each sample had an effect."""
        none = torch.zeros(self.n, dtype=torch.int64)
        return sum(((c[: self.n].abs() > 1e-9).long() for c in self.changes), none)


class Counted(Mean):
    """Counts the rounds in which each element has changed, over the whole history: the counts are
    part of the healing state and of checkpoints.
    """

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
    """The counts of :class:`Counted` after a history in which each batch counts once."""
    expected = torch.zeros(SLOTS, n, dtype=torch.int64)
    for epoch in range(ledger.first_open):
        expected[epoch % SLOTS] += 1
    for epoch in ledger.open_epochs:
        order = permutation(n, epoch, seed)
        for span in ledger.consumed_of(epoch):
            expected[epoch % SLOTS, order[span.start * batch_size : span.stop * batch_size]] += 1
    return expected.view(-1)


class Machine:
    """One machine of a cluster with the engine of ``tests/support/memory_engine.py``.

    Args:
        cluster: The ``MemoryCluster``.
        name: The machine's id.
        n: Number of samples.
        epochs: Number of epochs.
        hold: Event for which each step waits, or ``None``.
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
        self.outer = RecordedChanges(n) if outer is None else outer
        self.started = threading.Event()
        self._lock = threading.Lock()
        self._hold = hold
        self._before_step = before_step

        def train(model, batch):
            (samples,) = batch
            self.started.set()
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
    """True if all states are bitwise equal."""
    return all(torch.equal(states[0].params["w"], state.params["w"]) for state in states)


def report_of(ledger, machine, done=(), **values):
    """The report of a machine that is up to date with a ledger."""
    return MachineReport(
        machine=machine,
        step=ledger.step,
        lineage=ledger.lineage,
        consumed=ledger.consumed,
        settings=ledger.settings,
        done=done,
        **values,
    )
