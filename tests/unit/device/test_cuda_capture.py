"""The calls around a capture, on stand-ins for PyTorch's own objects."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.torch_version import TorchVersion

from runtime.device import cuda_api
from runtime.device.cuda_api import CudaApi


class Generator:
    def __init__(self, log, name):
        self._log, self._name = log, name
        self.device = "cpu"


class Log(list):
    graph = None


@pytest.fixture
def log(monkeypatch):
    log = Log()

    class Graph:
        broken = refuses = invalid = has_ended = False

        def register_generator_state(self, generator):
            log.append(f"register {generator._name}")

        def capture_begin(self, pool, capture_error_mode):
            if Graph.refuses and pool == "pool":
                raise RuntimeError("already recording to mempool_id")
            log.append(f"begin in {pool}, {capture_error_mode}")

        def capture_end(self):
            log.append("end")
            if Graph.broken:
                raise RuntimeError("the capture was invalidated")
            self.has_ended = True
            if Graph.invalid:
                raise RuntimeError("the graph cannot be instantiated")

        def pool(self):
            if not self.has_ended:
                raise RuntimeError("without a preceding successful capture")
            return "pool"

        def reset(self):
            log.append("reset")

        def replay(self):
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "new pool")
    monkeypatch.setattr(
        torch._C,
        "_cuda_endAllocateToPool",
        lambda device, pool: log.append(f"allocate to {pool} no more"),
        raising=False,
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_releasePool",
        lambda device, pool: log.append(f"release {pool}"),
        raising=False,
    )
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    monkeypatch.setattr(cuda_api, "_broken", [])
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(log, "default"),))
    log.graph = Graph
    return log


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    """Draws after a broken capture: only the default generator raises."""

    def uniform_(self, *, generator):
        if generator._name == "default":
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)


def test_a_capture_is_thread_local_and_registers_the_generators(log):
    own = Generator(log, "own")
    api = CudaApi()
    graph = api.capture(lambda: log.append("work"), pool="pool", generators=[own])
    api.replay(graph)
    assert log == [
        *("register own", "begin in pool, thread_local", "work", "end", "replay"),
    ]


def test_generators_are_not_registered_if_pytorch_registers_them(log, monkeypatch):
    """PyTorch 2.14 and later warn about every call."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    CudaApi().capture(lambda: None, pool="pool", generators=[Generator(log, "own")])
    assert log == ["begin in pool, thread_local", "end"]


def begin(refused):
    with pytest.raises(RuntimeError, match=refused):
        CudaApi().capture(lambda: None, pool="pool")


def test_a_broken_capture_ends_and_generators_can_draw_again(log):
    def work():
        log.graph.broken = True
        raise ValueError("reads the device")

    with pytest.raises(ValueError, match="reads the device"):
        CudaApi().capture(work, pool="pool", generators=[Generator(log, "own")])
    healed = ["register own", "begin in new pool, thread_local", "end"]
    assert log[2:] == [
        *("end", "allocate to pool no more", "reset", "release pool"),
        *(*healed, "allocate to new pool no more", "reset", "release new pool"),
    ]


def test_a_capture_that_breaks_at_its_end_raises(log):
    log.graph.broken = True
    begin("invalidated")
    assert log[1:5] == ["end", "allocate to pool no more", "reset", "release pool"]
    assert log[5:7] == ["begin in new pool, thread_local", "end"]


def test_a_broken_graph_outlives_the_filter_of_the_pinned_allocator(log):
    log.graph.broken = True
    begin("invalidated")
    graphs = [graph for graph in gc.get_objects() if isinstance(graph, log.graph)]
    assert len(graphs) == 2  # also that of the generators


def test_a_pool_is_released_once_if_the_function_raises_and_the_capture_ends(log):
    """``reset`` releases the pool; a second release would take it from graphs that share it."""

    def work():
        raise ValueError("a mistake of the user's")

    with pytest.raises(ValueError, match="mistake"):
        CudaApi().capture(work, pool="pool")
    assert "reset" in log
    assert "release pool" not in log


def test_a_pool_is_released_once_if_the_graph_cannot_be_instantiated(log):
    log.graph.invalid = True
    begin("cannot be instantiated")
    assert "reset" in log
    assert "release pool" not in log


@pytest.mark.parametrize(
    ("version", "hip", "gives_back"),
    [
        ("2.11.0+cu130", None, True),
        ("2.13.0+cu130", None, True),
        ("2.13.1+cu130", None, False),
        ("2.14.0", None, False),
        ("2.11.0+rocm7.2", "7.2", False),
    ],
)
def test_a_pool_is_released_only_if_reset_does_not_release_it(
    version, hip, gives_back, log, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.version, "hip", hip)
    log.graph.broken = True
    begin("invalidated")
    assert ("release pool" in log) is gives_back


def test_a_capture_that_cannot_begin_leaves_no_generator_waiting(log):
    log.graph.refuses = True
    begin("already recording")
    assert log == ["allocate to pool no more", "reset", "begin in new pool, thread_local", "end"]
