"""The sections of the GPU benchmark, in order, and the facts of the machine."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed

from benchmarks import gpu_data, gpu_memory, gpu_nccl, gpu_order
from benchmarks.gpu import checks as gpu_syncs
from benchmarks.gpu import sections as gpu_speed
from benchmarks.gpu.bench import Section
from benchmarks.harness.measure import describe

SECTIONS = (
    Section(
        name="syncs",
        title="no wait for the device in the step loop",
        seconds=25,
        run=gpu_syncs.step_loop,
    ),
    Section(
        name="order",
        title="exact averages under delay kernels",
        seconds=25,
        run=gpu_order.averagings,
    ),
    Section(
        name="streaming",
        title="a ResNet in bf16: streamed against resident data",
        seconds=85,
        run=gpu_data.streaming,
    ),
    Section(
        name="copying",
        title="a model too small to hide the copy",
        seconds=50,
        run=gpu_data.copying,
    ),
    Section(
        name="conv-loop",
        title="the worker's loop against a bare one: convolutions",
        seconds=50,
        run=gpu_speed.conv_loop,
    ),
    Section(
        name="transformer-loop",
        title="the worker's loop against a bare one: transformer",
        seconds=45,
        run=gpu_speed.transformer_loop,
    ),
    Section(
        name="graphs",
        title="CUDA graphs against the eager loop, launch-bound",
        seconds=45,
        run=gpu_speed.graphs,
        needs_cuda=True,
    ),
    Section(
        name="memory",
        title="reserved memory within its budget, and out of memory",
        seconds=45,
        run=gpu_memory.budgets,
        needs_cuda=True,
    ),
    Section(
        name="nccl",
        title="NCCL with one rank",
        seconds=20,
        run=gpu_nccl.world_of_one,
        needs_cuda=True,
    ),
    Section(
        name="crowd",
        title="two workers on one GPU against one",
        seconds=35,
        run=gpu_speed.crowd,
    ),
)


def driver_version() -> str:
    """Of the NVIDIA driver, as ``nvidia-smi`` tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip().split("\n")[0]


def nccl_version() -> str:
    """Of the NCCL in this build of PyTorch."""
    if not torch.distributed.is_nccl_available():
        return "none"
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def shared_memory_gib() -> float | None:
    """Size of ``/dev/shm``, where the processes of a ``DataLoader`` put their batches."""
    try:
        return round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
    except OSError:
        return None


def facts() -> dict[str, Any]:
    """What a reader of the results must know of the machine. Wakes the device."""
    machine = {key: value for key, value in describe().items() if key != "environment"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "shm_gib": shared_memory_gib(),
        **machine,
    }
