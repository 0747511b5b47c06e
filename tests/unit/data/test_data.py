"""Adapters for every form of data set, and the order of an epoch."""

import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import runtime.data.epoch_index
from coordinator.splitting import permutation
from runtime.data.dataset import adapt_dataset
from runtime.data.epoch_index import EpochIndex
from tests.support.running import at_once

N = 11
INDICES = torch.tensor([7, 0, 10, 3])


def columns():
    return torch.arange(N * 3.0).reshape(N, 3), torch.arange(N)


class Squares(Dataset):
    """Map-style: sample i is (i, i * i)."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        assert type(index) is int
        return index, torch.tensor(float(index * index))


class ManySquares(Dataset):
    """Has ``__getitems__`` only."""

    def __len__(self):
        return N

    def __getitems__(self, indices):
        return [Squares.__getitem__(self, index) for index in indices]


class Batches:
    def __init__(self, make):
        self.make = make
        self.seen = []

    def __len__(self):
        return N

    def get_batch(self, indices):
        self.seen.append(indices)
        return self.make(indices)


def assert_columns(batch):
    x, y = columns()
    assert type(batch) is tuple
    torch.testing.assert_close(batch, (x[INDICES], y[INDICES]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: TensorDataset(x, y),
        lambda x, y: (x.numpy(), y.numpy()),
        lambda x, y: (x, y.numpy()),
    ],
    ids=["tuple", "TensorDataset", "arrays", "mixed"],
)
def test_tensors_and_arrays_are_gathered_in_memory(form):
    adapter = adapt_dataset(form(*columns()))
    assert adapter.in_memory
    assert adapter.on_cpu
    assert adapter.num_samples == N
    assert_columns(adapter.load(INDICES))


@pytest.mark.parametrize("single", [columns()[0], columns()[0].numpy()], ids=["tensor", "array"])
def test_a_single_column_yields_tuples_of_one(single):
    (batch,) = adapt_dataset(single).load(INDICES)
    assert torch.equal(batch, columns()[0][INDICES])


def test_a_subset_of_a_tensor_dataset_stays_in_memory():
    x, y = columns()
    outer = Subset(Subset(TensorDataset(x, y), range(1, N)), [4, -1, 0])
    adapter = adapt_dataset(outer)
    assert adapter.in_memory
    assert adapter.num_samples == 3
    assert adapter.load(torch.tensor([0, 1, 2]))[1].tolist() == [5, N - 1, 1]


def test_a_subset_with_indices_out_of_range_is_refused():
    with pytest.raises(ValueError, match="outside of its data set of 11"):
        adapt_dataset(Subset(TensorDataset(*columns()), [0, N]))


def test_a_subset_of_a_map_style_data_set_is_read_by_item():
    adapter = adapt_dataset(Subset(Squares(), [5, 6]))
    assert not adapter.in_memory
    assert adapter.load(torch.tensor([1, 0]))[1].tolist() == [36.0, 25.0]


def test_a_subclass_of_tensor_dataset_keeps_its_own_items():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * part for part in super().__getitem__(index))

    adapter = adapt_dataset(Doubled(*columns()))
    assert not adapter.in_memory
    assert adapter.load(INDICES)[1].tolist() == [14, 0, 20, 6]


@pytest.mark.parametrize("dataset", [Squares(), ManySquares()])
def test_map_style_samples_are_collated(dataset):
    adapter = adapt_dataset(dataset)
    assert not adapter.in_memory
    assert adapter.num_samples == N
    numbers, squares = adapter.load(INDICES)
    assert numbers.tolist() == INDICES.tolist()
    assert squares.tolist() == [float(i * i) for i in INDICES]


class Hub:
    """A data set with Hugging Face's interface: columns by name, rows by index."""

    column_names = ("ids", "label")

    def __len__(self):
        return N

    def __getitem__(self, key):
        if isinstance(key, str):
            return [row[key] for row in self]
        if not isinstance(key, int):
            raise TypeError(key)
        return {"ids": torch.tensor([key, -key]), "label": key % 3}

    def __getitems__(self, keys):
        return [self[int(key)] for key in keys]

    def __iter__(self):
        return (self[i] for i in range(N))


def test_a_hugging_face_data_set_yields_dict_batches():
    adapter = adapt_dataset(Hub())
    assert adapter.num_samples == N
    batch = adapter.load(INDICES)
    assert batch["ids"].tolist() == [[i, -i] for i in INDICES.tolist()]
    assert batch["label"].tolist() == [i % 3 for i in INDICES.tolist()]


def test_a_dict_of_data_sets_is_refused_and_names_one_of_them():
    with pytest.raises(TypeError, match=r"pass one of the data sets in it, dict\['train'\]"):
        adapt_dataset({"train": Hub(), "test": Hub()})


def test_a_list_of_samples_is_map_style():
    batch = adapt_dataset([{"x": i, "y": -i} for i in range(N)]).load(INDICES)
    assert batch["y"].tolist() == [-7, 0, -10, -3]


def test_named_tuples_are_kept():
    Pair = namedtuple("Pair", "x y")
    batch = adapt_dataset([Pair(i, -i) for i in range(N)]).load(INDICES)
    assert batch.y.tolist() == [-7, 0, -10, -3]


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(*columns()), columns(), Subset(TensorDataset(*columns()), range(N))],
    ids=["TensorDataset", "tuple", "Subset"],
)
def test_a_collate_fn_receives_single_samples_of_tensors_in_memory(dataset):
    def collate(samples):
        assert [y.item() for _, y in samples] == INDICES.tolist()
        assert all(x.shape == (3,) for x, _ in samples)
        return {"x": torch.stack([x for x, _ in samples])}

    adapter = adapt_dataset(dataset, collate_fn=collate)
    assert not adapter.in_memory
    assert torch.equal(adapter.load(INDICES)["x"], columns()[0][INDICES])


def test_a_collate_fn_may_pack_samples():
    adapter = adapt_dataset(Squares(), collate_fn=lambda samples: (torch.zeros(99),))
    assert adapter.load(INDICES)[0].shape == (99,)


def test_get_batch_receives_its_own_copy_of_int64_indices():
    dataset = Batches(lambda indices: (indices * 2, torch.tensor(1.0)))
    indices = INDICES.clone()
    adapter = adapt_dataset(dataset)
    assert not adapter.in_memory
    assert adapter.load(indices)[0].tolist() == [14, 0, 20, 6]
    dataset.seen[0].zero_()
    assert dataset.seen[0].dtype is torch.int64
    assert torch.equal(indices, INDICES)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda i: (i, i[:3]), ValueError, r"shapes \(4,\), \(3,\) for 4 samples"),
        (lambda i: {"x": i[:3]}, ValueError, r"shapes \(3,\) for 4 samples"),
        (lambda i: i[:3], ValueError, r"shapes \(3,\) for 4 samples"),
        (lambda i: (i.numpy(),), TypeError, "from_numpy"),
        (lambda i: None, TypeError, "NoneType.*return a tuple"),
        (lambda i: 3, TypeError, "int.*return a tuple"),
    ],
)
def test_a_bad_batch_is_refused_with_the_reason(make, error, match):
    with pytest.raises(error, match=match):
        adapt_dataset(Batches(make)).load(INDICES)


def test_items_missing_from_getitems_are_refused():
    class Short(Squares):
        def __getitems__(self, indices):
            return [self[index] for index in indices[1:]]

    with pytest.raises(ValueError, match="for 4 samples: each needs 4 rows"):
        adapt_dataset(Short()).load(INDICES)


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class NoItems(Dataset):
    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("dataset", "error", "match"),
    [
        (None, TypeError, "None is not a data set: dataset\\(\\) takes"),
        (5, TypeError, "5 is not a data set"),
        ("train.csv", TypeError, "is not a data set"),
        (Squares, TypeError, "Squares, a class"),
        (object(), TypeError, "neither __getitem__ nor get_batch"),
        (NoLength(), TypeError, "NoLength has no length: define __len__"),
        (NoItems(), TypeError, "NoItems defines neither"),
        ({"x": 3}, TypeError, "dict of 1 elements without a tensor"),
        ((), ValueError, "tuple of 0 elements"),
        ([], ValueError, "the data set is empty"),
        ((1, 2), TypeError, "without a tensor"),
        ((torch.zeros(3), [1, 2, 3]), TypeError, "element 1 .* of type list"),
        ((torch.zeros(3), torch.zeros(2)), ValueError, r"unequal lengths: \[3, 2\]"),
        ((torch.zeros(3), torch.tensor(1.0)), ValueError, "element 1 .* no dimension"),
        ((np.float64(1) * np.ones(()),), (TypeError, ValueError), "."),
        ((np.array(["a", "b"]),), TypeError, "which PyTorch lacks"),
        ((torch.eye(2).to_sparse(),), ValueError, "to_dense"),
        ((torch.zeros(0, 3),), ValueError, "empty"),
        (TensorDataset(torch.zeros(0)), ValueError, "empty"),
        (Subset(Squares(), []), ValueError, "empty"),
    ],
)
def test_objects_that_are_not_data_sets_are_refused_with_the_remedy(dataset, error, match):
    with pytest.raises(error, match=match):
        adapt_dataset(dataset)


def test_a_collate_fn_without_effect_or_not_callable_is_refused():
    with pytest.raises(ValueError, match="remove collate_fn"):
        adapt_dataset(Batches(lambda i: (i,)), collate_fn=list)
    with pytest.raises(TypeError, match="must be callable, got int"):
        adapt_dataset(Squares(), collate_fn=3)


def test_tensors_on_another_device_are_indexed_on_it():
    x = torch.empty(N, 3, device="meta")
    adapter = adapt_dataset((x, torch.arange(N)))
    assert not adapter.on_cpu
    batch, y = adapter.load(INDICES)
    assert batch.device.type == "meta"
    assert batch.shape == (4, 3)
    assert y.tolist() == INDICES.tolist()


# -- threads -----------------------------------------------------------------


@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("base", [Batches, Squares, ManySquares])
def test_the_lock_lets_one_thread_at_a_time_read(base, lock):
    meeting = threading.Barrier(2)
    met = []

    def meet():
        # With the lock no other thread arrives; without it, one does.
        try:
            meeting.wait(0.3 if lock else 20)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)

    class Watched(base):
        def __init__(self):
            pass

        def get_batch(self, indices):
            meet()
            return (indices,)

        def __getitem__(self, index):
            meet()
            return index

        def __getitems__(self, indices):
            meet()
            return indices

    if base is not Batches:
        del Watched.get_batch
    if base is not ManySquares:
        Watched.__getitems__ = None
    adapter = adapt_dataset(Watched(), lock=lock)
    at_once(lambda i: adapter.load(torch.tensor([i])), range(2))
    assert met == [not lock] * 2


# -- order -------------------------------------------------------------------


def test_the_batches_of_an_epoch_make_up_its_permutation():
    index = EpochIndex(N, 4, seed=3)
    for epoch in range(2):
        batches = [index.indices(epoch, batch) for batch in range(3)]
        assert [len(batch) for batch in batches] == [4, 4, 3]
        assert batches[0].dtype is torch.int64
        assert torch.cat(batches).tolist() == permutation(N, epoch, 3).tolist()


def test_indices_are_views_of_one_permutation():
    index = EpochIndex(N, 4, seed=3)
    first, second = index.indices(0, 0), index.indices(0, 1)
    assert second.data_ptr() == first.data_ptr() + 4 * 8


@pytest.mark.parametrize("batch", [-1, 3])
def test_a_batch_out_of_range_raises_an_index_error(batch):
    with pytest.raises(IndexError, match=f"no batch {batch} in an epoch of 11 samples"):
        EpochIndex(N, 4, seed=3).indices(0, batch)


def test_permutations_of_old_epochs_are_dropped_and_recomputed():
    index = EpochIndex(N, 4, seed=3)
    first = index.indices(0, 0)
    for epoch in range(1, 6):
        index.indices(epoch, 0)
        assert len(index._orders) <= 3
    again = index.indices(0, 0)
    assert again.data_ptr() != first.data_ptr()
    assert torch.equal(again, first)


def test_an_epochs_permutation_is_computed_once_without_blocking_other_epochs(monkeypatch):
    computing, release = threading.Event(), threading.Event()
    calls = []

    def slow(num_samples, epoch, seed):
        calls.append(epoch)
        if epoch == 0:
            computing.set()
            assert release.wait(20)
        return permutation(num_samples, epoch, seed)

    monkeypatch.setattr(runtime.data.epoch_index, "permutation", slow)
    index = EpochIndex(N, 4, seed=3)
    found = []
    threads = [threading.Thread(target=lambda: found.append(index.indices(0, 0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert computing.wait(20)
    index.indices(1, 0)  # not blocked by epoch 0
    release.set()
    for thread in threads:
        thread.join(20)
    assert sorted(calls) == [0, 1]
    assert [x.tolist() for x in found] == [permutation(N, 0, 3)[:4].tolist()] * 3
