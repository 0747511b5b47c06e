"""The machine report of ``python -m runtime``."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coordinator.config import ApplyPolicy
from runtime.__main__ import machine_report
from tests.support import programs

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GPUS = [torch.device("cuda", i) for i in range(2)]


@pytest.fixture
def gpus(monkeypatch):
    """Simulates a machine with these models of GPU, and NCCL."""

    def pretend(*names):
        def properties(device):
            return SimpleNamespace(
                name=names[device.index], total_memory=80 * 2**30, major=9, minor=0
            )

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    return pretend


def lines_of(text, word):
    return [line.split(None, 1)[1] for line in text.splitlines() if line.split()[:1] == [word]]


def test_the_command_prints_the_report():
    done = programs.run([sys.executable, "-m", "runtime"], timeout=50, check=True)
    assert done.stderr == ""
    for word in ("devices", "models", "host", "NCCL", "GIL", "SYNC", "CADENCE", "ASYNC"):
        assert len(lines_of(done.stdout, word)) == 1, word


def test_the_report_names_the_reason_for_no_nccl_with_cpu_workers():
    text = machine_report([CPU, CPU])
    assert lines_of(text, "SYNC")[0].startswith("THREAD")
    assert lines_of(text, "CADENCE")[0].startswith("CPU ")
    assert "NCCL is out" in lines_of(text, "ASYNC")[0]
    assert lines_of(text, "models") == ["no GPU"]
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert lines_of(text, "GIL")[0].startswith("on" if gil else "off")


def test_the_report_distinguishes_models_of_gpus(gpus):
    gpus("Fast 1", "Slow 2")
    text = machine_report()
    assert "distinct: 2 models" in lines_of(text, "models")[0]
    assert lines_of(text, "devices") == ["cuda:0, Fast 1, 80.0 GiB, compute capability 9.0"]
    assert "cuda:1, Slow 2" in text
    assert lines_of(text, "NCCL")[0].startswith("available")
    for policy in ApplyPolicy:
        assert lines_of(text, policy.name)[0].startswith("NCCL")


def test_the_report_describes_equal_gpus_and_mixed_devices(gpus):
    gpus("One", "One")
    assert lines_of(machine_report(), "models") == ["one model of GPU"]
    assert lines_of(machine_report([GPUS[0], CPU]), "models") == ["mixed: CUDA devices and the CPU"]
    twice = machine_report([GPUS[0], GPUS[0]])
    assert "more than once" in lines_of(twice, "CADENCE")[0]
    assert twice.count("compute capability") == 1


def test_a_build_without_nccl_is_reported(gpus, monkeypatch):
    gpus("One", "One")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    text = machine_report()
    assert lines_of(text, "NCCL") == ["not in this build of PyTorch"]
    assert lines_of(text, "SYNC")[0].startswith("THREAD")


def test_launch_blocking_is_reported_with_the_transports_that_it_leaves(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    gpus("One", "One")
    text = machine_report()
    assert "CUDA_LAUNCH_BLOCKING=1" in lines_of(text, "NCCL")[0]
    assert "unset it" in lines_of(text, "NCCL")[0]
    for policy in ApplyPolicy:
        (line,) = lines_of(text, policy.name)
        assert not line.startswith("NCCL")
        assert "CUDA_LAUNCH_BLOCKING is set" in line
