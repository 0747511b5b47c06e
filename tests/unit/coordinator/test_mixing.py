"""The weighted mean with several intra-op threads."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from coordinator import averaging as blocks
from coordinator import averaging as mixing
from tests.support.pairs import pairwise
from tests.unit.coordinator.test_averaging import DTYPES, bits


@pytest.fixture
def small_blocks(monkeypatch):
    """Use blocks of a few elements, so that small tensors have several."""
    monkeypatch.setattr(mixing, "BLOCK_BYTES", 256)
    monkeypatch.setattr(blocks, "_BLOCKS_PER_SPLIT", 3)
    monkeypatch.setattr(mixing, "_SERIAL_NUMEL", 50)


def mixed(tensors, weights, num_threads):
    mix = mixing.WeightedMean(weights, num_threads)
    out = torch.empty_like(tensors[0])
    mix.average(out, tensors, measure=True)
    return out, mix.divergences


@pytest.mark.usefixtures("small_blocks")
@pairwise(
    weights=[[3, 5], [5, 3], [1, 0], [5, 1, 7], [0, 3, 0, 4]],
    dtype=DTYPES,
    numel=[0, 1, 1000, 4099],
)
def test_the_mean_is_bitwise_equal_for_any_number_of_threads(dtype, weights, numel):
    tensors = [torch.randn(numel).to(dtype) + 1 for _ in weights]
    alone, divergences = mixed(tensors, weights, 1)
    for num_threads in (0, 2, 3, 70):
        shared, others = mixed(tensors, weights, num_threads)
        assert bits(shared) == bits(alone)
        assert others == pytest.approx(divergences, rel=1e-5, abs=1e-12)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("weights", [[3, 5], [5, 3]])
def test_a_block_whose_squares_overflow_is_measured(weights):
    """In float32 the squares of the first block overflow, and the difference in the last."""
    first, second = torch.ones(1000), torch.full((1000,), 2.0)
    first[:64], second[:64] = 1e25, 3e25
    first[-1], second[-1] = -3e38, 3e38
    wide, _ = mixed([first.double(), second.double()], weights, 1)
    for num_threads in (0, 1, 2):
        mean, divergences = mixed([first, second], weights, num_threads)
        torch.testing.assert_close(mean, wide.float())
        # The last difference is no float32 number.
        assert divergences == (torch.inf, torch.inf)
    _, exact = mixed([first[:-1].double(), second[:-1].double()], weights, 1)
    _, divergences = mixed([first[:-1], second[:-1]], weights, 1)
    assert divergences == pytest.approx(exact, rel=1e-5)


def num_started(num_threads):
    """Number of OS threads that an average of several blocks starts."""
    tensors = [torch.randn(5 * mixing._SERIAL_NUMEL + 7) for _ in range(2)]
    started = []

    def average():
        before = set(os.listdir("/proc/self/task"))
        mixed(tensors, [3, 5], num_threads)
        # Earlier intra-op threads may end meanwhile.
        started.append(len(set(os.listdir("/proc/self/task")) - before))

    # On a new thread, which has no intra-op threads yet.
    thread = threading.Thread(target=average, daemon=True)
    thread.start()
    thread.join(20.0)
    return started[0]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_serial_average_starts_no_thread():
    """Idle intra-op threads would keep spinning on the ranks' cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        if num_started(2) == 0:
            pytest.skip("this PyTorch has no intra-op threads of its own for each thread")
        # Another thread of this process may start one meanwhile, but not each time.
        assert min(num_started(0) for _ in range(3)) == 0
    finally:
        torch.set_num_threads(before)
