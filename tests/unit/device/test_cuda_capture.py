"""The calls around a capture, on stand-ins for PyTorch's own objects."""

from __future__ import annotations

import pytest
import torch

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
        broken = refuses = False

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
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(log, "default"),))
    log.graph = Graph
    return log


@pytest.fixture(autouse=True)
def probes(monkeypatch):
    """Whether a generator can draw after a broken capture; the default one cannot."""

    def uniform_(self, *, generator):
        if generator._name == "default":
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)


def test_a_capture_is_of_one_thread_and_knows_the_generators(log):
    own = Generator(log, "own")
    api = CudaApi()
    graph = api.capture(lambda: log.append("work"), pool="pool", generators=[own])
    api.replay(graph)
    assert log == [
        *("register own", "begin in pool, thread_local", "work", "end", "replay"),
    ]


def test_a_broken_capture_ends_and_generators_can_draw_again(log):
    def work():
        log.graph.broken = True
        raise ValueError("reads the device")

    with pytest.raises(ValueError, match="reads the device"):
        CudaApi().capture(work, pool="pool", generators=[Generator(log, "own")])
    assert log[2:] == [
        *("end", "reset", "allocate to pool no more"),
        *("register own", "begin in new pool, thread_local", "end"),
    ]


def test_a_capture_that_turns_out_broken_at_its_end_says_so(log):
    log.graph.broken = True
    with pytest.raises(RuntimeError, match="invalidated"):
        CudaApi().capture(lambda: None, pool="pool")
    assert log[1:] == [
        *("end", "reset", "allocate to pool no more"),
        *("begin in new pool, thread_local", "end"),
    ]


def test_a_capture_that_cannot_begin_leaves_no_generator_waiting(log):
    log.graph.refuses = True
    with pytest.raises(RuntimeError, match="already recording"):
        CudaApi().capture(lambda: None, pool="pool")
    assert log == ["reset", "allocate to pool no more", "begin in new pool, thread_local", "end"]
