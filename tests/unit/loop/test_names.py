"""Names of the model, read, set and deleted on what Trainer.setup returns."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from tests.support.own_loop import (
    NUM_FEATURES,
    OneDevice,
    assert_close,
    assert_identical,
    make_batch,
    on_cpus,
    train_step,
)

one_or_two = pytest.mark.parametrize("num_devices", [1, 2])


class Named(nn.Module):
    """Its ``head``, temperature and gain act on the output."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    @property
    def width(self):
        return self.head.out_features

    @width.setter
    def width(self, width):
        self.head = nn.Linear(4, width, dtype=torch.float64)

    def forward(self, x):
        self.seen += 1
        out = self.head(self.body(x)) * self.gain / getattr(self, "_temperature", 1.0)
        return out if self.training else out + 100

    def amplify(self):
        self.gain *= 2
        return self


class Hidden(Named):
    """Has names of ReplicatedModule: a buffer, an attribute, a class attribute and a method."""

    world_size = "of the model"

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.devices = "of the model"

    def accumulate(self, x):
        return x + 1


def change_head(model):
    model.head = copy.deepcopy(HEAD)


def change_width(model):
    torch.manual_seed(3)
    model.width = 3


def change_private(model):
    model._temperature = 4.0


def change_class_attribute(model):
    model.gain = 3.0


def delete_attribute(model):
    model.gain = 5.0
    del model.gain
    model.extra = nn.Linear(1, 1)
    del model.extra


def change_mode(model):
    model.training = False


def call_method(model):
    assert model.amplify() is not None


HEAD = nn.Linear(4, 3, dtype=torch.float64)
CHANGES = [
    change_head,
    change_width,
    change_private,
    change_class_attribute,
    delete_attribute,
    change_mode,
    call_method,
]


@one_or_two
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_the_models_names_reaches_every_rank(change, num_devices):
    net = Named()
    alone = OneDevice(net)
    with on_cpus(net, num_devices) as model:
        for x, y in (make_batch(6), make_batch(5)):
            train_step(model, x, y)
            train_step(alone, x, y)
            change(model)
            change(alone.model)
        x, _ = make_batch(6)
        assert_close([model(x)], [alone.model(x)])
        assert_identical(model)
        assert list(model.state_dict()) == list(alone.model.state_dict())
        assert model.training == net.training == alone.model.training
        assert model.width == 3


@one_or_two
def test_names_are_read_as_on_the_model(num_devices):
    net = Named()
    with on_cpus(net, num_devices) as model:
        assert model.head is net.head
        assert model.seen is net.seen is model.get_buffer("seen")
        assert model.gain is Named.gain
        assert {"head", "gain", "amplify", "step"} <= set(dir(model))
        for has in (model, net):
            assert not hasattr(has, "missing")
            with pytest.raises(AttributeError, match=r"^'Named' object has no attribute 'missing'"):
                _ = has.missing
            with pytest.raises(AttributeError, match="missing"):
                del has.missing


@one_or_two
def test_layers_of_a_sequence_are_read_by_their_index(num_devices):
    net = nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.Tanh())
    with on_cpus(net, num_devices) as model:
        assert model[0] is net[0]
        assert list(model) == list(net)
        assert model[:1][0] is net[0]


@one_or_two
def test_names_that_the_returned_object_hides_are_named_once_at_setup(num_devices, caplog):
    with caplog.at_level(logging.WARNING), on_cpus(Hidden(), num_devices) as model:
        text = (
            "attributes of Hidden are hidden by those of the object that Trainer.setup returns: "
            "use model.module.accumulate, model.module.devices, model.module.step, "
            "model.module.world_size"
        )
        assert [r.getMessage() for r in caplog.records if "hidden" in r.getMessage()] == [text]
        assert model.devices == (torch.device("cpu"),) * num_devices
        assert model.module.devices == "of the model"
        train_step(model, *make_batch(6))
        model.module.step += 1
        assert float(model.replicas[-1].step) == float(model.state_dict()["step"]) == 1


@one_or_two
def test_a_name_that_the_returned_object_needs_cannot_be_set_on_it(num_devices):
    with on_cpus(Hidden(), num_devices) as model:
        with pytest.raises(TypeError, match=r"the model's own: model\.module\.step.*'int'"):
            model.step += 1
        refused = (
            "model.{} belongs to the object that Trainer.setup returns, and cannot be changed: "
            r"that of the model itself is model.module.{}$"
        )
        for name in ("step", "devices", "optimizer", "forward"):
            with pytest.raises(AttributeError, match=refused.format(name, name)):
                setattr(model, name, torch.ones(()))
            with pytest.raises(AttributeError, match=refused.format(name, name)):
                delattr(model, name)
        for register in (model.register_buffer, model.register_parameter, model.add_module):
            with pytest.raises(AttributeError, match=refused.format("close", "close")):
                register("close", None)
        train_step(model, *make_batch(6))
        assert float(model.module.step) == 0


def test_the_head_that_was_passed_hides_that_of_the_model(caplog):
    class Task:
        def __init__(self, module):
            self.module = module

    net = Named()
    task = Task(net)
    with caplog.at_level(logging.WARNING), on_cpus(task, 2) as model:
        assert model.head is task
        assert model.module.head is net.head
        assert "use model.module.head" in caplog.text
        with pytest.raises(AttributeError, match=r"is model\.module\.head$"):
            model.head = nn.Identity()
