"""Streams of workers and ranks, which differ from the reused streams of PyTorch's pool of 32."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.device.cuda_api import CudaApi

SIZE = 32


class PooledStream:
    """Like ``torch.cuda.Stream``: the next handle of the pool, in use or not."""

    numbers = itertools.count()

    def __init__(self, device):
        self.device = device
        self.cuda_stream = next(self.numbers) % SIZE


@pytest.fixture
def take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", PooledStream)
    monkeypatch.setattr(PooledStream, "numbers", itertools.count())
    api, device = CudaApi(), torch.device("cuda", 0)
    return lambda number=0: api.new_stream(torch.device("cuda", number) if number else device)


def test_a_stream_in_use_is_not_handed_out_again(take):
    first = take()
    for _ in range(3 * SIZE):
        assert take().cuda_stream != first.cuda_stream


def test_streams_of_another_device_do_not_count(take):
    first = take()
    for _ in range(SIZE - 1):
        take(1)
    assert take(1).cuda_stream == first.cuda_stream


def test_a_released_stream_is_reused_and_an_exhausted_pool_yields_a_shared_one(take):
    held = [take() for _ in range(SIZE)]
    assert len({stream.cuda_stream for stream in held}) == SIZE
    assert take().cuda_stream in {stream.cuda_stream for stream in held}
    free = held.pop(5).cuda_stream
    assert take().cuda_stream == free
