"""OutputCollector: outputs of batches, assembled in the order of the samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
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
        out: Path of a ``.npy`` file to create, or an array or tensor to fill; for outputs of
            several tensors a tuple or dict of these. ``None``: new tensors.
    """

    def __init__(self, num_samples: int | None, out: Any = None) -> None:
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
                outs = self._outs(output, len(tensors))
                self._spec = spec
                self._columns = [_Column(self._num_samples, out) for out in outs]
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

    def _outs(self, output: Any, num_tensors: int) -> list[Any]:
        """The target of each tensor."""
        out = self._out
        if out is None or (num_tensors == 1 and not isinstance(out, (tuple, list, Mapping))):
            return [out] * num_tensors
        named = isinstance(output, Mapping) and isinstance(out, Mapping)
        targets = [out[key] for key in output] if named and set(out) == set(output) else out
        if isinstance(targets, (tuple, list)) and len(targets) == num_tensors:
            return list(targets)
        raise ValueError(
            f"the output has {num_tensors} tensors: pass out= with a path or array for each, as a "
            "tuple, or as a dict with the output's names"
        )

    def result(self) -> Any:
        """All outputs in order.

        Tensors whose batches differ in the shape of a sample become lists with one tensor for each
        sample. Columns with ``out`` are NumPy arrays, or the tensors that were passed.
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
        out: Path, array or tensor for the rows; ``None``: a new tensor.
    """

    def __init__(self, num_samples: int | None, out: Any) -> None:
        if out is not None and num_samples is None:
            raise ValueError("out= needs a data set with a length, which this stream does not have")
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
        if isinstance(self._out, (str, os.PathLike)):
            if dtype is torch.bfloat16:
                raise TypeError("NumPy has no bfloat16: return output.float() from fn for out=")
            of_numpy = torch.empty(0, dtype=dtype).numpy().dtype
            self._out = np.lib.format.open_memmap(self._out, "w+", of_numpy, shape)
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
