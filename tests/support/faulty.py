"""Injected non-finite values, and checks that they are not passed on."""

from __future__ import annotations

import threading
from collections import Counter

import torch
from torch import nn

from coordinator.averaging import Averager
from runtime import current_worker
from runtime.collective import Collective
from tests.support.running import CADENCE, OVER_CPU, SYNC, WAIT_S, builder

KINDS = ("loss", "gradient", "value")
"""NaN in loss and gradients; an infinite gradient under a finite loss; NaN in the loss alone."""


class Pair(nn.Module):
    """Two parameters, to each of which :func:`count_pair` adds 1 a step."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def pair(device):
    return Pair().to(device)


class Single(nn.Module):
    """One number in single precision, for fp16."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


class Blow(torch.autograd.Function):
    """The identity with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def count_pair(model, batch):
    return -model.first.sum() - model.second.sum()


class Spoilt:
    """A ``train_fn`` for :class:`Pair` with faults at some batches.

    Args:
        kind: One of :data:`KINDS`.
        at: ``(rank, number of the batch)`` of each.
        hold: ``(rank, number of the batch)`` of one that waits until ``opened`` is set.
    """

    def __init__(self, kind, *at, hold=None):
        self._kind = kind
        self._at = set(at)
        self._hold = hold
        self.held, self.opened = threading.Event(), threading.Event()
        self.steps = Counter()
        self.samples = Counter()
        self.fired = set()
        self._all_fired = threading.Event()

    def __call__(self, model, batch):
        rank = current_worker().rank
        place = rank, self.steps[rank]
        self.steps[rank] += 1
        self.samples[rank] += len(batch[0])
        if place == self._hold:
            self.held.set()
            assert self.opened.wait(WAIT_S), "the batch was never let go"
        if not self._is_due(place):
            return count_pair(model, batch)
        self.fired.add(place)
        if self.fired == self._at:
            self._all_fired.set()
        if self._kind == "gradient":
            return -model.first.sum() - Blow.apply(model.second).sum()
        spoil = float("nan")
        loss = count_pair(model, batch)
        return loss * spoil if self._kind == "loss" else loss + spoil

    def _is_due(self, place):
        return place in self._at

    def stop_while_held(self, run):
        """Stop a run while the batch is held, after all faults; returns the handle."""
        handle = run.run()
        assert self.held.wait(WAIT_S), "the batch to hold was never reached"
        assert self._all_fired.wait(WAIT_S), "another rank was never spoilt"
        handle.stop()
        self.opened.set()
        return handle

    def check(self):
        assert self.fired == self._at, "a fault never fired"


class SpoiltLater(Spoilt):
    """A fault on one rank, once, after an event.

    Attributes:
        at: Number of the batch.
    """

    def __init__(self, kind, rank, ready):
        super().__init__(kind)
        self._rank = rank
        self._ready = ready
        self.at = None

    def _is_due(self, place):
        rank, step = place
        if rank != self._rank or self.at is not None or not self._ready():
            return False
        self._at, self.at = {place}, step
        return True


def is_finite(tensors):
    return all(bool(torch.isfinite(t).all()) for t in tensors)


class Watch:
    """Records whether averaged, evaluated and returned values are finite.

    Attributes:
        seen: ``(name, is_finite)`` of each value.
        weights: Weights above 1 of all rounds; batches must hold an even number of samples.
    """

    def __init__(self, monkeypatch, *, collectives=True):
        self.seen = []
        self.weights = []
        average, mean = Averager.average, Collective.weighted_mean_

        def watched_average(averager, payloads, weights, squares):
            for payload, weight in zip(payloads, weights, strict=True):
                if weight or not any(weights):
                    self._note("averaged", payload.params, weight)
            return average(averager, payloads, weights, squares)

        def watched_mean(collective, tensors, weight):
            if weight:
                self._note("averaged", tensors, weight)
            return mean(collective, tensors, weight)

        monkeypatch.setattr(Averager, "average", watched_average)
        if collectives:  # under lockstep they carry gradients
            monkeypatch.setattr(Collective, "weighted_mean_", watched_mean)

    def _note(self, what, tensors, weight=0):
        self.seen.append((what, is_finite(tensors)))
        if weight > 1:
            self.weights.append(weight)

    def evaluate(self, model, epoch):
        self._note("evaluated", model.parameters())
        return {"epoch": float(epoch)}

    def checkpoint(self, version, model):
        self._note("checkpointed", model.parameters())

    def check(self):
        assert [what for what, finite in self.seen if not finite] == []


def spoilt_run(mode, train, *, watch=None, ranks=2, way=None, anchor=3, **kwargs):
    """A builder of a run of :class:`Pair`, shares fixed, every epoch evaluated."""
    way = way or (CADENCE, OVER_CPU)
    kwargs = {"model": pair, "dataset": 40, "batch_size": 2, "epochs": 3} | kwargs
    b = builder(train=train, ranks=ranks, way=way, **kwargs)
    if way[0] is not SYNC:
        b.partition_ratios([1] * ranks)
    if watch is not None:
        b.eval_fn(watch.evaluate).checkpoint_fn(watch.checkpoint)
    return b.anchor(anchor).on_non_finite(mode)
