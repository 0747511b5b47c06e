"""The kernel that reads pinned memory, as far as it can be tested without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from runtime.device import cuda_api

PTX_INPUT = 2
LINKERS = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvJitLink.so.*"))


@pytest.mark.skipif(not LINKERS, reason="needs the linker that comes with builds for CUDA")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles(arch):
    linker = ctypes.CDLL(str(LINKERS[0]))
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"-arch={arch}".encode())
    source = cuda_api._READ_HOST.encode() + b"\0"
    assert linker.nvJitLinkCreate(ctypes.byref(handle), 1, options) == 0
    length = ctypes.c_size_t(len(source))
    assert linker.nvJitLinkAddData(handle, PTX_INPUT, source, length, b"read_host") == 0
    assert linker.nvJitLinkComplete(handle) == 0
    assert linker.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size)) == 0
    assert size.value > 0


def test_pytorch_loads_the_kernel_by_name_and_passes_both_tensors(monkeypatch):
    calls = []
    assert callable(torch.cuda._utils._cuda_load_module)

    def load(source, names):
        assert f".entry {names[0]}(" in source
        return {names[0]: lambda args: calls.append(args)}

    monkeypatch.setattr(torch.cuda._utils, "_cuda_load_module", load)
    target, source = torch.zeros(()), torch.ones(())
    read = cuda_api.CudaApi().host_reader()
    read(target, source)
    assert [id(tensor) for tensor in calls[0]] == [id(target), id(source)]


def test_a_build_for_rocm_has_none(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert cuda_api.CudaApi().host_reader() is None
