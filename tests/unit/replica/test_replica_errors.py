"""Notes on errors of users, and states, gradients and modules that are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from runtime.core.nested import num_rows
from runtime.replica.build import build_optimizers_of_loop
from runtime.replica.capturable import _plain
from runtime.replica.copying import first_difference
from runtime.replica.error_notes import accumulate_remedy, add_note_once, explain_error
from runtime.replica.flat import _overlap, add
from runtime.replica.graphs import batch_signature
from runtime.replica.optimizers import load_optimizer_state
from runtime.replica.schedule import Schedule, takes_total

DTYPES = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")


@dataclass
class Sample:
    x: torch.Tensor


def notes_of(error, model, batch):
    error = type(error)(*error.args)
    explain_error(error, "train_fn", model, batch)
    return getattr(error, "__notes__", [])


def test_a_batch_of_another_dtype_than_the_model_is_named():
    model = nn.Linear(2, 1)
    (note,) = notes_of(DTYPES, model, {"x": [torch.ones(1, 2, dtype=torch.float64)]})
    assert note.startswith("batch['x'][0] is float64, and the model's parameters are float32")
    (note,) = notes_of(DTYPES, model, [Sample(x=torch.ones(1, 2, dtype=torch.float64))])
    assert note.startswith("batch[0].x is float64")
    assert notes_of(DTYPES, model, torch.ones(1, 2)) == []  # of the model's own tensors
    assert notes_of(DTYPES, model, "text") == []
    assert notes_of(DTYPES, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double()), {}) == []
    assert notes_of(ValueError(*DTYPES.args), model, torch.ones(1, 2).double()) == []


def test_a_batch_that_is_too_small_for_batch_norm_is_explained():
    model = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        model(torch.ones(1, 2))
    (note,) = notes_of(caught.value, model, torch.ones(1, 2))
    assert "drop_last" in note


def test_a_note_is_added_once():
    error = ValueError("planted")
    add_note_once(error, "note")
    add_note_once(error, "note")
    assert error.__notes__ == ["note"]


@pytest.mark.parametrize(
    ("num_samples", "largest", "accumulate", "global_batch_size", "words"),
    [
        (1, 0, 1, None, ['use precision("bf16")']),
        (8, 0, 1, None, [".batch_size(4)", ".accumulate(2)"]),
        (8, 3, 2, None, [".batch_size(3)", ".accumulate(6)"]),
        (8, 2, 1, 16, [".accumulate(4)"]),
    ],
)
def test_the_remedy_for_memory_divides_a_batch_until_its_parts_fit(
    num_samples, largest, accumulate, global_batch_size, words
):
    remedy = accumulate_remedy(num_samples, largest, accumulate, global_batch_size)
    assert all(word in remedy for word in words), remedy


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (torch.ones(3, 2), 3),
        (torch.tensor(1.0), 1),
        ({"x": torch.ones(4)}, 4),
        ([[torch.ones(5)]], 5),
        ("text", 1),
        (7, 1),
        ([], 1),
    ],
)
def test_the_samples_of_a_batch_are_the_length_of_its_first_tensor(batch, number):
    assert (num_rows(batch) or 1) == number


# -- tensors -------------------------------------------------------------------------


def test_tensors_of_one_storage_overlap_if_they_share_an_element():
    whole = torch.zeros(8)
    assert not _overlap(whole[:4], whole[4:])
    assert not _overlap(whole[::2], whole[1::2])
    assert _overlap(whole[::2], whole[4:])
    assert _overlap(whole[:2], whole.view(torch.float64)[:1])


def test_an_average_on_another_device_is_copied_before_it_is_added():
    mean = torch.ones(2, dtype=torch.float64)
    out = torch.empty(2, dtype=torch.float64, device="meta")
    add(mean, torch.empty_like(out), out)  # raises if devices are mixed
    out = torch.empty(2, dtype=torch.float64)
    add(mean, torch.tensor([1.0, 2.0], dtype=torch.float64), out)
    assert out.tolist() == [2.0, 3.0]


def test_the_signature_of_a_batch_has_its_containers_shapes_and_values():
    def batch(x=4, flag=True, kind=dict):
        return kind({"x": torch.ones(x), "parts": [torch.ones(2), flag]})

    assert batch_signature(batch()) == batch_signature(batch())
    others = [batch(x=5), batch(flag=False), batch(kind=MappingProxyType), torch.ones(4)]
    assert batch_signature(batch()) not in map(batch_signature, others)
    for refused in (SimpleNamespace(to=print), {"x": SimpleNamespace(to=print)}, [{1, 2}]):
        assert batch_signature(refused) is None
    assert batch_signature(torch.ones(2, 2).to_sparse()) is None


def test_a_setting_that_is_a_tensor_is_compared_by_identity():
    rate = torch.tensor(0.1)
    assert _plain(rate) == _plain(rate) != _plain(rate.clone())


# -- optimizers and schedules --------------------------------------------------------


def stepped(kind=torch.optim.SGD, **settings):
    p = nn.Parameter(torch.ones(3))
    optimizer = kind([p], 0.1, **settings)
    p.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def test_momentum_without_a_value_is_loaded_before_the_first_gradient():
    state = stepped(momentum=0.9).state_dict()
    state["state"][0]["momentum_buffer"] = None
    optimizer = stepped(momentum=0.9)
    load_optimizer_state(optimizer, state)
    assert next(iter(optimizer.state.values()))["momentum_buffer"] is None


def test_settings_of_any_other_type_are_loaded_as_they_are():
    optimizer = stepped()
    optimizer.param_groups[0]["note"] = {"a": 1}
    state = optimizer.state_dict()
    state["param_groups"][0]["note"] = {"b": 2}
    load_optimizer_state(optimizer, state)
    assert optimizer.param_groups[0]["note"] == {"b": 2}


def test_the_state_of_an_optimizer_that_requires_a_closure_is_loaded():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([p])
    optimizer.step(lambda: (p.grad.zero_() if p.grad is not None else None, p.sum())[1])
    optimizer.state[p]["extra"] = 1
    load_optimizer_state(optimizer, optimizer.state_dict())
    assert optimizer.state[p]["extra"] == 1


class Half(torch.Tensor):
    pass


def test_an_optimizer_that_loses_the_class_of_a_state_is_refused():
    optimizer = stepped(momentum=0.9)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.ones(3).as_subclass(Half)
    load = torch.optim.SGD.load_state_dict

    class Plain(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            load(self, state_dict)
            for own in self.state.values():
                own["momentum_buffer"] = torch.ones(3)

    with pytest.raises(ValueError, match="'momentum_buffer', of type Half, as Tensor"):
        load_optimizer_state(stepped(Plain, momentum=0.9), state)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda model: {}, r"a dict with the names \[\]: name each optimizer by a string"),
        (lambda model: {1: torch.optim.SGD(model.parameters())}, r"a dict with the names \[1\]"),
        (
            lambda model: {
                name: torch.optim.SGD(model.parameters(), 0.1) for name in ("one", "other")
            },
            "the optimizers 'one' and 'other' share a parameter",
        ),
    ],
)
def test_optimizers_of_a_loop_are_named_and_share_no_parameter(found, message):
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=message):
        build_optimizers_of_loop(found, model)


def test_a_schedule_with_a_tensor_rate_copies_and_restores_state_and_rate():
    def schedule():
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], torch.tensor(0.5))
        made = Schedule(optimizer)
        made.attach(lambda o: StepLR(o, 1, 0.5))
        return made, optimizer.param_groups[0]

    (one, group), (other, _) = schedule(), schedule()
    mark = one.mark()
    rate = group["lr"]
    one.advance(2)
    assert float(rate) == 0.125
    other.copy_from(one)
    assert other._read() == [0.125]
    assert other.scheduler.state_dict() == one.scheduler.state_dict()
    one.restore(mark)
    assert group["lr"] is rate
    assert float(rate) == 0.5


def test_a_scheduler_factory_without_a_signature_takes_no_number_of_steps():
    class Opaque:
        __signature__ = "none"

        def __call__(self, optimizer):
            return StepLR(optimizer, 1)

    assert takes_total(Opaque()) is False


# -- copies --------------------------------------------------------------------------


def test_a_tensor_that_only_the_copy_has_is_named():
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    other.load_state_dict(one.state_dict())
    assert first_difference(one, other) is None
    other.register_buffer("extra", torch.ones(1))
    assert "only in the copy" in first_difference(one, other)
    assert "only in the original" in first_difference(other, one)
