"""Choice of the backend, and rejected combinations."""

from __future__ import annotations

from itertools import product

import pytest

from coordinator.backend_choice import choose_backend
from coordinator.config import ApplyPolicy, AverageBackend

CPUS = ("cpu", "cpu")
GPUS = ("cuda:0", "cuda:1")
AUTO, CPU, THREAD, GLOO, NCCL = (
    AverageBackend.AUTO,
    AverageBackend.CPU,
    AverageBackend.THREAD,
    AverageBackend.GLOO,
    AverageBackend.NCCL,
)
SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC


@pytest.mark.parametrize("policy", ApplyPolicy)
@pytest.mark.parametrize(
    ("devices", "nccl", "why"),
    [
        (("cpu",), True, "one device"),
        (("cuda:0",), True, "one device"),
        (CPUS, True, "not all devices are CUDA"),
        (("cuda:0", "cpu"), True, "not all devices are CUDA"),
        (("cuda:0", "cuda:0"), True, "more than once"),
        (GPUS, False, "no NCCL"),
    ],
)
def test_auto_falls_back_to_thread_for_sync_and_cpu_otherwise(policy, devices, nccl, why):
    backend, reason = choose_backend(AUTO, policy, devices, nccl_available=nccl)
    assert backend is (THREAD if policy is SYNC else CPU)
    assert why in reason


@pytest.mark.parametrize("policy", ApplyPolicy)
def test_auto_selects_nccl_for_distinct_gpus(policy):
    backend, reason = choose_backend(AUTO, policy, GPUS, nccl_available=True)
    assert backend is NCCL
    assert "2 distinct CUDA devices" in reason


@pytest.mark.parametrize("devices", [CPUS, ("cuda:0", "cuda:0"), ("cuda:0", "cpu")])
def test_nccl_on_repeated_or_cpu_devices_is_rejected(devices):
    with pytest.raises(ValueError, match=r"backend\(NCCL\).*use THREAD, CPU or AUTO"):
        choose_backend(NCCL, CADENCE, devices, nccl_available=True)


def test_nccl_on_a_repeated_gpu_is_accepted_where_its_library_allows_it_and_never_by_auto():
    shared = ("cuda:0", "cuda:0")
    allowed = {"nccl_available": True, "shared_gpu_fault": None}
    assert choose_backend(NCCL, SYNC, shared, **allowed)[0] is NCCL
    for policy in ApplyPolicy:
        assert choose_backend(AUTO, policy, shared, **allowed)[0] in (THREAD, CPU)
    with pytest.raises(ValueError, match="NCCL refuses CPU devices"):
        choose_backend(NCCL, SYNC, ("cuda:0", "cpu"), **allowed)
    with pytest.raises(ValueError, match="an old one is loaded; use THREAD"):
        choose_backend(
            NCCL, SYNC, shared, nccl_available=True, shared_gpu_fault="an old one is loaded"
        )


def test_nccl_is_rejected_without_nccl_in_pytorch():
    with pytest.raises(ValueError, match="has no NCCL; use"):
        choose_backend(NCCL, CADENCE, GPUS, nccl_available=False)


def test_gloo_on_cuda_devices_is_rejected():
    with pytest.raises(ValueError, match=r"backend\(GLOO\) serves CPU devices only"):
        choose_backend(GLOO, SYNC, ("cpu", "cuda:0"), nccl_available=True)


@pytest.mark.parametrize(("policy", "backend"), list(product(ApplyPolicy, (CPU, THREAD, GLOO))))
def test_a_usable_requested_backend_is_chosen(policy, backend):
    chosen, reason = choose_backend(backend, policy, CPUS, nccl_available=False)
    assert chosen is backend
    assert reason


def test_sync_over_cpu_explains_its_reduction():
    _, reason = choose_backend(CPU, SYNC, CPUS, nccl_available=False)
    assert "as THREAD" in reason


def test_requested_nccl_is_chosen():
    assert choose_backend(NCCL, CADENCE, GPUS, nccl_available=True)[0] is NCCL
