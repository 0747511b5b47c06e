"""Queries and settings of devices and of the allocator, with fakes for what a machine lacks."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from runtime.device import host_allocator
from runtime.device.accelerator import AcceleratorDevice
from runtime.device.base import Device, device_summary
from runtime.device.capture_gate import CaptureGate
from runtime.device.cuda_api import CudaApi
from runtime.device.memory import MEMORY, MemoryReading

GPU = torch.device("cuda", 1)


def test_a_cpu_has_no_generator_of_its_own_and_captures_nothing():
    device = Device(1)
    assert device.generator_state() is None
    device.set_generator_state(torch.zeros(1, dtype=torch.uint8))
    assert device.is_shared is False
    with device.capturing() as granted:
        assert granted is False


def test_the_state_of_an_accelerators_generator_is_read_and_restored(monkeypatch):
    states = {"acc": torch.tensor([1, 2], dtype=torch.uint8)}
    module = SimpleNamespace(
        get_rng_state=lambda device: states[str(device)].clone(),
        set_rng_state=lambda state, device: states.update({str(device): state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    accelerator = object.__new__(AcceleratorDevice)
    accelerator.device = "acc"
    state = accelerator.generator_state()
    states["acc"].zero_()
    accelerator.set_generator_state(state)
    assert states["acc"].tolist() == [1, 2]


def test_memory_of_an_accelerator_is_allocated_on_it():
    accelerator = object.__new__(AcceleratorDevice)
    accelerator.device = torch.device("meta")
    found = accelerator.empty([2, 3], torch.float16)
    assert (found.device.type, tuple(found.shape), found.dtype) == ("meta", (2, 3), torch.float16)


def test_a_reading_of_cuda_memory_has_the_values_of_the_allocator(monkeypatch):
    stats = {
        "reserved_bytes.all.current": 30,
        "active_bytes.all.current": 20,
        "active_bytes.all.peak": 25,
    }
    reset = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100)
    )
    assert MEMORY.read(GPU) == MemoryReading(
        total_bytes=100, free_bytes=40, reserved_bytes=30, active_bytes=20, peak_bytes=25
    )
    stats.clear()  # before the first allocation
    assert MEMORY.read(GPU) == MemoryReading(
        total_bytes=100, free_bytes=40, reserved_bytes=0, active_bytes=0, peak_bytes=0
    )
    assert (MEMORY.reserved_bytes(GPU), MEMORY.total_bytes(GPU)) == (30, 100)
    MEMORY.reset_peak(GPU)
    assert reset == [GPU]


class Recorded:
    """An event of CUDA that records its calls."""

    def __init__(self):
        self.calls = []

    def record(self, *args):
        self.calls.append(("record", *args))

    def wait(self, *args):
        self.calls.append(("wait", *args))

    def synchronize(self):
        self.calls.append(("synchronize",))

    def elapsed_time(self, end):
        return 1500.0


def test_events_of_cuda_are_recorded_and_awaited_on_the_given_or_the_current_stream():
    api, event = CudaApi(), Recorded()
    api.record(event)
    api.record(event, "stream")
    api.wait_event(event)
    api.wait_event(event, "stream")
    api.wait_host(event)
    assert event.calls == [
        ("record",),
        ("record", "stream"),
        ("wait",),
        ("wait", "stream"),
        ("synchronize",),
    ]
    assert api.elapsed_s(event, event) == 1.5


# -- the allocator of the host -------------------------------------------------------


@pytest.fixture
def untuned(monkeypatch):
    monkeypatch.setattr(host_allocator, "_done", False)
    monkeypatch.setattr(host_allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)


def test_an_allocator_without_the_calls_is_not_tuned(untuned, monkeypatch, caplog):
    monkeypatch.setattr(host_allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    with caplog.at_level(logging.DEBUG, host_allocator.__name__):
        assert host_allocator.tune() is False
    assert "the allocator cannot be tuned" in caplog.text


def test_a_refused_threshold_is_logged(untuned, monkeypatch, caplog):
    libc = SimpleNamespace(mallopt=lambda parameter, value: 0)
    monkeypatch.setattr(host_allocator.ctypes, "CDLL", lambda name: libc)
    with caplog.at_level(logging.DEBUG, host_allocator.__name__):
        assert host_allocator.tune() is True
        host_allocator.acquire()
        host_allocator.release()  # this libc has no malloc_trim
    messages = [record.getMessage() for record in caplog.records]
    assert [text.startswith("mallopt(") for text in messages] == [True, True, False]
    assert messages[2].startswith("freed memory could not be returned to the system")
    monkeypatch.setattr(host_allocator.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(host_allocator, "_done", False)
    assert host_allocator.tune() is False


# -- launches and calls of the driver ------------------------------------------------


def test_launches_and_driver_calls_wait_for_each_other_for_a_limited_time(caplog):
    gate = CaptureGate(launch_wait_s=0.01)
    with gate.launching(), gate.launching(), gate.driver_call():
        pass
    with gate.driver_call():
        with gate.driver_call():  # of the same thread
            pass
        with gate.launching():
            pass
    with gate.driver_call():
        gate._is_launching = True  # as by a launch that waits for this call
        with gate.driver_call():
            pass
        gate._is_launching = False
    assert [record.getMessage() for record in caplog.records] == [
        "the launch of another exchange takes more than 0.01 s: not waiting for it",
        "the launch of an exchange takes more than 0.01 s: not waiting for it",
        "a call to the driver in another thread takes more than 0.01 s: not waiting for it",
    ]


def test_a_summary_without_devices_describes_those_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_summary().startswith("1 worker on ")
    assert device_summary([torch.device("cpu")] * 2).startswith("2 workers on 2 x ")
