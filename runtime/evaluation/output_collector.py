"""OutputCollector: outputs of batches, assembled in the order of the samples."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.core.nested import NestedSpec, flatten

Array = npt.NDArray[Any]
_ROWS = "return one row for each sample from fn, or a list with one item for each sample"


class OutputCollector:
    """Collects outputs of batches in any order; thread-safe.

    An output is a tensor whose first dimension counts the samples; a tuple, list, dict or dataclass
    of such tensors; or a list with one item for each sample. Tensors are copied to the host.

    Args:
        num_samples: Samples in all; ``None``: not known.
        out: Tensor or memory map to fill with outputs of one tensor; ``None``: new tensors.

    Raises:
        TypeError: ``out`` is neither.
        ValueError: ``out`` was given, and the number of samples is not known.
    """

    def __init__(self, num_samples: int | None, out: Tensor | Array | None = None) -> None:
        if out is not None and not isinstance(out, (Tensor, np.ndarray)):
            raise TypeError(
                f"predict(..., out={out!r:.80}) was removed: pass a tensor or memory map to fill, "
                'such as numpy.lib.format.open_memmap("out.npy", "w+", "float32", (len(ds), 10)), '
                "and return one tensor from fn"
            )
        if out is not None and num_samples is None:
            raise ValueError("out= needs a data set with a length, which this stream does not have")
        self._num_samples = num_samples
        self._out = out
        self._lock = threading.Lock()
        self._spec: NestedSpec | None = None
        self._columns: list[_Column] = []
        self._items: dict[int, list[Any]] | None = None  # lists of items, by first sample

    def add(self, start: int, stop: int, output: Any) -> None:
        """Add the output of the samples ``start`` to ``stop - 1``; waits for the device.

        Raises:
            TypeError, ValueError: It has no row for each sample, is of another structure than
                that of an earlier batch, or does not fit ``out``.
        """
        num_samples = stop - start
        if _is_item_list(output, num_samples):
            self._add_items(start, output)
            return
        tensors: list[Tensor] = []
        spec = flatten(_without_arrays(output), tensors, strict=False)
        _check_constants(spec)
        if not tensors:
            raise TypeError(f"the output of a batch is {output!r:.80}: {_ROWS}")
        for tensor in tensors:
            if tensor.dim() == 0 or len(tensor) != num_samples:
                raise ValueError(
                    f"the output of {num_samples} samples has a tensor of shape "
                    f"{tuple(tensor.shape)}: {_ROWS}"
                )
        with self._lock:
            if self._items is not None:
                raise TypeError("fn returned a list of items and, for another batch, tensors")
            if self._spec is None:
                if self._out is not None and len(tensors) > 1:
                    raise ValueError(
                        f"out= is one tensor or memory map, and the output has {len(tensors)} "
                        "tensors: return one from fn, or leave out= out"
                    )
                self._spec = spec
                self._columns = [_Column(self._num_samples, self._out) for _ in tensors]
            difference = self._spec.difference(spec)
            if difference is not None:
                raise ValueError(f"batches have outputs of unlike structure: {difference}")
        for column, tensor in zip(self._columns, tensors, strict=True):
            column.add(start, tensor)

    def _add_items(self, start: int, items: list[Any]) -> None:
        with self._lock:
            if self._spec is not None:
                raise TypeError("fn returned tensors and, for another batch, a list of items")
            if self._out is not None:
                raise TypeError("out= is for tensors, and fn returned a list of items")
            self._items = self._items or {}
            self._items[start] = [_on_host(item) for item in items]

    def result(self) -> Any:
        """All outputs in order.

        Tensors whose batches differ in the shape of a sample become lists with one tensor for each
        sample. In place of an output with ``out`` is what was passed.
        """
        if self._items is not None:
            return [item for start in sorted(self._items) for item in self._items[start]]
        if self._spec is None:
            return []
        return self._spec.build(iter([column.result() for column in self._columns]))


def _is_item_list(output: Any, num_samples: int) -> bool:
    """True for a list of items, one for each sample, rather than of tensors with a row for each."""
    if type(output) is not list or len(output) != num_samples:
        return False
    return not all(
        isinstance(part, Tensor) and part.dim() and len(part) == num_samples for part in output
    )


def _check_constants(spec: NestedSpec) -> None:
    """Refuse values that are not tensors, except ``None``."""
    if spec.kind is None and spec.value is not None:
        raise TypeError(f"the output of a batch has a {type(spec.value).__name__}: {_ROWS}")
    for child in spec.children:
        _check_constants(child)


def _without_arrays(output: Any) -> Any:
    return torch.from_numpy(output) if isinstance(output, np.ndarray) else output


def _on_host(item: Any) -> Any:
    tensors: list[Tensor] = []
    spec = flatten(item, tensors, strict=False)
    return spec.build(iter([t.detach().to("cpu", copy=True) for t in tensors]))


class _Column:
    """Rows of one tensor of the outputs.

    Args:
        num_samples: Samples in all; ``None``: not known.
        out: Array or tensor for the rows; ``None``: a new tensor.
    """

    def __init__(self, num_samples: int | None, out: Tensor | Array | None) -> None:
        self._num_samples = num_samples
        self._out = out
        self._lock = threading.Lock()
        self._rows: Tensor | None = None  # all of them, once the shape is known
        self._copied: list[tuple[int, int]] = []
        self._pieces: dict[int, Tensor] = {}  # of another shape, or without a known length

    def add(self, start: int, tensor: Tensor) -> None:
        """Copy the rows from sample ``start`` on."""
        stop = start + len(tensor)
        with self._lock:
            if self._rows is None and self._num_samples is not None:
                self._rows = self._allocate((self._num_samples, *tensor.shape[1:]), tensor.dtype)
            rows = self._rows
        if (
            rows is not None
            and rows.shape[1:] == tensor.shape[1:]
            and (rows.dtype == tensor.dtype or self._out is not None)
        ):
            rows[start:stop].copy_(tensor.detach())
            with self._lock:
                self._copied.append((start, stop))
            return
        if rows is not None and self._out is not None:
            raise ValueError(
                f"out= holds samples of shape {tuple(rows.shape[1:])}, and an output has samples "
                f"of shape {tuple(tensor.shape[1:])}"
            )
        piece = tensor.detach().to("cpu", copy=True)
        with self._lock:
            self._pieces[start] = piece

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._out is None:
            return torch.empty(shape, dtype=dtype)
        rows = self._out if isinstance(self._out, Tensor) else torch.from_numpy(self._out)
        if tuple(rows.shape) != shape:
            raise ValueError(f"out= has the shape {tuple(rows.shape)}, the outputs have {shape}")
        return rows

    def result(self) -> Any:
        """All rows, as a tensor, an array or a list."""
        if self._out is not None:
            if isinstance(self._out, np.memmap):
                self._out.flush()
            return self._out
        rows = self._rows
        if rows is not None:
            if not self._pieces:
                return rows
            self._pieces |= {start: rows[start:stop] for start, stop in self._copied}
        pieces = [self._pieces[start] for start in sorted(self._pieces)]
        if len({(piece.shape[1:], piece.dtype) for piece in pieces}) == 1:
            return torch.cat(pieces)
        return [row for piece in pieces for row in piece]
