"""Calls of ``save()`` that are answered by an error, and what the end of a run frees."""

from __future__ import annotations

import gc
import weakref

import pytest

from runtime.checkpoint_service import Ticket
from runtime.core.errors import CheckpointError
from tests.support.running import WAIT_S, builder, counter


def test_a_call_may_wait_longer_than_a_lock_can():
    ticket = Ticket()
    ticket.give(None, CheckpointError("planted"))
    with pytest.raises(CheckpointError, match="planted"):
        ticket.wait(float("inf"))


def test_the_end_of_a_run_with_checkpoints_frees_its_models(tmp_path):
    models = []

    def make(device):
        model = counter(device)
        models.append(weakref.ref(model))
        return model

    handle = builder(model=make).checkpoint_dir(tmp_path).run()
    assert handle.join(WAIT_S).state_dict()
    gc.collect()
    assert [model() for model in models] == [None] * 2
