"""Limits of step sizes by device memory, on stand-ins with simulated memory."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from coordinator.shares import Shares
from runtime import current_worker
from runtime.device.memory import CudaMemory, MemoryReading, StepMemory
from tests.support.fake_cuda import GPU
from tests.support.graphing import (
    DATA,
    a_run,
    capturable_on_cpu,
    loss_of,
    posing,
    train,
    warnings_of,
)
from tests.support.running import SYNC, THREAD

__all__ = ["capturable_on_cpu", "posing"]  # fixtures

MIB = 2**20


class WrittenMemory(CudaMemory):
    """Devices of ``total`` MiB; the run may use a part of it; a step of n samples peaks at
    ``100 + each * n`` MiB, of which 100 are held between steps; no graph frees anything.
    """

    def __init__(self, total=2000, fraction=0.5, each=10):
        self.total, self.part, self.each = total * MIB, fraction, each
        self.peaks = defaultdict(lambda: 100 * MIB)
        self.reserved = defaultdict(int)
        self.num_reads = 0

    def step(self, device, num_samples):
        self.peaks[device] = max(self.peaks[device], (100 + self.each * num_samples) * MIB)

    def read(self, device):
        self.num_reads += 1
        return MemoryReading(
            total_bytes=self.total,
            free_bytes=self.total - self.reserved_bytes(device),
            reserved_bytes=self.reserved_bytes(device),
            active_bytes=100 * MIB,
            peak_bytes=self.peaks[device],
        )

    def reserved_bytes(self, device):
        return self.peaks[device] + self.reserved[device]

    def fraction(self, device):
        return self.part


@pytest.fixture
def written():
    return WrittenMemory()


def follow(memory, sizes, num_workers=1):
    found = StepMemory(memory, GPU, lambda: num_workers)
    for size in sizes:
        memory.step(GPU, size)
        found.stepped(size)
    return found


# The budget is 1000 less a margin of 64 MiB.


def test_there_is_no_warning_before_the_first_step():
    assert follow(WrittenMemory(), []).most is None


@pytest.mark.parametrize(("size", "most"), [(8, 16), (40, 80), (60, 83), (83, 83), (90, 83)])
def test_one_measured_size_limits_by_its_memory_and_by_its_double(written, size, most):
    assert follow(written, [size]).most == most


def test_the_fixed_memory_of_a_step_follows_from_two_sizes(written):
    found = StepMemory(written, GPU, lambda: 1)
    for size, most in ((40, 40 + 336 // 12.5), (60, 60 + 236 // 5)):  # peaks at 400 + 5 n
        written.peaks[GPU] = (400 + 5 * size) * MIB
        for _ in range(3):
            found.stepped(size)
        assert found.most == most


def test_a_size_that_was_seen_once_is_no_point_of_the_line(written):
    """Its peak may miss memory that the first step allocates at its end."""
    found = StepMemory(written, GPU, lambda: 1)
    written.peaks[GPU] = 200 * MIB
    found.stepped(20)
    written.peaks[GPU] = 600 * MIB
    found.stepped(40)
    assert found.most == 40 + 336 // 12.5, "a line from the first step would give 56"


def test_workers_of_a_device_share_the_remaining_memory(written):
    assert follow(written, [60], num_workers=2).most == 60 + (936 - 700) // 2 // 10


def test_memory_is_looked_at_now_and_then(written):
    follow(written, [8] * 130)
    assert written.num_reads == 3 + 1


def test_a_graph_needs_the_memory_of_a_step_beside_all_that_is_reserved(written):
    found = follow(written, [30] * 3)  # 400 reserved, 300 a step, 536 left
    assert found.has_room_for_graph(30)
    assert found.has_room_for_graph(53)
    assert not found.has_room_for_graph(54)
    with found.capturing():
        written.reserved[GPU] += 300 * MIB
    assert not found.has_room_for_graph(30)
    assert found.has_room_for_graph(23)
    for _ in range(64):
        found.stepped(30)
    assert found.most == 30 + (936 - 300 - 400) // 10, "what graphs keep is no step's"


# -- runs of two ranks, each on its own device ------------------------------------------------


def peaking(memory, pieces):
    def loss(model, batch):
        worker = current_worker()
        num_samples = len(batch[0])
        memory.step(worker.replica.context.device, num_samples)
        pieces[worker.rank].append(num_samples)
        return loss_of(model, batch)

    return loss


@pytest.mark.parametrize("bears", [4, 5, 99])
def test_a_share_stays_within_the_budget_before_an_out_of_memory(bears, posing, monkeypatch):
    """By their speed rank 0 would get 6 of each 8 samples."""
    cost = Shares.cost

    def written_cost(shares, rank):
        return cost(shares, rank) and (0.0, (1e-3, 3e-3)[rank])

    monkeypatch.setattr(Shares, "cost", written_cost)
    memory = posing.memory = WrittenMemory(each=836 / (bears + 0.1))
    pieces = defaultdict(list)
    b = a_run(
        loss=peaking(memory, pieces),
        way=(SYNC, THREAD),
        ranks=2,
        dataset=(DATA[:64],),
        epochs=8,
    )
    state = train(b.balance(True))
    assert [e.num_samples for e in state.metrics] == [64] * 8
    assert max(pieces[0]) == min(bears, 6)


def test_shares_that_are_fixed_stay_whatever_is_measured(posing):
    memory = posing.memory = WrittenMemory(each=836 / 4.1)
    pieces = defaultdict(list)
    b = a_run(
        loss=peaking(memory, pieces), way=(SYNC, THREAD), ranks=2, dataset=(DATA[:64],), epochs=8
    )
    train(b.batch_size([5, 3]).cuda_graphs(False))
    assert set(pieces[0]) == {5}


def test_a_size_without_room_for_a_graph_is_trained_eagerly_and_reported_once(
    posing, monkeypatch, caplog
):
    # 5 samples peak at 550 of 936 MiB: a second graph of such a step would take 450 more.
    memory = posing.memory = WrittenMemory(each=90)
    sizes = {8: (5, 3)}
    monkeypatch.setattr(
        Shares,
        "sizes",
        lambda shares, total, ranks: sizes.get(total, (total - total // 2, total // 2)),
    )
    pieces = defaultdict(list)
    b = a_run(
        loss=peaking(memory, pieces), way=(SYNC, THREAD), ranks=2, dataset=(DATA[:64],), epochs=5
    )
    state = train(b.balance(True).cuda_graphs(True))
    assert [e.num_samples for e in state.metrics] == [64] * 5
    warnings = [text for text in warnings_of(caplog) if "lacks memory for a graph" in text]
    assert len(warnings) == 1
    assert "rank 0" in warnings[0]
    assert "5 samples" in warnings[0]
    assert len(pieces[0]) == 40, "each step is made eagerly"
    assert len(pieces[1]) < 40, "3 samples have room"
    assert torch.isfinite(torch.cat([p.flatten() for p in state.params.values()])).all()
