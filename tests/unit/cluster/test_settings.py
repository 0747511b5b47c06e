"""Cluster settings and outer optimizers, and the errors raised before a run."""

from __future__ import annotations

import pytest
import torch

from runtime import Mean, Nesterov
from runtime.cluster.cluster_settings import PERIOD_VARIABLE, ClusterSettings
from runtime.cluster.options import MAX_MACHINE_ID_BYTES, EngineOptions

ADDRESS = {"GPUWORKER_CLUSTER": "host:1"}


def settings(period=None, outer=None, **environ):
    return ClusterSettings.of(period=period, outer=outer, environ={**ADDRESS, **environ})


def test_the_period_comes_from_the_call_or_the_environment_and_defaults_to_30_s():
    assert settings().period_s == 30
    assert settings(**{PERIOD_VARIABLE: "2.5"}).period_s == 2.5
    assert settings(period=4, **{PERIOD_VARIABLE: "2.5"}).period_s == 4
    with pytest.raises(ValueError, match=f"{PERIOD_VARIABLE}='soon': pass a number"):
        settings(**{PERIOD_VARIABLE: "soon"})
    with pytest.raises(ValueError, match="period"):
        settings(period=0)


@pytest.mark.parametrize("machine", ["", "x" * (MAX_MACHINE_ID_BYTES + 1), "é" * 200])
def test_an_id_without_or_with_too_many_bytes_is_refused(machine):
    EngineOptions(address="host:1", machine="x" * MAX_MACHINE_ID_BYTES)
    with pytest.raises(ValueError, match="pass an id of 1 to"):
        EngineOptions(address="host:1", machine=machine)


def test_another_type_of_outer_optimizer_raises():
    assert repr(settings().outer) == "Mean()"
    with pytest.raises(TypeError, match=r"gpuworker\.Mean\(\) or Nesterov\(\)"):
        settings(outer="nesterov")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "GROUP_WORLD_SIZE"])
def test_processes_that_torchrun_restarts_together_are_refused(name):
    settings(TORCHELASTIC_RUN_ID="none", **{name: "1"})
    settings(**{name: "2"})  # not set by torchrun
    with pytest.raises(ValueError, match="once on each machine"):
        settings(TORCHELASTIC_RUN_ID="none", **{name: "2"})


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_a_momentum_outside_0_to_1_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum"):
        Nesterov(momentum=momentum)


def test_momentum_requires_twice_the_rounds_in_which_it_builds_up():
    assert Nesterov().min_rounds == 4
    assert Nesterov(0.7, 0.9).min_rounds == pytest.approx(20)
    assert Nesterov(1.0, 0.0).min_rounds == Mean().min_rounds == 0


def test_the_state_of_another_outer_optimizer_is_refused():
    nesterov = Nesterov()
    nesterov.step([torch.zeros(2)], [torch.ones(2)])
    with pytest.raises(ValueError, match=r"Mean\(\) has no state, but got 1 tensors"):
        Mean().load_state(nesterov.state())
    again = Nesterov()
    again.load_state(nesterov.state())
    assert torch.equal(again.state()[0], torch.ones(2))
