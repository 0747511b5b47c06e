"""Schedulers that ``epoch_fn`` attaches during a run: rates as in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from runtime import Trainer, current_worker
from tests.support.running import CADENCE, SYNC, WAIT_S

X = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
SIZE, EPOCHS, AT = 16, 4, 2  # the last batch has 10 samples
PER_EPOCH = 6

SCHEDULERS = {
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 6),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "steps": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "averaging": lambda o: SWALR(o, 0.01, anneal_epochs=6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=13),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.8)], [4]
    ),
}


def sgd(params):
    return torch.optim.SGD(params, 0.05)


def plain(first, second):
    """Rates of each step on one device, and the weights."""
    torch.manual_seed(0)
    net = nn.Linear(6, 1)
    optimizer, rates = sgd(net.parameters()), []
    scheduler = None if first is None else first(optimizer)
    for epoch in range(EPOCHS):
        scheduler = second(optimizer) if epoch == AT else scheduler
        for start in range(0, len(X), SIZE):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            net(X[start : start + SIZE]).square().mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return rates


def run(second, *, first=None, ranks=1, policy=SYNC, door="builder", accumulate=1, scale=None):
    """Rates of each step of rank 0."""
    rates = []

    def new(device):
        torch.manual_seed(0)
        return nn.Linear(6, 1)

    def train(model, batch):
        if current_worker().rank == 0:
            rates.append(current_worker().optimizer.param_groups[0]["lr"])
        return model(batch[0]).square().mean()

    def body(worker):
        for batch in worker.batches():
            worker.step(train(worker.model, batch))

    if door == "loop":
        b = Trainer.loop(new, lambda model: sgd(model.parameters()), body)
    else:
        b = Trainer.builder(new, sgd, train).accumulate(accumulate)
    b.epoch_fn(lambda epoch, worker: worker.set_scheduler(second) if epoch == AT else None)
    b.dataset((X,)).sampler(range(len(X))).global_batch_size(SIZE).num_epochs(EPOCHS)
    b.devices(["cpu"] * ranks).policy(policy).progress(False)
    if first is not None:
        b.scheduler(first)
    b.run().join(WAIT_S)
    return rates[::accumulate]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_attached_at_epoch_two_begins_at_its_first_step(name, ranks):
    second = SCHEDULERS[name]
    assert run(second, ranks=ranks) == pytest.approx(plain(None, second))


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_replaces_the_scheduler_of_the_run(ranks):
    first, second = SCHEDULERS["cosine"], SCHEDULERS["steps"]
    assert run(second, first=first, ranks=ranks) == pytest.approx(plain(first, second))


def test_accumulated_batches_make_one_step_of_it():
    second = SCHEDULERS["function"]
    assert run(second, ranks=2, accumulate=2) == pytest.approx(plain(None, second))


def test_epoch_fn_of_a_loop_attaches_it():
    second = SCHEDULERS["function"]
    assert run(second, door="loop", ranks=2) == pytest.approx(plain(None, second))


def test_last_epoch_says_where_it_begins():
    def second(optimizer):
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.05
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step), last_epoch=3)

    assert run(second) == pytest.approx(plain(None, second))


def test_under_cadence_each_rank_begins_it_at_its_own_step():
    first = {}

    def train(model, batch):
        worker = current_worker()
        rate = worker.optimizer.param_groups[0]["lr"]
        first.setdefault((worker.rank, worker.current_epoch), rate)
        return model(batch[0]).square().mean()

    second = SCHEDULERS["warm-up"]
    b = Trainer.builder(nn.Linear(6, 1), sgd, train).dataset((X,)).batch_size(3)
    b.epoch_fn(lambda epoch, worker: worker.set_scheduler(second) if epoch == AT else None)
    b.num_epochs(EPOCHS).devices(["cpu"] * 2).policy(CADENCE).progress(False).run().join(WAIT_S)
    assert [first[rank, AT] for rank in (0, 1)] == pytest.approx([0.005, 0.005])


def test_a_scheduler_by_metric_ignores_the_metrics_before_it():
    rates = []

    def second(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def train(model, batch):
        rates.append(current_worker().optimizer.param_groups[0]["lr"])
        return model(batch[0]).square().mean()

    values = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    b = Trainer.builder(nn.Linear(6, 1), sgd, train).dataset((X,)).global_batch_size(SIZE)
    b.scheduler(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=100), metric="eval/loss")
    b.eval_fn(lambda model, epoch: {"loss": next(values)}).num_epochs(6).devices(["cpu"])
    b.epoch_fn(lambda epoch, worker: worker.set_scheduler(second) if epoch == 3 else None)
    b.progress(False).run().join(WAIT_S)
    by_epoch = rates[::PER_EPOCH]
    assert by_epoch == [0.05, 0.05, 0.05, 0.05, 0.05, 0.025]
