"""The version of the loaded NCCL, and groups whose ranks share a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from runtime import AverageBackend
from runtime.collective import create_collectives, nccl_library, resolve_backend
from runtime.collective import nccl as nccl_module
from runtime.collective.nccl_library import loaded_version, shared_gpu_fault
from tests.support.fake_cuda import FakeCuda, standing_in
from tests.support.posing import PosingBackend
from tests.unit.collective.test_collectives import on_ranks

SHARED = ["cuda:0", "cuda:0"]


class Library:
    """A fake NCCL library that returns a version or an error."""

    def __init__(self, code, status=0):
        self._code, self._status = code, status

    def ncclGetVersion(self, pointer):  # noqa: N802
        pointer._obj.value = self._code
        return self._status


@pytest.fixture
def load(monkeypatch):
    def load(*libraries):
        monkeypatch.setattr(nccl_library, "_libraries", lambda: list(libraries))

    return load


@pytest.mark.parametrize(
    ("libraries", "version"),
    [
        ([], None),
        ([object()], None),
        ([Library(23007)], (2, 30, 7)),
        ([Library(22809)], (2, 28, 9)),
        ([Library(2804)], (2, 8, 4)),
        ([object(), Library(23100)], (2, 31, 0)),
        ([Library(23007), Library(22809)], (2, 30, 7)),
        ([Library(0, status=3), Library(22809)], (2, 28, 9)),
    ],
)
def test_the_version_is_that_of_the_first_working_library(load, libraries, version):
    load(*libraries)
    assert loaded_version() == version


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of PyTorch has NCCL")
def test_a_process_without_nccl_has_no_version():
    assert loaded_version() is None


@pytest.mark.parametrize(
    ("code", "variable", "accepted"),
    [
        (23007, "1", True),
        (23000, " 1", True),
        (30000, "1", True),
        (22999, "1", False),
        (22809, "1", False),
        (23007, "0", False),
        (23007, "", False),
        (23007, None, False),
    ],
)
def test_ranks_share_a_gpu_from_2_30_on_where_the_variable_is_set(
    load, monkeypatch, code, variable, accepted
):
    load(Library(code))
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    fault = shared_gpu_fault()
    assert (fault is None) == accepted
    if fault is not None:
        assert "2.30" in fault
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in fault
        assert f"NCCL {code // 10_000}.{code // 100 % 100}" in fault


def test_a_group_and_a_loop_on_a_repeated_gpu_name_the_remedy(load, monkeypatch):
    load(Library(22809))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with pytest.raises(ValueError, match=r"2\.30 .*NCCL 2\.28\.9 is loaded.*use 'thread'"):
        create_collectives(2, "nccl", SHARED)
    with pytest.raises(ValueError, match=r"2\.30 .*NCCL 2\.28\.9 is loaded.*use THREAD"):
        resolve_backend(AverageBackend.NCCL, [torch.device("cuda", 0)] * 2)


def test_a_group_on_a_repeated_gpu_reduces(load, monkeypatch):
    load(Library(23007))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(nccl_module, "new_backend", PosingBackend)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    fake = FakeCuda(patience=0, prompt=True, allow_default=True)
    with standing_in(fake):
        ends = create_collectives(2, "nccl", SHARED)
        try:
            tensors = [torch.full((3,), float(rank + 1)) for rank in range(2)]
            on_ranks(ends, lambda end: end.all_reduce_(tensors[end.rank]))
            assert [t.tolist() for t in tensors] == [[3.0] * 3] * 2
        finally:
            for end in ends:
                end.close()
