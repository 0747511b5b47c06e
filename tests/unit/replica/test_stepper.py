"""Accumulation windows: the order of their calls, and the gradients that they leave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.core.errors import CollectiveAborted
from runtime.replica.flat import FlatParams
from runtime.replica.stepper import DROPPED, MADE
from tests.support.steppers import part_of, stepper_of


def linear():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def loss_of(model, batch):
    return -model.weight.sum() * batch


@pytest.fixture
def model():
    return linear()


@pytest.fixture
def stepper(model):
    return stepper_of(model, torch.optim.SGD(model.parameters(), 1.0))


def test_a_step_follows_the_mean_of_its_micro_batches(model, stepper):
    with stepper.window(4, 2) as window:
        first, _ = window.add(loss_of, 1.0, 1)
        window.add(loss_of, 3.0, 3)
        assert window.finish() == MADE
    assert first.item() == 0.0
    assert model.weight.item() == (1 * 1.0 + 3 * 3.0) / 4
    assert [n for _, n, _ in window.values.losses] == [1, 3]


CALLS = {
    "add": lambda window: window.add(loss_of, 1.0, 1),
    "finish": lambda window: window.finish(),
    "restart": lambda window: window.restart(),
    "pack": lambda window: window.pack(),
    "apply": lambda window: window.apply(),
    "load": lambda window: window.load(window.captured()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("is_dropped", [False, True])
def test_no_call_follows_the_finish_of_a_window(call, is_dropped, model, stepper):
    with stepper.window(1) as window:
        window.add(loss_of, 1.0, 1)
        if not is_dropped:
            window.finish()
            with pytest.raises(RuntimeError, match="is CLOSED"):
                call(window)
    with pytest.raises(RuntimeError, match="is CLOSED"):
        call(window)
    assert model.weight.item() == (0.0 if is_dropped else 1.0)


def test_no_step_is_applied_before_its_gradients_are_packed(model, stepper):
    with stepper.window(1) as window:
        window.add(loss_of, 1.0, 1)
        with pytest.raises(RuntimeError, match="is ACCUMULATING"):
            window.apply()
    assert model.weight.item() == 0.0


def test_no_micro_batch_is_added_to_packed_gradients(stepper):
    with stepper.window(2, 2) as window:
        window.add(loss_of, 1.0, 1)
        window.pack()
        with pytest.raises(RuntimeError, match="is PACKED"):
            window.add(loss_of, 1.0, 1)


def test_no_window_opens_while_another_is_open(stepper):
    with (
        stepper.window(1),
        pytest.raises(RuntimeError, match="a window is open"),
    ):
        stepper.window(1)
    with stepper.window(1) as window:
        window.add(loss_of, 1.0, 1)
        window.finish()


@pytest.mark.parametrize("fails", [False, True])
def test_a_window_without_finish_makes_no_step_and_drops_its_gradients(fails, model, stepper):
    def leave():
        with stepper.window(2, 2) as window:
            window.add(loss_of, 1.0, 1)
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            leave()
    else:
        leave()
    assert model.weight.grad is None
    assert model.weight.item() == 0.0
    with stepper.window(1) as window:
        window.add(loss_of, 2.0, 1)
        window.finish()
    assert model.weight.item() == 2.0


def test_a_restarted_window_forgets_its_micro_batches(model, stepper):
    with stepper.window(1) as window:
        window.add(loss_of, 7.0, 1)
        window.restart()
        window.add(loss_of, 1.0, 1)
        window.finish()
    assert model.weight.item() == 1.0


def test_a_loaded_result_is_finished_as_it_was_captured(model, stepper):
    """The gradients of a captured window make the same step again."""
    with stepper.window(1) as window:
        window.add(loss_of, 3.0, 1)
        captured = window.captured()
        window.load(captured)
        window.finish()
    stepper.clear_gradients()
    with stepper.window(1) as window:
        window.load(captured)
        assert window.finish() == MADE
    assert model.weight.item() == 6.0


class Refusing:
    """A finite check that drops every step."""

    skips = True

    def begin(self, values):
        pass

    def accept(self):
        return False


def test_a_refused_step_is_dropped(model):
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    stepper = stepper_of(model, optimizer, finite_check=Refusing())
    with stepper.window(1) as window:
        window.add(loss_of, 1.0, 1)
        assert window.finish() == DROPPED
    assert model.weight.item() == 0.0


# -- several optimizers ---------------------------------------------------------------------


@pytest.fixture
def pair():
    return nn.ModuleDict({"a": linear(), "b": linear()})


@pytest.fixture
def alternating(pair):
    optimizers = {name: torch.optim.SGD(part.parameters(), 1.0) for name, part in pair.items()}
    params = FlatParams(pair)
    parts = tuple(
        part_of(pair, optimizers[name], params=FlatParams(part), name=name)
        for name, part in pair.items()
    )
    whole = torch.optim.SGD(params.params, 1.0)
    return stepper_of(pair, whole, params=params, parts=parts)


def of_both(model, batch):
    return -(model["a"].weight + model["b"].weight).sum()


def test_a_window_of_one_optimizer_leaves_the_others_without_gradients(pair, alternating):
    with alternating.alternate(undo=False), alternating.window(1, part="b") as window:
        window.add(of_both, None, 1)
        assert pair["a"].weight.grad is None
        window.finish()
    assert (pair["a"].weight.item(), pair["b"].weight.item()) == (0.0, 1.0)
    assert all(p.requires_grad for p in pair.parameters())


@pytest.mark.parametrize("undo", [False, True])
def test_an_aborted_step_undoes_those_of_earlier_optimizers(undo, pair, alternating):
    def step():
        with alternating.alternate(undo=undo):
            with alternating.window(1, part="a") as window:
                window.add(of_both, None, 1)
                window.finish()
            with alternating.window(1, part="b") as window:
                window.add(of_both, None, 1)
                raise CollectiveAborted("planted")

    with pytest.raises(CollectiveAborted):
        step()
    assert pair["a"].weight.item() == (0.0 if undo else 1.0)
    assert pair["b"].weight.item() == 0.0
    assert all(p.requires_grad for p in pair.parameters())
