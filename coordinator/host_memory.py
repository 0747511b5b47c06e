"""Memory of the host for tensors of many megabytes, in huge pages where the system gives them.

A pass over a large state touches a new page every thousand float32 numbers, and the processor
has to look each of them up. Linux gives pages of 2 MiB to whoever asks for them, unless
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``never``.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_BYTES = 8 << 20
"""Smaller tensors come from PyTorch's allocator: they lie in the caches, and share pages."""
_PAGE_BYTES = 2 << 20
"""Size of a huge page on x86-64, and on ARM with base pages of 4 KiB."""


def empty_like(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor of that shape and dtype whose values are not initialised.

    It asks for no gradient, and its memory goes back to the system with it.
    """
    num_bytes = math.prod(tensor.shape) * tensor.element_size()
    if num_bytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    area = _huge_pages(num_bytes + _PAGE_BYTES)
    start = -torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr() % _PAGE_BYTES
    # The tensor keeps the area alive. What lies around it was never written to: it takes nothing.
    flat = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return flat.view(tensor.shape)


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone: of what is shared with children, other settings decide."""
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages: ordinary ones do
        area.madvise(mmap.MADV_HUGEPAGE)
    return area
