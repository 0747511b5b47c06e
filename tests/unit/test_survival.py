"""Survival of a worker's death: no hang, no lost sample, and the failure in the result."""

from __future__ import annotations

import copy
import threading
from collections import Counter as Tallies

import pytest
import torch
from torch import nn

from runtime import AverageBackend, ReplicaMismatch, current_worker
from runtime.core.errors import CollectiveAborted
from runtime.replica.reducer import GradientReducer
from tests.support.pairs import SCALE
from tests.support.running import (
    ASYNC,
    CADENCE,
    GLOO,
    LOCAL_WAYS,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
)

BATCH = 2
NUM_SAMPLES = 21
"""Eleven batches, the last one short."""

WAYS = [*LOCAL_WAYS, (SYNC, GLOO), (CADENCE, GLOO)]
every_way = pytest.mark.parametrize("way", WAYS, ids=[f"{p.value}-{b.value}" for p, b in WAYS])


class Effects(nn.Module):
    """One number per sample, changed only by training that sample."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUM_SAMPLES, dtype=torch.float64))


def effects(device):
    return Effects().to(device)


def train_samples(model, batch):
    (indices,) = batch
    return -model.w[indices].mean()


class Dies:
    """A ``train_fn`` that raises on some ranks at some steps, and counts that."""

    def __init__(self, *deaths, inner=train_samples, error=None):
        self._deaths = set(deaths)
        self._inner = inner
        self._error = error or (lambda: ValueError("planted"))
        self._steps = Tallies()
        self._lock = threading.Lock()
        self.num_shots = 0

    def __call__(self, model, batch):
        rank = current_worker().rank
        with self._lock:
            step = self._steps[rank]
            self._steps[rank] += 1
            dies = (rank, step) in self._deaths
            self.num_shots += dies
        if dies:
            raise self._error()
        return self._inner(model, batch)


def run(fault, way, *, ranks=3, epochs=1, model=effects, **settings):
    b = builder(
        model=model,
        train=fault,
        dataset=NUM_SAMPLES,
        batch_size=BATCH,
        epochs=epochs,
        ranks=ranks,
        way=way,
    ).on_worker_failure("continue")
    for name, value in settings.items():
        getattr(b, name)(value)
    return b.run()


def assert_whole(state, fault, *, epochs=1):
    assert len(state.failures) == fault.num_shots
    assert [m.epoch for m in state.metrics] == list(range(epochs))
    for m in state.metrics:
        assert m.num_samples == NUM_SAMPLES
        assert sum(r.num_samples for r in m.per_rank) - m.num_retrained == NUM_SAMPLES
    if "w" in state.params:
        assert bool((state.params["w"] > 0).all()), state.params["w"]


@pytest.mark.parametrize("step", [0, 2])
def test_under_sync_every_sample_has_its_effect_exactly_once(step):
    """Each step holds 6 of the 24 samples, also with two ranks of three: each has a sixth."""
    w = nn.Module()
    w.w = nn.Parameter(torch.zeros(24, dtype=torch.float64))
    fault = Dies((1, step))
    state = (
        builder(
            model=lambda device: copy.deepcopy(w),
            train=fault,
            dataset=24,
            batch_size=BATCH,
            ranks=3,
            way=(SYNC, THREAD),
        )
        .on_worker_failure("continue")
        .run()
        .join(WAIT_S)
    )
    assert fault.num_shots == 1
    assert (state.params["w"] - 1 / 6).abs().max() < 1e-12


@every_way
def test_ranks_that_die_at_once_are_survived(way):
    meeting = threading.Barrier(2)

    def together():
        meeting.wait(WAIT_S)
        return ValueError("planted")

    fault = Dies((1, 1), (2, 1), error=together)
    state = run(fault, way, epochs=2).join(WAIT_S)
    assert fault.num_shots == 2
    assert_whole(state, fault, epochs=2)


def test_replicas_that_differ_end_the_run_in_any_case():
    def odd(device):
        return nn.Linear(1 + current_worker().rank, 1)

    with pytest.raises(ReplicaMismatch, match="the shape of 'weight' is"):
        run(train_samples, (CADENCE, OVER_CPU), model=odd).join(WAIT_S)


@pytest.mark.parametrize("way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, THREAD)])
def test_an_evaluation_that_kills_the_lead_is_done_by_the_next(way):
    evaluated = []

    def evaluate(model, epoch):
        rank = current_worker().rank
        if rank == 0 and epoch == 1:
            raise ValueError("planted")
        evaluated.append((rank, epoch))
        return {"seen": float((model.w > 0).sum())}

    state = run(train_samples, way, epochs=3, eval_fn=evaluate).join(WAIT_S)
    assert [f.rank for f in state.failures] == [0]
    assert [m.scalars["eval/seen"] for m in state.metrics] == [NUM_SAMPLES] * 3
    assert evaluated == [(0, 0), (1, 1), (1, 2)]


class Wave(nn.Module):
    """A model with buffers, which the next lead must take over, too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("backend", [THREAD, GLOO])
def test_under_sync_the_survivors_stay_identical(backend):
    """Including momentum, schedule and buffers: their effect on the last steps is the same."""
    models = {}
    held = threading.Lock()

    def fit(model, batch):
        with held:
            models[current_worker().rank] = model
        (x,) = batch
        x = x.double().unsqueeze(1)
        return ((model(x) - x.sin()) ** 2).mean()

    fault = Dies((1, 3), inner=fit)
    state = (
        builder(
            model=lambda device: Wave(),
            optim=lambda params: torch.optim.Adam(params, 0.01),
            train=fault,
            dataset=40,
            batch_size=4,
            epochs=3,
            ranks=3,
            way=(SYNC, backend),
        )
        .scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5))
        .on_worker_failure("continue")
        .run()
        .join(WAIT_S)
    )
    assert fault.num_shots == 1
    assert [f.rank for f in state.failures] == [1]
    first, other = models[0].state_dict(), models[2].state_dict()
    for key, value in first.items():
        assert torch.equal(value, other[key]), key


def test_a_death_is_logged_as_it_happens(caplog):
    fault = Dies((1, 1))
    run(fault, (CADENCE, OVER_CPU)).join(WAIT_S)
    (record,) = [r for r in caplog.records if "the others continue if" in r.getMessage()]
    assert "rank 1" in record.getMessage()
    assert "planted" in str(record.exc_info[1])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="pass one of raise, continue"):
        builder().on_worker_failure("ignore")


@pytest.mark.parametrize(
    "way", [(SYNC, THREAD), (CADENCE, OVER_CPU), (CADENCE, GLOO), (ASYNC, AverageBackend.THREAD)]
)
def test_digits_are_learned_although_one_of_three_workers_dies_in_the_middle(way):
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[359:], order[:359]

    def fit(model, batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    # 30 batches an epoch and rank: in the middle.
    epochs = 12 if SCALE > 1 else 5
    fault = Dies((1, 15 * epochs), inner=fit)
    state = (
        builder(
            model=lambda device: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
            optim=lambda params: torch.optim.AdamW(params, 3e-3),
            train=fault,
            dataset=(x[train], y[train]),
            batch_size=16,
            epochs=epochs,
            ranks=3,
            way=way,
        )
        .on_worker_failure("continue")
        .run()
        .join(90)
    )
    assert fault.num_shots == 1
    assert [f.rank for f in state.failures] == [1]
    assert [m.num_samples for m in state.metrics] == [len(train)] * epochs
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(state.state_dict())
    accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
    assert accuracy >= (0.93 if SCALE > 1 else 0.9)


def test_under_sync_the_mean_loss_counts_no_batch_twice():
    """A failed step is repeated; its first loss is dropped."""

    def constant(model, batch):
        (indices,) = batch
        return model.w[indices].mean() * 0.0 + float(indices.double().mean())

    fault = Dies((1, 0), inner=constant)
    state = run(fault, (SYNC, THREAD)).join(WAIT_S)
    assert fault.num_shots == 1
    assert state.metrics[0].avg_loss == pytest.approx((NUM_SAMPLES - 1) / 2)


def test_under_sync_a_rank_behind_copies_the_statistics_of_a_rank_ahead(monkeypatch):
    """Rank 1 dies within step 2, which rank 0 has made, and rank 2 has not."""
    exchange, cut_ranks = GradientReducer.exchange, set()
    statistics = {rank: [] for rank in range(3)}  # before each forward pass

    def cut(reducer, num_samples, **settings):
        made = exchange(reducer, num_samples, **settings)
        worker = current_worker()
        if worker.local_step == 2 and worker.rank and worker.rank not in cut_ranks:
            cut_ranks.add(worker.rank)
            raise ValueError("planted") if worker.rank == 1 else CollectiveAborted("planted")
        return made

    def train(model, batch):
        norm = model[0]
        state = norm.num_batches_tracked.double(), norm.running_mean
        statistics[current_worker().rank].append(torch.cat([state[0].view(1), state[1]]))
        return model(batch[0]).square().mean()

    def make(device):
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    monkeypatch.setattr(GradientReducer, "exchange", cut)
    data = torch.randn(96, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = {"optim": lambda p: torch.optim.SGD(p, 0.01), "way": (SYNC, THREAD), "ranks": 3}
    b = builder(model=make, train=train, dataset=(data,), batch_size=4, **settings)
    state = b.on_worker_failure("continue").run().join(WAIT_S)
    assert [failure.rank for failure in state.failures] == [1]
    assert cut_ranks == {1, 2}
    assert not torch.equal(statistics[0][2], statistics[2][2])
    assert float(statistics[0][3][0]) == 3
    assert torch.equal(statistics[0][3], statistics[2][3])
