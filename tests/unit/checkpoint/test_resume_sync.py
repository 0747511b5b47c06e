"""A ``SYNC`` run stopped at any step and resumed is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from runtime import Weighted, current_worker, record_scalar
from runtime.checkpoint.store import load_newest, write_checkpoint
from tests.support.pairs import SCALE
from tests.support.resuming import capture_often
from tests.support.running import SYNC, THREAD, WAIT_S, builder

N, EPOCHS = 22, 3
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
DATA = (X, X.sum(1, keepdim=True))


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, which its state dict lacks."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.num_steps = 0
        self.has_stepped = False

    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"] if self.has_stepped else ():
                p.grad.div_(self.num_steps)
        self.has_stepped = True
        return super().step(closure)


@dataclass(frozen=True)
class Recipe:
    """A run that is bitwise reproducible from its settings."""

    ranks: int = 2
    accumulate: int = 1
    ratios: tuple[float, ...] | None = None
    max_steps: int | None = None
    dropout: bool = False
    optim: type[torch.optim.Optimizer] = torch.optim.AdamW
    drop_last: bool = False
    weighted: bool = False
    precision: str = "fp32"

    def model(self, device):
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()]
        layers += [nn.Dropout(0.3)] if self.dropout else []
        return nn.Sequential(*layers, nn.Linear(6, 1)).to(device)

    def start(self, *, stop_at=None, configure=lambda b: b):
        handles, started = [], threading.Event()

        def train(model, batch):
            worker = current_worker()
            x, y = batch
            if worker.rank == 0 and stop_at is not None and worker.local_step >= stop_at:
                assert started.wait(WAIT_S)
                handles[0].stop()
            noise = torch.randn(x.shape, generator=worker.generator) * 0.1
            if self.dropout and self.ranks == 1:  # else they are drawn in any order
                noise = noise + random.random() * 0.1 + np.random.rand() * 0.1
            record_scalar("mean", x.mean())
            loss = ((model(x + noise) - y) ** 2).mean()
            return Weighted(loss, x.abs().sum() / 3) if self.weighted else loss

        b = builder(
            model=self.model,
            optim=lambda params: self.optim(params, 0.01),
            train=train,
            dataset=DATA,
            batch_size=2 if self.ratios is None else 4,
            epochs=EPOCHS,
            ranks=self.ranks,
            way=(SYNC, THREAD),
        ).seed(5)
        b.scheduler(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 9, 17], 0.5))
        b.accumulate(self.accumulate).lr_scale_ratio(0.5).max_grad_norm(1.0)
        b.drop_last(self.drop_last).tune_allocator(False).precision(self.precision)
        if self.ratios is not None:
            b.partition_ratios(self.ratios)
        if self.max_steps is not None:
            b.max_steps(self.max_steps)
        handle = configure(b).run()
        handles.append(handle)
        started.set()
        return handle

    def straight(self):
        seed_process(1)
        return self.start().join(WAIT_S)

    def resumed(self, path, **kwargs):
        seed_process(2)  # the run must not depend on the process's generators
        return self.start(configure=lambda b: b.resume(path).checkpoint_dir(path), **kwargs)


def seed_process(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def assert_same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert [figures(m) for m in one.metrics] == [figures(m) for m in other.metrics]


def figures(m):
    """The metrics of an epoch except times."""
    ranks = [(r.rank, r.num_batches, r.num_samples, r.avg_loss) for r in m.per_rank]
    return m.epoch, m.avg_loss, m.scalars, m.num_samples, m.num_averagings, ranks


RECIPES = {
    "plain": Recipe(),
    "three ranks, windows of two": Recipe(ranks=3, accumulate=2),
    "fixed ratios": Recipe(ratios=(1.0, 2.0)),
    "max_steps": Recipe(max_steps=25),
    "one rank with dropout": Recipe(ranks=1, dropout=True),
    "three ranks with dropout": Recipe(ranks=3, dropout=True),
    "weights": Recipe(accumulate=2, weighted=True),
    "momentum, short batch dropped": Recipe(ranks=3, optim=torch.optim.RMSprop, drop_last=True),
    "an optimizer that counts its steps": Recipe(ranks=3, optim=Counting),
    "fp16": Recipe(precision="fp16", optim=torch.optim.SGD),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_run_stopped_at_any_step_equals_an_uninterrupted_one(recipe, tmp_path):
    straight = recipe.straight()
    stops = set()
    # The steps of two epochs; all or every seventh of them in the simplest recipe.
    num_steps = 2 * N // (2 * recipe.ranks)
    every = (1 if SCALE > 1 else 7) if recipe == Recipe() else num_steps // 2
    for step in range(0, num_steps, every):
        path = tmp_path / str(step)
        seed_process(1)
        handle = recipe.start(stop_at=step, configure=lambda b, p=path: b.checkpoint_dir(p))
        handle.join(WAIT_S)
        stops.add(load_newest(path).data.global_step)
        assert_same(recipe.resumed(path).join(WAIT_S), straight)
    assert len(stops) > 1


@pytest.mark.parametrize(
    ("whole", "max_steps"),
    [
        (Recipe(), 2),
        (Recipe(), 8),
        (Recipe(), 13),
        (Recipe(accumulate=2), 4),
        (Recipe(accumulate=2), 15),
        (Recipe(ratios=(1.0, 2.0)), 4),
        (Recipe(ratios=(1.0, 2.0)), 10),
        (Recipe(ratios=(1.0, 2.0), accumulate=2), 12),
    ],
)
def test_a_run_ended_by_max_steps_is_resumed_like_an_uninterrupted_one(whole, max_steps, tmp_path):
    """Also the running statistics, which the first run averages for the state that it returns."""
    first = replace(whole, max_steps=max_steps)
    first.start(configure=lambda b: b.checkpoint_dir(tmp_path)).join(WAIT_S)
    assert_same(whole.resumed(tmp_path).join(WAIT_S), whole.straight())


def test_a_run_stopped_twice_equals_an_uninterrupted_one(tmp_path):
    recipe = RECIPES["three ranks, windows of two"]
    straight = recipe.straight()
    for first, second in ((0, 4), (2, 4), (4, 8)):
        path = tmp_path / str(first)
        recipe.start(stop_at=first, configure=lambda b, p=path: b.checkpoint_dir(p)).join(WAIT_S)
        state = recipe.resumed(path, stop_at=second).join(WAIT_S)
        assert state.stopped
        assert_same(recipe.resumed(path).join(WAIT_S), straight)


@pytest.mark.parametrize(
    "name", ["plain", "fixed ratios", "one rank with dropout", "three ranks with dropout"]
)
def test_resuming_from_an_intermediate_checkpoint_gives_the_same_result(name, tmp_path):
    """Neither taking the checkpoint nor resuming from it changes a bit."""
    recipe = RECIPES[name]
    straight = recipe.straight()
    seed_process(1)
    handle = recipe.start()
    saved = capture_often(handle, most=6)
    assert_same(handle.join(WAIT_S), straight)
    for data in saved[1:6:2]:
        path = write_checkpoint(tmp_path, data)
        seed_process(2)
        end = recipe.start(configure=lambda b, p=path: b.resume(p)).join(WAIT_S)
        assert_same(end, straight)


def test_checkpoints_at_epoch_boundaries_give_the_same_result(tmp_path):
    recipe = RECIPES["plain"]
    straight = recipe.straight()
    whole = recipe.start(configure=lambda b: b.checkpoint_dir(tmp_path, keep=10)).join(WAIT_S)
    assert_same(whole, straight)
    paths = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    assert load_newest(paths[-1]).data.epoch == EPOCHS
    for path in paths:
        end = recipe.start(configure=lambda b, p=path: b.resume(p)).join(WAIT_S)
        assert_same(end, straight)


def test_resuming_a_finished_run_returns_its_state_without_metrics(tmp_path):
    recipe = RECIPES["plain"]
    whole = recipe.start(configure=lambda b: b.checkpoint_dir(tmp_path)).join(WAIT_S)
    handle = recipe.resumed(tmp_path)
    assert list(handle.metrics()) == []
    assert_same(handle.join(WAIT_S), whole)


def test_a_resumed_run_yields_the_epochs_not_yet_yielded(tmp_path):
    recipe = RECIPES["plain"]
    handle = recipe.start(stop_at=8, configure=lambda b: b.checkpoint_dir(tmp_path))
    epochs = [m.epoch for m in handle.metrics()]
    handle = recipe.resumed(tmp_path)
    epochs += [m.epoch for m in handle.metrics()]
    assert epochs == [0, 1, 2]
    assert [m.epoch for m in handle.join(WAIT_S).metrics] == [0, 1, 2]
