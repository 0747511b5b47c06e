"""Stream order of means over replicas on GPUs, on a fake CUDA."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from runtime.collective import nccl as nccl_module
from runtime.core.errors import CollectiveAborted
from runtime.loop import reduction as reduction_module
from runtime.loop.reduction import GroupReduction
from runtime.replica.gradients import FlatGradients
from tests.support.fake_cuda import (
    CPU,
    GPU,
    FakeCuda,
    pinned_alive_at_allocation,
    standing_in,
)
from tests.support.parallel import replicas, samples_of
from tests.support.posing import PosingBackend

OTHER_GPU = torch.device("cuda", 1)
SHAPES = ((3, 2), (5,), ())


@pytest.fixture
def fake():
    fake = FakeCuda(patience=1, allow_default=True, prompt=True)
    with standing_in(fake):
        yield fake


@pytest.fixture
def staged(fake, monkeypatch):
    """Makes reductions in CPU memory for these devices."""
    made = []
    load = FlatGradients.load

    def posing_load(store, grads):
        for flat in store.flats:
            fake.place(flat, fake.device_of(grads[0]))
        load(store, grads)

    monkeypatch.setattr(FlatGradients, "load", posing_load)

    def make(devices):
        made.append(GroupReduction(devices, "thread", 20.0))
        return made[-1]

    yield make
    for reduction in made:
        reduction.close()


def gradients(fake, devices, dtypes=(torch.float32, torch.float64, torch.float32)):
    """``[rank][i]``: tensors full of ``10 ** rank``, posing as tensors of their devices."""
    return [
        [
            fake.place(torch.full(shape, 10.0**rank, dtype=dtype), device)
            for shape, dtype in zip(SHAPES, dtypes, strict=True)
        ]
        for rank, device in enumerate(devices)
    ]


def values(tensors):
    return [t.unique().tolist() for own in tensors for t in own]


@pytest.mark.parametrize("devices", [(GPU, GPU), (GPU, CPU), (CPU, GPU), (GPU, OTHER_GPU)], ids=str)
def test_staged_gradients_become_their_weighted_mean(fake, staged, devices):
    tensors = gradients(fake, devices)
    reduction = staged(devices)
    reduction.mean_(tensors, [3, 1])
    fake.run_all()
    assert values(tensors) == [[3.25]] * 6
    num_gpus = sum(device != CPU for device in devices)
    assert len(fake.calls("copy")) == 2 * 2 * num_gpus  # two dtypes, there and back
    reduction.close()
    reduction.close()


@pytest.mark.parametrize(
    ("weights", "mean"), [((3, 1), 3.25), ((0, 2), 10), ((0, 0), 0), ((-1, 2), math.nan)]
)
def test_weights_that_the_host_does_not_read_scale_flat_copies(fake, staged, weights, mean):
    tensors = gradients(fake, (GPU, CPU))
    if weights[0] == 0:
        tensors[0][0].fill_(math.nan)
    staged((GPU, CPU)).mean_(tensors, [torch.tensor(float(w)) for w in weights])
    fake.run_all()
    for tensor in (t for own in tensors for t in own):
        torch.testing.assert_close(tensor, torch.full_like(tensor, mean), equal_nan=True)


def test_earlier_work_on_the_callers_stream_is_waited_for(fake, staged):
    devices = (GPU, GPU)
    tensors = gradients(fake, devices)
    reduction = staged(devices)
    stream = fake.new_stream(GPU)
    with fake.stream(stream):
        fake.mark("backward")
        reduction.mean_(tensors, [1, 1])
        assert fake.done == ["backward"]
        fake.mark("optimizer")
    assert fake.done == ["backward"]  # later work is not waited for
    assert values(tensors) == [[5.5]] * 6


def test_a_call_on_another_stream_waits_for_the_copies_of_the_last_result(fake, staged):
    devices = (GPU, GPU)
    reduction = staged(devices)
    with fake.stream(fake.new_stream(GPU)):
        reduction.mean_(gradients(fake, devices), [1, 1])
    fake.log.clear()
    stream = fake.new_stream(GPU)
    with fake.stream(stream):
        reduction.mean_(gradients(fake, devices), [1, 1])
    given = [entry[0] for entry in fake.log if entry[-1] == stream.name]
    # Per rank: a wait before packing, and an event after it.
    assert given[:5] == ["enter", "wait", "record", "wait", "record"]
    assert len(fake.calls("pin")) == 0  # pinned memory is reused


def test_pinned_memory_grows_with_the_gradients(fake, staged):
    reduction = staged((GPU, GPU))
    for count in (2, 1, 2, 3, 3):
        tensors = [own[:count] for own in gradients(fake, (GPU, GPU), [torch.float32] * 3)]
        reduction.mean_(tensors, [1, 0])
        fake.run_all()
        assert values(tensors) == [[1.0]] * 2 * count
    # Tensors are aligned to 64 bytes, and sizes rounded up like those of PyTorch's allocator.
    assert [size for _, size in fake.calls("pin")] == [128, 128, 256, 256]


def test_pinned_memory_that_is_too_small_is_freed_before_more_is_allocated(fake, staged):
    reduction = staged((GPU,))
    alive = pinned_alive_at_allocation(fake)
    for count in (10, 1000, 100_000):
        reduction.mean_([[torch.ones(count)]], [1])
        fake.run_all()
    assert alive == [0, 0, 0]


def test_strides_and_complex_gradients_survive_staging(fake, staged):
    reduction = staged((GPU, CPU))
    layout = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = [[torch.randn_like(layout), torch.randn(3, dtype=torch.complex64)] for _ in range(2)]
    fake.place(tensors[1][0], CPU), fake.place(tensors[1][1], CPU)
    expected = [(a + b) / 2 for a, b in zip(*tensors, strict=True)]
    reduction.mean_(tensors, [1, 1])
    fake.run_all()
    for own in tensors:
        assert own[0].stride() == layout.stride()
        for mine, wanted in zip(own, expected, strict=True):
            torch.testing.assert_close(mine, wanted)


def test_gradients_in_other_memory_formats_are_averaged_by_element(fake, staged):
    reduction = staged((GPU, GPU))
    tensors = [[torch.randn(2, 3, 4, 4)] for _ in range(2)]
    tensors[1][0] = tensors[1][0].to(memory_format=torch.channels_last)
    strides = [own[0].stride() for own in tensors]
    expected = (tensors[0][0] + tensors[1][0]) / 2
    reduction.mean_(tensors, [1, 1])
    fake.run_all()
    for own, stride in zip(tensors, strides, strict=True):
        torch.testing.assert_close(own[0], expected)
        assert own[0].stride() == stride


# -- over NCCL ------------------------------------------------------------------------------


@pytest.fixture
def posing_nccl(fake, monkeypatch):
    """A reduction over two ranks that pose as GPUs, and the NCCL calls made."""
    calls = []

    def new_backend(*args):
        return PosingBackend(*args, calls)

    def create(world_size, kind, devices, timeout_s):
        assert (world_size, kind) == (2, "nccl")
        return nccl_module.create_nccl_groups(devices, timeout_s)

    monkeypatch.setattr(nccl_module, "new_backend", new_backend)
    monkeypatch.setattr(reduction_module, "create_collectives", create)
    reduction = GroupReduction((GPU, GPU), "nccl", 20.0)
    yield reduction, calls
    reduction.close()


def test_nccl_averages_on_its_own_streams_after_the_callers(fake, posing_nccl):
    reduction, calls = posing_nccl
    tensors = gradients(fake, (GPU, GPU))
    with fake.stream(fake.new_stream(GPU)):
        fake.mark("backward")
        fake.log.clear()
        reduction.mean_(tensors, [3, 1])
        assert "backward" in fake.done  # the exchange's stream waited for it
    # Each exchange waits for packing, and the caller's stream for each exchange.
    assert len(fake.calls("wait")) == 4
    assert values(tensors) == [[3.25]] * 6
    assert sorted(calls).count(("allreduce", 0)) == 2  # one per dtype
    reduction.close()
    assert {rank for name, rank in calls if name == "shutdown"} == {0, 1}
    assert not [t for t in threading.enumerate() if t.name.startswith("ddp-")]


def test_an_aborted_exchange_leaves_the_gradients(fake, posing_nccl):
    reduction, calls = posing_nccl
    tensors = gradients(fake, (GPU, GPU))
    reduction._collectives[0].abort()
    with pytest.raises(CollectiveAborted):
        reduction.mean_(tensors, [1, 1])
    assert values(tensors) == [[1.0]] * 3 + [[10.0]] * 3
    reduction.close()
    assert {rank for name, rank in calls if name == "abort"} == {0, 1}


def test_a_group_whose_threads_cannot_start_is_closed(monkeypatch):
    ends = []

    def create(*args):
        ends.extend(original(*args))
        return ends

    def refuse(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    original = reduction_module.create_collectives
    monkeypatch.setattr(reduction_module, "create_collectives", create)
    monkeypatch.setattr(reduction_module, "RankThreads", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        GroupReduction((CPU, CPU), "gloo")
    assert len(ends) == 2
    for end in ends:
        with pytest.raises(CollectiveAborted):
            end.barrier()


# -- replicas in parallel -----------------------------------------------------------------------


def test_replicas_wait_for_work_on_the_callers_streams(fake):
    x, y = samples_of(6)
    fake.place(x, OTHER_GPU), fake.place(y, CPU)
    with replicas(3) as coordinator:
        fake.log.clear()
        with fake.stream(fake.new_stream(OTHER_GPU)):
            fake.mark("samples")
            coordinator.train_batch((x, y))
        assert len(fake.calls("record")) == 1
        # CPU replicas have no stream that could delay the copy from the GPU.
        assert len(fake.calls("wait_host")) == 3
        assert fake.done == ["samples"]
        fake.log.clear()
        coordinator.train_batch((fake.place(x.clone(), CPU), y))
        assert fake.calls("wait") == fake.calls("wait_host") == []
