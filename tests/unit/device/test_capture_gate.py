"""One capture at a time in the process, and none while a data set is read."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from runtime.collective import create_collectives
from runtime.core.errors import CollectiveTimeout
from runtime.data import batches
from runtime.data.batches import Position, read_batch
from runtime.device import capture_gate
from runtime.device.capture_gate import CaptureGate
from runtime.device.cuda import CudaDevice
from tests.support.fake_cuda import GPU, FakeCuda

WAIT_S = 10.0
HELD_UP_S = 0.05


@pytest.fixture
def gate():
    return CaptureGate(capture_wait_s=WAIT_S, read_wait_s=WAIT_S)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def capture(gate):
    """True if a capture was admitted."""
    with gate.capturing() as granted:
        return granted


def is_taken(gate):
    """Poll until a capture is next in turn, for which the gate has no notification."""
    deadline = time.monotonic() + WAIT_S
    while not gate._is_taken and time.monotonic() < deadline:
        time.sleep(0.001)
    return gate._is_taken


class Data:
    """A data set that signals when it is read."""

    def __init__(self):
        self.entered, self.leave = threading.Event(), threading.Event()

    def load(self, indices):
        self.entered.set()
        assert self.leave.wait(WAIT_S)
        return indices


def start_reading(pool, data):
    return pool.submit(read_batch, data, torch.arange(2), seed=0, rank=0, position=Position(0, 0))


def test_no_data_set_is_read_while_a_graph_is_captured(gate, pool, monkeypatch):
    monkeypatch.setattr(batches, "GATE", gate)
    data = Data()
    data.leave.set()
    with gate.capturing() as granted:
        assert granted
        done = start_reading(pool, data)
        assert not data.entered.wait(HELD_UP_S)
    assert done.result(WAIT_S).tolist() == [0, 1]


def test_a_capture_waits_until_data_sets_have_been_read(gate, pool, monkeypatch):
    monkeypatch.setattr(batches, "GATE", gate)
    data, late = Data(), Data()
    done = start_reading(pool, data)
    assert data.entered.wait(WAIT_S)
    captured = pool.submit(capture, gate)
    assert is_taken(gate)
    late.leave.set()
    waiting = start_reading(pool, late)  # or readers in turn would block captures for ever
    assert not late.entered.wait(HELD_UP_S)
    assert not captured.done()
    data.leave.set()
    assert captured.result(WAIT_S)
    for future in (done, waiting):
        future.result(WAIT_S)


def test_data_sets_are_read_by_several_threads_at_once(gate, pool):
    both = threading.Barrier(2)

    def read():
        with gate.reading():
            both.wait(WAIT_S)

    for future in [pool.submit(read) for _ in range(2)]:
        future.result(WAIT_S)


def test_a_stuck_reader_costs_a_capture_and_no_more():
    gate = CaptureGate(capture_wait_s=0.01, read_wait_s=WAIT_S)
    with gate.reading():
        assert not capture(gate)
        with gate.reading():  # no capture is pending any more
            pass
    assert capture(gate)


def test_a_stuck_capture_holds_readers_up_to_the_limit(caplog):
    gate = CaptureGate(capture_wait_s=WAIT_S, read_wait_s=0.01)
    with gate.capturing():
        assert not capture(gate)
        with gate.reading():
            assert "going on beside it" in caplog.text


def test_a_capture_that_fails_lets_the_next_one_in(gate):
    with pytest.raises(ValueError, match="reads the device"), gate.capturing():
        raise ValueError("reads the device")
    assert capture(gate)


def test_captures_run_one_at_a_time(gate, pool):
    inside, most, lock = 0, 0, threading.Lock()
    all_there = threading.Barrier(4)

    def count():
        nonlocal inside, most
        all_there.wait(WAIT_S)
        with gate.capturing() as granted:
            assert granted
            with lock:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.01)
            with lock:
                inside -= 1

    for future in [pool.submit(count) for _ in range(4)]:
        future.result(WAIT_S)
    assert most == 1


def test_a_device_is_shared_while_another_worker_uses_it(gate):
    def device(index):
        return CudaDevice(torch.device("cuda", index), api=FakeCuda(), gate=gate)

    mine, neighbour, far = device(0), device(0), device(1)
    with ExitStack() as stack:
        stack.enter_context(mine.activate())
        stack.enter_context(far.activate())
        assert not mine.is_shared
        with neighbour.activate():
            assert (mine.is_shared, neighbour.is_shared, far.is_shared) == (True, True, False)
            neighbour.abandon()  # a thread that is stuck after the end of its run
            neighbour.abandon()
            assert not mine.is_shared
        with pytest.raises(KeyError), neighbour.activate():
            raise KeyError
        assert not mine.is_shared


def test_a_worker_joins_behind_a_capture(gate, pool):
    with gate.capturing():
        joined = pool.submit(gate.join, object(), GPU)
        with pytest.raises(TimeoutError):
            joined.result(HELD_UP_S)
    joined.result(WAIT_S)
    assert gate.num_workers(GPU) == 1


def test_issued_work_is_complete_before_a_worker_waits_to_capture(gate, pool):
    """Another rank, which holds the gate, may wait for a collective in it."""
    fake = FakeCuda()
    device = CudaDevice(GPU, api=fake, gate=gate)

    def capture_later():
        with device.activate():
            fake.mark("in flight")
            with device.capturing() as granted:
                return granted

    with gate.reading():
        captured = pool.submit(capture_later)
        assert is_taken(gate)
        assert fake.done == ["in flight"]
    assert captured.result(WAIT_S)


# -- time limits of peers ------------------------------------------------------------


def test_time_of_captures_and_of_their_queue_is_counted_once(gate, pool):
    begun, release = threading.Event(), threading.Event()

    def first():
        with gate.capturing():
            begun.set()
            assert release.wait(WAIT_S)

    assert gate.captured_s == 0
    holder = pool.submit(first)
    assert begun.wait(WAIT_S)
    queued = [pool.submit(capture, gate) for _ in range(3)]
    start = gate.captured_s
    while gate.captured_s - start < HELD_UP_S:
        threading.Event().wait(HELD_UP_S / 10)
    release.set()
    assert all(future.result(WAIT_S) for future in queued)
    holder.result(WAIT_S)
    total = gate.captured_s
    threading.Event().wait(HELD_UP_S)
    assert gate.captured_s == total >= HELD_UP_S


def test_a_peer_that_captures_past_the_time_limit_is_waited_for(gate, monkeypatch):
    """Rank 1 captures for longer than the limit; rank 0 is in the collective meanwhile."""
    limit_s = 0.05
    monkeypatch.setattr(capture_gate, "GATE", gate)
    ends = create_collectives(2, timeout_s=limit_s)
    arrived = threading.Event()
    wait = ends[0]._group.barrier.wait

    def work(end):
        value = torch.ones(3)
        if end.rank == 1:
            with gate.capturing():
                assert arrived.wait(WAIT_S)
                start = gate.captured_s
                while gate.captured_s - start < 4 * limit_s:
                    threading.Event().wait(limit_s)
        end.all_reduce_(value)
        return value.tolist()

    def noted(rank, timeout_s, action=None, on_wait=None):
        wait(rank, timeout_s, action, arrived.set)

    monkeypatch.setattr(ends[0]._group.barrier, "wait", noted)
    with ThreadPoolExecutor(2) as two:
        assert list(two.map(work, ends)) == [[2.0] * 3] * 2


def test_a_missing_peer_times_out_although_graphs_were_captured_before(gate, monkeypatch):
    monkeypatch.setattr(capture_gate, "GATE", gate)
    assert capture(gate)
    ends = create_collectives(2, timeout_s=0.05)
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        ends[0].barrier()
