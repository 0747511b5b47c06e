"""Runs of several workers on one GPU: the results of CPU runs, also after failures."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import runs
from tests.gpu.delays import GPU
from tests.gpu.runs import ASYNC, CADENCE, OVER_CPU, WAYS, learn, name_of

pytestmark = pytest.mark.gpu

not_sync = pytest.mark.parametrize("policy", [CADENCE, ASYNC], ids=lambda p: p.name)


@pytest.mark.parametrize("other", ["cuda:0", "cpu"])
def test_a_sync_run_equals_a_cpu_run(other):
    """Gradients are exchanged through pinned memory with a worker on the same GPU or the CPU."""
    expected = runs.sync_state(["cpu", "cpu"])
    runs.assert_states_agree(runs.sync_state([GPU, torch.device(other)]), expected)


@not_sync
def test_workers_averaging_through_pinned_memory_converge_as_cpu_workers(policy):
    runs.converges_as_on_cpu(GPU, policy)


@not_sync
def test_workers_of_unequal_speed_train_every_sample_once_and_converge(policy):
    runs.unequal_speeds(GPU, policy)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_the_other_workers_continue_when_one_dies(way, rank):
    runs.survivors_continue([GPU] * 3, way, rank)


def test_bf16_steps_keep_parameters_in_float32_and_learn():
    runs.low_precision(GPU)


@pytest.mark.parametrize("side_stream", [False, True], ids=["default", "side"])
def test_data_still_being_written_by_the_caller_is_read_once_complete(side_stream):
    # A first allocation would synchronise with the caller's kernel by itself.
    learn([GPU, GPU], (CADENCE, OVER_CPU), epochs=2).join(runs.WAIT_S)
    runs.late_data(GPU, side_stream=side_stream)
