"""Data sets as the runtime reads them: one adapter for every form, and each epoch's order."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from coordinator.dispatch import batch_bounds, permutation
from runtime.core.draws import draws_from, seeded_globals

Array = npt.NDArray[Any]


class MappedArray:
    """Rows of a NumPy memory map, read from disk batch by batch.

    Pickled for a loader process it opens the file again instead of copying it.
    """

    def __init__(self, array: Array) -> None:
        self._array = np.asarray(array)

    def __len__(self) -> int:
        return len(self._array)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, as they are once read."""
        return self._array.nbytes

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Read rows, as ``Tensor.index_select`` with ``dim=0`` would; blocks on the disk."""
        assert dim == 0
        array, rows = self._array, indices.numpy()
        # np.take is the faster one, but it would first copy the whole of a strided array.
        if array.flags.c_contiguous and array.flags.aligned:
            taken = np.take(array, rows, axis=0)
        else:
            taken = array[rows]
        return torch.from_numpy(_native(taken))

    def __reduce__(self) -> tuple[Any, ...]:
        array, root = self._array, map_of(self._array)
        # What was written to a copy-on-write map is not in the file.
        if root is None or root.filename is None or root.mode == "c":
            return MappedArray, (np.array(array),)
        shift = _address(array) - _address(root)
        layout = (array.shape, array.dtype, array.strides)
        return _reopen, (str(root.filename), root.offset, root.nbytes, shift, layout)


Column = Tensor | MappedArray


def row_bytes(column: Column) -> int:
    """Bytes of one row of a column."""
    return column.nbytes // max(1, len(column))


def _reopen(
    filename: str, offset: int, num_bytes: int, shift: int, layout: tuple[Any, ...]
) -> MappedArray:
    """Map ``num_bytes`` of a file and view them as the array that starts ``shift`` into them."""
    raw = np.memmap(filename, dtype=np.uint8, mode="r", offset=offset, shape=(num_bytes,))
    shape, dtype, strides = layout
    return MappedArray(np.ndarray(shape, dtype, buffer=raw, offset=shift, strides=strides))


def map_of(array: Array) -> np.memmap[Any, Any] | None:
    """The memory map that ``array`` is a view of, if it is one of any."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        base: Any = owner.base
        if isinstance(owner, np.memmap) and isinstance(base, mmap.mmap):
            return owner
        owner = base
    return None


def as_column(part: Tensor | Array, position: int) -> Column:
    """Wrap element ``position`` of a data set, without a copy where that is possible.

    Raises:
        TypeError: An array whose dtype PyTorch lacks.
        ValueError: No dimension to count samples along, or not a strided tensor.
    """
    if part.ndim == 0:
        raise ValueError(
            f"element {position} of the data set has no dimension: its first one counts samples"
        )
    if isinstance(part, Tensor):
        if part.layout != torch.strided:
            raise ValueError(f"element {position} of the data set is sparse: use .to_dense()")
        return part.detach()
    try:
        torch.from_numpy(_native(np.empty(0, part.dtype)))
    except TypeError as error:
        raise TypeError(
            f"element {position} of the data set has dtype {part.dtype}, which PyTorch lacks: "
            "convert it to numbers, for instance with .astype(numpy.float32)"
        ) from error
    if map_of(part) is not None:
        return MappedArray(part)
    array = _native(part)
    if not _has_torch_strides(array):
        array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)


class _Writable:
    """A read-only array under a writable face: PyTorch warns of others, and only reads here."""

    def __init__(self, array: Array) -> None:
        face = array.__array_interface__
        self.__array_interface__ = {**face, "data": (face["data"][0], False)}
        self._owner = array  # keeps the memory


def _native(array: Array) -> Array:
    """``array`` in this machine's byte order, the same object if it is already."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _has_torch_strides(array: Array) -> bool:
    return all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


Collate = Callable[[list[Any]], Any]

FORMS = (
    "dataset() takes a map-style torch Dataset, an IterableDataset, a TensorDataset, a tuple or "
    "dict of tensors or NumPy arrays, a DataLoader, or an object with __len__ and "
    "get_batch(indices)"
)
_KEPT_EPOCHS = 3  # ranks are at most two epochs apart


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
        way = FORMS
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
        raise TypeError(f"{what} is no data set: {FORMS}")
    get_item = getattr(type(dataset), "__getitem__", None)
    if get_item in (None, Dataset.__getitem__) and not callable(
        getattr(dataset, "get_batch", None)
    ):
        raise TypeError(f"{name} defines neither __getitem__ nor get_batch: {FORMS}")
    try:
        len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"{name} has no length: define __len__") from error


def parts_of_loader(loader: DataLoader[Any]) -> dict[str, Any]:
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


def check_sampler(sampler: Any) -> Any:
    """A sampler that says how many samples an epoch has.

    Raises:
        TypeError: No iterable with a length, or one of batches.
        ValueError: It is empty, or gives each process its part.
    """
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"a DistributedSampler over {sampler.num_replicas} processes leaves most samples out: "
            "the workers share the data set out among themselves, leave the sampler out"
        )
    if isinstance(sampler, BatchSampler):
        raise TypeError(
            "sampler() takes a sampler of single samples: pass the sampler that is in the "
            "BatchSampler, and use batch_size()"
        )
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"sampler({sampler!r:.80}): pass a torch.utils.data.Sampler, or another iterable of "
            "indices with a length, which is the same in each epoch"
        ) from error
    if not callable(getattr(sampler, "__iter__", None)):
        raise TypeError(f"sampler({sampler!r:.80}): it has no __iter__")
    if length == 0:
        raise ValueError("sampler(): it is empty, so that an epoch would have no sample")
    return sampler


class SampledOrder:
    """The order that a sampler gives for each epoch, drawn under a seed of the epoch.

    Samplers draw from a ``generator`` of their own, which is seeded here unless the user has
    set one, or from PyTorch's, NumPy's or Python's own, which are seeded for as long as it
    takes and put back. ``set_epoch`` is called where there is one. Not thread-safe.

    Args:
        sampler: See :func:`check_sampler`.
        num_samples: Length of the data set.
        seed: Seed of the run.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self, epoch: int) -> Tensor:
        """The samples of an epoch, in order, int64, of shape ``(len(self),)``.

        Raises:
            ValueError: Another number than the sampler's length, or no sample of the data set.
        """
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)
        seed = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        with self._seeded(seed):
            order = torch.tensor([int(index) for index in self._sampler], dtype=torch.int64)
        if len(order) != len(self._sampler):
            raise ValueError(
                f"the sampler gave {len(order)} samples in epoch {epoch}, and its length is "
                f"{len(self._sampler)}: both must agree, in each epoch"
            )
        return self.check(epoch, order)

    def check(self, epoch: int, order: Tensor) -> Tensor:
        """An epoch's order, if all of it is in the data set.

        Raises:
            ValueError: It is not.
        """
        low, high = (int(value) for value in order.aminmax())
        if low < 0 or high >= self._num_samples:
            raise ValueError(
                f"the sampler gave index {low if low < 0 else high} in epoch {epoch}, and the data "
                f"set has {self._num_samples} samples"
            )
        return order

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        if getattr(self._sampler, "generator", self) is None:
            self._sampler.generator = torch.Generator().manual_seed(seed)
            try:
                yield
            finally:
                self._sampler.generator = None
            return
        with draws_from(torch.Generator().manual_seed(seed)), seeded_globals():
            yield


class _Order:
    """The permutation of one epoch, computed by whoever asks first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.permutation: Tensor | None = None


class EpochIndex:
    """Which samples each batch of each epoch holds; shared by all workers, thread-safe.

    The permutations of the last few epochs that were asked for are kept (8 bytes a
    sample each); any other is computed again.

    Args:
        num_samples: Length of the data set.
        batch_size: Samples in a batch.
        seed: Seed of the run.
        sampler: Gives each epoch's order; ``None``: a permutation.
        of_stream: The data set is a stream, which has an order of its own.

    Attributes:
        num_samples: Samples in an epoch.
        of_stream: Whether sample ``epoch * num_samples + i`` is the ``i``-th of an epoch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        sampler: Any = None,
        *,
        of_stream: bool = False,
    ) -> None:
        self.of_stream = of_stream
        self._sampled = None if sampler is None else SampledOrder(sampler, num_samples, seed)
        self.num_samples = num_samples if sampler is None else len(sampler)
        self.batch_size = batch_size
        self.seed = seed
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._orders: OrderedDict[int, _Order] = OrderedDict()

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Samples of a batch, by its position in the epoch.

        Blocks while the epoch's permutation is computed, by this thread or another;
        other epochs are not waited for.

        Returns:
            An int64 CPU tensor, a view of the permutation that must not be written to.

        Raises:
            IndexError: The epoch has no such batch.
        """
        start, stop = self.bounds(batch)
        return self.order(epoch)[start:stop]

    def bounds(self, batch: int) -> tuple[int, int]:
        """Where a batch starts and stops in an epoch's permutation.

        Raises:
            IndexError: An epoch has no such batch.
        """
        start, stop = batch_bounds(batch, self.num_samples, self.batch_size)
        if not 0 <= start < stop:
            raise IndexError(f"no batch {batch} in an epoch of {self.num_samples} samples")
        return start, stop

    def order(self, epoch: int) -> Tensor:
        """The permutation of an epoch, not to be written to; blocks as :meth:`indices` does."""
        with self._lock:
            order = self._orders.get(epoch)
            if order is None:
                order = self._orders[epoch] = _Order()
                if len(self._orders) > _KEPT_EPOCHS:
                    self._orders.popitem(last=False)
            else:
                self._orders.move_to_end(epoch)
        with order.lock:
            if order.permutation is None:
                order.permutation = self._compute(epoch)
            return order.permutation

    def _compute(self, epoch: int) -> Tensor:
        if self._sampled is None:
            return torch.from_numpy(permutation(self.num_samples, epoch, self.seed))
        with self._drawing:
            return self._sampled.draw(epoch)

    def drawn(self, since: int) -> dict[int, Tensor]:
        """What the sampler has given for an epoch and those after it; nothing without one."""
        with self._lock:
            orders = {e: o.permutation for e, o in self._orders.items() if e >= since}
        return {e: p for e, p in orders.items() if p is not None and self._sampled is not None}

    def restore(self, orders: Mapping[int, Tensor]) -> None:
        """Take what the sampler gave before for some epochs; it is not asked again.

        Raises:
            ValueError: The data set has become shorter.
        """
        if self._sampled is None:
            return
        for epoch, order in sorted(orders.items()):
            kept = self._orders[epoch] = _Order()
            kept.permutation = self._sampled.check(epoch, order)
