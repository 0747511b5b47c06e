"""CPU affinity of worker threads: the cores of the NUMA node that their GPU is attached to."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")


class NumaTopology:
    """NUMA nodes of the machine, as Linux describes them in sysfs. Thread-safe."""

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs

    @property
    def num_nodes(self) -> int:
        """Nodes that are online; 0 where the system does not say."""
        return len(_parse_list(self._read("devices/system/node/online")))

    def cores_near(self, pci_address: str) -> frozenset[int]:
        """Cores of the node of a PCI device; empty where the system does not say.

        Args:
            pci_address: Such as ``0000:17:00.0``.
        """
        device = f"bus/pci/devices/{pci_address}"
        node = self._read(f"{device}/numa_node")
        if not node.isdigit():  # -1: the firmware does not say
            return frozenset()
        cores = _parse_list(self._read(f"devices/system/node/node{node}/cpulist"))
        return cores or _parse_list(self._read(f"{device}/local_cpulist"))

    def _read(self, path: str) -> str:
        try:
            return (self._sysfs / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""


def _parse_list(text: str) -> frozenset[int]:
    """The numbers of a list such as ``0-3,8``; empty for anything else."""
    found: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(found)


def pci_address(device: torch.device) -> str | None:
    """PCI address of a CUDA device in sysfs; ``None`` for others, and in builds without it."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # the stubs lack some attributes
    if not hasattr(properties, "pci_bus_id"):
        return None
    domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


@contextmanager
def near(device: torch.device, topology: NumaTopology | None = None) -> Iterator[None]:
    """Pins the calling thread to the cores of its GPU's NUMA node, and restores its affinity.

    Within the affinity that the thread has already, which the user may have set. Nothing on a
    machine of one node, for other devices, and where the system does not name the node. Threads
    that are started meanwhile inherit the affinity.

    Args:
        device: The thread's device.
        topology: ``None``: that of the machine.
    """
    before = _pin(device, topology or NumaTopology())
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def _pin(device: torch.device, topology: NumaTopology) -> set[int] | None:
    """Pin the thread; returns its previous affinity, or ``None`` if it is unchanged."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity") or topology.num_nodes < 2:
        return None
    address = pci_address(device)
    if address is None:
        return None
    before = os.sched_getaffinity(0)
    cores = topology.cores_near(address) & before
    if not cores or cores == before:
        return None
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:  # a container's rules
        logger.debug("%s: the thread cannot be pinned: %s", device, error)
        return None
    logger.info("%s: its thread runs on the %d cores of its NUMA node", device, len(cores))
    return before
