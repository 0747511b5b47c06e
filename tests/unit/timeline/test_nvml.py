"""GPU load in a timeline, from a fake NVML with the documented behaviour."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from runtime.timeline.nvml import open_gpus
from runtime.timeline.resources import ResourcePoller

GPUS = [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)]
UUIDS = ["aaaa", "bbbb"]


class Nvml(ModuleType):
    """Two GPUs, in the reverse of the process's order."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, divided=False, fails=None):
        super().__init__("pynvml")
        self.num_open = 0
        self.divided = divided
        self.fails = fails

    def nvmlInit(self):  # noqa: N802
        if self.fails == "init":
            raise self.NVMLError("no driver")
        self.num_open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if self.fails == "handle":
            raise self.NVMLError("not found")
        return {"GPU-aaaa": 7, "GPU-bbbb": 9}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=handle * 1000)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if self.divided:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=handle)


@pytest.fixture
def install(monkeypatch):
    def put(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=UUIDS[device.index]),
        )
        return nvml

    return put


def test_gpus_are_found_by_uuid_each_once(install):
    nvml = install(Nvml())
    gpus = open_gpus(GPUS)
    assert gpus.read() == [(9.0, 9000.0), (7.0, 7000.0)]
    gpus.close()
    assert nvml.num_open == 0


def test_values_missing_on_a_mig_instance_are_nan(install):
    install(Nvml(divided=True))
    ((load, used), _) = open_gpus(GPUS).read()
    assert math.isnan(load)
    assert used == 9000.0


@pytest.mark.parametrize("fails", ["init", "handle"])
def test_without_a_driver_there_is_no_gpu_load(install, fails):
    nvml = install(Nvml(fails=fails))
    assert open_gpus(GPUS) is None
    assert nvml.num_open == 0


def test_a_run_on_the_cpu_does_not_open_nvml(install):
    nvml = install(Nvml(fails="init"))
    assert open_gpus([torch.device("cpu")]) is None
    assert nvml.num_open == 0


def test_without_the_library_there_is_no_gpu_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus(GPUS) is None


def test_a_poller_reads_gpus_and_closes_nvml(install):
    nvml = install(Nvml())
    poller = ResourcePoller(0.001, GPUS)
    poller.start()
    try:
        assert poller.columns[-4:] == (
            "gpu0_percent",
            "gpu0_used_bytes",
            "gpu1_percent",
            "gpu1_used_bytes",
        )
        while not poller.rows():
            assert poller._thread.is_alive()
    finally:
        poller.stop()
        poller.stop()
    assert poller.rows()[0][-4:] == (9.0, 9000.0, 7.0, 7000.0)
    assert nvml.num_open == 0


def test_a_failing_poller_logs_once_and_ends(install, caplog):
    nvml = install(Nvml())

    def broken():
        raise RuntimeError("planted")

    poller = ResourcePoller(0.001, GPUS)
    poller._gpus.read = broken
    poller.start()
    poller._thread.join(20)
    poller.stop()
    assert [r.getMessage() for r in caplog.records] == ["the machine's load is no longer recorded"]
    assert nvml.num_open == 0
