"""Compiled models keep the keys of the bare module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime import KeepBest
from runtime.checkpoint.tensor_file import load_file
from tests.support.own_loop import on_cpus
from tests.support.running import SYNC, THREAD, WAIT_S, builder


def bare():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    net[2].weight.requires_grad_(False)
    return net


def whole():
    return torch.compile(bare(), backend="eager")


def in_part():
    net = bare()
    net[0] = torch.compile(net[0], backend="eager")
    return net


compiled = pytest.mark.parametrize("make", [whole, in_part])


def train(model, batch):
    return model(batch[0].double()[:, None]).square().mean()


def run(tmp_path, make, **settings):
    b = builder(model=lambda device: make(), train=train, way=(SYNC, THREAD), **settings)
    return b.checkpoint_dir(tmp_path / "run")


@compiled
def test_state_files_and_checkpoints_of_a_run_load_into_the_bare_module(make, tmp_path):
    keep = KeepBest(tmp_path / "best.safetensors")
    state = run(tmp_path, make).callbacks(keep).run().join(WAIT_S)
    state.save(tmp_path / "state.safetensors")
    bare().load_state_dict(state.state_dict())
    assert list(state.state_dict()) == list(bare().state_dict())
    assert set(state.params) == {name for name, _ in bare().named_parameters()}
    for file in ("best.safetensors", "state.safetensors", *tmp_path.glob("run/*/weights.*")):
        bare().load_state_dict(load_file(tmp_path / file))


@pytest.mark.parametrize(("first", "then"), [(whole, bare), (bare, whole), (whole, in_part)])
def test_a_run_is_resumed_with_or_without_compiling(first, then, tmp_path):
    run(tmp_path, first).run().join(WAIT_S)
    state = run(tmp_path, then, epochs=2).resume(tmp_path / "run").run().join(WAIT_S)
    assert [m.epoch for m in state.metrics] == [0, 1]
    straight = run(tmp_path / "straight", bare, epochs=2).run().join(WAIT_S)
    torch.testing.assert_close(state.state_dict(), straight.state_dict())


@compiled
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loops_state_goes_to_the_bare_module_and_back(make, num_devices):
    with on_cpus(make(), num_devices) as model:
        model(torch.randn(6, 1, dtype=torch.float64)).sum().backward()
        model.step()
        state = model.state_dict()
        net = bare()
        net.load_state_dict(state)
        assert list(state) == list(net.state_dict())
        for value in net.state_dict().values():
            value.zero_()
        model.load_state_dict(net.state_dict())
        assert not model.state_dict()["0.weight"].any()


def test_a_state_with_other_keys_is_still_refused():
    with on_cpus(whole()) as model, pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.weight": torch.zeros(4, 1)})
