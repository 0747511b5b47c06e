"""Capabilities of devices, beyond running PyTorch's operators, of operating systems and Python."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, fields

import torch

HAS_DIRECTORY_DESCRIPTORS = hasattr(os, "O_DIRECTORY")
"""True if directories can be opened, flushed and locked; not on Windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapabilities:
    """Parts of the runtime that a kind of device supports.

    A device with none of them trains with one worker, in the order of its calls.

    Attributes:
        kind: Name of the kind: CPU, CUDA, ROCm, or the type of another accelerator.
        streams: Several streams of one worker, ordered by events.
        events: Events with times, and waits of the host without the interpreter lock.
        memory: Budgets and caps of device memory.
        collectives: Exchanges between workers on such devices.
        graphs: Captured steps.
        host_reader: A kernel that reads pinned memory, with which the device sees an abort. Without
            it the host waits for each reduction.
    """

    kind: str
    streams: bool = False
    events: bool = False
    memory: bool = False
    collectives: bool = False
    graphs: bool = False
    host_reader: bool = False

    @classmethod
    def of(cls, device: torch.device) -> DeviceCapabilities:
        """The capabilities of a device's kind; queries no device.

        PyTorch built for ROCm names its devices ``cuda``, and has no PTX for them.
        """
        if device.type == "cuda":
            is_rocm = torch.version.hip is not None
            return cls(
                kind="ROCm" if is_rocm else "CUDA",
                streams=True,
                events=True,
                memory=True,
                collectives=True,
                graphs=True,
                host_reader=not is_rocm,
            )
        # Workers on the CPU exchange in shared memory and over Gloo, and need no streams.
        return cls(kind=device.type.upper(), collectives=device.type == "cpu")

    def missing(self, required: DeviceCapabilities) -> tuple[str, ...]:
        """Names of the required capabilities that are absent, in the order of the attributes."""
        names = [each.name for each in fields(self) if each.name != "kind"]
        return tuple(n for n in names if getattr(required, n) and not getattr(self, n))


SEVERAL_WORKERS = DeviceCapabilities(
    kind="several workers", streams=True, events=True, collectives=True
)
"""Required of accelerators that several workers train on."""
GRAPHS = DeviceCapabilities(kind="CUDA graphs", streams=True, events=True, graphs=True)
"""Required by ``cuda_graphs``."""


def missing_in(device: torch.device, required: DeviceCapabilities) -> str:
    """A clause on what a device's kind lacks, such as ``XPU has no streams, events here``."""
    found = DeviceCapabilities.of(device)
    names = ", ".join(name.replace("_", " ") for name in found.missing(required))
    return f"{required.kind} require {names}, which this version has for CUDA, not for {found.kind}"


def missing_in_system(feature: str, part: str) -> str:
    """A clause on a part of the operating system that a feature requires and that is absent."""
    return f"{feature} requires {part}, which {sys.platform} does not have"


def has_gil() -> bool:
    """True if one interpreter lock is shared by all threads of this process."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def thread_end_fault() -> str | None:
    """The reason why the end of a thread can crash this process; ``None`` if none is known."""
    # pybind11's gil_scoped_acquire, in the wheels of PyTorch up to 2.12: objects that backward()
    # leaves in a thread are finalized while its state is cleared, which is then cleared again.
    if not sysconfig.get_config_var("Py_GIL_DISABLED") or torch.__version__ >= "2.13":
        return None
    return (
        f"PyTorch {torch.__version__} on free-threaded Python can crash when a thread ends that "
        "has called backward() (pybind11#5827): use PyTorch 2.13 or later"
    )
