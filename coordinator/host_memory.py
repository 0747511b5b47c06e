"""Memory of the host for large tensors, in huge pages where the system gives them.

A pass over a large state touches a new page every thousand float32 numbers, and the processor
has to look each of them up. Linux gives pages of 2 MiB to whoever asks for them, unless
``/sys/kernel/mm/transparent_hugepage/enabled`` says ``never``.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 32 << 20
"""Smaller tensors lie in the caches, or in memory that was used before and has its pages."""
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
"""``None`` where the system cannot be asked."""


def empty_like(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor of that shape and dtype whose values are not initialised.

    It asks for no gradient, and lies on the CPU whatever the thread's default device is.
    """
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if made.nbytes >= _LEAST_BYTES and _ADVICE is not None:
        _advise(made.data_ptr(), made.nbytes, _ADVICE)
    return made


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Tell the kernel what a range of memory is for; ordinary pages do where it will not hear.

    A block of this size has pages of its own, so that those at its ends are asked for, too.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + num_bytes - start
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
