"""NvmlGpus: load and memory of GPUs, read from NVML."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


class NvmlGpus:
    """Load and memory of some GPUs of the machine. Used by one thread at a time.

    Args:
        nvml: The module ``pynvml``, initialized.
        handles: NVML handles of the GPUs.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> list[tuple[float, float]]:
        """Load in percent and used memory in bytes of each; NaN where not available."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: Any) -> tuple[float, float]:
        load = used = float("nan")
        try:
            used = float(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            # Not available for MIG instances.
            load = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._nvml.NVMLError:
            pass
        return load, used

    def close(self) -> None:
        """Shut NVML down; it counts its initializations."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            logger.debug("NVML could not be shut down", exc_info=True)


def open_gpus(devices: Sequence[torch.device]) -> NvmlGpus | None:
    """The GPUs of a run, without duplicates, in the run's order.

    Args:
        devices: The run's devices; devices other than CUDA are ignored.

    Returns:
        ``None`` if the run has no GPU or NVML is not available.
    """
    cuda = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if not cuda:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or no driver
        logger.debug("no GPU load in the timeline: %s", error)
        return None
    try:
        return NvmlGpus(nvml, [_handle(nvml, device) for device in cuda])
    except Exception as error:
        logger.debug("no GPU load in the timeline: %s", error)
        nvml.nvmlShutdown()
        return None


def _handle(nvml: Any, device: torch.device) -> Any:
    # By UUID: NVML numbers all GPUs, CUDA only those in CUDA_VISIBLE_DEVICES.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
