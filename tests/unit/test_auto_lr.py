"""Runs with the automatic factor of the learning rate."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from coordinator import messages as m
from coordinator.cadence import ElChe
from coordinator.messages import Send
from coordinator.service import Service
from runtime import Trainer, current_worker
from runtime.checkpoint.store import load_newest, write_checkpoint
from tests.support.checkpointing import rewrite
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

ROOT = round(math.sqrt(2), 9)


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch):
    """Speeds that are not measured count as equal."""
    monkeypatch.setattr(ElChe, "observe", lambda *args: None)


class SignSgd(torch.optim.Optimizer):
    """Moves by the sign of the gradient, and records the learning rate of each step."""

    def __init__(self, params, lr=1.0, used=None):
        super().__init__(params, {"lr": lr})
        self._used = used

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self._used is not None:
                self._used.of[threading.get_ident()].append(group["lr"])
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


class Used:
    """The learning rates of each worker's steps, in order; a probe's are not recorded."""

    def __init__(self):
        self.of = defaultdict(list)

    def __call__(self, params):
        return SignSgd(params, used=self)

    @property
    def all(self):
        return {round(rate, 9) for of in self.of.values() for rate in of}


def auto(used, **settings):
    """A run of short rounds."""
    return builder(optim=used, dataset=24, **settings).anchor(3).max_anchor(3)


@pytest.mark.parametrize("way", [(CADENCE, OVER_CPU), (CADENCE, THREAD), (ASYNC, OVER_CPU)])
def test_steps_of_two_equal_ranks_use_the_root_of_two(way):
    used = Used()
    handle = auto(used, way=way).run()
    state = handle.join(WAIT_S)
    assert used.all == {ROOT}
    assert state.metrics[0].lr_factor == pytest.approx(ROOT)
    assert state.metrics[0].learning_rate == 1.0
    assert handle.summary().lr_factor == pytest.approx(ROOT)
    assert "learning rate x 1.414" in str(handle.summary())


@pytest.mark.parametrize(
    ("settings", "way", "rate"),
    [
        ({"lr_scale_ratio": 0.5}, (CADENCE, OVER_CPU), 1.5),
        ({"lr_scale_ratio": 0}, (CADENCE, OVER_CPU), 1.0),
        ({}, (SYNC, THREAD), 1.0),
        ({"lr_scale_ratio": "auto"}, (SYNC, THREAD), 1.0),
        ({"max_anchor": 201, "anchor": 201}, (CADENCE, OVER_CPU), 1.0),
    ],
)
def test_a_number_sync_and_sparse_rounds_have_no_automatic_factor(settings, way, rate):
    used = Used()
    b = auto(used, way=way)
    for name, value in settings.items():
        getattr(b, name)(value)
    state = b.run().join(WAIT_S)
    assert used.all == {rate}
    assert state.metrics[0].lr_factor == 1.0


def test_one_device_has_no_factor():
    used = Used()
    auto(used, ranks=1).run().join(WAIT_S)
    assert used.all == {1.0}


def test_sgd_has_no_factor():
    handle = auto(plain_sgd).run()
    assert handle.join(WAIT_S).metrics[0].lr_factor == 1.0
    assert handle.summary().lr_factor == 1.0


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 1)
        self.head = nn.Linear(1, 1)


def test_of_two_optimizers_only_the_invariant_one_is_scaled():
    used, seen = Used(), set()

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            seen.add(self.param_groups[0]["lr"])
            super().step(closure)

    def loss_of(name):
        return lambda model, batch: getattr(model, name)(torch.ones(2, 1)).mean()

    train = {name: loss_of(name) for name in ("body", "head")}
    optim = {"body": used, "head": lambda p: Recording(p, 0.5)}
    auto(optim, model=lambda d: Pair().to(d), train=train).run().join(WAIT_S)
    assert used.all == {ROOT}
    assert seen == {0.5}


def test_the_factor_multiplies_scheduled_rates_and_those_of_set_lr():
    used, read = Used(), set()

    def train(model, batch):
        read.add(current_worker().current_lr)
        return count_up(model, batch)

    b = auto(used, train=train).scheduler(lambda o: ConstantLR(o, 0.5, total_iters=10**6))
    b.run().join(WAIT_S)
    assert read == {0.5}
    assert used.all == {round(0.5 * math.sqrt(2), 9)}

    used, read = Used(), set()
    auto(used, train=train).epoch_fn(lambda epoch, worker: worker.set_lr(3.0)).run().join(WAIT_S)
    assert read == {3.0}
    assert used.all == {round(3.0 * math.sqrt(2), 9)}


def test_steps_of_an_own_loop_use_the_factor():
    used = Used()

    def loop(worker):
        for _ in worker.batches():
            worker.step(-worker.model.w.sum())

    b = Trainer.loop(counter, lambda model: used(model.parameters()), loop)
    b = b.dataset(numbers(24)).batch_size(2).num_epochs(1).devices(["cpu"] * 2)
    b.policy(CADENCE).backend(OVER_CPU).anchor(3).max_anchor(3).run().join(WAIT_S)
    assert used.all == {ROOT}


def test_clipping_and_accumulation_keep_the_factor():
    used = Used()
    auto(used).max_grad_norm(1.0).accumulate(2).run().join(WAIT_S)
    assert used.all == {ROOT}


def test_a_resumed_run_has_the_factor_of_the_speeds_in_its_checkpoint(tmp_path):
    auto(Used()).checkpoint_dir(tmp_path / "first").run().join(WAIT_S)
    data = load_newest(tmp_path / "first").data
    speeds = replace(data.run.elche, seconds=(0.1, 0.4), suspects=(0, 0))
    data = replace(data, run=replace(data.run, elche=speeds))
    path = write_checkpoint(tmp_path / "edited", data)
    used = Used()
    state = auto(used).num_epochs(2).resume(path).run().join(WAIT_S)
    expected = math.sqrt(2) / 2 / (0.8**2 + 0.2**2)
    assert used.all == {round(expected, 9)}
    assert [e.lr_factor for e in state.metrics] == pytest.approx([ROOT, expected])


def test_a_checkpoint_without_a_factor_is_resumed(tmp_path):
    auto(Used()).checkpoint_dir(tmp_path / "first").run().join(WAIT_S)
    path = write_checkpoint(tmp_path / "edited", load_newest(tmp_path / "first").data)
    rewrite(path, lambda parts: parts["run"]["metrics"][0].pop("lr_factor"))
    state = auto(Used()).num_epochs(2).resume(path).run().join(WAIT_S)
    assert [m.lr_factor for m in state.metrics] == [1.0, pytest.approx(ROOT)]


def test_the_survivor_of_two_ranks_trains_with_its_own_factor(monkeypatch):
    begun, alone, execute = threading.Event(), threading.Event(), Service._execute

    def tapped(service, command, now):
        execute(service, command, now)
        message = command.message if isinstance(command, Send) else None
        if isinstance(message, m.Resume) and message.alone:
            alone.set()

    def train(model, batch):
        if current_worker().rank == 1:
            assert begun.wait(WAIT_S)
            raise RuntimeError("planted")
        begun.set()
        assert alone.wait(WAIT_S)
        return count_up(model, batch)

    monkeypatch.setattr(Service, "_execute", tapped)
    used = Used()
    state = auto(used, train=train).on_worker_failure("continue").run().join(WAIT_S)
    (rates,) = used.of.values()  # the message arrives while the first step runs
    assert rates == pytest.approx([ROOT] + [1 / math.sqrt(2)] * (len(rates) - 1))
    assert state.metrics[-1].lr_factor == pytest.approx(1 / math.sqrt(2))
