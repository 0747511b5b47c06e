"""Pieces of a global batch in models whose layers compute statistics of them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from coordinator.shares import Shares
from runtime import Trainer, current_worker
from tests.support.running import WAIT_S

GENERATOR = torch.Generator().manual_seed(0)


def net(norm):
    return lambda device: nn.Sequential(nn.Linear(6, 4), norm(4), nn.Linear(4, 1)).to(device)


def frozen(num_features):
    return nn.BatchNorm1d(num_features).eval()


def sgd(params):
    return torch.optim.SGD(params, 0.01)


class Pieces:
    """A ``train_fn`` that records the size of each piece of each rank."""

    def __init__(self, **fails_at):
        self.sizes = {}
        self._fails_at = {int(rank[1:]): at for rank, at in fails_at.items()}
        self._lock = threading.Lock()

    def __call__(self, model, batch):
        worker = current_worker()
        with self._lock:
            own = self.sizes.setdefault(worker.rank, [])
        own.append(len(batch[0]))
        if self._fails_at.get(worker.rank) == len(own):
            raise RuntimeError("planted")
        return model(batch[0]).square().mean()

    @property
    def every(self):
        return [n for own in self.sizes.values() for n in own]


def run(pieces, norm=nn.BatchNorm1d, *, num_samples, ranks=2, **more):
    if "global_batch_size" not in more:
        more = {"batch_size": 8, **more}
    b = Trainer.builder(net(norm), sgd, pieces).policy("sync").num_epochs(2)
    b.dataset((torch.randn(num_samples, 6, generator=GENERATOR),)).devices(["cpu"] * ranks)
    b.collective_timeout(WAIT_S).progress(False)
    for name, value in more.items():
        getattr(b, name)(value)
    state = b.run().join(WAIT_S)
    assert all(epoch.num_samples == num_samples for epoch in state.metrics if not epoch.partial)
    return state


@pytest.fixture
def slow(monkeypatch):
    """Measure ranks as if a sample on the last one took 12 times as long."""
    observe = Shares.observe

    def modelled(self, rank, num_samples, compute_s):
        last = rank == len(self._fits) - 1
        observe(self, rank, num_samples, num_samples * (0.012 if last else 0.001))

    monkeypatch.setattr(Shares, "observe", modelled)


@pytest.mark.parametrize(
    ("ranks", "num_samples", "more"),
    [
        (2, 640, {}),
        (2, 643, {"accumulate": 3}),
        (3, 648, {"batch_size": [4, 9, 2]}),
        (4, 645, {"bucket_cap_mb": 1e-4}),
        (4, 646, {"batch_size": 2}),
    ],
)
def test_balanced_shares_have_two_samples_or_none(slow, ranks, num_samples, more):
    pieces = Pieces()
    run(pieces, ranks=ranks, num_samples=num_samples, balance=True, **more)
    assert min(pieces.every) == 2


@pytest.mark.parametrize(
    ("norm", "more"),
    [
        (nn.LayerNorm, {}),
        (lambda num_features: nn.GroupNorm(2, num_features), {}),
        (frozen, {}),
        (nn.BatchNorm1d, {"sync_batchnorm": True}),
    ],
    ids=["layer norm", "group norm", "frozen", "synchronised"],
)
def test_one_sample_is_enough_where_no_layer_computes_statistics_of_the_piece(slow, norm, more):
    pieces = Pieces()
    run(pieces, norm, num_samples=640, balance=True, **more)
    assert min(pieces.sizes[1]) == 1


def test_a_resumed_run_has_no_pieces_of_one_sample(slow, tmp_path):
    first, resumed = Pieces(), Pieces()
    run(first, num_samples=640, balance=True, max_steps=12, checkpoint_dir=tmp_path)
    run(resumed, num_samples=640, balance=True, resume=tmp_path)
    assert sum(first.every) + sum(resumed.every) == 2 * 640
    assert min(resumed.every) == 2


@pytest.mark.parametrize(
    ("ranks", "num_samples", "deaths", "more"),
    [
        (4, 160, {"r3": 3}, {"batch_size": 2}),
        (3, 165, {"r0": 3, "r1": 5}, {"batch_size": 2}),
        (3, 165, {"r1": 5}, {"batch_size": [2, 3, 4]}),
        (3, 646, {"r0": 9}, {"balance": True}),
    ],
)
def test_after_a_death_there_are_no_pieces_of_one_sample(slow, ranks, num_samples, deaths, more):
    pieces = Pieces(**deaths)
    state = run(pieces, ranks=ranks, num_samples=num_samples, on_worker_failure="continue", **more)
    assert len(state.failures) == len(deaths)
    assert min(pieces.every) == 2


@pytest.mark.parametrize(
    ("ranks", "num_samples", "more"),
    [
        (4, 118, {"batch_size": [30, 2, 2, 2]}),
        (4, 77, {"global_batch_size": 7}),
        (2, 78, {"global_batch_size": 14, "accumulate": 4}),
    ],
)
def test_fixed_sizes_have_no_remainders_of_one_sample(ranks, num_samples, more):
    pieces = Pieces()
    run(pieces, ranks=ranks, num_samples=num_samples, **more)
    assert min(pieces.every) >= 2


def test_batches_of_one_sample_that_are_set_stay(slow):
    """Layers over images have several values of each channel in one sample."""
    pieces = Pieces()

    def images(num_features):
        return nn.Sequential(
            nn.Unflatten(1, (num_features, 1, 1)),
            nn.Upsample(scale_factor=2),
            nn.BatchNorm2d(num_features),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )

    run(pieces, images, num_samples=60, batch_size=1, on_worker_failure="continue", balance=True)
    assert min(pieces.every) == 1
    again = Pieces()
    run(again, images, ranks=4, num_samples=64, global_batch_size=4)
    assert set(again.every) == {1}
