"""Values and functions of the user: accepted, refused with a remedy, or rebuilt unchanged."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime import ReplicaFailed, record_scalar
from runtime.core import process_state
from runtime.core.checks import check_callable
from runtime.core.loss_weights import (
    WeightAccumulator,
    labels_weight,
    named_inputs,
    output_weight,
)
from runtime.core.nested import flatten, map_batch
from runtime.core.process_state import _entering
from runtime.core.tracebacks import fold_tracebacks
from runtime.evaluation.pending_means import EvaluationView

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (3, 1.0, TypeError, r"record_scalar\(3, .*the name must be a string"),
        ("loss", "high", TypeError, "'high'.: pass a number or a tensor"),
        ("loss", torch.ones(2), ValueError, r"got shape \(2,\)"),
        ("loss", 1.0, RuntimeError, "worker"),
    ],
)
def test_invalid_scalars_are_refused(name, value, error, message):
    with pytest.raises(error, match=message):
        record_scalar(name, value)


def test_a_callable_without_a_signature_is_accepted():
    class Opaque:
        __signature__ = "none"  # as for functions implemented in C

        def __call__(self):
            return None

    check_callable("train_fn", Opaque(), "(model, batch) -> loss")
    with pytest.raises(TypeError, match="train_fn must be a function"):
        check_callable("train_fn", 3, "(model, batch) -> loss")


def test_a_failure_of_a_replica_is_pickled_with_its_fields():
    error = pickle.loads(pickle.dumps(ReplicaFailed(1, "cpu", "step", ValueError("planted"))))
    assert (error.rank, error.device, error.what) == (1, "cpu", "step")
    assert str(error) == "rank 1 on cpu failed in step: ValueError: planted"
    made = ReplicaFailed.of(1, "cpu", "step", KeyError("planted"))
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, KeyError)
    assert (str(again), again.rank) == (str(made), 1)


@dataclasses.dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.loss)


def test_a_dataclass_is_rebuilt_with_fields_that_its_constructor_does_not_take():
    tensors = []
    spec = flatten(Output(torch.ones(2)), tensors, strict=True)
    assert [t.tolist() for t in tensors] == [[1, 1], [2, 2]]
    built = spec.build(iter([torch.zeros(2), torch.full((2,), 7.0)]))
    assert (built.loss.tolist(), built.doubled.tolist()) == ([0, 0], [7, 7])


def test_an_opaque_input_is_passed_on_and_an_opaque_output_refused():
    opaque, tensors = object(), []
    assert flatten((opaque, torch.ones(1)), tensors, strict=False).build(iter(tensors))[0] is opaque
    with pytest.raises(TypeError, match="forward returned a object"):
        flatten(opaque, [], strict=True)


def test_a_read_only_mapping_keeps_its_class():
    batch = MappingProxyType({"x": torch.ones(2), "id": 3})
    found = map_batch(batch, lambda t: t + 1)
    assert type(found) is MappingProxyType
    assert (found["x"].tolist(), found["id"]) == ([2, 2], 3)


def test_a_failed_entry_of_forward_ad_leaves_it_available_to_other_threads():
    def fails():
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        _entering(fails)()
    with ThreadPoolExecutor(1) as pool:
        free = pool.submit(process_state._FORWARD_AD.acquire, blocking=False)
        assert free.result()
        pool.submit(process_state._FORWARD_AD.release).result()


def test_folded_frames_are_logged_at_debug_level(caplog):
    with caplog.at_level(logging.DEBUG, "runtime.core.tracebacks"):
        error = fold_tracebacks(ValueError("planted"))
    (record,) = caplog.records
    assert record.getMessage() == "all frames of the error"
    assert record.exc_info[1] is error


# -- weights -------------------------------------------------------------------------


class Regression(nn.Module):
    def forward(self, x, labels=None):
        return x


def test_samples_of_a_regression_have_equal_weights():
    inputs = {"labels": torch.rand(5, 2)}
    assert labels_weight(Regression(), inputs, torch.zeros(())) == 5.0


def test_loss_weight_receives_positional_and_keyword_inputs_by_name():
    x, labels, seen = torch.ones(3), torch.zeros(3), []

    def loss_weight(inputs, output):
        seen.append(inputs)
        return 2

    assert output_weight(Regression(), (x,), {"labels": labels}, None, loss_weight) == 2
    assert seen == [{"x": x, "labels": labels}]


def test_inputs_of_a_forward_without_a_signature_are_those_passed_by_keyword():
    model, labels = Regression(), torch.zeros(3)
    model.forward = type("Opaque", (), {"__signature__": 0, "__call__": lambda *_: None})()
    assert named_inputs(model, (torch.ones(3),), {"labels": labels}) == {"labels": labels}


def test_a_weight_on_another_device_of_the_kind_is_refused():
    with FakeTensorMode():
        loss, weight = torch.zeros((), device="cuda:0"), torch.ones((), device="cuda:1")
    with pytest.raises(ValueError, match="a loss on cuda:0 with a weight on cuda:1"):
        WeightAccumulator(1.0, is_prompt=False).add(loss, weight, 1.0, 4)


# -- evaluation ----------------------------------------------------------------------


def test_the_view_of_an_evaluation_gathers_its_own_rows_and_names_missing_attributes():
    view = EvaluationView(nn.Identity(), CPU, torch.Generator())
    rows = torch.ones(3, 2)
    assert view.all_gather(rows) == (rows, slice(0, 3))
    with pytest.raises(AttributeError, match=r"current_worker\(\).step is not available"):
        view.step(rows)
    view = EvaluationView(nn.Identity(), CPU, torch.Generator(), worker=Regression())
    assert view.training is True
