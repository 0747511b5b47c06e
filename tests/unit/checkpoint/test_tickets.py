"""Calls of ``save()`` that wait for a state, and refused models of a checkpoint."""

from __future__ import annotations

import pytest
import torch

from runtime import CheckpointError
from runtime.checkpoint.resume import _first_difference
from runtime.checkpoint_service import Ticket
from tests.support.checkpointing import make


def test_a_call_of_save_is_answered_once():
    ticket, data = Ticket(), make(1)
    with pytest.raises(TimeoutError, match=r"no step boundary was reached within 0\.01 s"):
        ticket.wait(0.01)
    ticket.give(data)
    ticket.give(None, CheckpointError("planted"))
    assert ticket.wait(1.0) is data


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({}, "the checkpoint has 'w', the model does not"),
        ({"w": torch.ones(3)}, r"the shape of 'w' is \(2,\) in the checkpoint and \(3,\)"),
        ({"w": torch.ones(2).double()}, "the dtype of 'w' is torch.float32 in the checkpoint"),
        ({"w": torch.ones(2), "v": torch.ones(1)}, "the model has 'v', the checkpoint does not"),
    ],
)
def test_the_first_difference_of_a_model_from_its_checkpoint_is_named(own, message):
    assert _first_difference({"w": torch.ones(2)}, {"w": torch.zeros(2)}) is None
    found = _first_difference({"w": torch.ones(2)}, own)
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)
