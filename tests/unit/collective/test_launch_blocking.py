"""``CUDA_LAUNCH_BLOCKING``, under which the ranks of one process would hang in NCCL."""

from __future__ import annotations

import pytest
import torch

from coordinator.backend_choice import choose_backend
from coordinator.config import ApplyPolicy, AverageBackend
from runtime.collective import create_collectives, resolve_backend
from runtime.collective.nccl_library import launch_blocking_fault

GPUS = [torch.device("cuda", i) for i in range(2)]


@pytest.fixture(autouse=True)
def _blocking(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def test_a_group_over_nccl_is_refused_with_reason_and_remedy():
    with pytest.raises(ValueError, match=r"ranks of one process hang; unset it.*'thread'"):
        create_collectives(2, "nccl", GPUS, timeout_s=1.0)


def test_a_request_for_nccl_is_refused_before_a_run_begins():
    with pytest.raises(ValueError, match=r"backend\(NCCL\): CUDA_LAUNCH_BLOCKING=1 .* use THREAD"):
        resolve_backend(AverageBackend.NCCL, GPUS)


@pytest.mark.parametrize("policy", ApplyPolicy)
def test_auto_selects_another_backend_and_names_the_reason(policy):
    backend, reason = choose_backend(
        AverageBackend.AUTO,
        policy,
        ["cuda:0", "cuda:1"],
        nccl_available=True,
        nccl_fault=launch_blocking_fault(2),
    )
    assert backend is not AverageBackend.NCCL
    assert "CUDA_LAUNCH_BLOCKING=1" in reason


def test_one_rank_and_a_variable_of_0_are_no_fault(monkeypatch):
    assert launch_blocking_fault(1) is None
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert launch_blocking_fault(2) is None
