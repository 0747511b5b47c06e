"""Delay kernels, which expose missing stream synchronisation; no-ops on the CPU."""

from __future__ import annotations

import random

import torch

from runtime.device.base import Device
from runtime.device.cuda import CudaDevice
from runtime.device.cuda_api import CudaApi
from runtime.replica.flat import FlatState

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
SHORT = 100_000
"""Clock cycles of a short delay, about 50 microseconds."""
LONG = 10_000_000
"""Clock cycles of a long delay, about 5 milliseconds."""


def delay(device, cycles=SHORT):
    """Launch a delay kernel on this thread's current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


class Delays:
    """Delays of random length from a seed, so that the slow stream varies."""

    def __init__(self, device, seed):
        self._device = device
        self._random = random.Random(seed)

    def __call__(self):
        cycles = self._random.choice((0, 1, 1, 4)) * SHORT
        if cycles:
            delay(self._device, cycles)


class DelayedApi(CudaApi):
    """Delays the current stream before every copy."""

    def __init__(self, delays):
        self._delays = delays

    def copy(self, target, source):
        self._delays()
        super().copy(target, source)


class DelayedState(FlatState):
    """Delays the current stream before it reads or writes parameters."""

    def __init__(self, module, delays):
        super().__init__(module)
        self._delays = delays

    def snapshot_into(self, payload):
        self._delays()
        super().snapshot_into(payload)
        self._delays()

    def snapshot_with_norms(self, payload):
        self._delays()
        squares = super().snapshot_with_norms(payload)
        self._delays()
        return squares

    def load(self, average):
        self._delays()
        super().load(average)

    def compute_progress(self, base, scratch):
        self._delays()
        super().compute_progress(base, scratch)

    def load_with_progress(self, average, progress, scratch):
        self._delays()
        super().load_with_progress(average, progress, scratch)
        self._delays()

    def add_progress(self, average, base, scratch):
        self._delays()
        super().add_progress(average, base, scratch)
        self._delays()


def context_of(device, delays=None):
    """Device object for a worker."""
    if device.type == "cuda":
        return CudaDevice(device, api=DelayedApi(delays) if delays else None)
    return Device(torch.get_num_threads())
