"""Context variables of the caller are seen by every function that a thread calls for it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import runtime
from runtime import DdpConfig, Trainer
from tests.support.pairs import pairwise
from tests.support.running import (
    LOCAL_WAYS,
    WAIT_S,
    Counter,
    builder,
    count_up,
    plain_sgd,
)

SETTING = ContextVar("setting", default="unset")


class Reads(Dataset):
    def __init__(self, note):
        self.note = note

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.note("data set")
        return torch.tensor(index)


class Streams(IterableDataset):
    def __init__(self, note):
        self.note = note

    def __len__(self):
        return 8

    def __iter__(self):
        self.note("data set")
        return iter(range(8))


@pytest.fixture
def caller():
    token = SETTING.set("caller")
    yield
    SETTING.reset(token)


@pairwise(kind=[Reads, Streams], way=LOCAL_WAYS, prefetch=[0, 2])
def test_the_builders_functions_see_the_callers_variables(kind, way, prefetch, caller):
    seen = set()

    def note(name):
        seen.add((name, SETTING.get()))

    def noting(name, result=None):
        def function(*args):
            note(name)
            return result(*args) if callable(result) else result

        return function

    b = builder(
        model=noting("model", lambda device: Counter()),
        optim=noting("optimizer", plain_sgd),
        train=noting("train_fn", count_up),
        dataset=kind(note),
        way=way,
    )
    b.epoch_fn(noting("epoch_fn")).eval_fn(noting("eval_fn", {"x": 1.0}))
    b.checkpoint_fn(noting("checkpoint_fn")).metrics_fn(noting("metrics_fn"))
    b.prefetch(prefetch).run().join(WAIT_S)
    names = ["model", "optimizer", "train_fn", "data set", "epoch_fn", "eval_fn"]
    names += ["checkpoint_fn", "metrics_fn"]
    assert seen == {(name, "caller") for name in names}


def test_fit_sees_the_callers_variables(caller):
    seen = set()

    def loss(output, target):
        seen.add(SETTING.get())
        return nn.functional.mse_loss(output, target)

    data = (torch.randn(8, 2), torch.randn(8, 1))
    runtime.fit(nn.Linear(2, 1), data, optimizer=plain_sgd, loss=loss, epochs=1, batch_size=4)
    assert seen == {"caller"}


class Noting(nn.Linear):
    seen: ClassVar = []  # of all copies

    def forward(self, x):
        self.seen.append(SETTING.get())
        return super().forward(x)


def test_an_own_loops_model_sees_the_variables_of_each_call():
    Noting.seen.clear()
    config = DdpConfig(whole=[])  # without a trial of the first batch
    model = Trainer.setup_with(Noting(2, 1), plain_sgd, devices=["cpu"] * 2, config=config)
    for value in ("first", "second"):
        token = SETTING.set(value)
        model(torch.randn(4, 2)).sum().backward()
        model.step()
        SETTING.reset(token)
    model.close()
    assert Noting.seen == ["first"] * 2 + ["second"] * 2
