"""Shards of any sizes are complete and disjoint."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.fsdp import layout as layout_module
from runtime.fsdp.layout import Layout, make_layouts
from runtime.replica.flat import dense_stride

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)
worlds = st.integers(1, 7)
properties = settings(max_examples=60)


def numbered(shapes):
    """Parameters all of whose elements differ."""
    first = 0
    tensors = []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + numel, dtype=torch.float64).view(shape))
        first += numel
    return tensors


@contextmanager
def limits(large):
    """Set the size of large parameters, and of buckets to twice as much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "LARGE_ELEMENTS", large)
        patch.setattr(layout_module, "BUCKET_BYTES", 8 * large)  # two of the largest
        yield


def make_layout(shapes, num_shards, large=layout_module.LARGE_ELEMENTS):
    tensors = numbered(shapes)
    with limits(large):
        return Layout(list(enumerate(tensors)), num_shards), tensors


larges = st.sampled_from([1, 20, layout_module.LARGE_ELEMENTS])


@properties
@given(shapes=shapes, num_shards=worlds, large=larges)
def test_every_element_belongs_to_exactly_one_rank(shapes, num_shards, large):
    layout, tensors = make_layout(shapes, num_shards, large)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        flat = tensor.reshape(-1)
        extents = [slot.extent(rank) for rank in range(num_shards)]
        assert torch.cat([flat[start:stop] for start, stop in extents]).equal(flat)
        assert sum(stop - start for start, stop in extents) == slot.numel


@properties
@given(shapes=shapes, num_shards=worlds, large=larges)
def test_chunks_and_full_parameters_do_not_overlap(shapes, num_shards, large):
    layout, _ = make_layout(shapes, num_shards, large)
    shard = torch.zeros(layout.shard_numel, dtype=torch.int64)
    full = torch.zeros(layout.full_numel, dtype=torch.int64)
    for slot in layout.slots:
        assert slot.numel <= slot.chunk * num_shards < slot.numel + num_shards
        shard[slot.shard_offset : slot.shard_offset + slot.chunk] += 1
        slot.padded_of(full, num_shards).add_(1)
    assert bool((shard <= 1).all())
    assert bool((full <= 1).all())
    assert int(shard.sum()) * num_shards == int(full.sum())


@properties
@given(shapes=shapes, num_shards=worlds, large=larges)
def test_a_bucket_is_a_contiguous_range_of_the_shard(shapes, num_shards, large):
    layout, _ = make_layout(shapes, num_shards, large)
    end = 0
    for bucket in layout.buckets:
        assert bucket.start >= end
        offset = bucket.start
        for slot in bucket.slots:
            assert slot.shard_offset == offset
            offset += slot.chunk
        assert offset == bucket.stop
        end = bucket.stop
    assert end == layout.shard_numel
    indices = [slot.index for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(indices) == list(range(len(shapes)))


def test_large_parameters_are_exchanged_alone_and_small_ones_together():
    sizes = [10, 1 << 16, 20, 1 << 18, 30]
    layout = Layout([(i, torch.empty(n)) for i, n in enumerate(sizes)], 3)
    assert [[slot.index for slot in bucket.slots] for bucket in layout.buckets] == [
        [0, 2, 4],
        [1],
        [3],
    ]


def test_a_bucket_of_small_parameters_is_bounded():
    layout = Layout([(i, torch.empty(1 << 15)) for i in range(250)], 2)
    assert [len(bucket.slots) for bucket in layout.buckets] == [200, 50]


def test_dtypes_and_frozen_parameters_have_separate_layouts():
    tensors = [
        torch.empty(3, requires_grad=True),
        torch.empty(3),
        torch.empty(3, dtype=torch.bfloat16, requires_grad=True),
        torch.empty(4, requires_grad=True),
    ]
    layouts = make_layouts(tensors, 2)
    assert [[slot.index for slot in layout.slots] for layout in layouts] == [[0, 3], [1], [2]]


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(2, 3).t(), (1, 3)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(1).expand(4), (1,)),
        (torch.empty(4, 6)[:, :3], (3, 1)),
        (torch.empty(()), ()),
    ],
)
def test_dense_strides_are_kept(tensor, stride):
    assert dense_stride(tensor) == stride


@pytest.mark.parametrize("like", [torch.empty(5, 4).t(), torch.empty(4, 5), torch.empty(8, 5)[::2]])
def test_a_tensor_of_any_strides_is_flattened_in_the_order_of_the_parameter(like):
    parameter = torch.empty_strided((4, 5), dense_stride(torch.empty(5, 4).t()))
    parameter.copy_(torch.arange(20.0).view(4, 5))
    layout = Layout([(0, parameter)], 3)
    given = like.clone(memory_format=torch.preserve_format)
    given.copy_(parameter)
    flat = layout.slots[0].flatten(given)
    assert flat.is_contiguous()
    assert layout.slots[0].view_of(flat).equal(parameter)
