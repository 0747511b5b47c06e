"""Adapters through which the runtime reads every supported form of data set."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from runtime.core.rng import seeded_globals
from runtime.data.columns import Column, as_column, row_bytes
from runtime.data.epoch_index import check_sampler

Collate = Callable[[list[Any]], Any]

SUPPORTED_DATASETS = (
    "dataset() takes a map-style torch Dataset, an IterableDataset, a TensorDataset, a tuple or "
    "dict of tensors or NumPy arrays, a DataLoader, or an object with __len__ and "
    "get_batch(indices)"
)


class DatasetAdapter(ABC):
    """A data set that is read batch by batch; shared by all workers and thread-safe.

    Attributes:
        num_samples: Length of the data set.
        in_memory: Whether ``load`` only gathers rows of tensors in memory, so that it
            draws no random number, runs no code of the user and need not be prefetched.
        on_cpu: Whether batches are known to lie in CPU memory.
    """

    num_samples: int
    in_memory: bool = False
    on_cpu: bool = True

    @abstractmethod
    def load(self, indices: Tensor) -> Any:
        """Read one batch. Blocks while the data set reads.

        Args:
            indices: Samples of the batch, int64, on the CPU, of shape ``(n,)``; not
                changed.

        Returns:
            A tuple, list or dict of tensors (or what the user's ``collate_fn`` returns).

        Raises:
            TypeError: The data set did not give tensors.
            ValueError: The tensors do not have one row for each index.
        """


class ColumnAdapter(DatasetAdapter):
    """Tensors, or memory maps, whose rows are the samples.

    Args:
        columns: All of one length.
        rows: The samples, by their rows; ``None``: all.
        names: Batches are dicts under these names; ``None``: tuples.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Tensor | None = None,
        names: Sequence[Any] | None = None,
    ) -> None:
        self._columns = tuple(columns)
        self._rows = rows
        self._names = names
        self.num_samples = len(self._columns[0]) if rows is None else len(rows)
        self.in_memory = all(isinstance(column, Tensor) for column in self._columns)
        self.on_cpu = all(column.is_cpu for column in self._columns if isinstance(column, Tensor))
        self._plain = self.in_memory and self.on_cpu and rows is None

    def load(self, indices: Tensor) -> Any:
        """Gather the rows ``indices`` of every column, as one batch."""
        return self.batch_of(self.gather(indices))

    def batch_of(self, parts: Sequence[Tensor]) -> Any:
        """A tuple or dict of what stands for each column."""
        return tuple(parts) if self._names is None else dict(zip(self._names, parts, strict=True))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The rows ``indices`` of every column."""
        if self._plain:
            return tuple([column.index_select(0, indices) for column in self._columns])
        if self._rows is not None:
            indices = self._rows.index_select(0, indices)
        return tuple(
            [
                # Without a wait for the device where the column lies on one; of more than 8,192
                # indices CUDA may wait until they are copied.
                column.index_select(0, indices.to(column.device, non_blocking=True))
                if isinstance(column, Tensor)
                else column.index_select(0, indices)
                for column in self._columns
            ]
        )

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample: of one row of every column."""
        return sum(row_bytes(column) for column in self._columns)

    def load_into(self, indices: Tensor, out: Sequence[Tensor]) -> None:
        """Gather the rows ``indices`` into CPU tensors, one for each column.

        Args:
            indices: See :meth:`load`.
            out: Tensors of a batch's shapes and dtypes; pinned ones are filled directly.
        """
        if self._rows is not None:
            indices = self._rows.index_select(0, indices)
        for column, target in zip(self._columns, out, strict=True):
            if isinstance(column, Tensor):
                torch.index_select(column, 0, indices, out=target)
            else:
                target.copy_(column.index_select(0, indices))

    def subset(self, indices: Sequence[int]) -> ColumnAdapter:
        """The same columns restricted to the samples ``indices`` (negative: from the end)."""
        rows = torch.as_tensor(indices, dtype=torch.int64).reshape(-1)
        rows = torch.where(rows < 0, rows + self.num_samples, rows)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_samples:
            raise ValueError(
                f"the Subset has indices outside of its data set of {self.num_samples} samples: "
                "correct its indices"
            )
        rows = rows if self._rows is None else self._rows.index_select(0, rows)
        return ColumnAdapter(self._columns, rows, self._names)


class _Rows:
    """Columns as a map-style data set, for a ``collate_fn`` that wants single samples."""

    def __init__(self, columns: ColumnAdapter) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return self._columns.num_samples

    def __getitem__(self, index: int) -> Any:
        parts = self._columns.gather(torch.tensor([index]))
        return self._columns.batch_of([rows[0] for rows in parts])


class _ReadingAdapter(DatasetAdapter):
    """An adapter that runs the user's code, one thread at a time if ``lock``."""

    def __init__(self, dataset: Any, lock: bool) -> None:
        self._dataset = dataset
        self.num_samples = len(dataset)
        self._lock = threading.Lock() if lock else None

    def __getstate__(self) -> dict[str, Any]:
        # Each loader process reads a copy of the data set, in one thread: no lock is needed.
        return {**self.__dict__, "_lock": None}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Alone, if that is asked for: what the data set draws from Python's and NumPy's
        generators is then the batch's own, too."""
        if self._lock is None:
            yield
            return
        with self._lock, seeded_globals():
            yield


class MapAdapter(_ReadingAdapter):
    """A map-style data set, read by ``__getitems__`` where it exists and then collated."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, lock: bool) -> None:
        super().__init__(dataset, lock)
        self._collate = collate_fn
        # Like torch, which takes an attribute that is None for a missing one.
        self._get_items = getattr(dataset, "__getitems__", None) is not None

    def load(self, indices: Tensor) -> Any:
        """Read the samples ``indices`` and collate them."""
        dataset, positions = self._dataset, indices.tolist()
        with self._reading():
            if self._get_items:
                samples = dataset.__getitems__(positions)
            else:
                samples = [dataset[position] for position in positions]
        if self._collate is None:
            return check_batch(default_collate(samples), len(positions))
        # A collate_fn may pack samples as it likes, so that its rows are not counted.
        return check_batch(self._collate(samples), None)


class BatchAdapter(_ReadingAdapter):
    """An object whose ``get_batch(indices)`` reads a whole batch."""

    def load(self, indices: Tensor) -> Any:
        """Hand a copy of ``indices``, which the data set may change, to ``get_batch``."""
        with self._reading():
            batch = self._dataset.get_batch(indices.clone())
        return check_batch(batch, len(indices))


def check_batch(batch: Any, num_samples: int | None) -> Any:
    """Return ``batch`` if it is fit for training.

    Args:
        batch: What the data set gave.
        num_samples: Rows that each of its tensors shall have (0-dimensional ones
            excepted); ``None``: any number.

    Raises:
        TypeError: It is no tensor, no container and has no ``to(device)``, or it holds a
            NumPy array.
        ValueError: A tensor has another number of rows.
    """
    parts: tuple[Any, ...]
    if isinstance(batch, Tensor):
        parts = (batch,)
    elif isinstance(batch, Mapping):
        parts = tuple(batch.values())
    elif isinstance(batch, tuple | list):
        parts = tuple(batch)
    elif callable(getattr(batch, "to", None)):
        return batch
    else:
        raise TypeError(
            f"the data set gave a batch of type {type(batch).__name__}: "
            "return a tuple, list or dict of tensors"
        )
    if any(isinstance(part, np.ndarray) for part in parts):
        raise TypeError("the data set gave a batch of NumPy arrays: wrap them by torch.from_numpy")
    if num_samples is not None:
        shapes = [tuple(part.shape) for part in parts if isinstance(part, Tensor)]
        if any(shape[0] != num_samples for shape in shapes if shape):
            raise ValueError(
                f"the data set gave tensors of shapes {', '.join(map(str, shapes))} for "
                f"{num_samples} samples: each needs {num_samples} rows"
            )
    return batch


def adapt_dataset(
    dataset: Any, *, collate_fn: Collate | None = None, lock: bool = False
) -> DatasetAdapter:
    """Make any supported data set readable by the runtime.

    Args:
        dataset: A map-style data set, a ``TensorDataset`` (or a ``Subset`` of one), a
            tensor or array, a tuple or list of them, or an object with ``__len__`` and
            ``get_batch(indices)``. Arrays are wrapped, not copied; memory maps stay on
            disk.
        collate_fn: Makes a batch of a list of samples; ``None``: PyTorch's. With one,
            samples are always fetched one by one.
        lock: Let one thread at a time read the data set.

    Raises:
        TypeError: Not a data set of these forms.
        ValueError: An empty data set, columns of unequal lengths, or a ``collate_fn``
            that could have no effect.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be callable, got {type(collate_fn).__name__}")
    columns = _columns_of(dataset)
    if columns is not None and collate_fn is None:
        return _not_empty(columns)
    if columns is not None and isinstance(dataset, Tensor | np.ndarray | tuple | list | Mapping):
        return _not_empty(MapAdapter(_Rows(columns), collate_fn, lock))
    _reject_unreadable(dataset)
    if not callable(getattr(dataset, "get_batch", None)):
        return _not_empty(MapAdapter(dataset, collate_fn, lock))
    if collate_fn is not None:
        raise ValueError("a data set with get_batch makes its batches itself: remove collate_fn")
    return _not_empty(BatchAdapter(dataset, lock))


def _not_empty(adapter: DatasetAdapter) -> DatasetAdapter:
    if adapter.num_samples == 0:
        raise ValueError("the data set is empty: give it at least one sample")
    return adapter


def _columns_of(dataset: Any) -> ColumnAdapter | None:
    """The columns of a data set in memory or of memory maps; ``None`` for any other."""
    # A subclass may change what a sample is.
    if type(dataset) is TensorDataset:
        dataset = dataset.tensors
    elif type(dataset) is Subset:
        whole = _columns_of(dataset.dataset) if _is_tabular(dataset.dataset) else None
        return None if whole is None else whole.subset(dataset.indices)
    elif isinstance(dataset, Tensor | np.ndarray):
        dataset = (dataset,)
    kind, names = type(dataset).__name__, None
    if isinstance(dataset, Mapping):
        names, dataset = tuple(dataset), tuple(dataset.values())
    if not isinstance(dataset, tuple | list):
        return None
    are_arrays = [isinstance(part, Tensor | np.ndarray) for part in dataset]
    if not any(are_arrays):
        if isinstance(dataset, list) and dataset:
            return None  # a list of samples is a map-style data set
        way = SUPPORTED_DATASETS
        if names and all(callable(getattr(part, "__getitem__", None)) for part in dataset):
            way = f"pass one of the data sets in it, {kind}[{names[0]!r}]"
        raise (TypeError if dataset else ValueError)(
            f"a {kind} of {len(dataset)} elements without a tensor: {way}"
        )
    if not all(are_arrays):
        position = are_arrays.index(False)
        raise TypeError(
            f"element {position if names is None else repr(names[position])} of the data set is of "
            f"type {type(dataset[position]).__name__}: make it a tensor or a NumPy array"
        )
    columns = [as_column(part, position) for position, part in enumerate(dataset)]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"the tensors of the data set have unequal lengths: {lengths}")
    return ColumnAdapter(columns, names=names)


def _is_tabular(dataset: Any) -> bool:
    return type(dataset) in (TensorDataset, Subset)


def _reject_unreadable(dataset: Any) -> None:
    """Raise ``TypeError`` for what has no length or cannot be read by index."""
    name = type(dataset).__name__
    if dataset is None or isinstance(dataset, int | float | str | bytes | type):
        what = dataset.__name__ + ", a class" if isinstance(dataset, type) else repr(dataset)
        raise TypeError(f"{what} is no data set: {SUPPORTED_DATASETS}")
    get_item = getattr(type(dataset), "__getitem__", None)
    if get_item in (None, Dataset.__getitem__) and not callable(
        getattr(dataset, "get_batch", None)
    ):
        raise TypeError(f"{name} defines neither __getitem__ nor get_batch: {SUPPORTED_DATASETS}")
    try:
        len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"{name} has no length: define __len__") from error


def settings_of_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a ``DataLoader`` says of how its data set is read, under the builder's names.

    Raises:
        TypeError: It makes its batches in a way that cannot be shared out among workers.
        ValueError: It reads one part of the data set for each process.
    """
    if loader.batch_size is None:
        how = "a batch_sampler of its own" if loader.batch_sampler else "batch_size=None"
        raise TypeError(
            f"a DataLoader with {how} decides which samples make a batch, and workers need batches "
            "of one size: pass its data set, and use batch_size(), sampler() and collate_fn()"
        )
    found: dict[str, Any] = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "loader_workers": loader.num_workers,
        "drop_last": loader.drop_last,
    }
    if loader.collate_fn is not default_collate:
        found["collate_fn"] = loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        del found["loader_workers"]  # one reader, in a thread, hands out each item once
        return found
    sampler: Any = loader.sampler
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    if not shuffles or sampler.num_samples != len(sampler.data_source):
        found["sampler"] = check_sampler(sampler)
    return found
