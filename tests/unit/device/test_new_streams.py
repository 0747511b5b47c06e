"""Streams of workers and ranks, which differ from the reused streams of PyTorch's pool of 32."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading

import pytest
import torch

from runtime.device import cuda_api
from runtime.device.cuda_api import CudaApi
from tests.support.running import WAIT_S

SIZE = 32


class PooledStream:
    """Like ``torch.cuda.Stream``: the next handle of the pool, in use or not.

    It has no weak references: those to PyTorch's streams dangle (pytorch#183403).
    """

    __slots__ = ("__dict__",)
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


def test_a_stream_is_released_while_another_thread_reads_those_in_use(take, monkeypatch):
    about_to_remove, reading, released = (threading.Event() for _ in range(3))

    class ReadInUse(cuda_api._StreamInUse):
        """Notes that the streams in use are being read, and waits there for the release."""

        @property
        def device(self):
            if about_to_remove.is_set():
                reading.set()
                assert released.wait(WAIT_S)
            return self._device

        @device.setter
        def device(self, device):
            self._device = device

    monkeypatch.setattr(cuda_api, "_StreamInUse", ReadInUse)
    held = [take() for _ in range(4)]

    def pause(frame, event, arg):
        if "discard(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            about_to_remove.set()
            assert reading.wait(WAIT_S)
        return pause

    def release():
        before = sys.gettrace()
        sys.settrace(pause)
        try:
            held.pop()
        finally:
            sys.settrace(before)
            about_to_remove.set()
            released.set()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        assert about_to_remove.wait(WAIT_S)
        assert take().cuda_stream == 4
    finally:
        reading.set()
        released.set()
        thread.join(WAIT_S)
