"""Tests of checkpoints of whole runs."""

from __future__ import annotations

from collections import Counter as Count

import torch
from torch import nn

from coordinator.splitting import permutation
from runtime import CheckpointError, current_worker
from tests.support.running import CADENCE, OVER_CPU, WAIT_S, builder, plain_sgd

SEED = 3
EPOCHS = 3


class Marks(nn.Module):
    """One number for each sample of each epoch, above 0 once the sample was trained."""

    def __init__(self, num_epochs, num_samples):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_epochs, num_samples, dtype=torch.float64))


class MarkingRun:
    """Trains marks, which show the samples in the weights; records which rank trained them."""

    def __init__(self, n=60, batch_size=2, ranks=2, way=(CADENCE, OVER_CPU), epochs=EPOCHS):
        self.n, self.batch_size, self.epochs = n, batch_size, epochs
        self.trained = Count()
        self._ranks, self._way = ranks, way
        self.on_step = lambda worker: None

    def train(self, model, batch):
        worker = current_worker()
        self.on_step(worker)
        self.trained.update((worker.current_epoch, i) for i in batch[0].tolist())
        return -model.w[worker.current_epoch, batch[0]].sum()

    def builder(self):
        made = builder(
            model=lambda device: Marks(self.epochs, self.n).to(device),
            optim=plain_sgd,
            train=self.train,
            dataset=self.n,
            batch_size=self.batch_size,
            epochs=self.epochs,
            ranks=self._ranks,
            way=self._way,
        )
        return made.seed(SEED).anchor(3).tune_allocator(False)

    def all_samples(self):
        return {(epoch, i) for epoch in range(self.epochs) for i in range(self.n)}


def marked(weights):
    """Samples trained into the weights."""
    return set(map(tuple, weights["w"].nonzero().tolist()))


def consumed(data, n, batch_size):
    """Samples that a checkpoint records as consumed."""
    found = {(m.epoch, i) for m in data.run.metrics for i in range(n)}
    for epoch in data.run.epochs:
        order = permutation(n, epoch.epoch, SEED).tolist()
        for span in epoch.consumed:
            for i in order[span.start * batch_size : span.stop * batch_size]:
                found.add((epoch.epoch, i))
    return found


def capture_often(handle, most=40):
    """Take the state repeatedly, as ``handle.save`` does; returns the states, oldest first."""
    taken = []
    while handle.state is None and len(taken) < most:
        try:
            taken.append(handle._run.save(WAIT_S))
        except CheckpointError:
            break
    handle.join(WAIT_S)
    return taken


def captured_run(n, **settings):
    """A run and at least three of its states; has more samples where it would end before."""
    saved = []
    while len(saved) < 3:
        run = MarkingRun(n=n, **settings)
        saved, n = capture_often(run.builder().run()), 2 * n
    return run, saved
