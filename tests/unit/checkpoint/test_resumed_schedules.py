"""Schedules of a resumed run: the checkpoint's settings are used, and other ones are reported."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from runtime import Trainer
from tests.support.running import (
    ASYNC,
    CADENCE,
    OVER_CPU,
    SYNC,
    THREAD,
    WAIT_S,
    builder,
    count_up,
    counter,
    numbers,
    plain_sgd,
)

WAYS = [(SYNC, THREAD), (CADENCE, OVER_CPU), (ASYNC, OVER_CPU)]


def messages(caplog):
    return [r.getMessage() for r in caplog.records if "schedule is used" in r.getMessage()]


def resumed(path, caplog, scheduler, first, then, **settings):
    """Messages of a run of ``then`` epochs, of 10 batches, that resumes one of ``first``."""
    for epochs in (first, then):
        caplog.clear()
        b = builder(epochs=epochs, **settings).scheduler(scheduler).resume(path, True)
        b.checkpoint_dir(path).run().join(WAIT_S)
    return messages(caplog)


def cosine(optimizer, total):
    return lrs.CosineAnnealingLR(optimizer, total)


def warmed_up(optimizer, total):
    parts = [
        lrs.LinearLR(optimizer, 0.5, total_iters=3),
        lrs.CosineAnnealingLR(optimizer, total - 3),
    ]
    return lrs.SequentialLR(optimizer, parts, [3])


def milestones_in(optimizer, total):
    return lrs.SequentialLR(
        optimizer, [lrs.ConstantLR(optimizer, 0.5), lrs.ConstantLR(optimizer, 1.0)], [total // 2]
    )


def chained(optimizer, total):
    parts = [lrs.ExponentialLR(optimizer, 0.9), lrs.PolynomialLR(optimizer, total)]
    return lrs.ChainedScheduler(parts, optimizer)


class OfItsOwn:
    """A scheduler with fields of its own names, in a part of its state."""

    def __init__(self, optimizer, total):
        self.optimizer, self.count, self.horizon = optimizer, 0, total
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step(self):
        self.count += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * (1 - self.count / (self.horizon + 1))

    def state_dict(self):
        return {"count": self.count, "plan": {"horizon": self.horizon}}

    def load_state_dict(self, state):
        self.count, self.horizon = state["count"], state["plan"]["horizon"]


SCHEDULES = {
    "T_max=10, where scheduler(f) now makes T_max=30": cosine,
    "total_iters=10, where scheduler(f) now makes total_iters=30": lambda o, total: lrs.LinearLR(
        o, 1.0, 0.1, total
    ),
    "milestones=Counter({5: 1}), where scheduler(f) now makes milestones=Counter({15: 1})": (
        lambda o, total: lrs.MultiStepLR(o, [total // 2])
    ),
    "_schedulers[1].T_max=7, where scheduler(f) now makes _schedulers[1].T_max=27": warmed_up,
    "_milestones=[5], where scheduler(f) now makes _milestones=[15]": milestones_in,
    "_schedulers[1].total_iters=10, where scheduler(f) now makes _schedulers[1].total_iters=30": (
        chained
    ),
    "plan.horizon=10, where scheduler(f) now makes plan.horizon=30": lambda o, total: OfItsOwn(
        o, total
    ),
}


@pytest.mark.parametrize("expected", SCHEDULES, ids=lambda text: text.partition("=")[0])
def test_more_epochs_than_the_checkpoints_schedule_is_for_are_reported_once(
    expected, tmp_path, caplog
):
    (message,) = resumed(tmp_path, caplog, SCHEDULES[expected], 1, 3)
    assert expected in message
    assert "weights.safetensors" in message


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].name)
def test_the_report_is_made_under_each_policy(way, tmp_path, caplog):
    (message,) = resumed(tmp_path, caplog, cosine, 1, 3, way=way)
    assert "T_max=10, where scheduler(f) now makes T_max=30" in message


def test_a_schedule_that_max_steps_has_ended_is_reported(tmp_path, caplog):
    for steps in (8, 20):
        caplog.clear()
        b = builder(epochs=2).scheduler(cosine).max_steps(steps).resume(tmp_path, True)
        b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    (message,) = messages(caplog)
    assert "T_max=8, where scheduler(f) now makes T_max=20" in message


def test_a_horizon_that_the_factory_sets_by_itself_is_reported(tmp_path, caplog):
    for epochs in (1, 2):
        caplog.clear()
        b = builder(epochs=epochs).resume(tmp_path, True).checkpoint_dir(tmp_path)
        b.scheduler(lambda o, num=epochs: lrs.CosineAnnealingLR(o, 100 * num)).run().join(WAIT_S)
    (message,) = messages(caplog)
    assert "T_max=100, where scheduler(f) now makes T_max=200" in message


def test_a_run_resumed_twice_reports_the_first_runs_schedule(tmp_path, caplog):
    for epochs in (1, 2, 3):
        caplog.clear()
        b = builder(epochs=epochs).scheduler(cosine).resume(tmp_path, True)
        b.checkpoint_dir(tmp_path).run().join(WAIT_S)
    (message,) = messages(caplog)
    assert "T_max=10, where scheduler(f) now makes T_max=30" in message


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)


def of(name):
    return lambda model, batch: getattr(model, name)(batch[0][:, None]).square().mean()


def test_the_schedules_of_several_optimizers_are_named(tmp_path, caplog):
    def make(epochs):
        sgd = partial(plain_sgd, lr=0.1)
        b = Trainer.builder(lambda device: Pair(), {"a": sgd, "b": sgd}, {n: of(n) for n in "ab"})
        b.dataset((torch.ones(20),)).batch_size(2).devices(["cpu"] * 2).num_epochs(epochs)
        return b.scheduler({"b": cosine}).resume(tmp_path, True).checkpoint_dir(tmp_path)

    make(1).run().join(WAIT_S)
    make(3).run().join(WAIT_S)
    (message,) = messages(caplog)
    assert "b.T_max=10, where scheduler(f) now makes b.T_max=30" in message


def test_the_schedule_of_an_own_loop_is_reported(tmp_path, caplog):
    def body(worker):
        for batch in worker.batches():
            worker.step(count_up(worker.model, batch))

    def make(epochs):
        b = Trainer.loop(counter, lambda model: plain_sgd(model.parameters()), body)
        b.dataset(numbers(20)).batch_size(2).devices(["cpu"] * 2).num_epochs(epochs)
        return b.scheduler(cosine).resume(tmp_path, True).checkpoint_dir(tmp_path)

    make(1).run().join(WAIT_S)
    make(3).run().join(WAIT_S)
    (message,) = messages(caplog)
    assert "T_max=10, where scheduler(f) now makes T_max=30" in message


UNCHANGED = {
    "StepLR": lambda o: lrs.StepLR(o, 3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 30]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 40),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 40),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.2, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=40, cycle_momentum=False),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "SequentialLR": lambda o: warmed_up(o, 40),
    "ChainedScheduler": lambda o: chained(o, 40),
    "of its own": lambda o: OfItsOwn(o, 40),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_is_said_of_an_unchanged_schedule(name, tmp_path, caplog):
    for epochs, ranks in ((1, 2), (2, 3)):
        sgd = partial(plain_sgd, lr=0.1 * epochs)  # reported by itself
        b = builder(epochs=epochs, ranks=ranks, optim=sgd).scheduler(UNCHANGED[name])
        b.resume(tmp_path, True).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert messages(caplog) == []


def test_nothing_is_said_of_a_schedule_that_a_metric_steps(tmp_path, caplog):
    for epochs in (2, 3):
        b = builder(epochs=epochs).eval_fn(lambda model, epoch: {"loss": 1.0})
        b.scheduler(lambda o: lrs.ReduceLROnPlateau(o, patience=0), metric="eval/loss")
        b.resume(tmp_path, True).checkpoint_dir(tmp_path).run().join(WAIT_S)
    assert messages(caplog) == []
