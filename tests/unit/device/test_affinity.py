"""Pinning of a worker's thread to the NUMA node of its GPU, with a fake sysfs."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from runtime.device import affinity
from runtime.device.affinity import NumaTopology, near
from runtime.worker import worker_threads
from tests.support.running import builder

GPU = torch.device("cuda", 0)
ADDRESS = "0000:17:00.0"

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system has no affinity of threads"
)


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """Write the files of a machine: cores of each node, and the node of the GPU."""

    def write(nodes, gpu_node, address=ADDRESS):
        node_root = tmp_path / "devices/system/node"
        for number, cores in enumerate(nodes):
            (node_root / f"node{number}").mkdir(parents=True)
            (node_root / f"node{number}/cpulist").write_text(f"{cores}\n")
        (node_root / "online").write_text(f"0-{len(nodes) - 1}\n")
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu_node}\n")
        return NumaTopology(tmp_path)

    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return write


@pytest.fixture
def mask(monkeypatch):
    """The simulated affinity of the threads; starts as cores 0 to 7."""
    masks = {}

    def get(pid):
        assert pid == 0, "the calling thread"
        return set(masks.get(threading.get_ident(), range(8)))

    def put(pid, cores):
        assert pid == 0, "the calling thread"
        masks[threading.get_ident()] = set(cores)

    monkeypatch.setattr(os, "sched_getaffinity", get)
    monkeypatch.setattr(os, "sched_setaffinity", put)
    return masks


def cores_meanwhile(device, topology):
    before = os.sched_getaffinity(0)
    with near(device, topology):
        found = os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) == before
    return found


def test_a_thread_runs_on_the_cores_of_the_node_of_its_gpu(sysfs, mask):
    assert cores_meanwhile(GPU, sysfs(["0-3", "4-5,7"], 1)) == {4, 5, 7}


def test_the_affinity_is_that_of_before_after_an_exception(sysfs, mask):
    topology = sysfs(["0-3", "4-7"], 1)
    with pytest.raises(KeyError), near(GPU, topology):
        raise KeyError
    assert os.sched_getaffinity(0) == set(range(8))


def test_cores_that_the_user_has_excluded_stay_excluded(sysfs, mask):
    mask[threading.get_ident()] = {0, 5, 6}
    assert cores_meanwhile(GPU, sysfs(["0-3", "4-7"], 1)) == {5, 6}


def test_a_thread_whose_mask_excludes_the_node_keeps_its_mask(sysfs, mask):
    mask[threading.get_ident()] = {0, 1}
    assert cores_meanwhile(GPU, sysfs(["0-3", "4-7"], 1)) == {0, 1}


@pytest.mark.parametrize(
    ("nodes", "gpu_node"), [(["0-3"], 0), (["0-3", "4-7"], -1), (["0-3", ""], 1), (["0-3", "x"], 1)]
)
def test_nothing_is_pinned_on_one_node_or_where_the_node_is_not_known(sysfs, mask, nodes, gpu_node):
    assert cores_meanwhile(GPU, sysfs(nodes, gpu_node)) == set(range(8))


def test_nothing_is_pinned_for_a_cpu_worker_or_without_sysfs(sysfs, mask, tmp_path):
    assert cores_meanwhile(torch.device("cpu"), sysfs(["0-3", "4-7"], 1)) == set(range(8))
    assert cores_meanwhile(GPU, NumaTopology(tmp_path / "missing")) == set(range(8))


def test_threads_are_not_pinned_by_a_build_without_pci_addresses(sysfs, mask, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert cores_meanwhile(GPU, sysfs(["0-3", "4-7"], 1)) == set(range(8))


def test_a_refusal_of_the_system_is_no_error(sysfs, mask, monkeypatch):
    def refuse(pid, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert cores_meanwhile(GPU, sysfs(["0-3", "4-7"], 1)) == set(range(8))


def test_only_the_calling_thread_is_pinned():
    """On the real system: ``sched_setaffinity(0, ...)`` applies to the calling thread on Linux."""
    everywhere = os.sched_getaffinity(0)
    seen = []

    def pin():
        os.sched_setaffinity(0, {min(everywhere)})
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join(10)
    assert seen == [{min(everywhere)}]
    assert os.sched_getaffinity(0) == everywhere


def test_the_address_has_the_form_of_sysfs(sysfs, mask):
    assert affinity.pci_address(GPU) == ADDRESS
    assert affinity.pci_address(torch.device("cpu")) is None


@pytest.mark.parametrize("flag", [True, False])
def test_workers_are_pinned_unless_pinning_is_off(flag, monkeypatch):
    pinned = []

    def near(device):
        return nullcontext(pinned.append(threading.current_thread()))

    monkeypatch.setattr(worker_threads, "near", near)
    builder().pin_threads(flag).run().join()
    assert len(set(pinned)) == (2 if flag else 0)
