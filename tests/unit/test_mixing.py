"""The arithmetic of an average for several intra-op threads."""

from __future__ import annotations

import pytest
import torch

from coordinator import mixing
from tests.unit.test_averaging import DTYPES, bits


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few elements, so that small tensors are cut as large ones are."""
    monkeypatch.setattr(mixing, "_BLOCK_BYTES", 256)
    monkeypatch.setattr(mixing, "_GROUP", 3)


def mixed(tensors, weights, num_threads):
    mix = mixing.Mix(weights, num_threads)
    out = torch.empty_like(tensors[0])
    mix.average(out, tensors, measure=True)
    return out, mix.divergences


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("weights", [[3, 5], [5, 3], [1, 0], [5, 1, 7], [0, 3, 0, 4]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000, 4099])
def test_any_number_of_threads_gives_the_same_bits(dtype, weights, numel):
    tensors = [torch.randn(numel).to(dtype) + 1 for _ in weights]
    alone, divergences = mixed(tensors, weights, 1)
    for num_threads in (2, 3, 70):
        shared, others = mixed(tensors, weights, num_threads)
        assert bits(shared) == bits(alone)
        assert others == pytest.approx(divergences, rel=1e-5, abs=1e-12)
