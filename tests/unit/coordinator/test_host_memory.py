"""Host memory in huge pages: tensor properties, and the request to the kernel."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from coordinator import averaging as host_memory
from coordinator.averaging import Averager
from runtime.replica.flat import FlatState

MANY = 9_000_001
"""float32 numbers just above the size from which huge pages are requested."""
_SMAPS = Path("/proc/self/smaps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
needs_huge_pages = pytest.mark.skipif(
    not (hasattr(mmap, "MADV_HUGEPAGE") and _HUGE_PAGES.is_dir() and _SMAPS.is_file()),
    reason="needs a Linux kernel with transparent huge pages, which tells of them in smaps",
)


def flags_of(tensor: torch.Tensor) -> list[str]:
    """The kernel's flags of the mapping of a tensor's first element."""
    address, inside = tensor.data_ptr(), False
    for line in _SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (MANY,), (3, 3_000_001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_an_empty_tensor_has_the_shape_and_dtype_and_is_writable(shape, dtype):
    like = torch.ones(shape, dtype=dtype)
    made = host_memory.empty_like(like)
    assert (made.shape, made.dtype, made.device) == (like.shape, dtype, like.device)
    assert made.is_contiguous()
    assert not made.requires_grad
    made.copy_(like)
    assert torch.equal(made, like)


def test_empty_tensors_share_no_memory_and_require_no_gradient():
    like = torch.zeros(MANY, requires_grad=True)
    one, other = host_memory.empty_like(like), host_memory.empty_like(like)
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.sum() == MANY
    assert not one.requires_grad


def test_an_empty_tensor_like_one_on_another_device_is_on_the_cpu():
    made = host_memory.empty_like(torch.empty(MANY, device="meta"))
    assert made.is_cpu
    assert made.numel() == MANY


@pytest.mark.parametrize("num_elements", [5, MANY])
def test_an_empty_tensor_ignores_the_default_device(num_elements):
    like = torch.zeros(num_elements)
    with torch.device("meta"):
        made = host_memory.empty_like(like)
    assert made.is_cpu


@needs_huge_pages
def test_only_large_tensors_request_huge_pages():
    large = host_memory.empty_like(torch.empty(MANY, device="meta")).zero_()
    small = host_memory.empty_like(torch.empty(1000, device="meta")).zero_()
    assert "hg" in flags_of(large)
    assert "hg" not in flags_of(small)
    assert "hg" in flags_of(large[-1:])


@needs_huge_pages
def test_results_and_snapshots_are_in_huge_pages():
    state = FlatState(torch.nn.Linear(MANY, 1, bias=False))
    base, payload = state.new_base(), state.new_payload()
    state.snapshot_into(payload)
    average = Averager().average([payload, payload], [1, 1]).average
    for tensor in (base.params[0], payload.params[0], average.params[0]):
        assert "hg" in flags_of(tensor)


@pytest.mark.parametrize("advice", [None, 9999])
def test_ordinary_pages_are_used_without_huge_pages(monkeypatch, advice):
    monkeypatch.setattr(host_memory, "_MADV_HUGEPAGE", advice)
    made = host_memory.empty_like(torch.empty(MANY, device="meta")).fill_(3.0)
    assert made.sum(dtype=torch.float64) == 3.0 * MANY
