"""A rank's own state: a checkpoint restores all of it."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from coordinator import messages as m
from coordinator.codec import decode, encode
from runtime import CheckpointError
from runtime.checkpoint.format import plain
from runtime.checkpoint.resume import ResumePoint
from runtime.replica.flat import FlatParams
from runtime.replica.schedule import Schedule
from runtime.worker.run_peers import RunPeers
from tests.support.steppers import stepper_of
from tests.unit.worker import test_worker

OPTIMIZERS = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "lr in a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
}


class Own(lrs.LRScheduler):
    """A user's scheduler with a function, which no file can hold."""

    def __init__(self, optimizer):
        self.rate = lambda step: 0.01 * (step + 1)
        super().__init__(optimizer)

    def get_lr(self):
        return [self.rate(self.last_epoch) for _ in self.optimizer.param_groups]


SCHEDULERS = {
    "a function within": lambda o: lrs.SequentialLR(o, [Own(o), lrs.ExponentialLR(o, 0.9)], [4]),
    "steps": lambda o: lrs.MultiStepLR(o, [3, 3, 5], 0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 12),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lrs.OneCycleLR(o, 1.0, total_steps=20, cycle_momentum=False),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "sequence": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.ExponentialLR(o, 0.9)], [4]
    ),
}


def through_a_file(state):
    """The state after a round trip through a file."""
    file = io.BytesIO()
    torch.save(plain(state, "the state", copy=True), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stored(saved):
    """A dataclass after a round trip through a file."""
    return decode(type(saved), through_a_file(encode(saved)), "it")


def build(optim):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    params = FlatParams(model)
    optimizer = optim(params.params)
    return model, stepper_of(model, optimizer, params=params), optimizer


def train(model, stepper, steps):
    for step in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        with stepper.window(4) as window:
            window.add(lambda model, x: (model(x) ** 2).mean(), x, 4)
            window.finish()


@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_restored_optimizer_continues_bitwise_equal(optim):
    straight, stepper, _ = build(optim)
    train(straight, stepper, range(6))
    first, stepper, _ = build(optim)
    train(first, stepper, range(3))
    state = stored(stepper.saved())
    second, stepper, _ = build(optim)
    second.load_state_dict(first.state_dict())
    stepper.restore(state)
    train(second, stepper, range(3, 6))
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_ranks_that_share_a_saved_state_do_not_share_memory():
    model, stepper, _ = build(OPTIMIZERS["adamw"])
    train(model, stepper, range(2))
    saved = stored(stepper.saved())
    optimizers = []
    for _ in range(2):
        _, stepper, optimizer = build(OPTIMIZERS["adamw"])
        stepper.restore(saved)
        optimizers.append(optimizer)
    ours, theirs = ({id(t) for s in o.state.values() for t in s.values()} for o in optimizers)
    pointers = [{t.data_ptr() for s in o.state.values() for t in s.values()} for o in optimizers]
    assert not ours & theirs
    assert not pointers[0] & pointers[1]


def test_implementation_settings_of_an_optimizer_stay_as_built():
    _, stepper, _ = build(lambda p: torch.optim.AdamW(p, 0.5, foreach=True))
    saved = stored(stepper.saved())
    _, stepper, optimizer = build(lambda p: torch.optim.AdamW(p, 0.01, fused=True))
    stepper.restore(saved)
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"], group["lr"]) == (True, None, 0.5)


@pytest.mark.parametrize("factory", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_restored_schedule_continues_bitwise_equal(factory, scale):
    def rates(schedule, positions):
        found = []
        for position in positions:
            schedule.advance(position)
            found.append(schedule.current)
        return found

    def made():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
        schedule = Schedule(optimizer, factory, 15)
        schedule.set_scale(scale)
        return schedule, optimizer

    straight = rates(made()[0], range(15))
    schedule, optimizer = made()
    first = rates(schedule, range(6))
    saved, state = stored(schedule.saved()), through_a_file(optimizer.state_dict())
    schedule, optimizer = made()
    optimizer.load_state_dict(state)
    schedule.load(saved)
    assert first + rates(schedule, range(6, 15)) == straight


def test_another_world_size_rescales_the_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    plain_schedule = Schedule(optimizer)
    plain_schedule.scale_lr(2.0)
    plain_schedule.rescale(1.5)
    assert plain_schedule.current == pytest.approx(0.3)
    scheduled = Schedule(optimizer, SCHEDULERS["steps"])
    scheduled.set_scale(2.0)
    scheduled.rescale(0.5)
    scheduled.advance(1)
    assert scheduled.current == pytest.approx(0.3)


# -- in the worker -----------------------------------------------------------------------


class Alone(test_worker.Alone):
    """A standalone worker with a model that has buffers, driven by the test."""

    def __init__(self, **kwargs):
        super().__init__(
            model=lambda device: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
            optim=lambda p: torch.optim.Adam(p, 0.1),
            train=lambda model, x: model(x).square().mean(),
            **kwargs,
        )

    def step(self, seed):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        return float(self.worker.train_step(x).loss)

    def begin(self, epoch):
        """Begin an epoch without batches for this rank."""
        self.worker.run_epoch_plan(m.EpochPlan(epoch=epoch))
        self.reports.get_nowait()

    def ask(self, message):
        self.send(message)
        self.worker.handle_control()
        return self.take()


@pytest.fixture
def alone():
    made = []

    def make(resume=None, **kwargs):
        made.append(Alone(peers=RunPeers(resume=resume), **kwargs))
        return made[-1]

    yield make
    for made_one in made:
        made_one.worker.close()


def point(captured, weights):
    """A resume point with the state that the worker sent."""

    class Data:
        epoch = 0

    Data.ranks, Data.weights = (stored(captured.extra),), weights
    return ResumePoint(Data, "a checkpoint")


def test_a_worker_continues_from_the_state_that_it_sent(alone):
    first = alone()
    for seed in range(3):
        first.step(seed)
    (captured,) = first.ask(m.TakeCheckpoint(id=1))
    assert captured.report.stats.num_batches == 3
    weights = {k: t.clone() for k, t in first.worker.model.state_dict().items()}
    losses = [first.step(seed) for seed in range(3, 6)]
    assert first.ask(m.TakeCheckpoint(id=2))[0].report.stats.num_batches == 3

    second = alone(resume=point(captured, weights))
    assert second.worker.local_step == 3
    assert [second.step(seed) for seed in range(3, 6)] == losses
    for name, tensor in first.worker.model.state_dict().items():
        assert torch.equal(tensor, second.worker.model.state_dict()[name]), name


def test_a_sent_state_does_not_change_with_the_next_step(alone):
    worker = alone()
    worker.step(0)
    (captured,) = worker.ask(m.TakeCheckpoint(id=1))
    before = through_a_file(
        {"extra": encode(captured.extra), "params": list(captured.payload.params)}
    )
    worker.step(1)
    after = through_a_file(
        {"extra": encode(captured.extra), "params": list(captured.payload.params)}
    )
    assert repr(before) == repr(after)


def test_a_snapshot_of_a_round_carries_the_state_only_if_requested(alone):
    worker = alone()
    worker.step(0)
    (bare,) = worker.ask(m.RequestParams(round=1))
    (full,) = worker.ask(m.RequestParams(round=2, capture=True))
    assert bare.extra is None
    assert full.extra.local_step == 1
    assert full.extra.stepper.optimizer["state"]


def test_generators_are_restored_after_epoch_fn_of_the_epoch_that_was_begun(alone):
    def draws(worker):
        return (
            float(torch.rand(1, generator=worker.generator)),
            float(torch.rand(1)),
            random.random(),
            float(np.random.rand()),
        )

    def epoch_fn(epoch, worker):
        draws(worker)  # as in the first run; must have no effect

    first = alone(epoch_fn=epoch_fn)
    first.begin(0)
    draws(first.worker)
    (captured,) = first.ask(m.TakeCheckpoint(id=1))
    weights = dict(first.worker.model.state_dict())
    expected = draws(first.worker)
    second = alone(resume=point(captured, weights), epoch_fn=epoch_fn)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    second.begin(0)
    assert draws(second.worker) == expected
    at_the_edge = alone(resume=point(captured, weights), epoch_fn=lambda epoch, worker: None)
    at_the_edge.begin(1)
    assert draws(at_the_edge.worker)[1:] == expected[1:]
    assert draws(at_the_edge.worker)[0] != expected[0]


def test_a_rank_without_a_saved_state_draws_from_its_own_seed(alone):
    first = alone()
    first.begin(0)
    (captured,) = first.ask(m.TakeCheckpoint(id=1))
    going_on = point(captured, dict(first.worker.model.state_dict()))
    drawn = []
    for worker in (first, alone(resume=going_on), alone(resume=going_on, rank=1), alone(rank=1)):
        if worker is not first:
            worker.begin(0)
        drawn.append(float(torch.rand(1, generator=worker.worker.generator)))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_a_state_that_no_file_can_hold_is_reported_and_training_continues(alone):
    worker = alone()
    worker.step(0)
    next(iter(worker.worker.optimizer.state.values()))["odd"] = object()
    (captured,) = worker.ask(m.TakeCheckpoint(id=1))
    assert isinstance(captured.extra, CheckpointError)
    assert "the state of rank 0" in str(captured.extra)
