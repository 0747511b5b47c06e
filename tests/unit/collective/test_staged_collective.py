"""Collectives between threads with tensors on GPUs: order of copies, streams and host."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from runtime.collective import create_collectives
from tests.support.fake_cuda import (
    CPU,
    GPU,
    FakeCuda,
    pinned_alive_at_allocation,
    standing_in,
)
from tests.unit.collective.test_collectives import on_ranks

OTHER_GPU = torch.device("cuda", 1)


@pytest.fixture
def fake():
    fake = FakeCuda(patience=None)
    with standing_in(fake):
        yield fake


@pytest.fixture
def group(fake):
    made = []

    def make(*devices):
        made.extend(create_collectives(len(devices), "thread", devices))
        return made

    yield make
    for end in made:
        end.close()


def in_stream(fake, work):
    """Run a rank's work on a separate stream; returns the stream."""

    def run(end):
        stream = fake.new_stream(GPU)
        with fake.stream(stream):
            work(end)
        return stream

    return run


def test_earlier_work_of_the_stream_is_in_the_result(fake, group):
    (end,) = group(GPU)
    tensor = torch.zeros(3)
    gradient = torch.ones(3)
    with fake.stream(fake.new_stream(GPU)):
        fake.mark("backward")
        fake.copy(tensor, gradient)
        end.all_reduce_(tensor)
        assert fake.done == ["backward"]
        fake.mark("optimizer")
        assert fake.done == ["backward"]  # the host does not wait for work after the copy
    assert tensor.tolist() == [1.0] * 3


def test_later_work_of_the_stream_sees_the_result(fake, group):
    ends = group(GPU, GPU)
    tensors = [torch.ones(3), torch.full((3,), 5.0)]
    streams = on_ranks(
        ends, in_stream(fake, lambda end: end.weighted_mean_([tensors[end.rank]], 1 + end.rank))
    )
    assert [t[0].item() for t in tensors] == [1.0, 5.0]
    fake.run(*streams)
    assert [t[0].item() for t in tensors] == [pytest.approx(11 / 3)] * 2


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_a_call_in_another_stream_waits_for_the_result_of_the_last(fake, group, order):
    (end,) = group(GPU)
    streams = [fake.new_stream(GPU) for _ in range(2)]
    first, second = torch.full((4,), 2.0), torch.full((4,), 3.0)
    with fake.stream(streams[0]):
        end.all_reduce_(first)
    first.zero_()  # garbage, which the result must replace
    with fake.stream(streams[1]):
        end.all_reduce_(second)
    fake.run(*(streams[i] for i in order))
    assert (first[0].item(), second[0].item()) == (2.0, 3.0)


def test_peers_write_only_once_the_last_result_is_copied(fake, group):
    ends = group(GPU, CPU)
    device, host = torch.full((4,), 2.0), fake.place(torch.full((4,), 7.0), CPU)

    def work(end):
        if end.rank == 0:
            end.all_reduce_(device)
            device.zero_()
            other = torch.zeros(4)
            end.broadcast_(other, 1)  # reads nothing of this rank's
        else:
            end.all_reduce_(fake.place(torch.ones(4), CPU))
            end.broadcast_(host, 1)

    streams = on_ranks(ends, in_stream(fake, work))
    assert device.tolist() == [3.0] * 4
    fake.run(*streams)
    assert device.tolist() == [3.0] * 4


def test_ranks_on_a_gpu_and_on_the_cpu_may_be_mixed(fake, group):
    ends = group(GPU, CPU, GPU)
    tensors = [torch.full((6,), float(rank)) for rank in range(3)]
    fake.place(tensors[1], CPU)
    fake.run(*on_ranks(ends, in_stream(fake, lambda end: end.all_reduce_(tensors[end.rank]))))
    assert [t.tolist() for t in tensors] == [[3.0] * 6] * 3


def test_a_rank_may_pass_tensors_of_both_sides_at_once(fake, group):
    ends = group(GPU, GPU)
    small = [fake.place(torch.full((2,), float(rank)), CPU) for rank in range(2)]
    large = [torch.full((5,), float(rank), dtype=torch.float64) for rank in range(2)]

    def work(end):
        end.weighted_mean_([large[end.rank], small[end.rank]], 1)

    fake.run(*on_ranks(ends, in_stream(fake, work)))
    assert [t.tolist() for t in (*small, *large)] == [[0.5] * 2] * 2 + [[0.5] * 5] * 2


def test_only_read_tensors_are_copied_in_and_only_written_ones_are_copied_back(fake, group):
    ends = group(GPU, GPU)
    whole, part = [torch.zeros(4) for _ in range(2)], [torch.ones(2) for _ in range(2)]
    for work, copies in (
        (lambda end: end.all_reduce_(part[end.rank]), 4),
        (lambda end: end.all_gather_into(whole[end.rank], part[end.rank]), 4),
        (lambda end: end.reduce_scatter_into(part[end.rank], whole[end.rank]), 4),
        (lambda end: end.broadcast_(part[end.rank]), 2),
        (lambda end: end.weighted_mean_([part[end.rank]], 0), 2),
        (lambda end: end.barrier(), 0),
    ):
        fake.log.clear()
        fake.run(*on_ranks(ends, in_stream(fake, work)))
        assert len(fake.calls("copy")) == copies


def test_pinned_memory_is_used_again_and_only_grows(fake, group):
    (end,) = group(GPU)
    with fake.stream(fake.new_stream(GPU)):
        for size in (10, 5, 10, 1000, 10, 1000):
            end.all_reduce_(torch.ones(size))
    assert [size for _, size in fake.calls("pin")] == [64, 4096]  # as PyTorch would round them
    assert len(fake.events) == 2


def test_pinned_memory_that_is_too_small_is_let_go_before_more_is_taken(fake, group):
    (end,) = group(GPU)
    alive = pinned_alive_at_allocation(fake)
    with fake.stream(fake.new_stream(GPU)):
        for size in (10, 1000, 100_000):
            end.all_reduce_(torch.ones(size))
            fake.run_all()
    assert alive == [0, 0, 0]


def test_a_call_that_is_refused_leaves_the_tensors_as_they_were(fake, group):
    ends = group(GPU, GPU)
    tensors = [torch.full((3,), 2.0), torch.full((4,), 2.0)]

    def work(end):
        with pytest.raises(ValueError, match="shape"):
            end.all_reduce_(tensors[end.rank])

    fake.run(*on_ranks(ends, in_stream(fake, work)))
    assert [set(t.tolist()) for t in tensors] == [{2.0}] * 2


def test_a_tensor_of_another_gpu_is_refused(fake, group):
    ends = group(GPU, GPU)
    tensors = [torch.ones(3), fake.place(torch.ones(3), OTHER_GPU)]

    def work(end):
        with pytest.raises(ValueError, match="rank 1 passed a tensor on cuda:1"):
            end.all_reduce_(tensors[end.rank])

    on_ranks(ends, in_stream(fake, work))


def test_a_failed_copy_aborts_the_peers(fake, group, monkeypatch):
    ends = group(GPU, CPU)
    monkeypatch.setattr(fake, "copy", lambda *_: 1 / 0)

    def work(end):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            end.all_reduce_(torch.ones(3) if end.rank == 0 else fake.place(torch.ones(3), CPU))
        return caught.type.__name__

    def run(end):
        with fake.stream(fake.new_stream(GPU)):
            return work(end)

    assert on_ranks(ends, run) == ["ZeroDivisionError", "CollectiveAborted"]
