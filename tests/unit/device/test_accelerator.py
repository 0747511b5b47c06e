"""Devices of other kinds than CUDA: detected, refused by name, and used for training through
``torch.accelerator`` alone.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from coordinator.messages import Payload
from runtime import Trainer
from runtime import run as run_module
from runtime.collective import create_collectives
from runtime.core.capabilities import GRAPHS, SEVERAL_WORKERS, DeviceCapabilities
from runtime.core.checks import check_devices
from runtime.data.data_path import DataPath
from runtime.device import cuda_api
from runtime.device.accelerator import AcceleratorDevice
from runtime.device.base import Device, device_summary
from runtime.device.cuda import CudaDevice, open_device
from runtime.loop import loop_setup
from tests.support.running import builder

CPU, GPU, XPU, MPS = (torch.device(kind) for kind in ("cpu", "cuda:0", "xpu:0", "mps:0"))


class FakeAccelerator:
    """The calls of ``torch.accelerator`` that a device makes, in order."""

    def __init__(self):
        self.calls = []

    @contextmanager
    def device_index(self, index):
        self.calls.append(("enter", index))
        yield
        self.calls.append(("leave", index))

    def synchronize(self, device):
        self.calls.append(("synchronize", device))

    def get_memory_info(self, device):
        return 3, 7

    @property
    def num_waits(self):
        return sum(call[0] == "synchronize" for call in self.calls)


@pytest.fixture
def accelerator():
    return FakeAccelerator()


@pytest.fixture
def here(monkeypatch):
    """Make PyTorch report a kind as the accelerator of this machine."""

    def name(kind, count=1):
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: found
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return name


# -- kinds ---------------------------------------------------------------------------


def test_rocm_lacks_the_kernel_that_reads_host_memory_alone(monkeypatch):
    everything = DeviceCapabilities.of(GPU)
    assert everything.kind == "CUDA"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    rocm = DeviceCapabilities.of(GPU)
    assert rocm.kind == "ROCm"
    assert rocm.missing(everything) == ("host_reader",)
    assert isinstance(open_device(GPU, 0), CudaDevice)


@pytest.mark.parametrize("device", [XPU, MPS])
def test_other_accelerators_lack_features_that_the_cuda_api_requires(device):
    found = DeviceCapabilities.of(device)
    assert found.kind == device.type.upper()
    assert found.missing(cuda_api.REQUIRED) == ("streams", "events", "memory")
    assert found.missing(SEVERAL_WORKERS) == ("streams", "events", "collectives")
    assert isinstance(open_device(device, 0), AcceleratorDevice)
    assert found.kind in device_summary([device])


# -- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["xpu", "mps", "meta"])
def test_an_absent_device_and_a_missing_capability_have_different_errors(here, kind):
    here(None)
    with pytest.raises(ValueError, match=f"there is no {kind} here; PyTorch finds no accelerator"):
        check_devices(kind)
    here("cuda")
    with pytest.raises(ValueError, match=f"there is no {kind} here; PyTorch finds cuda alone"):
        check_devices(kind)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_several_workers_are_refused_and_the_missing_features_named(here, kind):
    here(kind, count=2)
    for devices in ([kind, kind], [kind, "cpu"]):
        with pytest.raises(ValueError, match=f"streams, events, collectives.* {kind.upper()}"):
            check_devices(devices)
    assert check_devices(kind) == (torch.device(kind, 0),)
    assert check_devices([f"{kind}:1"]) == (torch.device(kind, 1),)
    with pytest.raises(ValueError, match=f"there is no {kind}:2; 2 are visible"):
        check_devices([f"{kind}:2"])


def test_groups_graphs_and_loader_processes_are_refused_by_name(here):
    here("xpu")
    with pytest.raises(ValueError, match="no collective serves xpu:0"):
        create_collectives(1, "thread", [XPU])
    assert DeviceCapabilities.of(XPU).missing(GRAPHS) == ("streams", "events", "graphs")
    with pytest.raises(ValueError, match=r"cuda_graphs\(True\): CUDA graphs require .* XPU"):
        builder(ranks=1).devices("xpu").cuda_graphs(True).run()
    with pytest.raises(ValueError, match=r"loader_workers\(2\)"):
        builder(ranks=1).devices("xpu").loader_workers(2).run()


# -- training ------------------------------------------------------------------------


def test_a_device_is_synchronised_before_the_runtime_reads_its_results(accelerator):
    device = AcceleratorDevice(CPU, accelerator)
    with device.activate():
        assert accelerator.calls == [("enter", 0), ("synchronize", CPU)]
        timer = device.new_timer()
        for _ in range(3):
            timer.start()
            timer.stop(1)
        assert accelerator.num_waits == 1 + 3
    assert accelerator.calls[-2:] == [("synchronize", CPU), ("leave", 0)]
    assert (device.memory().free_bytes, device.memory().total_bytes) == (3, 7)


def test_memory_is_that_of_the_host_for_kinds_that_report_none(accelerator, monkeypatch):
    def refuse(device):
        raise RuntimeError("getMemoryInfo is not supported on MPS yet")

    monkeypatch.setattr(accelerator, "get_memory_info", refuse)
    reading = AcceleratorDevice(CPU, accelerator).memory()
    assert reading.total_bytes == Device().memory().total_bytes


def test_state_is_copied_to_the_host_at_once(accelerator):
    device = AcceleratorDevice(CPU, accelerator)
    source = Payload(params=(torch.arange(3.0),))
    twin = device.host_twin(source)
    assert twin.tensors[0] is not source.tensors[0]
    assert device.fetch(source, twin) is None
    assert torch.equal(twin.tensors[0], source.tensors[0])


def test_a_run_of_one_worker_trains_as_on_the_cpu(accelerator, monkeypatch):
    expected = builder(ranks=1, epochs=2).run().join()

    def data_path(config, adapter, index, contexts):
        return DataPath(config, adapter, index, [Device(1) for _ in contexts])

    monkeypatch.setattr(
        run_module, "open_device", lambda device, n: AcceleratorDevice(device, accelerator)
    )
    monkeypatch.setattr(run_module, "DataPath", data_path)
    state = builder(ranks=1, epochs=2).run().join()
    assert accelerator.num_waits >= 20  # one in each step
    for name, value in expected.params.items():
        assert torch.equal(state.params[name], value)


def test_an_own_loop_on_one_device_calls_pytorch_alone(monkeypatch):
    """The meta device runs every operator of PyTorch without an accelerator."""
    meta = torch.device("meta")  # its tensors have no index, unlike those of an accelerator
    monkeypatch.setattr(loop_setup, "check_devices", lambda devices: (meta,))
    model = Trainer.setup(
        lambda device: nn.Linear(3, 2, device=device),
        lambda params: torch.optim.SGD(params, 0.1),
        devices=["meta"],
    )
    loss = model(torch.ones(4, 3)).sum()
    assert loss.device == meta
    loss.backward()
    model.step()
    assert all(p.device == meta for p in model.parameters())
