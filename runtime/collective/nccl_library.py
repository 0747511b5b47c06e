"""The NCCL library that this process has loaded: its version, and ranks that share a GPU."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch.distributed

MULTI_RANK_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable with which NCCL accepts several ranks on one GPU."""
MULTI_RANK_SINCE = (2, 30, 0)
"""First version of NCCL that has it."""

Version = tuple[int, int, int]


def loaded_version() -> Version | None:
    """Version of the NCCL that PyTorch's calls reach, or ``None`` if none is loaded.

    ``torch.cuda.nccl.version()`` is the version of the headers that PyTorch was compiled with,
    which differs from this one after ``LD_PRELOAD``.
    """
    for library in _libraries():
        get_version = getattr(library, "ncclGetVersion", None)
        code = ctypes.c_int()
        if get_version is not None and get_version(ctypes.byref(code)) == 0:
            return _version_of(code.value)
    return None


def _libraries() -> list[ctypes.CDLL]:
    """In the order in which the dynamic linker searches: the global scope, then PyTorch's own.

    None on Windows, for which there is no NCCL.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return []
    found = [ctypes.CDLL(None)]
    with suppress(OSError):  # a build without CUDA
        # By its handle, symbols of the libraries that it depends on are found, too.
        found.append(ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    return found


def _version_of(code: int) -> Version:
    """2.30.7 of 23007; versions before 2.9 have one digit less."""
    major, rest = divmod(code, 10_000 if code >= 10_000 else 1_000)
    return major, rest // 100, rest % 100


def version_name(version: Version | None) -> str:
    """The version as NCCL prints it."""
    return "no NCCL" if version is None else "NCCL " + ".".join(map(str, version))


def has_nccl() -> bool:
    """True if this build of PyTorch has NCCL."""
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def launch_blocking_fault(num_ranks: int) -> str | None:
    """The reason why NCCL would hang under ``CUDA_LAUNCH_BLOCKING``; ``None`` if it would not.

    See https://github.com/NVIDIA/nccl/pull/774, which leaves the ranks of one process hanging.
    """
    value = os.environ.get("CUDA_LAUNCH_BLOCKING", "").strip()
    if num_ranks < 2 or value in ("", "0"):
        return None
    return (
        f"CUDA_LAUNCH_BLOCKING={value} makes each launch wait for its kernel, and a kernel of NCCL "
        "waits for those of the other ranks, so that the ranks of one process hang; unset it "
        "(compute-sanitizer and torch.autograd.set_detect_anomaly find faults without it)"
    )


def shared_gpu_fault() -> str | None:
    """The reason why NCCL refuses two ranks on one GPU, with the remedy; ``None`` if it accepts.

    Two ranks on one GPU are for checks on a machine that has no second one.
    """
    value = os.environ.get(MULTI_RANK_VARIABLE, "").strip()
    enabled = value not in ("", "0")
    version = loaded_version()
    if enabled and version is not None and version >= MULTI_RANK_SINCE:
        return None
    return (
        "NCCL accepts two ranks on one GPU, for checks, from version 2.30 on and with "
        f"{MULTI_RANK_VARIABLE}=1; {version_name(version)} is loaded and the variable is "
        f"{value or 'not set'}"
    )
