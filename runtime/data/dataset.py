"""Adapters for every supported form of map-style data set."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from runtime.core.nested import is_container, items_of
from runtime.data.columns import Column, as_column, row_bytes, selects_rows, take_rows
from runtime.data.shared_reads import SharedReads

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]

SUPPORTED_DATASETS = (
    "dataset() takes a map-style torch Dataset, an IterableDataset, a TensorDataset, a tuple or "
    "dict of tensors or NumPy arrays, a DataLoader, or an object with __len__ and "
    "get_batch(indices)"
)

MAX_NAMED_COLUMNS = 8
"""Columns of a table that are named in a message."""


class DatasetAdapter(ABC):
    """A data set that is read batch by batch; shared by all workers and thread-safe.

    Attributes:
        num_samples: Length of the data set.
        in_memory: True if ``load`` only gathers rows of tensors in memory: it draws no random
            numbers, runs no user code and needs no prefetching.
        on_cpu: True if all columns are known to be in CPU memory.
    """

    num_samples: int
    in_memory: bool = False
    on_cpu: bool = True

    @abstractmethod
    def load(self, indices: Tensor) -> Any:
        """Read one batch. Blocks while the data set reads.

        Args:
            indices: Sample indices, int64, on the CPU, of shape ``(n,)``; not modified.

        Returns:
            A tuple, list or dict of tensors (or what the user's ``collate_fn`` returns).

        Raises:
            TypeError: The data set returned no tensors.
            ValueError: A tensor does not have one row for each index.
        """

    def current_length(self) -> int:
        """The length as it is now, after code of the user may have changed the data set."""
        return self.num_samples


class ColumnAdapter(DatasetAdapter):
    """Tensors, or memory maps, whose rows are the samples.

    Args:
        columns: Tensors or memory maps of equal length.
        rows: Row index of each sample; ``None``: all rows in order.
        names: Keys of the columns in dict batches; ``None``: batches are tuples.
        bare: Batches of a single column are tensors instead of tuples.
        source: Data set whose columns may be replaced between epochs.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Tensor | None = None,
        names: Sequence[Any] | None = None,
        *,
        bare: bool = False,
        source: Any = None,
    ) -> None:
        self._columns = tuple(columns)
        self._rows = rows
        self._names = names
        self._bare = bare
        self._source = source
        self.num_samples = len(self._columns[0]) if rows is None else len(rows)
        self.in_memory = all(isinstance(column, Tensor) for column in self._columns)
        self.on_cpu = all(column.is_cpu for column in self._columns if isinstance(column, Tensor))
        selects = all(
            selects_rows(column) for column in self._columns if isinstance(column, Tensor)
        )
        self._plain = self.in_memory and self.on_cpu and rows is None and selects

    def load(self, indices: Tensor) -> Any:
        """Gather the rows ``indices`` of every column, as one batch."""
        return self.batch_of(self.gather(indices))

    def batch_of(self, parts: Sequence[Tensor]) -> Any:
        """Build a tuple or dict with one item for each column."""
        if self._bare:
            return parts[0]
        return tuple(parts) if self._names is None else dict(zip(self._names, parts, strict=True))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return the rows ``indices`` of every column."""
        if self._plain:
            return tuple([column.index_select(0, indices) for column in self._columns])
        if self._rows is not None:
            indices = self._rows.index_select(0, indices)
        return tuple(
            [
                # Does not synchronise for columns on a device, except that CUDA may wait for
                # the copy of more than 8,192 indices.
                take_rows(column, indices.to(column.device, non_blocking=True))
                if isinstance(column, Tensor)
                else column.index_select(0, indices)
                for column in self._columns
            ]
        )

    def current_length(self) -> int:
        """The length as it is now; tensors that were put in the place of others are read from
        here on.
        """
        if self._source is None:
            return self.num_samples
        current = _columns_of(self._source)
        assert current is not None, "it was a table before"
        if current.num_samples == self.num_samples and current.content() != self.content():
            self._columns, self._rows = current._columns, current._rows
        return current.num_samples

    def content(self) -> tuple[object, ...]:
        """Equal before and after if PyTorch has written to no column and none was replaced."""
        rows = () if self._rows is None else (hash(self._rows.numpy().tobytes()),)
        return (*map(_content_of, self._columns), *rows)

    @property
    def sample_bytes(self) -> int:
        """Size of one sample: one row of every column."""
        return sum(row_bytes(column) for column in self._columns)

    def load_into(self, indices: Tensor, out: Sequence[Tensor]) -> None:
        """Gather the rows ``indices`` into CPU tensors, one for each column.

        Args:
            indices: See :meth:`load`.
            out: Tensors of the batch's shapes and dtypes, which may be pinned.
        """
        if self._rows is not None:
            indices = self._rows.index_select(0, indices)
        for column, target in zip(self._columns, out, strict=True):
            if isinstance(column, Tensor) and selects_rows(column):
                torch.index_select(column, 0, indices, out=target)
            elif isinstance(column, Tensor):
                target.copy_(take_rows(column, indices))
            else:
                target.copy_(column.index_select(0, indices))

    def subset(self, indices: Sequence[int], source: Any) -> ColumnAdapter:
        """Return an adapter for the samples ``indices`` (negative: from the end) of ``source``."""
        rows = torch.as_tensor(indices, dtype=torch.int64).reshape(-1)
        rows = torch.where(rows < 0, rows + self.num_samples, rows)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_samples:
            raise ValueError(
                f"the Subset has indices outside of its data set of {self.num_samples} samples: "
                "correct its indices"
            )
        rows = rows if self._rows is None else self._rows.index_select(0, rows)
        return ColumnAdapter(self._columns, rows, self._names, source=source)


def _content_of(column: Column) -> tuple[object, ...]:
    if not isinstance(column, Tensor):
        return (column.address, len(column), column.nbytes)
    version = 0 if column.is_inference() else column._version
    return (column.data_ptr(), tuple(column.shape), column.stride(), column.dtype, version)


class Samples(Dataset[Any]):
    """A container as a data set whose elements are the samples, as ``DataLoader`` reads it.

    Args:
        elements: A list, tuple, dict by position, tensor or array.
    """

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]


class _RowDataset:
    """Columns as a map-style data set, for a ``collate_fn`` that receives single samples."""

    def __init__(self, columns: ColumnAdapter) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return self._columns.num_samples

    def __getitem__(self, index: int) -> Any:
        parts = self._columns.gather(torch.tensor([index]))
        return self._columns.batch_of([rows[0] for rows in parts])


class _UserCodeAdapter(DatasetAdapter):
    """Base of adapters that run user code.

    Args:
        collate_fn: The function that makes its batches, if the user has set one.
        lock: See :class:`~runtime.data.shared_reads.SharedReads`.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None, lock: bool | None) -> None:
        self._dataset = dataset
        self.num_samples = self.current_length()
        elements = dataset.elements if isinstance(dataset, Samples) else dataset
        self._reads = SharedReads(elements, collate_fn, lock=lock)

    def load(self, indices: Tensor) -> Any:
        """Read one batch; waits for reads of other threads that share what it changes."""
        if self._reads.are_free:
            return self._load(indices)
        with self._reads.turn() as turn:
            return turn.take(self._load(indices, turn.sample_read), indices.tolist())

    @abstractmethod
    def _load(self, indices: Tensor, sample_read: Callable[[int], None] | None = None) -> Any:
        """Read one batch.

        Args:
            indices: See :meth:`load`.
            sample_read: Called after each sample that is read by itself.
        """

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._dataset

    def current_length(self) -> int:
        """``len()`` of the data set, read anew."""
        return len(self._dataset)


class MapAdapter(_UserCodeAdapter):
    """A map-style data set, read by ``__getitems__`` where it exists and then collated."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, lock: bool | None) -> None:
        super().__init__(dataset, collate_fn, lock)
        self._collate = collate_fn
        self._gets_items = self._inner_gets_items = _gets_items(dataset)
        while type(dataset) is Subset:  # which has __getitems__ for any data set
            dataset = dataset.dataset
            self._inner_gets_items = _gets_items(dataset)
        self._is_checked = collate_fn is not None  # by the first batch

    def _load(self, indices: Tensor, sample_read: Callable[[int], None] | None = None) -> Any:
        """Read the samples ``indices`` and collate them."""
        dataset, positions = self._dataset, indices.tolist()
        if self._gets_items if sample_read is None else self._inner_gets_items:
            samples = dataset.__getitems__(positions)
        else:
            samples = [self._read_sample(position, sample_read) for position in positions]
        if self._collate is None:
            if not self._is_checked:
                with _CHECK_LOCK:  # loaders of several ranks read at once
                    is_first, self._is_checked = not self._is_checked, True
                if is_first:
                    _warn_of_lists(samples[0])
            try:
                return check_batch(default_collate(samples), len(positions))
            except (TypeError, RuntimeError) as error:
                elements = getattr(dataset, "elements", dataset)  # those of Samples
                if isinstance(elements, list) and isinstance(samples[0], Tensor):
                    error.add_note(
                        "the elements of a list are its samples: pass inputs and targets as a "
                        "tuple, dataset((x, y))"
                    )
                    raise
                error.add_note(
                    "PyTorch's default collate function made a batch of samples of type "
                    f"{type(samples[0]).__name__}: return tensors or arrays of equal shapes, or "
                    "pass collate_fn(f), which makes a batch from a list of samples"
                )
                raise
        # A collate_fn may pack samples, so its rows are not counted.
        return check_batch(self._collate(samples), None)

    def _read_sample(self, position: int, sample_read: Callable[[int], None] | None) -> Any:
        try:
            sample = self._dataset[position]
        except Exception as error:
            error.add_note(f"raised by the data set for sample {position}")
            raise
        if sample_read is not None:
            sample_read(position)
        return sample


def _gets_items(dataset: Any) -> bool:
    # As in torch, an attribute that is None counts as missing.
    return getattr(dataset, "__getitems__", None) is not None


_CHECK_LOCK = threading.Lock()


def _warn_of_lists(sample: Any) -> None:
    """Warn of lists of numbers in a sample, which PyTorch's collate function transposes."""
    if not isinstance(sample, Mapping):
        return
    lists = [
        name
        for name, value in sample.items()
        if isinstance(value, list) and value and isinstance(value[0], int | float)
    ]
    if lists:
        logger.warning(
            "the data set's rows hold %s as lists of numbers, of which PyTorch's default collate "
            "function makes a list with one tensor for each position: for one tensor of shape "
            '(batch, length) call dataset.with_format("torch") (Hugging Face datasets), return '
            "tensors, or pass a collate_fn",
            ", ".join(map(repr, lists)),
        )


class BatchAdapter(_UserCodeAdapter):
    """An object whose ``get_batch(indices)`` reads a whole batch."""

    def _load(self, indices: Tensor, sample_read: Callable[[int], None] | None = None) -> Any:
        """Call ``get_batch`` with a copy of ``indices``, which it may modify."""
        return check_batch(self._dataset.get_batch(indices.clone()), len(indices))


def check_batch(batch: Any, num_samples: int | None) -> Any:
    """Return ``batch`` if it can be trained on.

    Args:
        batch: A batch from the data set.
        num_samples: Required rows of each tensor that is not 0-dimensional; ``None``: any
            number.

    Raises:
        TypeError: Neither a tensor, a container nor an object with ``to(device)``; or a container
            of NumPy arrays.
        ValueError: A tensor has a different number of rows.
    """
    parts: tuple[Any, ...]
    if isinstance(batch, Tensor):
        parts = (batch,)
    elif is_container(batch):
        parts = tuple(items_of(batch)[1])
    elif callable(getattr(batch, "to", None)):
        return batch
    else:
        raise TypeError(
            f"the data set returned a batch of type {type(batch).__name__}: "
            "return a tuple, list or dict of tensors"
        )
    if any(isinstance(part, np.ndarray) for part in parts):
        raise TypeError(
            "the data set returned a batch of NumPy arrays: convert them with torch.from_numpy"
        )
    if num_samples is not None:
        shapes = [tuple(part.shape) for part in parts if isinstance(part, Tensor)]
        if any(shape[0] != num_samples for shape in shapes if shape):
            raise ValueError(
                f"the data set returned tensors of shapes {', '.join(map(str, shapes))} for "
                f"{num_samples} samples: each needs {num_samples} rows"
            )
    return batch


TRAINING = "dataset(ds)"
"""The call that gives the data set of a run, for errors."""


def adapt_dataset(
    dataset: Any,
    *,
    collate_fn: Collate | None = None,
    lock: bool | None = None,
    call: str = TRAINING,
) -> DatasetAdapter:
    """Wrap any supported map-style data set in an adapter.

    Args:
        dataset: A map-style data set, a ``TensorDataset`` (or a ``Subset`` of one), a
            tensor or array, a tuple of them, a list of samples, or an object with ``__len__``
            and ``get_batch(indices)``. Arrays are not copied; memory maps stay on disk.
        collate_fn: Collates a list of samples into a batch; ``None``: PyTorch's. If set, samples
            are fetched one by one.
        lock: See :class:`~runtime.data.shared_reads.SharedReads`.
        call: The user's call, for errors.

    Raises:
        TypeError: Not one of these forms.
        ValueError: The data set is empty, its columns differ in length, or ``collate_fn`` would
            have no effect.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be callable, got {type(collate_fn).__name__}")
    adapter = _adapter_of(dataset, collate_fn, lock)
    if adapter.num_samples == 0:
        raise ValueError(empty_text(call))
    return adapter


def empty_text(call: str) -> str:
    """The message for a call with a data set, stream or loader that has no sample."""
    remedy = "" if call == TRAINING else ", or leave the call out"
    return f"{call}: the data set is empty: give it at least one sample{remedy}"


def _adapter_of(dataset: Any, collate_fn: Collate | None, lock: bool | None) -> DatasetAdapter:
    columns = _columns_of(dataset)
    if columns is not None and collate_fn is None:
        return columns
    if columns is not None and isinstance(dataset, Tensor | np.ndarray | tuple | Mapping):
        return MapAdapter(_RowDataset(columns), collate_fn, lock)
    _reject_unreadable(dataset)
    if not callable(getattr(dataset, "get_batch", None)):
        return MapAdapter(dataset, collate_fn, lock)
    if collate_fn is not None:
        raise ValueError("a data set with get_batch builds its own batches: remove collate_fn")
    return BatchAdapter(dataset, None, lock)


def _columns_of(dataset: Any) -> ColumnAdapter | None:
    """Columns of a data set of tensors, arrays or memory maps; ``None`` for any other."""
    # Exact types: a subclass may change the samples.
    source, bare = dataset, False
    if type(dataset) is TensorDataset:
        dataset = dataset.tensors
    elif type(dataset) is Samples and isinstance(dataset.elements, Tensor | np.ndarray):
        dataset, bare = (dataset.elements,), True
    elif type(dataset) is Subset:
        whole = _columns_of(dataset.dataset) if _is_tabular(dataset.dataset) else None
        return None if whole is None else whole.subset(dataset.indices, dataset)
    elif isinstance(dataset, Tensor | np.ndarray):
        dataset = (dataset,)
    kind, names = type(dataset).__name__, None
    if isinstance(dataset, Mapping):
        names, dataset = tuple(dataset), tuple(dataset.values())
    if not isinstance(dataset, tuple):  # a list holds samples, as for a DataLoader
        return None
    are_arrays = [isinstance(part, Tensor | np.ndarray) for part in dataset]
    if not any(are_arrays):
        remedy = SUPPORTED_DATASETS
        if names and all(callable(getattr(part, "__getitem__", None)) for part in dataset):
            remedy = f"pass one of the data sets in it, {kind}[{names[0]!r}]"
        raise (TypeError if dataset else ValueError)(
            f"a {kind} of {len(dataset)} elements without a tensor: {remedy}"
        )
    if not all(are_arrays):
        position = are_arrays.index(False)
        part, label = dataset[position], position if names is None else repr(names[position])
        remedy = "make it a tensor or a NumPy array"
        if _is_frame(part):
            remedy = f"make it an array, {_arrays_of(part)}"
        raise TypeError(
            f"element {label} of the data set is of type {type(part).__name__}: {remedy}"
        )
    columns = [as_column(part, position) for position, part in enumerate(dataset)]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"the tensors of the data set have unequal lengths: {lengths}")
    return ColumnAdapter(columns, names=names, bare=bare, source=source)


def _is_tabular(dataset: Any) -> bool:
    return type(dataset) in (TensorDataset, Subset)


def _is_frame(dataset: Any) -> bool:
    """True for tables and columns of pandas, polars and similar libraries."""
    return callable(getattr(dataset, "to_numpy", None)) and not callable(
        getattr(dataset, "get_batch", None)
    )


def _arrays_of(frame: Any) -> str:
    """Code that makes arrays of a table's columns: the last one is taken for the target."""
    convert = '.to_numpy().astype("float32")'
    columns = getattr(frame, "columns", None)
    if columns is None:
        return f"column{convert}"
    names = list(columns)
    if len(names) < 2 or len(names) > MAX_NAMED_COLUMNS:
        return f"table[[...]]{convert}, table[...]{convert}"
    return f"table[{names[:-1]!r}]{convert}, table[{names[-1]!r}]{convert}"


def _reject_unreadable(dataset: Any) -> None:
    """Raise ``TypeError`` if ``dataset`` has no length or cannot be read by index."""
    name = type(dataset).__name__
    if dataset is None or isinstance(dataset, int | float | str | bytes | type):
        what = dataset.__name__ + ", a class" if isinstance(dataset, type) else repr(dataset)
        raise TypeError(f"{what} is not a data set: {SUPPORTED_DATASETS}")
    if _is_frame(dataset):
        raise TypeError(
            f"the data set is a {name}, whose items are not its rows: pass a tuple of arrays, "
            f"dataset(({_arrays_of(dataset)},)); a batch is then a tuple with one tensor for each"
        )
    get_item = getattr(type(dataset), "__getitem__", None)
    others = (getattr(dataset, name, None) for name in ("get_batch", "__getitems__"))
    if get_item in (None, Dataset.__getitem__) and not any(map(callable, others)):
        raise TypeError(f"{name} defines neither __getitem__ nor get_batch: {SUPPORTED_DATASETS}")
    try:
        len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"{name} has no length: define __len__") from error
