"""Mini-batches of any containers are cut completely, disjointly and in order."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime import DataParallelCoordinator, shard_samples
from runtime.loop.shard_samples import count_samples

Pair = namedtuple("Pair", "x y")


def sizes(shards):
    return [count_samples(shard) for shard in shards]


def test_ten_samples_over_three_give_three_three_and_four():
    assert sizes(shard_samples(list(range(10)), 3)) == [3, 3, 4]
    assert sizes(DataParallelCoordinator.shard_samples(torch.arange(10), 3)) == [3, 3, 4]


@pytest.mark.parametrize("nothing", [[], (), range(0), torch.zeros(0, 3), {"x": torch.zeros(0)}])
def test_no_samples_give_no_shards(nothing):
    assert shard_samples(nothing, 3) == []


def test_one_sample_is_in_exactly_one_shard():
    assert shard_samples([42], 3) == [[], [], [42]]


@given(count=st.integers(0, 200), num_shards=st.integers(1, 12))
def test_shards_are_complete_disjoint_and_of_nearly_one_size(count, num_shards):
    shards = shard_samples(list(range(count)), num_shards)
    assert [sample for shard in shards for sample in shard] == list(range(count))
    assert len(shards) == (num_shards if count else 0)
    assert max(sizes(shards), default=0) - min(sizes(shards), default=0) <= 1
    assert sizes(shards) == sorted(sizes(shards))


@given(count=st.integers(1, 40), num_shards=st.integers(1, 8))
def test_columns_are_cut_at_the_same_places(count, num_shards):
    rows = torch.arange(count)
    samples = {"x": (rows, [str(i) for i in range(count)]), "y": [rows[:, None], rows * 2]}
    shards = shard_samples(samples, num_shards)
    assert torch.equal(torch.cat([shard["x"][0] for shard in shards]), rows)
    for shard in shards:
        own = shard["x"][0].tolist()
        assert shard["x"][1] == [str(i) for i in own]
        assert shard["y"][0].flatten().tolist() == own
        assert shard["y"][1].tolist() == [2 * i for i in own]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (torch.arange(3), [torch.arange(1), torch.arange(1, 3)]),
        ((torch.arange(2),), [(torch.tensor([0]),), (torch.tensor([1]),)]),
        # As from a DataLoader.
        ([torch.arange(2), ("a", "b")], [[torch.tensor([0]), ("a",)], [torch.tensor([1]), ("b",)]]),
        (
            Pair(torch.arange(2), [3, 4]),
            [Pair(torch.tensor([0]), [3]), Pair(torch.tensor([1]), [4])],
        ),
        ((["a", "b"], [1, 2]), [(["a"], [1]), (["b"], [2])]),
        (OrderedDict(x=[1, 2]), [OrderedDict(x=[1]), OrderedDict(x=[2])]),
        # Separate samples.
        (["a", "b"], [["a"], ["b"]]),
        ([("a", 0), ("b", 1)], [[("a", 0)], [("b", 1)]]),
        ([{"x": 1}, {"x": 2}], [[{"x": 1}], [{"x": 2}]]),
        ([[1, 2, 3], [4]], [[[1, 2, 3]], [[4]]]),
        (("a", "b"), [("a",), ("b",)]),
        (range(5), [range(2), range(2, 5)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_cut_by_their_contents(samples, expected):
    shards = shard_samples(samples, 2)
    assert repr(shards) == repr(expected)
    assert all(type(shard) is type(wanted) for shard, wanted in zip(shards, expected, strict=True))


def test_samples_that_are_pairs_of_tensors_stay_samples():
    pairs = [(torch.zeros(i), torch.tensor(i)) for i in range(4)]
    shards = shard_samples(pairs, 2)
    assert shards == [pairs[:2], pairs[2:]]


def test_shards_of_tensors_share_their_memory():
    x = torch.arange(6)
    assert [s.data_ptr() for s in shard_samples(x, 2)] == [x.data_ptr(), x[3:].data_ptr()]


@pytest.mark.parametrize(
    ("samples", "num_shards", "error", "match"),
    [
        (torch.tensor(1), 2, ValueError, "samples is a tensor without dimension"),
        ([torch.zeros(2), torch.zeros(())], 2, ValueError, r"samples\[1\] is a tensor without"),
        (
            (torch.zeros(2), torch.zeros(3)),
            2,
            ValueError,
            r"samples\[0\] has 2, samples\[1\] has 3",
        ),
        ({"x": torch.zeros(2), "y": [1]}, 2, ValueError, r"samples\['x'\] has 2, samples\['y'\]"),
        ((torch.zeros(2), 3), 2, TypeError, r"samples\[1\] is a int"),
        ([torch.eye(2).to_sparse()], 2, TypeError, r"samples\[0\].*tensor\.to_dense"),
        ([torch.zeros(2), None], 2, TypeError, r"samples\[1\] is a NoneType"),
        ({}, 2, ValueError, "samples is an empty dict"),
        ("text", 2, TypeError, "samples is a str"),
        (b"text", 2, TypeError, "samples is a bytes"),
        (None, 2, TypeError, "samples is a NoneType"),
        ({1, 2}, 2, TypeError, "samples is a set"),
        ([1], 0, ValueError, "must be at least 1"),
        ([1], -1, ValueError, "must be at least 1"),
        ([1], 1.5, TypeError, "pass a whole number"),
        ([1], True, TypeError, "pass a whole number"),
    ],
)
def test_values_that_cannot_be_cut_are_named(samples, num_shards, error, match):
    with pytest.raises(error, match=match):
        shard_samples(samples, num_shards)
