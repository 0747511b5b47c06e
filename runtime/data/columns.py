"""Columns of a data set: tensors in memory, or NumPy memory maps read batch by batch."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class MappedArray:
    """Rows of a NumPy memory map, read from disk batch by batch.

    Unpickling in a loader process maps the file again instead of copying it.
    """

    def __init__(self, array: Array) -> None:
        self._array = np.asarray(array)

    def __len__(self) -> int:
        return len(self._array)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory."""
        return self._array.nbytes

    @property
    def address(self) -> int:
        """Address of the first row in the mapping."""
        return _address(self._array)

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Read rows, as ``Tensor.index_select`` with ``dim=0``; blocks on the disk."""
        assert dim == 0
        array, rows = self._array, indices.numpy()
        # np.take is faster, but copies a strided array as a whole first.
        if array.flags.c_contiguous and array.flags.aligned:
            taken = np.take(array, rows, axis=0)
        else:
            taken = array[rows]
        return torch.from_numpy(_native(taken))

    def __reduce__(self) -> tuple[Any, ...]:
        array, root = self._array, map_of(self._array)
        # Writes to a copy-on-write map are not in the file.
        if root is None or root.filename is None or root.mode == "c":
            return MappedArray, (np.array(array),)
        shift = _address(array) - _address(root)
        layout = (array.shape, array.dtype, array.strides)
        return _reopen, (str(root.filename), root.offset, root.nbytes, shift, layout)


Column = Tensor | MappedArray


def take_rows(column: Tensor, indices: Tensor) -> Tensor:
    """Rows of a column, on the device of both."""
    if selects_rows(column):
        return column.index_select(0, indices)
    return column.unsqueeze(1).index_select(0, indices).squeeze(1)


def selects_rows(column: Tensor) -> bool:
    """False for numbers of types for which PyTorch's ``index_select`` takes rows only."""
    return column.dim() > 1 or column.dtype not in _UNSIGNED


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def row_bytes(column: Column) -> int:
    """Bytes of one sample of a column; 0 if it is empty."""
    return column.nbytes // max(1, len(column))


def _reopen(
    filename: str, offset: int, num_bytes: int, shift: int, layout: tuple[Any, ...]
) -> MappedArray:
    """Map ``num_bytes`` of a file and return the array at byte ``shift`` of the map."""
    raw = np.memmap(filename, dtype=np.uint8, mode="r", offset=offset, shape=(num_bytes,))
    shape, dtype, strides = layout
    return MappedArray(np.ndarray(shape, dtype, buffer=raw, offset=shift, strides=strides))


def map_of(array: Array) -> np.memmap[Any, Any] | None:
    """The memory map that ``array`` is a view of, if any."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        base: Any = owner.base
        if isinstance(owner, np.memmap) and isinstance(base, mmap.mmap):
            return owner
        owner = base
    return None


def as_column(part: Tensor | Array, position: int) -> Column:
    """Wrap element ``position`` of a data set, without a copy if possible.

    Raises:
        TypeError: PyTorch lacks the array's dtype.
        ValueError: A 0-dimensional element, or a tensor that is not strided.
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
            "convert it, for instance with .astype(numpy.float32)"
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
    """A read-only array presented as writable, since ``torch.from_numpy`` warns otherwise."""

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._owner = array  # keeps the memory alive


def _native(array: Array) -> Array:
    """``array`` in native byte order, without a copy if it is already."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _has_torch_strides(array: Array) -> bool:
    return all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
