"""``fit``, the short form of the builder."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn

import runtime
from runtime import EarlyStopping, Trainer, TrainerBuilder, WorkerFailed
from runtime.trainer import FitSettings
from tests.support.running import WAIT_S

CPUS = ["cpu", "cpu"]


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=draw, dtype=torch.float64)
    return x, x[:, :1] * 2


def net():
    torch.manual_seed(2)
    return nn.Linear(4, 1, dtype=torch.float64)


def sgd(params):
    return torch.optim.SGD(params, 0.05)


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_fit_trains_the_module_like_the_builder():
    model, settings = net(), {"batch_size": 5, "devices": CPUS, "policy": "sync", "seed": 3}
    state = runtime.fit(
        model, data(), optimizer=sgd, loss=nn.functional.mse_loss, epochs=2, **settings
    )
    b = Trainer.builder(net(), sgd, loss_of).dataset(data()).num_epochs(2)
    for name, value in settings.items():
        getattr(b, name)(value)
    wanted = b.run().join(WAIT_S)
    assert torch.equal(model.weight, wanted.params["weight"])
    assert torch.equal(state.params["weight"], wanted.params["weight"])
    assert [m.avg_loss for m in state.metrics] == [m.avg_loss for m in wanted.metrics]


SUM = {"reduction": "sum"}


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(**SUM), functools.partial(nn.functional.mse_loss, **SUM)]
)
def test_a_loss_that_is_a_sum_trains_like_on_one_device(loss):
    one, two = net(), net()
    settings = {"optimizer": lambda params: torch.optim.SGD(params, 1e-3), "loss": loss}
    settings |= {"global_batch_size": 10, "epochs": 2, "seed": 3}
    runtime.fit(one, data(), devices=["cpu"], **settings)
    runtime.fit(two, data(), devices=CPUS, **settings)
    torch.testing.assert_close(two.weight, one.weight)
    runtime.fit(two := net(), data(), devices=CPUS, loss_reduction="mean", **settings)
    assert not torch.allclose(two.weight, one.weight)


class Judging(nn.Module):
    """A model that computes its loss."""

    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = net(), wrap

    def forward(self, x, y):
        return self.wrap(nn.functional.mse_loss(self.inner(x), y))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss}])
@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_computes_its_loss_needs_none(wrap, named):
    dataset = dict(zip("xy", data(), strict=True)) if named else data()
    model = Judging(wrap)
    state = runtime.fit(
        model, dataset, optimizer=sgd, epochs=3, batch_size=5, devices=CPUS, policy="sync"
    )
    assert state.metrics[-1].avg_loss < 0.5 * state.metrics[0].avg_loss
    assert torch.equal(model.inner.weight, state.params["inner.weight"])


def test_fit_passes_objects_to_settings():
    stop = EarlyStopping(target=1e9)
    state = runtime.fit(
        net(),
        data(),
        optimizer=sgd,
        loss=nn.functional.mse_loss,
        epochs=500,
        batch_size=5,
        devices=["cpu"],
        callbacks=stop,
    )
    assert state.stopped
    assert stop.stopped_epoch == 0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"batchsize": 3}, TypeError, "no setting 'batchsize': did you mean batch_size"),
        ({"_set": 3}, TypeError, "no setting '_set'"),
        ({"run": 3}, TypeError, "no setting 'run'"),
        ({"loss": 3}, TypeError, "loss"),
        ({"loss": nn.MSELoss}, TypeError, r"a class: pass an instance, MSELoss\(\)"),
        ({"lr": 0.1}, TypeError, r"the optimizer has it: .*lr=..."),
        ({}, ValueError, r"batch_size is not set.*fit\(..., batch_size=n\)"),
        ({"model": lambda device: net()}, TypeError, "torch.nn.Module in place, not a function"),
    ],
)
def test_fit_refuses_an_unknown_setting(settings, error, message):
    with pytest.raises(error, match=message):
        runtime.fit(**{"model": net(), "dataset": data(), "optimizer": sgd, **settings})


def test_fit_with_a_loss_refuses_batches_other_than_pairs_and_keeps_the_module():
    model = net()
    with pytest.raises(WorkerFailed) as caught:
        runtime.fit(
            model,
            (*data(), torch.ones(60)),
            optimizer=sgd,
            loss=nn.functional.mse_loss,
            batch_size=5,
            devices=["cpu"],
        )
    assert "needs (input, target)" in str(caught.value.__cause__)
    assert torch.equal(model.weight, net().weight)


def test_keyword_arguments_for_type_checkers_are_those_of_the_builder():
    # Arguments of fit under their own names, and a setting of Trainer.loop.
    own = {"dataset", "num_epochs", "run", "steps_per_epoch"}
    settings = {}
    for name, method in inspect.getmembers(TrainerBuilder, inspect.isfunction):
        _, *parameters = inspect.signature(method).parameters.values()
        required = [p for p in parameters if p.default is p.empty]
        if name.startswith("_") or name in own or not parameters or len(required) > 1:
            continue
        settings[name] = parameters[0].annotation.replace("ModelT_co", "Any")
    declared = {k: v.__forward_arg__ for k, v in FitSettings.__annotations__.items()}
    assert declared == settings, "add the setting to FitSettings in runtime/trainer.py"
