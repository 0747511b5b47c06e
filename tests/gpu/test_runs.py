"""Runs of several workers on one GPU: the same results as on the CPU, whatever happens."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import runs
from tests.gpu.delays import GPU
from tests.gpu.runs import ASYNC, CADENCE, OVER_CPU, WAYS, learn, name_of

pytestmark = pytest.mark.gpu

not_sync = pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)


@pytest.mark.parametrize("other", ["cuda:0", "cpu"])
def test_a_lockstep_run_gives_what_a_cpu_run_gives(other):
    """Through pinned memory, with a worker of the same GPU or one of the CPU."""
    expected = runs.lockstep_state(["cpu", "cpu"])
    runs.assert_states_agree(runs.lockstep_state([GPU, torch.device(other)]), expected)


@not_sync
def test_workers_that_meet_through_pinned_memory_come_to_where_cpu_workers_come(policy):
    runs.meets_the_cpu(GPU, policy)


@not_sync
def test_workers_of_unequal_speed_train_every_sample_once_and_as_well(policy):
    runs.unequal_speeds(GPU, policy)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_the_others_go_on_when_a_worker_dies(way, rank):
    runs.death([GPU] * 3, way, rank)


def test_bf16_steps_keep_parameters_in_float32_and_learn():
    runs.low_precision(GPU)


@pytest.mark.parametrize("side_stream", [False, True], ids=["default", "side"])
def test_data_that_the_caller_still_writes_is_read_when_it_is_there(side_stream):
    # Memory that is made for the first time would wait for the caller's kernel by itself.
    learn([GPU, GPU], (CADENCE, OVER_CPU), epochs=2).join(runs.WAIT_S)
    runs.late_data(GPU, side_stream=side_stream)
