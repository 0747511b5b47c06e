"""Helpers of tests with graphs on a stand-in for the device."""

from __future__ import annotations

import importlib
import logging
from itertools import count

import pytest
import torch
from torch import nn

from runtime import record_scalar
from runtime import run as run_module
from runtime.data.data_path import DataPath
from runtime.device.base import Device
from runtime.device.cuda import CudaDevice
from runtime.device.memory import CudaMemory, MemoryReading
from tests.support.fake_cuda import GPU, FakeCuda
from tests.support.running import CADENCE, OVER_CPU, WAIT_S, builder

DATA = torch.randn(66, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net(device):
    layers = nn.BatchNorm1d(3), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).to(device, torch.float64)


def loss_of(model, batch):
    record_scalar("mean", batch[0].mean())
    record_scalar("one", 1.0)
    return (model(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()


def adamw(params):
    # Step counts are then float32, with and without graphs.
    return torch.optim.AdamW(params, 0.01, capturable=True)


def sgd(params):
    return torch.optim.SGD(params, 0.01, momentum=0.9)


@pytest.fixture(autouse=True)
def capturable_on_cpu(monkeypatch):
    """Allow ``capturable`` optimizers on a CPU, which PyTorch restricts to accelerators."""
    for name in ("adam", "rmsprop"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


class Boundless(CudaMemory):
    """Unlimited memory."""

    def read(self, device):
        return MemoryReading(
            total_bytes=2**50, free_bytes=2**50, reserved_bytes=0, active_bytes=0, peak_bytes=0
        )

    def reserved_bytes(self, device):
        return 0

    def fraction(self, device):
        return 1.0


class Posing:
    """CPU devices that pose as GPUs in runs.

    Attributes:
        shared: True if all workers share a GPU; otherwise each has its own.
        memory: The memory of the devices; unlimited unless a test sets it.
    """

    def __init__(self, monkeypatch):
        self.fake = FakeCuda(patience=2)
        self.shared = False
        self.memory = Boundless()
        indices = count(GPU.index)

        def data_path(config, adapter, index, contexts):
            return DataPath(config, adapter, index, [Device(1) for _ in contexts])

        def open_posing(device, num_cpu_workers):
            gpu = GPU if self.shared else torch.device("cuda", next(indices))
            return CudaDevice(gpu, api=self.fake, memory=self.memory)

        monkeypatch.setattr(run_module, "open_device", open_posing)
        monkeypatch.setattr(run_module, "DataPath", data_path)

    @property
    def num_replays(self):
        return [graph.num_replays for graph in self.fake.graphs]


@pytest.fixture
def posing(monkeypatch):
    posing = Posing(monkeypatch)
    yield posing
    assert posing.fake.violations == []


def train(b):
    return b.seed(3).run().join(WAIT_S)


def a_run(*, model=net, optim=adamw, loss=loss_of, way=(CADENCE, OVER_CPU), ranks=1, **kwargs):
    settings = {"dataset": (DATA,), "batch_size": 4, "epochs": 3} | kwargs
    return builder(model=model, optim=optim, train=loss, way=way, ranks=ranks, **settings)


def assert_equal_runs(actual, expected):
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)
    for a, e in zip(actual.metrics, expected.metrics, strict=True):
        assert a.avg_loss == pytest.approx(e.avg_loss)
        assert a.scalars == pytest.approx(e.scalars)
        assert a.num_samples == e.num_samples


def assert_graphs_change_nothing(make):
    """Train a run of ``make`` without graphs and one with them: the results are equal."""
    expected = train(make().cuda_graphs(False))
    assert_equal_runs(train(make().cuda_graphs(True)), expected)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
