"""Runs whose training loop is the user's own, beside plain loops on one device."""

from __future__ import annotations

import threading

import torch
from torch import nn

from runtime import Trainer, current_worker
from tests.support.running import WAIT_S

NUM_SAMPLES = 23


class Marks(nn.Module):
    """One number for each sample of each epoch; a step subtracts what the sample contributes."""

    def __init__(self, num_epochs=2, num_samples=NUM_SAMPLES):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_epochs, num_samples, dtype=torch.float64))

    def loss(self, epoch, batch):
        return -self.w[epoch, batch[0]].mean()


def loop_builder(loop, *, model=None, optim=None, dataset=None, ranks=2, policy="sync", epochs=2):
    """A complete builder of a loop; each batch has two samples."""
    return (
        Trainer.loop(
            model or (lambda device: Marks(epochs).to(device)),
            optim or (lambda model: torch.optim.SGD(model.parameters(), 1.0)),
            loop,
        )
        .dataset((torch.arange(NUM_SAMPLES),) if dataset is None else dataset)
        .batch_size(2)
        .num_epochs(epochs)
        .devices(["cpu"] * ranks)
        .policy(policy)
        .collective_timeout(WAIT_S)
        .tune_allocator(False)
    )


def plain(worker):
    """The usual loop, over marks."""
    for batch in worker.batches():
        worker.step(worker.model.loss(worker.epoch, batch))


def marked(state):
    """The number of marked samples of each epoch."""
    return (state.state_dict()["w"] > 0).sum(1).tolist()


def points(n, seed):
    x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def net(device):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
    return nn.Sequential(*layers).double().to(device)


def one(model, batch):
    return {"n": 1.0}


class Meeting:
    """An evaluation function in which every rank evaluates a batch before any ends its first."""

    def __init__(self, ranks, inner=one):
        self._barrier, self._inner = threading.Barrier(ranks, timeout=WAIT_S), inner
        self.met = set()

    def __call__(self, model, batch):
        rank = current_worker().rank
        if rank not in self.met:
            self.met.add(rank)
            self._barrier.wait()
        return self._inner(model, batch)
