"""Tensor subclasses in optimizers and models of runs with checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from runtime import CheckpointError, KeepBest
from runtime.checkpoint.format import plain
from runtime.checkpoint.store import load_newest, write_checkpoint
from runtime.checkpoint.subclasses import restore_subclasses
from tests.support.running import ASYNC, CADENCE, OVER_CPU, SYNC, THREAD, WAIT_S, Trace, builder

aten = torch.ops.aten


class Opaque(Tensor):
    """Values in half precision, which look like float64."""

    @staticmethod
    def __new__(cls, half):
        return Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float64)

    def __init__(self, half):
        self.half = half

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (aten.detach.default, aten.clone.default):
            return cls(op(args[0].half))
        if op is aten.copy_.default and isinstance(args[0], Opaque):
            args[0].half.copy_(args[1])
            return args[0]
        values = tree_map(lambda a: a.half.double() if isinstance(a, Opaque) else a, args)
        return op(*values, **(kwargs or {}))


class Halves(Opaque):
    """An opaque one that can be flattened."""

    def __tensor_flatten__(self):
        return ["half"], {"dtype": torch.float16}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        assert inner["half"].dtype is context["dtype"]
        return Halves(inner["half"])


class Unsaved(Halves):
    """One whose context is no plain value."""

    def __tensor_flatten__(self):
        return ["half"], frozenset()


class Labelled(Tensor):
    """Plain data with a class."""


def make(kind, value):
    return value.as_subclass(kind) if kind is Labelled else kind(value.half())


def momentum(kind):
    class Momentum(torch.optim.Optimizer):
        """SGD with momentum in tensors of a subclass."""

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state.setdefault("m", make(kind, torch.zeros_like(p)))
                    assert type(state["m"]) is kind
                    sum_ = Tensor.add(state["m"] * 0.9, p.grad).as_subclass(Tensor)
                    state["m"].copy_(sum_)
                    p.sub_(sum_, alpha=group["lr"])

    return Momentum


def square(model, batch):
    return (model.w - batch[0].double() / 7).square().mean()


def run(kind, way, epochs=1, *, train=square, **settings):
    *way, ranks = way
    return builder(
        optim=momentum(kind), train=train, way=way, ranks=ranks, epochs=epochs, **settings
    )


WAYS = [(SYNC, THREAD, 2), (SYNC, THREAD, 1), (CADENCE, OVER_CPU, 2), (ASYNC, OVER_CPU, 1)]


def named(value):
    return value.__name__ if isinstance(value, type) else f"{value[0].name}-{value[2]}"


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("kind", [Halves, Labelled], ids=named)
def test_optimizer_state_is_restored_with_its_class(kind, way, tmp_path):
    run(kind, way).checkpoint_dir(tmp_path).run().join(WAIT_S)
    resumed = run(kind, way, 2).resume(tmp_path).run().join(WAIT_S)
    whole = run(kind, way, 2).run().join(WAIT_S)
    assert not resumed.checkpoint_errors
    assert len(resumed.metrics) == 2
    if way[0] is SYNC or way[2] == 1:  # else rounds depend on time
        assert torch.equal(resumed.params["w"], whole.params["w"])


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Opaque, r"\['optimizer'\]\['state'\]\[0\]\['m'\] is of type Opaque, a tensor subclass"),
        (Unsaved, r"\['m'\]\['context'\] is of type frozenset"),
    ],
    ids=["class", "context"],
)
def test_a_state_without_a_plain_form_is_refused_after_the_first_step(kind, message, way, tmp_path):
    trace = Trace(square)
    with pytest.raises(CheckpointError, match=message):
        run(kind, way, train=trace).checkpoint_dir(tmp_path, every=9).run().join(WAIT_S)
    assert max(trace.steps.values()) == 1
    if kind is Opaque:
        keep = KeepBest(tmp_path / "best")
        run(kind, way).callbacks(keep).run().join(WAIT_S)
        assert keep.path.exists()


def with_tensor(kind, where):
    def factory(device):
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        value = make(kind, torch.ones(3, dtype=torch.float64))
        if where == "buffer":
            model.register_buffer("q", value)
        else:
            model.q = nn.Parameter(value, requires_grad=False)
        return model

    return factory


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize(
    ("kind", "where"),
    [(Halves, "buffer"), (Labelled, "buffer"), (Labelled, "frozen")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tensors_of_the_model_are_saved_by_value(kind, where, way, tmp_path):
    def train(model, batch):
        with torch.no_grad():
            model.q.copy_(torch.full((3,), 5.0, dtype=torch.float64))
        return square(model, batch)

    *policy, ranks = way
    settings = {"train": train, "way": policy, "ranks": ranks}
    b = builder(model=with_tensor(kind, where), **settings).checkpoint_dir(tmp_path)
    assert not b.run().join(WAIT_S).checkpoint_errors
    values = []

    def look(epoch, worker):
        values.append(worker.model.q * 1)
        assert type(worker.model.q) is kind

    b = builder(model=with_tensor(kind, where), epochs=2, **settings).epoch_fn(look)
    b.resume(tmp_path).run().join(WAIT_S)
    assert all(float(v.mean()) == 5.0 for v in values)


def test_a_frozen_parameter_that_wraps_others_is_refused_by_name(tmp_path):
    b = builder(model=with_tensor(Halves, "frozen")).checkpoint_dir(tmp_path)
    with pytest.raises(CheckpointError, match="frozen parameter 'q' is of type Halves"):
        b.run().join(WAIT_S)


def test_a_class_that_was_not_imported_is_named_at_the_resume(tmp_path):
    run(Halves, WAYS[0]).checkpoint_dir(tmp_path / "a").run().join(WAIT_S)
    data = load_newest(tmp_path / "a").data
    for rank in data.ranks:
        stored = rank.stepper.optimizer["state"][0]["m"]
        assert type(stored["inner"]["half"]) is Tensor
        stored.update((k, "gone.Other") for k, v in stored.items() if str(v).endswith("Halves"))
    write_checkpoint(tmp_path / "b", data)
    with pytest.raises(CheckpointError, match=r"no tensor subclass gone\.Other: import its module"):
        run(Halves, WAYS[0], 2).resume(tmp_path / "b").run().join(WAIT_S)


def test_values_are_restored_in_memory_of_their_own():
    value = {"a": [Halves(torch.ones(2).half())], "b": (torch.ones(2).as_subclass(Labelled), 1)}
    stored = plain(value, "state")
    restored = restore_subclasses(stored)
    assert type(restored["a"][0]) is Halves
    assert type(restored["b"][0]) is Labelled
    value["a"][0].half.zero_()
    value["b"][0].zero_()
    assert float(restored["a"][0].half.sum()) == 2
    assert float(restored["b"][0].sum()) == 2
    with torch.serialization.safe_globals([Labelled]):
        assert type(plain(value["b"][0], "state")) is Labelled
    assert type(plain(nn.Parameter(torch.zeros(2)), "state")) is Tensor


def test_an_attribute_of_a_tensor_is_not_lost():
    t = torch.zeros(2).as_subclass(Labelled)
    t.label = "x"
    with pytest.raises(CheckpointError, match="state is of type Labelled, a tensor subclass"):
        plain(t, "state")
