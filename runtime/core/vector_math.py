"""MKL's vector functions, each called once by one thread before several may call it at once.

PyTorch computes ``sqrt``, ``exp`` and the like of contiguous CPU tensors with MKL's VML. MKL
looks up the kernel of such a function in the first call of it. If two threads make that call
together, one of them may get a kernel of low accuracy for this one call: relative errors of
up to 3e-4 were seen here in ``sqrt``, which is in each step of AdamW. Reported as
https://github.com/pytorch/pytorch/issues/188792 for MKL 2024.2, which PyTorch's wheels hold;
MKL 2025.0 and later are said to be free of it.
"""

from __future__ import annotations

import functools
import threading

import torch

FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
"""What ``ATen/cpu/vml.h`` hands to MKL, in float32 and in float64."""

_LOCK = threading.Lock()


def resolve_vector_math() -> None:
    """Have MKL look up all its kernels; only the first call of the process does anything.

    To be called before threads are started that compute. Takes a few milliseconds.
    Thread-safe; blocks while another thread is in it.
    """
    with _LOCK:
        _resolve()


@functools.cache
def _resolve() -> None:
    # Without MKL in PyTorch this does no harm.
    # The caller may be under inference mode or a default device.
    with torch.inference_mode():
        for dtype in (torch.float32, torch.float64):
            x = torch.full((16,), 0.5, dtype=dtype, device="cpu")
            for name in FUNCTIONS:
                getattr(torch, name)(x)
