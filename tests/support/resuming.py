"""Tests of checkpoints of whole runs."""

from __future__ import annotations

import functools
import threading
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
        self._permits = None

    def train(self, model, batch):
        worker = current_worker()
        self.on_step(worker)
        assert self._permits is None or self._permits.acquire(timeout=WAIT_S)
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

    def capture_often(self):
        """Run, and take the state as :func:`capture_often` does, at least three times.

        Each request lets a third of the batches be trained, which suffices to answer it.
        """
        self._permits = threading.Semaphore(0)
        num_batches = self.epochs * self.n // self.batch_size
        permit = functools.partial(self._permits.release, num_batches // 3 - 1)
        return capture_often(self.builder().run(), permit=permit)

    def all_samples(self):
        return {(epoch, i) for epoch in range(self.epochs) for i in range(self.n)}


def marked(weights):
    """Samples trained into the weights."""
    return set(map(tuple, weights["w"].nonzero().tolist()))


def consumed(data, n, batch_size):
    """Samples that a checkpoint records as consumed."""
    found = {(m["epoch"], i) for m in data.run["metrics"] for i in range(n)}
    for epoch in data.run["epochs"]:
        order = permutation(n, epoch["epoch"], SEED).tolist()
        for start, stop in epoch["consumed"]:
            for i in order[start * batch_size : stop * batch_size]:
                found.add((epoch["epoch"], i))
    return found


def capture_often(handle, most=40, permit=lambda: None):
    """Take the state repeatedly, as ``handle.save`` does; returns the states, oldest first.

    Calls ``permit`` before each request, and before the run is joined.
    """
    taken = []
    while handle.state is None and len(taken) < most:
        permit()
        try:
            taken.append(handle._run.save(WAIT_S))
        except CheckpointError:
            break
    for _ in range(most):
        permit()
    handle.join(WAIT_S)
    return taken
