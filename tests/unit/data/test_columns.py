"""Columns: arrays of every layout in memory, and memory maps that stay on disk."""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from runtime.data.columns import MappedArray
from runtime.data.data_set_state import digest_of
from runtime.data.dataset import adapt_dataset
from tests.support.running import WAIT_S, builder

N = 11
UNSIGNED = ["uint16", "uint32", "uint64"]
INDICES = torch.tensor([7, 0, 10, 3])


def test_arrays_are_wrapped_without_a_copy():
    array = np.zeros((N, 2))
    adapter = adapt_dataset((array,))
    array[7] = 5
    assert adapter.load(INDICES)[0][0].tolist() == [5, 5]


def test_a_read_only_array_is_wrapped_without_a_warning():
    array = np.arange(N)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = adapt_dataset((array,))
    assert adapter.load(INDICES)[0].tolist() == INDICES.tolist()
    assert not array.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(N)[::-1],
        np.arange(2 * N)[::2],
        np.arange(N, dtype=">i8"),
        np.arange(N, dtype=">f4"),
        *(np.arange(N).astype(name) for name in UNSIGNED),
    ],
    ids=["reversed", "strided", "big-endian", "big-endian-float", *UNSIGNED],
)
def test_unusual_arrays_keep_their_values(array):
    (batch,) = adapt_dataset((array,)).load(INDICES)
    assert batch.tolist() == [array[i] for i in INDICES]


@pytest.mark.parametrize("name", UNSIGNED)
def test_unsigned_numbers_of_16_bits_and_more_are_gathered_everywhere(name):
    column = torch.arange(N).to(getattr(torch, name))
    part = Subset(TensorDataset(column), range(1, N))
    assert adapt_dataset(part).load(torch.tensor([2, 0]))[0].tolist() == [3, 1]
    out = torch.empty(len(INDICES), dtype=column.dtype)
    adapt_dataset((column,)).load_into(INDICES, [out])
    assert out.tolist() == INDICES.tolist()
    run = builder(train=lambda m, b: m.w.sum() * (b[0].dtype == column.dtype), dataset=(column,))
    assert run.resident(True).run().join(WAIT_S).metrics[0].num_samples == N


@pytest.fixture
def mapped(tmp_path):
    array = np.arange(N * 4, dtype=np.float32).reshape(N, 4)
    np.save(tmp_path / "x.npy", array)
    return np.load(tmp_path / "x.npy", mmap_mode="r")


VIEWS = {
    "whole": lambda a: a,
    "asarray": np.asarray,
    "rows": lambda a: a[2:],
    "strided": lambda a: a[::2, 1:3],
    "reversed": lambda a: a[::-1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_memory_map_is_read_from_disk_also_after_pickling(mapped, view):
    array = view(mapped)
    indices = torch.tensor([3, 0, 5])
    adapter = adapt_dataset((array, torch.arange(len(array))))
    assert not adapter.in_memory
    sent = pickle.dumps(adapter._columns[0])
    assert b"_reopen" in sent
    again = pickle.loads(sent).index_select(0, indices)
    for batch in (adapter.load(indices)[0], again):
        assert batch.tolist() == array[indices.numpy()].tolist()


def test_a_copy_on_write_map_is_pickled_by_value(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(N, dtype=">i4"))
    array = np.load(tmp_path / "x.npy", mmap_mode="c")
    array[3] = 9
    column = pickle.loads(pickle.dumps(MappedArray(array)))
    assert column.index_select(0, torch.tensor([3, 4])).tolist() == [9, 0]


def test_memory_maps_with_a_collate_fn_are_fetched_by_item(mapped):
    adapter = adapt_dataset((mapped,), collate_fn=lambda s: [x.sum() for (x,) in s])
    assert [x.item() for x in adapter.load(INDICES)] == mapped[INDICES.numpy()].sum(1).tolist()


def test_rows_of_a_subset_of_a_memory_map_are_gathered_into_tensors(mapped):
    subset = Subset(TensorDataset(torch.arange(N), torch.arange(N) * 10), [8, 2, 5, -1])
    adapter = adapt_dataset(subset)
    out = [torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.int64)]
    adapter.load_into(torch.tensor([0, 3]), out)
    assert [column.tolist() for column in out] == [[8, 10], [80, 100]]
    assert adapter.current_length() == 4

    adapter = adapt_dataset((mapped,))
    target = torch.empty(2, 4)
    adapter.load_into(torch.tensor([3, 0]), [target])
    assert target.tolist() == mapped[[3, 0]].tolist()


def test_a_replaced_memory_map_changes_the_state_of_the_data_set(mapped, tmp_path):
    array = np.asarray(mapped) + 1
    np.save(tmp_path / "y.npy", array)
    other = np.load(tmp_path / "y.npy", mmap_mode="r")
    digests = [digest_of(SimpleNamespace(x=x))[0] for x in (mapped, mapped, other)]
    assert digests[0] == digests[1] != digests[2]
